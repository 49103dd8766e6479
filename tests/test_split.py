"""The user's object, end to end over real loopback gRPC with toy engines: the split law and everything around it."""

import contextlib
import gc
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hetsplit import connect
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.engines import StepResult
from hetsplit.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    EngineError,
    HetsplitError,
    IncompatibleError,
    LocalProtocolError,
    PeerError,
    PeerFailed,
    PeerTimeout,
    PeerUnavailable,
    RequestError,
)
from hetsplit.kv import KvBlock
from hetsplit.security import Credentials, ServerSecurity
from hetsplit.spec import KvLayer, KvLayout, Rope
from hetsplit.split import Generation, Split
from hetsplit.wire import Peer, Server, Timeouts
from hetsplit.worker import Worker
from tests.faults import HostilePrefill, silent_script, stream_script
from tests.toy import LAYERS, ToyEngine, eventually, reference

pytestmark = pytest.mark.slow  # as a file: `make check` has a minute for all

P40 = [(37 * i + 5) % 97 for i in range(40)]
WAYS = ["local", "pull", "push", "addresses", "own", "engine+address"]
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 40, 255]


def ids(prompt: list[int], n: int, **sampling: Any) -> list[int]:
    return [token for token, _ in reference(prompt, max_tokens=n, **sampling)]


@contextlib.contextmanager
def split(way: str, prefill: ToyEngine, decode: ToyEngine, **options: Any) -> Iterator[Split]:
    """A Split joined in one of `WAYS`."""
    with contextlib.ExitStack() as stack:
        sides: tuple[Any, Any] = {"local": (None, decode), "pull": (prefill, decode)}.get(way, (prefill, None))
        if way in ("addresses", "own", "engine+address"):
            worker = stack.enter_context(Worker(prefill, role="prefill"))
            sides = worker.address, decode
        if way in ("push", "addresses", "own"):
            known = [worker.address] if way == "own" else []
            other = stack.enter_context(Worker(decode, role="decode", prefill=known))
            sides = None if way == "own" else sides[0], other.address
        yield stack.enter_context(connect(*sides, **options))


def two() -> tuple[ToyEngine, ToyEngine]:
    """Engines that do not share a compute thread."""
    return ToyEngine(device="toy:0"), ToyEngine(device="toy:1")


# The split law.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [1, 3, 8, 256])
def test_every_way_gives_the_same_tokens(way: str, chunk: int) -> None:
    """Case O5, with every length around the internal sizes."""
    decode = ToyEngine()
    rng = random.Random(chunk)
    with split(way, ToyEngine(), decode, chunk=chunk) as joined:
        for n in LENGTHS:
            prompt = [rng.randrange(97) for _ in range(n)]
            got = joined.complete(prompt, max_tokens=6, logprobs=0)
            want = reference(prompt, max_tokens=6, logprobs=0)
            assert [(t.id, t.logprob) for t in got.tokens] == want
            assert (got.prompt_tokens, got.finish) == (n, "length")
        assert eventually(lambda: decode.reserved == 0)
    # Before the first step the cache holds the prefilled span less its withheld tail, which decode computes itself.
    assert [store.sealed for store in decode.stores] == [max(n - 4, 0) for n in LENGTHS]


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_gives_the_same_text_whoever_prefilled(way: str) -> None:
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7}
    with split(way, ToyEngine(), ToyEngine()) as joined:
        assert joined.complete(P40, max_tokens=12, **options).ids == ids(P40, 12, **options)


def test_without_a_seed_two_runs_differ() -> None:
    with split("pull", ToyEngine(), ToyEngine()) as joined:
        runs = {tuple(joined.complete(P40, max_tokens=12, temperature=2.0).ids) for _ in range(3)}
    assert len(runs) == 3


def test_the_device_that_prefills_is_the_one_that_was_asked() -> None:
    for way in WAYS:
        prefill, decode = ToyEngine(), ToyEngine()
        with split(way, prefill, decode) as joined:
            joined.complete(P40, max_tokens=2)
        assert (prefill.prefilled_units > 0) == (way != "local")
        assert (decode.prefilled_units > 0) == (way == "local")


def test_top_alternatives_travel() -> None:
    with split("pull", ToyEngine(), ToyEngine()) as joined:
        token = joined.complete(P40, max_tokens=1, logprobs=3).tokens[0]
        plain = joined.complete(P40, max_tokens=1).tokens[0]
    assert len(token.top) == 3
    assert token.top[0] == (token.id, token.logprob)
    assert plain.logprob is None
    assert plain.top == ()


def test_a_numpy_prompt() -> None:
    with split("local", ToyEngine(), ToyEngine()) as joined:
        assert joined.complete(np.array(P40), max_tokens=3).ids == ids(P40, 3)  # type: ignore[arg-type]
        assert joined.complete(tuple(P40), max_tokens=3).ids == ids(P40, 3)
        with pytest.raises(RequestError, match="an empty prompt"):
            joined.generate(np.array([], np.int64))  # type: ignore[arg-type]


# Budgets (case O6) and sampling values (case O18).


@pytest.mark.parametrize("way", WAYS)
def test_max_tokens_is_exact(way: str) -> None:
    with split(way, ToyEngine(), ToyEngine()) as joined:
        for n in (1, 2, 16):
            generation = joined.generate(P40, max_tokens=n)
            assert (generation.prompt_tokens, generation.max_tokens) == (40, n)
            tokens = list(generation)
            assert [t.id for t in tokens] == ids(P40, n)
            assert [t.finish for t in tokens] == [None] * (n - 1) + ["length"]
            assert joined.complete(P40, max_tokens=n).ids == ids(P40, n)
        with pytest.raises(RequestError, match="max_tokens is 0"):
            joined.generate(P40, max_tokens=0)


@pytest.mark.parametrize("way", WAYS)
def test_the_edge_of_the_context(way: str) -> None:
    prompt = [i % 97 for i in range(255)]
    with split(way, ToyEngine(context=256), ToyEngine(context=256)) as joined:
        last = joined.complete(prompt, max_tokens=16)
        assert (last.ids, last.finish) == (ids(prompt, 1), "length")
        assert joined.complete(prompt[:250], max_tokens=16).ids == ids(prompt[:250], 6)
        for n in (256, 257, 1000):
            with pytest.raises(RequestError, match=f"a prompt of {n} tokens leaves no free position.* 256"):
                joined.generate([1] * n)
        assert joined.complete(P40, max_tokens=2).ids == ids(P40, 2)


def test_an_end_id_stops_and_counts_unless_ignored() -> None:
    second = ids(P40, 2)[1]
    decode = ToyEngine(eos_ids=(second,))
    with split("pull", ToyEngine(), decode) as joined:
        got = joined.complete(P40, max_tokens=16)
        assert (got.ids, got.finish) == (ids(P40, 2), "stop")
        assert joined.complete(P40, max_tokens=4, ignore_eos=True).ids == ids(P40, 4)


BAD_SAMPLING = [
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": "0.7"},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"seed": -1},
    {"seed": 2**64},
    {"logprobs": 98},
    {"max_tokens": 2.5},
    {"repetition_penalty": 0},
    {"stop": ["x"]},  # no tokenizer here
    {"temprature": 1},
]


def test_one_requests_bad_value_hurts_no_other() -> None:
    with split("pull", *two()) as joined:
        companion = joined.generate(P40, max_tokens=64)
        for options in BAD_SAMPLING:
            with pytest.raises(RequestError, match=next(iter(options))):
                joined.generate(P40, **options)
        assert [t.id for t in companion] == ids(P40, 64)
        for options in ({"temperature": 1e-30}, {"top_k": 1}, {"temperature": 1.0, "top_p": 1e-9, "seed": 1}):
            assert joined.complete(P40, max_tokens=4, **options).ids == ids(P40, 4)


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "a matrix": (np.array([[1, 2], [3, 4]]), r"prompt\[0\] is array\(\[1, 2\]\), expected a token id"),
    "a column": (np.array([[1], [2]]), r"prompt\[0\] is array\(\[1\]\), expected a token id"),
    "a mapping": ({1: 2}, "prompt is dict, expected text or token ids"),
    "a set": ({1, 2}, "prompt is set, expected text or token ids"),
    "a huge number": ([10**30], r"prompt\[0\] is 1000"),
    "no ids": ([], "an empty prompt"),
    "no text": ("", "an empty prompt"),
    "bytes": (b"abc", "prompt is bytes, expected text or token ids"),
    "a number": (5, "prompt is int"),
    "None": (None, "prompt is NoneType"),
    "an id over the vocabulary": ([1, 97], "token id 97, allowed: 0 to 96"),
    "a negative id": ([1, -1], r"prompt\[1\] is -1"),
    "a huge id": ([2**32], r"prompt\[0\] is 4294967296"),
    "a float": ([1.5], r"prompt\[0\] is 1.5"),
    "True": ([True], r"prompt\[0\] is True"),
    "words": (["a"], r"prompt\[0\] is 'a'"),
    "text without a tokenizer": ("hello", "needs a tokenizer"),
    "half a surrogate": ("ab\ud83d", "prompt is not valid Unicode at character 2"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_at_the_call(name: str) -> None:
    prompt, why = BAD_PROMPTS[name]
    with split("local", ToyEngine(), ToyEngine()) as joined, pytest.raises(RequestError, match=why):
        joined.generate(prompt)


BAD_CHATS: list[Any] = [
    5,
    None,
    [],
    "hi",
    {"role": "user", "content": "hi"},
    [{"role": "user"}],
    [{"role": "user", "content": 5}],
    ["hi"],
    [{"role": "user", "content": "hi"}, None],
    [{"role": "user", "content": "\ud83d"}],
]


@pytest.mark.parametrize("chat", BAD_CHATS, ids=str)
def test_a_bad_chat_is_refused_at_the_call(chat: Any) -> None:
    with split("local", ToyEngine(), ToyEngine()) as joined, pytest.raises(RequestError, match=r"messages|Unicode"):
        joined.chat(chat)


# Leaving early (case O8).


class Sides:
    """Two workers whose counters can be watched, joined by their addresses, or by a push."""

    def __init__(self, way: str, prefill: ToyEngine, decode: ToyEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self.stack = contextlib.ExitStack()
        self.decoding = self.stack.enter_context(Worker(decode, role="decode"))
        if way == "push":
            self.split = self.stack.enter_context(connect(prefill, self.decoding.address, chunk=8))
            assert self.split._push is not None
            self.prefilling: Any = self.split._push.source
        else:
            self.prefilling = self.stack.enter_context(Worker(prefill, role="prefill"))
            both = connect(self.prefilling.address, self.decoding.address, chunk=8)
            self.split = self.stack.enter_context(both)

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def start(self, count: int, **options: Any) -> list["Reader"]:
        return [Reader(self.split.generate(P40, **options)) for _ in range(count)]

    def idle(self) -> bool:
        engines = self.decode.reserved == 0 and self.prefill.running_prefills == 0
        return self.prefilling.live == 0 and self.decoding.live == 0 and engines


class Reader(threading.Thread):
    """Reads a generation on a thread of its own, as a user does; keeps what came of it."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(daemon=True)
        self.generation = generation
        self.ids: list[int] = []
        self.error: HetsplitError | None = None
        self.start()

    def run(self) -> None:
        try:
            for token in self.generation:
                self.ids.append(token.id)
        except HetsplitError as error:
            self.error = error


def moment(sides: Sides, name: str) -> list[Reader]:
    """Ten requests, held at one moment of their lives."""
    prefill, decode = sides.prefill, sides.decode
    options = {"max_tokens": 4000} if name == "decode" else {"max_tokens": 4}
    if name == "prefill":
        prefill.gate.clear()
    elif name == "transfer":
        prefill.gate_at = prefill.prefilled_units + 4
    elif name == "arrival":
        decode.write_gate.clear()
    computed = prefill.prefilled_units + 10 * 5 * LAYERS
    readers = sides.start(10, **options)
    reached = {
        "prefill": lambda: sides.prefilling.live == 10,
        "transfer": lambda: not prefill.gate.is_set() and sides.prefilling.live == 10,
        "arrival": lambda: prefill.prefilled_units == computed and sides.prefilling.live == 0,
        "decode": lambda: all(len(reader.ids) > 1 for reader in readers),
    }
    assert eventually(reached[name], 5), name
    assert sides.decoding.live == 10
    return readers


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("name", ["prefill", "transfer", "arrival", "decode"])
def test_leaving_early_frees_both_sides(way: str, name: str) -> None:
    facts = {"context": 8192, "capacity": 10**6}
    with Sides(way, ToyEngine(device="toy:0", **facts), ToyEngine(device="toy:1", **facts)) as sides:
        for _ in range(2):
            readers = moment(sides, name)
            for reader in readers:
                reader.generation.close()
            sides.decode.write_gate.set()
            assert eventually(sides.idle), (sides.prefilling.live, sides.decoding.live, sides.decode.reserved)
            for reader in readers:
                reader.join(2)
                assert not reader.is_alive()
                assert (reader.ids == []) == (name != "decode")
            sides.prefill.gate_at = -1
            sides.prefill.gate.set()
            assert sides.split.complete(P40, max_tokens=3).ids == ids(P40, 3)
        assert eventually(sides.idle)
        assert all(store.released for store in sides.decode.stores)


@pytest.mark.parametrize("how", ["close", "with", "delete", "break"])
def test_each_way_to_leave(how: str) -> None:
    with Sides("pull", ToyEngine(device="toy:0"), ToyEngine(device="toy:1", context=8192)) as sides:
        generation = sides.split.generate(P40, max_tokens=8000)
        first = next(generation)
        assert first.id == ids(P40, 1)[0]
        if how == "close":
            generation.close()
            generation.close()
        elif how == "with":
            with generation:
                next(generation)
        elif how == "break":
            for _ in generation:
                break
            del generation
        else:
            del generation
        gc.collect()
        assert eventually(sides.idle)
        assert sides.split.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_a_closed_generation_is_at_its_end() -> None:
    with split("pull", *two()) as joined:
        generation = joined.generate(P40, max_tokens=400)
        seen = 0
        for _ in generation:
            seen += 1
            generation.close()
        assert seen == 1
        assert list(generation) == []
        assert generation.timing is None
        with pytest.raises(PeerFailed, match="closed before its end"):
            generation.completion()


def test_close_after_the_end_changes_nothing() -> None:
    with split("pull", *two()) as joined:
        generation = joined.generate(P40, max_tokens=2)
        completion = generation.completion()
        generation.close()
        assert completion.ids == ids(P40, 2)
        assert generation.timing is completion.timing
        assert list(generation) == []


@pytest.mark.parametrize("way", WAYS)
def test_closing_a_split_ends_what_runs(way: str) -> None:
    prefill, decode = two()
    prefill.gate.clear()
    with split(way, prefill, decode) as joined:
        decode.gate.clear()
        readers = [Reader(joined.generate(P40, max_tokens=4)) for _ in range(3)]
        if way != "local":
            assert eventually(lambda: decode.reserved > 0)
        timer = threading.Timer(0.1, decode.gate.set)  # a local prefill has nobody else to stop it
        timer.start()
        joined.close()
        joined.close()
        timer.join()
        for reader in readers:
            reader.join(5)
            assert not reader.is_alive()
            assert isinstance(reader.error, PeerError) or way == "local"
        assert eventually(lambda: decode.reserved == 0 and prefill.running_prefills == 0)
        with pytest.raises((RequestError, PeerUnavailable), match="closed"):
            joined.generate(P40)


def test_a_split_that_was_dropped_serves_its_generation() -> None:
    generation = connect(ToyEngine(), ToyEngine()).generate(P40, max_tokens=5)
    gc.collect()
    assert [token.id for token in generation] == ids(P40, 5)


# Peers that fail (case O9).


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_prefill_side_that_falls_silent(after: int) -> None:
    decode = ToyEngine()
    server = Server("127.0.0.1:0", HostilePrefill(decode, silent_script(decode, after)))
    quick = Timeouts(connect_s=1.0, silence_s=0.3)
    with Worker(decode, role="decode", timeouts=quick) as worker, connect(server.address, worker.address) as joined:
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match=f"{server.address} was silent for 0.3 s") as info:
            joined.complete(P40)
        assert time.monotonic() - start < 2
        assert info.value.peer == server.address
        assert decode.reserved == 0
        assert worker.live == 0
        assert decode.steps == 0
    server.close(0)


def test_a_sender_that_pushes_nothing() -> None:
    """Its engine is stuck, so no sign of life comes either."""
    prefill, decode = two()
    prefill.gate.clear()
    quick = Timeouts(connect_s=1.0, silence_s=0.5)
    with Worker(decode, role="decode", timeouts=quick) as worker, connect(prefill, worker.address) as joined:
        with pytest.raises((PeerTimeout, PeerFailed)):
            joined.complete(P40)
        assert eventually(lambda: decode.reserved == 0 and worker.live == 0)
        prefill.gate.set()
        assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_signs_of_life_keep_a_long_wait_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsplit.worker.service.HEARTBEAT_S", 0.1)
    prefill = ToyEngine(unit_s=0.05)  # two prompts of about a second each: the second waits
    decode = ToyEngine(device="toy:1")
    quick = Timeouts(connect_s=1.0, silence_s=0.5)
    with (
        Worker(prefill, role="prefill") as one,
        Worker(decode, role="decode", timeouts=quick) as other,
        connect(one.address, other.address, chunk=4) as joined,
    ):
        readers = [Reader(joined.generate(P40, max_tokens=3)) for _ in range(3)]
        for reader in readers:
            reader.join(10)
            assert reader.error is None
            assert reader.ids == ids(P40, 3)


def test_a_killed_worker_and_its_successor() -> None:
    prefill, decode = two()
    prefill.gate.clear()
    first = Worker(prefill, role="prefill")
    with Worker(decode, role="decode") as worker, connect(first.address, worker.address) as joined:
        reader = Reader(joined.generate(P40, max_tokens=3))
        assert eventually(lambda: first.live == 1)
        first.close()
        reader.join(5)
        assert isinstance(reader.error, PeerError)
        assert reader.ids == []
        assert eventually(lambda: decode.reserved == 0 and worker.live == 0)
        with pytest.raises(PeerUnavailable, match=first.address):
            joined.complete(P40)
        with Worker(ToyEngine(device="toy:2"), address=first.address, role="prefill"):
            assert eventually(lambda: finds(joined))
            assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)
    assert decode.reserved == 0


def finds(joined: Split) -> bool:
    try:
        return joined.complete(P40, max_tokens=1).ids == ids(P40, 1)
    except PeerUnavailable:
        return False


def test_a_decode_worker_that_dies() -> None:
    prefill, decode = two()
    worker = Worker(decode, role="decode")
    prefill.gate.clear()
    with Worker(prefill, role="prefill") as one, connect(one.address, worker.address) as joined:
        reader = Reader(joined.generate(P40, max_tokens=3))
        assert eventually(lambda: one.live == 1)
        worker.close()
        reader.join(5)
        assert isinstance(reader.error, PeerError)
        assert eventually(lambda: one.live == 0)


def dead_address() -> str:
    with Worker(ToyEngine(), role="prefill") as worker:
        return worker.address


def test_the_second_address_takes_over() -> None:
    dead, decode = dead_address(), ToyEngine()
    with Worker(ToyEngine(), role="prefill") as alive, pytest.warns(UserWarning, match=f"prefill worker {dead}"):
        joined = connect([dead, alive.address], decode)
    with joined, Worker(ToyEngine(), address=alive.address, role="prefill"):
        assert eventually(lambda: finds(joined))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_the_second_address_takes_over_mid_stream(after: int) -> None:
    decode = ToyEngine()
    cut = HostilePrefill(decode, stream_script(decode, lambda messages: messages[:after]))
    server = Server("127.0.0.1:0", cut)
    with Worker(ToyEngine(), role="prefill") as alive, connect([server.address, alive.address], decode) as joined:
        assert joined.complete(P40, max_tokens=4).ids == ids(P40, 4)
    assert len(cut.requests) == 1
    server.close(0)


def test_two_dead_addresses() -> None:
    dead, decode = [dead_address(), dead_address()], ToyEngine()
    with pytest.raises(PeerUnavailable, match=dead[0]):
        connect(dead, decode)
    with Worker(ToyEngine(), role="prefill") as one, Worker(ToyEngine(), role="prefill") as two:
        joined = connect([one.address, two.address], decode)
    with joined, pytest.raises(PeerUnavailable, match=two.address):
        joined.complete(P40)
    assert eventually(lambda: decode.reserved == 0)


# Many at once (case O10).


@pytest.mark.parametrize("way", ["pull", "push", "local"])
def test_concurrent_requests_never_see_each_other(way: str) -> None:
    prompts = [P40[r:] + P40[:r] for r in range(16)] + [P40[:n] for n in range(3, 41, 4)]
    wants = [reference(prompt, max_tokens=96, logprobs=0) for prompt in prompts]
    prefill, decode = ToyEngine(unit_s=0.0002, device="toy:0"), ToyEngine(device="toy:1")
    with split(way, prefill, decode, chunk=7) as joined, ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            results = list(pool.map(lambda prompt: joined.complete(prompt, max_tokens=96, logprobs=0), prompts))
            for want, got in zip(wants, results, strict=True):
                assert [(t.id, t.logprob) for t in got.tokens] == want
        assert eventually(lambda: decode.reserved == 0)
    assert max(decode.batches) > 1  # they did share steps


# Room.


def test_little_room_queues_and_everyone_finishes() -> None:
    decode = ToyEngine(capacity=100, device="toy:1")
    with split("pull", ToyEngine(), decode) as joined, ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda i: joined.complete(P40[i:], max_tokens=5), range(12)))
    for i, got in enumerate(results):
        assert got.ids == ids(P40[i:], 5)
    assert decode.reserved == 0


def test_what_can_never_fit_is_refused_at_once() -> None:
    with split("pull", ToyEngine(), ToyEngine(capacity=50)) as joined:
        start = time.monotonic()
        with pytest.raises(CapacityError, match="60 positions asked, 50 free"):
            joined.complete(P40, max_tokens=20)
        assert time.monotonic() - start < 1
        assert joined.complete(P40, max_tokens=10).ids == ids(P40, 10)


# Text.


class Letters:
    """One character per token: id 0 is "!", 1 is '"' and so on."""

    bos_id = None
    eos_ids = (96,)
    vocab_size = 97

    def __init__(self, fingerprint: str = "letters", template: str | None = None) -> None:
        self.fingerprint = fingerprint
        self.template_fingerprint = template

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 33 for c in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token + 33) for token in tokens)

    def detokenizer(self) -> "Letters":
        return self

    def push(self, token: int) -> str:
        return self.decode([token])

    def flush(self) -> str:
        return ""


def with_letters(fingerprint: str = "letters", template: str | None = None) -> ToyEngine:
    engine = ToyEngine()
    engine.tokenizer = Letters(fingerprint, template)  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize("way", WAYS)
def test_text_in_and_text_out(way: str) -> None:
    letters = Letters()
    with split(way, with_letters(), with_letters()) as joined:
        want = ids(letters.encode("hello"), 8)
        assert 96 not in want
        got = joined.complete("hello", max_tokens=8)
        assert (got.text, got.ids) == (letters.decode(want), want)
        assert got.text == "".join(token.text for token in got.tokens)
        chat = letters.encode("<user>hi<bot>")
        answer = joined.chat([{"role": "user", "content": "hi"}, {"role": "bot", "content": ""}], max_tokens=4)
        assert answer.completion().ids == ids(chat, 4)


def test_a_stop_string_ends_a_request_and_is_not_shown() -> None:
    letters = Letters()
    want = letters.decode(ids(letters.encode("hello"), 8))
    with split("pull", with_letters(), with_letters()) as joined:
        got = joined.complete("hello", max_tokens=8, stop=[want[3:5], "never"])
        assert (got.text, got.finish, len(got.tokens)) == (want[:3], "stop", 5)
        almost = joined.complete("hello", max_tokens=8, stop=want[7] + "x")
        assert (almost.text, almost.finish) == (want, "length")


def test_the_tokenizers_end_id_counts() -> None:
    engine = with_letters()
    engine.tokenizer.eos_ids = (ids(P40, 2)[1],)  # type: ignore[attr-defined]
    with split("local", engine, engine) as joined:
        assert joined.complete(P40, max_tokens=9).finish == "stop"


@pytest.mark.parametrize("way", ["pull", "push"])
def test_another_chat_template_is_a_warning(way: str) -> None:
    prefill, decode = with_letters(template="a"), with_letters(template="b")
    with pytest.warns(UserWarning, match="has another chat template; the decode side's is used"):
        with split(way, prefill, decode) as joined:
            assert joined.complete(P40, max_tokens=1).ids == ids(P40, 1)


# Who may be joined.


def other_layout(engine: ToyEngine, layer: KvLayer) -> ToyEngine:
    engine.layout = KvLayout((layer,) * LAYERS, engine.layout.dtype)
    return engine


DIFFERENT = {
    "architecture": (lambda: ToyEngine(architecture="other"), "architecture: 'toy' here, 'other' there"),
    "width": (lambda: ToyEngine(width=17), "width: 16 here, 17 there"),
    "heads": (lambda: ToyEngine(heads=8), "heads: 4 here, 8 there"),
    "intermediate": (lambda: ToyEngine(intermediate=33), "intermediate: 32 here, 33 there"),
    "rope": (
        lambda: ToyEngine(rotary=(Rope((1.0, 0.02)),) * LAYERS),
        r"rotary of layer 0: inv_freq\[1\]: 0.01 here, 0.02 there",
    ),
    "rope width": (
        lambda: ToyEngine(rotary=(Rope((1.0,)),) * LAYERS),
        "rotary of layer 0: inv_freq: 2 RoPE frequencies here, 1 there",
    ),
    "head width": (lambda: other_layout(ToyEngine(), KvLayer(2, 8)), "layers: .*head_dim=4.* here, .*head_dim=8"),
    "window": (lambda: other_layout(ToyEngine(), KvLayer(2, 4, 64)), "layers: .*window=None.*window=64"),
    "tokenizer": (lambda: with_letters("other"), "tokenizer: '' here, 'other' there"),
    "weights": (lambda: ToyEngine(weights_hash="q4"), "weights: 'toy' here, 'q4' there .*mixed_weights=True"),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("way", ["pull", "push", "addresses", "own"])
def test_another_model_is_refused_at_connect(way: str, name: str) -> None:
    build, why = DIFFERENT[name]
    prefill, decode = build(), ToyEngine()
    with pytest.raises(IncompatibleError, match=f"holds another model: {why}"), split(way, prefill, decode):
        pass
    assert decode.reserved == 0


@pytest.mark.parametrize("way", ["pull", "push", "addresses", "own"])
def test_other_weights_are_allowed_on_request(way: str) -> None:
    with split(way, ToyEngine(weights_hash="q4"), ToyEngine(), mixed_weights=True) as joined:
        assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_mixed_weights_allows_nothing_else() -> None:
    with pytest.raises(IncompatibleError, match="width"):
        connect(ToyEngine(width=17, weights_hash="q4"), ToyEngine(), mixed_weights=True)


def test_a_worker_restarted_with_another_model_between_requests() -> None:
    decode = ToyEngine()
    with Worker(ToyEngine(), role="prefill") as first:
        joined = connect(first.address, decode)
        assert joined.complete(P40, max_tokens=1).ids == ids(P40, 1)
    with joined, Worker(ToyEngine(weights_hash="new"), address=first.address, role="prefill"):
        errors: list[HetsplitError] = []

        def asked() -> bool:
            with pytest.raises((IncompatibleError, PeerUnavailable)) as info:
                joined.complete(P40, max_tokens=1)
            errors.append(info.value)
            return isinstance(info.value, IncompatibleError)

        assert eventually(asked)
        assert "weights: 'new' here, 'toy' there" in str(errors[-1])
    assert decode.reserved == 0


def test_another_context_is_no_other_model() -> None:
    """Case O7 (f): the prefill side's limit is lower, which only a long prompt meets."""
    decode = ToyEngine()
    for way in ("pull", "push"):
        with split(way, ToyEngine(context=30), decode) as joined:
            with pytest.raises(RequestError, match="a prompt of 40 tokens, the prefill worker's context is 30"):
                joined.complete(P40)
            assert eventually(lambda: decode.reserved == 0)
            assert joined.complete(P40[:30], max_tokens=3).ids == ids(P40[:30], 3)


class Only:
    """An engine with one of the two roles."""

    def __init__(self, *names: str) -> None:
        engine = ToyEngine()
        for name in ("spec", "layout", "name", "tokenizer", "weights_hash", "device", "source", *names):
            setattr(self, name, getattr(engine, name))


def test_engines_without_the_role() -> None:
    prefill, decode = Only("prefill"), Only("reserve", "step")
    with pytest.raises(ConfigError, match=r"decode is .*expected an engine that decodes or an address"):
        connect(ToyEngine(), prefill)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"prefill is .*expected an engine that prefills"):
        connect(decode, ToyEngine())  # type: ignore[arg-type]
    with connect(prefill, decode) as joined:  # type: ignore[arg-type]
        assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_a_local_prefill_by_an_engine_that_has_none() -> None:
    decode = Only("reserve", "step")
    with connect(ToyEngine(device="toy:0"), decode) as joined:  # type: ignore[arg-type]
        companion = joined.generate(P40, max_tokens=300)
        next(companion)
        joined._mode = "local"
        with pytest.raises(RequestError, match="engine toy cannot prefill"):
            joined.generate(P40)
        assert len(list(companion)) == 299  # and nobody else was hurt
    with pytest.raises(ConfigError, match="engine toy cannot prefill"):
        connect(None, decode)  # type: ignore[arg-type]


def test_workers_of_the_wrong_role() -> None:
    with Worker(ToyEngine(), role="prefill") as prefill, Worker(ToyEngine(), role="decode") as decode:
        with pytest.raises(IncompatibleError, match="this worker has role prefill, decode was asked of it"):
            connect(None, prefill.address)
        with pytest.raises(IncompatibleError, match=f"{decode.address} has role decode, prefill is needed"):
            connect(decode.address, decode.address)
        with pytest.raises(IncompatibleError, match=f"{decode.address} has role decode, prefill is needed"):
            connect([prefill.address, decode.address], decode.address)


def test_a_worker_in_both_roles() -> None:
    engine = ToyEngine()
    with Worker(engine) as worker, connect(worker.address, worker.address) as joined:
        got = joined.complete(P40, max_tokens=3)
        assert (got.ids, got.timing.mode) == (ids(P40, 3), "split")


# Arguments.

BAD_CONNECTS: dict[str, tuple[tuple[Any, Any], dict[str, Any], str]] = {
    "mode": ((None, ToyEngine()), {"mode": "fast"}, "mode 'fast', allowed: auto, split, local"),
    "chunk 0": ((None, ToyEngine()), {"chunk": 0}, "chunk 0, allowed: 1 to 65536"),
    "chunk text": ((None, ToyEngine()), {"chunk": "8"}, "chunk '8'"),
    "chunk huge": ((None, ToyEngine()), {"chunk": 1 << 17}, "chunk 131072"),
    "split with nobody": ((None, ToyEngine()), {"mode": "split"}, "needs a prefill side"),
    "an empty list": (([], ToyEngine()), {}, "prefill is an empty list"),
    "a list of engines": (([ToyEngine()], ToyEngine()), {}, "expected an engine that prefills"),
    "no decode": ((ToyEngine(), None), {}, "decode is None"),
    "addresses that may not be dialled": ((["10.0.0.2:1"], ToyEngine()), {}, "refusing to dial 10.0.0.2:1"),
    "a number": ((5, ToyEngine()), {}, "prefill is 5"),
    "a bad prefill address": (("nonsense", ToyEngine()), {}, "address 'nonsense': expected HOST:PORT"),
    "a bad second address": ((["127.0.0.1:1", "x:y"], ToyEngine()), {}, "address 'x:y'"),
    "a bad decode address": ((None, "localhost"), {}, "address 'localhost'"),
    "an open address": ((None, "10.0.0.2:1"), {}, "refusing to dial 10.0.0.2:1"),
    "connect time-out": ((None, ToyEngine()), {"connect_timeout_s": 0}, "connect_s 0"),
    "silence time-out": ((None, ToyEngine()), {"silence_timeout_s": -1}, "silence_s -1"),
    "a heartbeat's silence": (
        (None, ToyEngine()),
        {"silence_timeout_s": 1},
        "silence_timeout_s 1, allowed: at least 2",
    ),
    "a token that is no text": ((None, ToyEngine()), {"token": 5}, "token is int, expected text or None"),
    "tls that is no file": ((None, ToyEngine()), {"tls": 5}, "tls 5, expected a PEM file, its bytes, or None"),
    "mixed_weights": ((None, ToyEngine()), {"mixed_weights": "yes"}, "mixed_weights 'yes', allowed: True, False"),
    "insecure": ((None, ToyEngine()), {"insecure": 1}, "insecure 1, allowed: True, False"),
    "chunk True": ((None, ToyEngine()), {"chunk": True}, "chunk True, allowed"),
    "token": ((None, ToyEngine()), {"token": ""}, "token: expected at least 16"),
    "tls file": ((None, ToyEngine()), {"tls": "/no/such.pem"}, "CA certificate /no/such.pem"),
}


@pytest.mark.parametrize("name", BAD_CONNECTS)
def test_arguments_are_checked_at_connect(name: str) -> None:
    sides, options, why = BAD_CONNECTS[name]
    with pytest.raises(ConfigError, match=why):
        connect(*sides, **options)


def test_nothing_stays_open_after_a_failed_connect() -> None:
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(IncompatibleError):
            connect(ToyEngine(width=17), ToyEngine())
        with pytest.raises(PeerUnavailable):
            connect(dead_address(), ToyEngine())
    gc.collect()
    assert eventually(lambda: threading.active_count() <= before + 2, 5), threading.enumerate()


def test_mode_local_asks_nobody() -> None:
    prefill, decode = ToyEngine(), ToyEngine()
    for way in ("pull", "push", "addresses"):
        with split(way, prefill, decode, mode="local") as joined:
            got = joined.complete(P40, max_tokens=3)
            assert (got.ids, got.timing.mode) == (ids(P40, 3), "local")
    assert prefill.prefilled_units == 0
    with Worker(decode, role="decode") as worker, connect(dead_address(), worker.address, mode="local") as joined:
        assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_mode_split_without_a_prefill_side_is_told_at_connect() -> None:
    with Worker(ToyEngine(), role="decode") as worker:
        with pytest.raises(ConfigError, match="mode 'split' needs a prefill side.*the decode worker knows none"):
            connect(None, worker.address, mode="split")
    for way in ("own", "push", "addresses"):
        with split(way, ToyEngine(), ToyEngine(), mode="split") as joined:
            assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_a_description_of_the_decode_side() -> None:
    with split("pull", ToyEngine(), ToyEngine(context=77)) as joined:
        facts = joined.description
        assert (facts.engine, facts.role, facts.context, facts.dtype) == ("toy", "decode", 77, "float32")


# Timing.


@pytest.mark.parametrize("way", WAYS)
def test_timing_is_filled(way: str) -> None:
    mode = {"local": "local", "push": "push"}.get(way, "split")
    with split(way, ToyEngine(unit_s=0.002), ToyEngine(unit_s=0.002)) as joined:
        start = time.monotonic()
        timing = joined.complete(P40, max_tokens=8).timing
        wall_s = time.monotonic() - start
        single = joined.complete([5], max_tokens=1).timing
        both_s = time.monotonic() - start
    assert timing.mode == mode
    assert timing.why
    assert 0 <= timing.queue_s < wall_s
    assert 0 < timing.prefill_s < timing.first_token_s < wall_s
    assert 0 < timing.decode_s < wall_s
    assert timing.first_token_s + timing.decode_s <= wall_s
    assert 0 <= timing.exposed_transfer_s < wall_s
    assert timing.codec == "raw"
    if mode == "local":
        assert (timing.sent_bytes, timing.transfer_s, timing.exposed_transfer_s) == (0, 0, 0)
    else:
        assert timing.sent_bytes == ToyEngine().layout.span_bytes(39)
        assert 0 < timing.transfer_s < wall_s
    assert single.sent_bytes == 0
    assert 0 < single.first_token_s < both_s - wall_s


def test_waiting_for_others_is_queue_time() -> None:
    prefill, decode = ToyEngine(device="toy:0"), ToyEngine(device="toy:1")
    with split("addresses", prefill, decode) as joined:
        prefill.gate.clear()
        readers = [Reader(joined.generate(P40, max_tokens=1)) for _ in range(2)]
        timer = threading.Timer(0.3, prefill.gate.set)
        timer.start()
        for reader in readers:
            reader.join(5)
        timer.join()
    timings = [reader.generation.timing for reader in readers]
    assert all(timing is not None and timing.exposed_transfer_s < 0.2 for timing in timings)
    waits = sorted((timing.queue_s, timing.prefill_s) for timing in timings if timing)
    assert waits[0][1] > 0.2  # one computes behind the gate
    assert waits[1][0] > 0.2  # the other waits for it


class Throttle:
    """A TCP proxy to `address` that lets so many bytes per second through, `down` to whoever dialled, and `up`."""

    def __init__(self, address: str, *, up: float | None = None, down: float | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._target, self._up, self._down = (host, int(port)), up, down
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for ends in ((near, far, self._up), (far, near, self._down)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, rate: float | None) -> None:
        due = 0.0
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(16384):
                target.sendall(data)
                if rate:
                    due = max(due, time.monotonic() - 0.02) + len(data) / rate  # may catch up on a late wake-up
                    threading.Event().wait(max(0.0, due - time.monotonic()))

    def __enter__(self) -> "Throttle":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


@pytest.mark.parametrize(("megabytes", "rate"), [(1, 4e6), (12, 12e6)])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_the_link_rate_is_the_links(megabytes: int, rate: float, way: str) -> None:
    """A sender's own clock sees only how fast its system's buffers take the bytes."""
    layout = ToyEngine().layout
    n = int(megabytes * 1e6 / layout.span_bytes(1)) + 1
    prompt = [i % 97 for i in range(n)]
    facts = {"context": n + 1, "capacity": 2 * n}
    prefill, decode = ToyEngine(device="toy:0", **facts), ToyEngine(device="toy:1", **facts)
    with contextlib.ExitStack() as stack:
        if way == "pull":
            worker = stack.enter_context(Worker(prefill, role="prefill"))
            link = stack.enter_context(Throttle(worker.address, down=rate))
            joined = stack.enter_context(connect(link.address, decode, chunk=4096))
        else:
            worker = stack.enter_context(Worker(decode, role="decode"))
            link = stack.enter_context(Throttle(worker.address, up=rate))
            joined = stack.enter_context(connect(prefill, link.address, chunk=4096))
        timing = joined.complete(prompt, max_tokens=1).timing
    assert timing.sent_bytes == layout.span_bytes(n - 1)
    assert timing.link_rate == pytest.approx(rate, rel=0.3)


def test_waiting_for_blocks_is_no_transfer_time() -> None:
    prefill, decode = two()
    prefill.gate_at = 6
    with split("addresses", prefill, decode, chunk=8) as joined:
        timer = threading.Timer(0.4, prefill.gate.set)
        reader = Reader(joined.generate(P40, max_tokens=1))
        assert eventually(lambda: not prefill.gate.is_set())
        timer.start()
        reader.join(5)
        timer.join()
    timing = reader.generation.timing
    assert timing is not None
    assert timing.prefill_s > 0.4
    assert 0 < timing.transfer_s < 0.2


@pytest.mark.parametrize("way", ["pull", "push", "local"])
def test_progress_until_the_first_token(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsplit.worker.service.HEARTBEAT_S", 0.02)

    class Slow(ToyEngine):
        def step(self, rows: Any) -> StepResult:
            threading.Event().wait(0.05)
            return super().step(rows)

    prefill, decode = ToyEngine(device="toy:0", unit_s=0.02), Slow(device="toy:1", unit_s=0.02)
    with split(way, prefill, decode, chunk=2) as joined:
        generation = joined.generate(P40, max_tokens=2)
        told: list[tuple[int, int, int]] = []
        generation.on_progress = lambda *progress: told.append(progress)
        assert next(generation).id == ids(P40, 1)[0]
        count = len(told)
        assert [token.id for token in generation] == ids(P40, 2)[1:]
    assert len(told) == count > 5
    assert {(ahead, total) for ahead, _, total in told} == {(0, 39)}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert done[0] < 20
    assert any(10 < count < 39 for count in done)


def test_progress_says_who_is_ahead_on_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("service", "prefill"):
        monkeypatch.setattr(f"hetsplit.worker.{module}.HEARTBEAT_S", 0.02, raising=False)
    prefill, decode = ToyEngine(device="toy:0", unit_s=0.01, context=4096), ToyEngine(device="toy:1", context=4096)
    with split("addresses", prefill, decode, chunk=8) as joined:
        first = Reader(joined.generate(P40 * 10, max_tokens=1))
        assert eventually(lambda: prefill.prefilled_units)
        second = joined.generate(P40, max_tokens=1)
        told: list[int] = []
        second.on_progress = lambda ahead, done, total: told.append(ahead)
        assert second.completion().ids == ids(P40, 1)
        first.join(5)
    assert told[0] in (0, 1)
    assert 1 in told


def test_a_peer_that_fails_first_is_no_exposed_transfer() -> None:
    decode = ToyEngine()

    def slowly(request: Any, call: Any) -> Iterator[bytes]:
        threading.Event().wait(0.3)
        raise PeerFailed("broken")
        yield b""

    server = Server("127.0.0.1:0", HostilePrefill(decode, slowly))
    with Worker(ToyEngine(), role="prefill") as alive, connect([server.address, alive.address], decode) as joined:
        timing = joined.complete(P40, max_tokens=1).timing
    assert timing.queue_s > 0.28
    assert timing.exposed_transfer_s < 0.25
    server.close(0)


def test_a_push_counts_its_round_trip() -> None:
    """The reservation travels to the sender, and its first message back: no block is under way then."""
    prefill, decode = two()
    with Worker(decode, role="decode") as worker, connect(prefill, worker.address) as joined:
        assert joined._push is not None
        start = joined._push.start

        def late(*args: Any, **options: Any) -> Any:
            threading.Event().wait(0.3)
            return start(*args, **options)

        joined._push.start = late  # type: ignore[method-assign]
        timing = joined.complete(P40, max_tokens=1).timing
    assert timing.first_token_s > 0.3
    assert timing.exposed_transfer_s < 0.2


# Who else is on this machine.


def listening(joined: Split) -> list[str]:
    return [joined._decode.address, *joined._addresses]


@pytest.mark.parametrize("way", ["local", "pull", "engine+address"])
def test_nobody_else_may_use_this_processes_workers(way: str) -> None:
    """They hold the user's credentials, and any user of the machine can reach loopback."""
    secret = "the-users-own-token"
    called: list[str] = []
    with split(way, ToyEngine(), ToyEngine(), token=secret) as joined:
        stranger = HostilePrefill(ToyEngine(), lambda request, call: called.append("prefill") or ())
        trap = Server("127.0.0.1:0", stranger)
        own = listening(joined)[:1] if way == "engine+address" else listening(joined)
        for address in own:
            for credentials in (Credentials(), Credentials(token=secret)):
                peer = Peer(address, credentials)
                for target in (trap.address, "203.0.113.7:5"):
                    with pytest.raises(AuthError):
                        peer.pair(pb.PairRequest(prefill=[target]))
                peer.close()
        assert joined.complete(P40, max_tokens=2).ids == ids(P40, 2)
        trap.close(0)


def test_this_processes_decode_worker_dials_what_it_was_given_only() -> None:
    with split("engine+address", ToyEngine(), ToyEngine()) as joined:
        with pytest.raises(RequestError, match="does not dial 203.0.113.7:5"):
            joined._decode.pair(pb.PairRequest(prefill=["203.0.113.7:5"]))


def test_the_users_credentials_reach_the_prefill_side() -> None:
    secret = "the-users-own-token"
    with Worker(ToyEngine(), role="prefill", security=ServerSecurity(token=secret)) as worker:
        with connect(worker.address, ToyEngine(), token=secret) as joined:
            assert joined.complete(P40, max_tokens=2).ids == ids(P40, 2)
        with pytest.raises(AuthError):
            connect(worker.address, ToyEngine())


def test_as_many_pushes_as_are_admitted() -> None:
    """Each takes two calls."""
    prefill, decode = two()
    decode.capacity = 10**6
    with split("push", prefill, decode) as joined:
        with ThreadPoolExecutor(120) as pool:
            results = list(pool.map(lambda i: joined.complete(P40[: 4 + i % 9], max_tokens=2).ids, range(120)))
    assert results == [ids(P40[: 4 + i % 9], 2) for i in range(120)]


# Engines that fail.


def test_a_prefill_that_fails_is_named() -> None:
    class Broken(ToyEngine):
        def prefill(self, tokens: Any, span: range, *, chunk: int, stop: threading.Event) -> Iterator[KvBlock]:
            yield self.block(0, 0, tokens[: min(chunk, span.stop)])
            raise EngineError("out of device memory")

    decode = ToyEngine()
    with split("pull", Broken(), decode) as joined:
        with pytest.raises(PeerFailed, match="EngineError: out of device memory"):
            joined.complete(P40)
        assert decode.reserved == 0
    with split("push", Broken(), decode) as joined:
        for _ in range(5):
            with pytest.raises(EngineError, match="out of device memory"):
                joined.complete(P40)
        assert eventually(lambda: decode.reserved == 0)
    with split("local", Broken(), Broken()) as joined, pytest.raises(PeerFailed, match="EngineError: out of device"):
        joined.complete(P40)


def test_a_fault_that_an_engine_did_not_name_is_still_an_error() -> None:
    class Broken(ToyEngine):
        broken = True

        def prefill(self, tokens: Any, span: range, *, chunk: int, stop: threading.Event) -> Iterator[KvBlock]:
            if self.broken:
                raise RuntimeError("CUDA error 700")
            yield from super().prefill(tokens, span, chunk=chunk, stop=stop)

    for way in ("pull", "push", "local"):
        prefill, decode = Broken(), Broken() if way == "local" else ToyEngine()
        with split(way, prefill, decode) as joined:
            kind = EngineError if way == "push" else PeerFailed
            with pytest.raises(kind, match=r"RuntimeError.*CUDA error 700"):
                joined.complete(P40)
            assert eventually(lambda decode=decode: decode.reserved == 0)
            prefill.broken = decode.broken = False  # type: ignore[attr-defined]
            assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_a_prefill_that_breaks_the_rules_is_the_engines_fault() -> None:
    class Skipping(ToyEngine):
        def prefill(self, tokens: Any, span: range, *, chunk: int, stop: threading.Event) -> Iterator[KvBlock]:
            yield self.block(0, 1, tokens[1:3])

    decode = ToyEngine()
    for way, kind in (("pull", PeerFailed), ("push", LocalProtocolError)):
        with split(way, Skipping(), decode) as joined, pytest.raises(kind) as info:
            joined.complete(P40)
        assert "block starts at position 1, expected 0" in str(info.value)
    assert eventually(lambda: decode.reserved == 0)


class Failing(ToyEngine):
    """Fails its steps as long as `fault` is set."""

    fault: Exception | None = None

    def step(self, rows: Any) -> StepResult:
        result = super().step(rows)
        if self.fault and max(self.batches[-1:]) > 1:
            raise self.fault
        return result


@pytest.mark.parametrize("fault", [EngineError("the device is gone"), RuntimeError("the device is gone")], ids=repr)
def test_a_step_that_fails_fails_its_batch_and_no_later_one(fault: Exception) -> None:
    decode = Failing(context=8192)
    decode.fault = fault
    with split("local", decode, decode) as joined:
        one, other = joined.generate(P40, max_tokens=8000), joined.generate(P40[:9], max_tokens=8000)
        for generation in (one, other):
            with pytest.raises(PeerFailed, match=r"EngineError: .*the device is gone"):
                list(generation)
        assert eventually(lambda: decode.reserved == 0)
        assert joined.complete(P40, max_tokens=3).ids == ids(P40, 3)


def test_logits_that_are_no_numbers_hurt_only_their_own_request() -> None:
    class Poisoned(ToyEngine):
        def step(self, rows: Any) -> StepResult:
            result = super().step(rows)
            for i, row in enumerate(rows):
                if row.cache.store.positions == 11:
                    result.logits[i] = np.nan
            return result

    decode = Poisoned()
    with split("pull", *(ToyEngine(device="toy:0"), decode)) as joined:
        good = [joined.generate(P40, max_tokens=200) for _ in range(2)]
        with pytest.raises(PeerFailed, match=r"EngineError: .*logits.* nan"):
            joined.complete(P40[:9], max_tokens=2)
        for generation in good:
            assert [t.id for t in generation] == ids(P40, 200)
        assert eventually(lambda: decode.reserved == 0)


def test_a_decode_worker_that_cuts_its_stream() -> None:
    """A stream of tokens that just ends is no completed request."""
    from hetsplit.errors import RemoteProtocolError

    class Cutting(HostilePrefill):
        events: list[pb.GenerateEvent] = []  # noqa: RUF012

        def pair(self, request: pb.PairRequest) -> pb.PairReply:
            return pb.PairReply()

        def generate(self, request: Any, call: Any) -> Iterator[pb.GenerateEvent]:
            yield from self.events

    accepted = pb.GenerateEvent(accepted=pb.Accepted(prompt_tokens=40, max_tokens=4))
    token = pb.GenerateEvent(token=pb.TokenEvent(id=5))
    last = pb.GenerateEvent(token=pb.TokenEvent(id=5, finish="length"))
    finished = pb.GenerateEvent(finished=pb.Finished())
    service = Cutting(ToyEngine(), lambda request, call: [])
    server = Server("127.0.0.1:0", service)
    with connect(None, server.address) as joined:
        for events in ([], [token], [accepted], [accepted, token], [accepted, last], [accepted, token, finished]):
            service.events = events
            with pytest.raises(RemoteProtocolError, match=r"ended|first"):
                joined.complete(P40)
        service.events = [accepted, token, last, finished]
        assert joined.complete(P40).ids == [5, 5]
    server.close(0)
