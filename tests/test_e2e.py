"""Real workers in processes of their own with the real model: the right answers, and what cancels and deaths leave."""

import contextlib
import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetsplit import connect
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.engines import Prefiller
from hetsplit.engines.torch import TorchEngine
from hetsplit.engines.torch_store import TorchStore
from hetsplit.errors import PeerError, PeerTimeout, RequestError
from hetsplit.kv import KvBlock, prefill_span
from hetsplit.messages import identity_to_pb
from hetsplit.protocol import BlockFrame
from hetsplit.result import Completion
from hetsplit.split import Generation, Split
from hetsplit.wire import Peer
from hetsplit.worker.service import identity_of
from tests.test_cli import ROOT, command, facts, free_port
from tests.toy import eventually

pytestmark = pytest.mark.e2e
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FRANCE_RAW = [504, 3575, 282, 4649, 314]
FRANCE_RAW_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
FRANCE_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
EMOJI = [{"role": "user", "content": "Reply with only this emoji: 😀"}]
EMOJI_IDS = [10813, 230, 249] * 2
WAYS = ["local", "pull", "push"]
MIB = 1 << 20
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Makes glibc return what is freed at once, so that resident memory is what a process holds."""


class WorkerProcess:
    """`python -m hetsplit worker` in float32 on the CPU; `start` may be called again after a death."""

    def __init__(self, model: Path, role: str, port: int = 0) -> None:
        self._command = [sys.executable, "-m", "hetsplit", "worker", str(model), "--role", role]
        self._command += ["--dtype", "float32", "--device", "cpu", "--listen", f"127.0.0.1:{port}"]
        self.start()

    def start(self) -> None:
        environment = os.environ | GIVES_BACK
        self._process = subprocess.Popen(self._command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

        self.peer: Peer | None = None

    def wait_ready(self) -> "WorkerProcess":
        self.address = facts(self._process.stdout.readline())["address"]
        self.peer = Peer(self.address)
        return self

    def live(self) -> int:
        return self.peer.describe().live

    def idle(self) -> bool:
        """Within the two seconds that case O8 allows."""
        return eventually(lambda: self.live() == 0)

    def rss(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text().split()
        return int(status[status.index("VmRSS:") + 1]) * 1024

    def send(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def dead(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        if not self.dead():
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
        if self.peer:
            self.peer.close()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def workers(smollm2_path: Path) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """A prefill and a decode process."""
    pair = WorkerProcess(smollm2_path, "prefill"), WorkerProcess(smollm2_path, "decode")
    try:
        yield pair[0].wait_ready(), pair[1].wait_ready()
    finally:
        for worker in pair:
            worker.close()


@pytest.fixture(scope="module")
def smol(smollm2_path: Path) -> TorchEngine:
    from hetsplit import load

    return load(smollm2_path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def split_of(smol: TorchEngine, workers: tuple[WorkerProcess, WorkerProcess]) -> Iterator[Callable[[str], Split]]:
    """`split_of(way)`: local here; two addresses, of which the decode process dials the other; or a push from here."""
    prefill, decode = (worker.address for worker in workers)
    sides: dict[str, tuple[Any, Any]] = {"local": (None, smol), "pull": (prefill, decode), "push": (smol, decode)}
    with contextlib.ExitStack() as stack:
        splits = {way: stack.enter_context(connect(*sides[way])) for way in WAYS}
        yield splits.__getitem__


@pytest.fixture(scope="module")
def english(smol: TorchEngine) -> Callable[[int], list[int]]:
    """`english(n)`: n tokens of prose."""
    from pydoc_data.topics import topics

    tokens = smol.tokenizer.encode("".join(topics[name] for name in ("with", "assert", "import")))
    return lambda n: tokens[:n]


# The right answers.


@pytest.mark.parametrize("way", WAYS)
def test_the_answers_of_transformers(way: str, split_of: Callable[[str], Split]) -> None:
    split = split_of(way)
    raw = split.complete(FRANCE_RAW, max_tokens=12)
    assert (raw.ids, raw.finish) == (FRANCE_RAW_IDS, "length")
    text = split.complete("The capital of France is", max_tokens=12)
    assert (text.ids, text.text, text.prompt_tokens) == (raw.ids, raw.text, 5)
    chat = split.chat(FRANCE).completion()
    assert (chat.ids, chat.finish, chat.prompt_tokens) == (FRANCE_IDS, "stop", 37)
    assert chat.text == "The capital of France is Paris."
    assert chat.timing.mode == {"pull": "split"}.get(way, way)


@pytest.fixture(scope="module")
def alone(split_of: Callable[[str], Split], english: Callable[[int], list[int]]) -> dict[int, Completion]:
    """What one process gives for prose of so many tokens."""
    lengths = (1, 2, 4, 5, 257, 700)
    return {n: split_of("local").complete(english(n), max_tokens=8, logprobs=0, ignore_eos=True) for n in lengths}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pull", "push"])
def test_prose_is_continued_as_in_one_process(
    way: str, split_of: Callable[[str], Split], english: Callable[[int], list[int]], alone: dict[int, Completion]
) -> None:
    for n, want in alone.items():
        got = split_of(way).complete(english(n), max_tokens=8, logprobs=0, ignore_eos=True)
        assert (got.ids, got.text, got.prompt_tokens) == (want.ids, want.text, n)
        logprobs = [[token.logprob for token in side.tokens] for side in (got, want)]
        np.testing.assert_allclose(*logprobs, atol=1e-3, rtol=0)
        assert got.timing.sent_bytes == 30 * 2 * (n - 1) * 3 * 64 * 4


@pytest.mark.parametrize("way", WAYS)
def test_a_character_of_several_tokens_is_never_shown_in_parts(way: str, split_of: Callable[[str], Split]) -> None:
    """Case O16: one star is three tokens."""
    for n, stars in ((3, "🌟"), (4, "🌟"), (6, "🌟🌟")):
        completion = split_of(way).chat(EMOJI, max_tokens=n).completion()
        pieces = [token.text for token in split_of(way).chat(EMOJI, max_tokens=n)]
        assert (completion.ids, completion.prompt_tokens) == ((EMOJI_IDS + EMOJI_IDS)[:n], 40)
        assert "".join(pieces) == completion.text
        assert [piece for piece in pieces[: n // 3 * 3] if piece] == list(stars)
        assert completion.text.rstrip("\N{REPLACEMENT CHARACTER}") == stars


# A megabyte of prompt (case O12).


def test_a_megabyte_of_text_is_refused_and_hurts_nobody(split_of: Callable[[str], Split]) -> None:
    split = split_of("pull")
    refusal = r"a prompt of \d+ tokens leaves no free position, the context is 8192"
    for text in ("one word after another " * 43_500, "a" * 1_000_000):
        with pytest.raises(RequestError, match=refusal):
            split.generate(text)
        with pytest.raises(RequestError, match=refusal):
            split.chat([{"role": "user", "content": text}])
    with pytest.raises(RequestError, match="a request of 5000[0-9]{3} bytes, at most 4194304 can travel"):
        split.generate("a" * 5_000_000)
    assert split.complete(FRANCE_RAW, max_tokens=12).ids == FRANCE_RAW_IDS


# Clients that leave (case O8).


def leave_during_prefill(split: Split, prompt: Sequence[int], workers: Sequence[WorkerProcess], count: int) -> None:
    started = [split.generate(prompt) for _ in range(count)]
    assert eventually(lambda: all(worker.live() == count for worker in workers), 20)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(Generation.close, started))


def leave_during_decode(split: Split, prompt: Sequence[int], count: int) -> None:
    started = [split.generate(prompt, max_tokens=4000, ignore_eos=True) for _ in range(count)]
    for generation in started:
        next(generation)
        generation.close()


def prefill_request(engine: TorchEngine, prompt: Sequence[int], name: str) -> pb.PrefillRequest:
    stop = prefill_span(len(prompt)).stop
    identity = identity_to_pb(identity_of(engine))
    return pb.PrefillRequest(transfer_id=name, tokens=prompt, stop=stop, chunk=256, identity=identity)


def leave_before_the_first_block_is_read(
    engine: TorchEngine, prompt: Sequence[int], prefill: WorkerProcess, count: int
) -> None:
    """Prompts are computed in order, so the end of a last short one says that all before it wait to be sent."""
    streams = [prefill.peer.prefill(prefill_request(engine, prompt, str(i))) for i in range(count)]
    for _ in prefill.peer.prefill(prefill_request(engine, FRANCE_RAW, "last")):
        pass
    assert eventually(lambda: prefill.live() == count), "what is computed and not sent yet is still held"
    for stream in streams:
        stream.cancel()


def leave_amid_the_blocks(engine: TorchEngine, prompt: Sequence[int], prefill: WorkerProcess, count: int) -> None:
    for i in range(count):
        stream = prefill.peer.prefill(prefill_request(engine, prompt, str(i)))
        while not any(isinstance(message, BlockFrame) for message in next(stream)):
            pass
        stream.cancel()


def test_a_push_is_cancelled_amid_its_blocks(
    smol: TorchEngine, workers: tuple[WorkerProcess, WorkerProcess], english: Callable[[int], list[int]]
) -> None:
    reached = threading.Event()

    def prefill(*args: Any, stop: threading.Event, **options: Any) -> Iterator[KvBlock]:
        yield from itertools.islice(smol.prefill(*args, stop=stop, **options), 40)
        reached.set()
        stop.wait(20)

    halting = copy.copy(smol)
    halting.prefill = prefill  # type: ignore[method-assign]
    assert isinstance(halting, Prefiller)
    decode = workers[1]
    with connect(halting, decode.address) as split:
        generation = split.generate(english(600))
        assert reached.wait(20)
        assert decode.live() == 1
        generation.close()
        assert decode.idle()
    assert eventually(lambda: smol.budget.used == 0)


@linux
@pytest.mark.slow
def test_clients_that_leave_cost_nothing(
    smol: TorchEngine,
    workers: tuple[WorkerProcess, WorkerProcess],
    split_of: Callable[[str], Split],
    english: Callable[[int], list[int]],
) -> None:
    prefill = workers[0]
    split, long = split_of("pull"), english(1500)
    first: list[int] = []

    def grown() -> list[int]:
        return [worker.rss() - before for worker, before in zip(workers, first, strict=True)]

    for _ in range(3):
        for leave in (
            lambda: leave_during_prefill(split, long, workers, 10),
            lambda: leave_during_prefill(split, long, workers, 1),
            lambda: leave_before_the_first_block_is_read(smol, english(300), prefill, 3),
            lambda: leave_amid_the_blocks(smol, long, prefill, 3),
            lambda: leave_during_decode(split, english(60), 3),
            lambda: leave_during_decode(split, english(700), 1),
        ):
            leave()
            assert all(worker.idle() for worker in workers)
        first = first or [worker.rss() for worker in workers]
    assert eventually(lambda: max(grown()) < 24 * MIB), f"the prefill and the decode process grew by {grown()} bytes"
    assert split.complete(FRANCE_RAW, max_tokens=12).ids == FRANCE_RAW_IDS


def test_a_client_that_is_killed_costs_nothing(workers: tuple[WorkerProcess, WorkerProcess]) -> None:
    addresses = [f"--{role}={worker.address}" for role, worker in zip(("prefill", "decode"), workers, strict=True)]
    with command("generate", "-", "one word after another " * 500, *addresses) as client:
        assert eventually(lambda: all(worker.live() == 1 for worker in workers), 30)
        client.kill()
    assert all(worker.idle() for worker in workers)


# A prefill process that dies or hangs (case O9).

SILENCE_S = 2.5


@pytest.fixture(scope="module")
def victim(smollm2_path: Path, workers: tuple[WorkerProcess, WorkerProcess]) -> Iterator[WorkerProcess]:
    """A prefill process at a fixed port, whose death hurts no other test."""
    worker = WorkerProcess(smollm2_path, "prefill", free_port())
    try:
        yield worker.wait_ready()
    finally:
        worker.close()


@pytest.fixture(scope="module")
def survivor(smol: TorchEngine, victim: WorkerProcess) -> Iterator[Split]:
    """Decodes here, and is never restarted."""
    with connect(victim.address, smol, silence_timeout_s=SILENCE_S) as split:
        yield split


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the second chunk arrives on the decode side."""
    second = threading.Event()
    write = TorchStore.write

    def watched(store: TorchStore, block: KvBlock) -> None:
        write(store, block)
        if block.start > 0:
            second.set()

    monkeypatch.setattr(TorchStore, "write", watched)
    return second


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the first block", "amid the blocks"])
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_prefill_process_that_ends(
    end: int,
    moment: str,
    victim: WorkerProcess,
    survivor: Split,
    smol: TorchEngine,
    written: threading.Event,
    english: Callable[[int], list[int]],
) -> None:
    if moment == "before the first block":
        victim.send(signal.SIGSTOP)
        generation = survivor.generate(english(1500))
    else:
        generation = survivor.generate(english(1500))
        assert written.wait(20)
    assert eventually(lambda: smol.budget.used > 0, 20)
    start = time.monotonic()
    victim.send(end)
    with pytest.raises(PeerTimeout if end == signal.SIGSTOP else PeerError, match=victim.address) as caught:
        next(generation)
    assert time.monotonic() - start < SILENCE_S + 2
    assert caught.value.peer == victim.address
    assert eventually(lambda: smol.budget.used == 0)
    if end == signal.SIGKILL:
        victim.close()
        victim.start()
        victim.wait_ready()
    else:
        victim.send(signal.SIGCONT)
        assert victim.idle()
    assert survivor.complete(FRANCE_RAW, max_tokens=12).ids == FRANCE_RAW_IDS


# Memory while a model is loaded.

LOAD = """
import json, sys
from pathlib import Path
from hetsplit.engines.torch import load

def status():
    words = Path("/proc/self/status").read_text().split()
    return {name: int(words[words.index(name + ":") + 1]) * 1024 for name in ("VmRSS", "VmHWM")}

before = status()["VmRSS"]
engine = load(sys.argv[1], device="cpu", dtype=sys.argv[2])
print(json.dumps({"peak": status()["VmHWM"] - before, "kept": status()["VmRSS"] - before}))
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 290 MB in float32."""
    from safetensors.numpy import save_file
    from transformers import LlamaConfig

    from hetsplit.spec_hf import spec_from_hf
    from hetsplit.weights.names import hf_name, tensor_shapes

    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    random = np.random.default_rng(0)
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()))
    shapes = tensor_shapes(spec)
    weights = {hf_name(name, spec): random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@linux
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_one_tensor_more_than_the_model(dtype: str, large_folder: Path) -> None:
    """Peak resident memory, file pages included, over that after the imports."""
    command = [sys.executable, "-c", LOAD, str(large_folder), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    stored = (large_folder / "model.safetensors").stat().st_size
    parameters = stored if dtype == "float32" else stored // 2
    largest = 8192 * 1024 * 4
    own = 48 << 20  # what threads, allocator and kernels of torch take, whatever the model
    assert 0.95 * parameters < found["kept"] < parameters + own, found
    assert found["peak"] < parameters + own + 2 * largest, found  # a tensor as it is stored, and on its way
