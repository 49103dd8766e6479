"""One generation on the decode side: what was asked, what it holds, and the events that its reader sees.

Owns the checks of a prompt, and which of the text is certain. Knows nothing of peers, nor when a request runs (`decode`
does). Invariant: after a `Finished` or an error no event follows.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetsplit.engines import Decoder, LocalPrefill
from hetsplit.errors import HetsplitError, RequestError
from hetsplit.kv import KvCache, KvFill, KvStore
from hetsplit.protocol import Receiver
from hetsplit.result import Timing, Token
from hetsplit.sampling import Sampler, SamplingParams
from hetsplit.scheduler import Job
from hetsplit.tokenizer import StopText, Tokenizer
from hetsplit.worker.prefill import check_chunk


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request."""

    timing: Timing


Event = Token | Finished | KvFill | HetsplitError
"""What a request's reader sees: a `KvFill` once room is reserved, tokens, and one `Finished` or one error."""


class Request:
    """One generation on the decode side. `start_fill` is None for a local prefill. Raises `RequestError`."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        engine: Decoder,
        *,
        mode: str,
        why: str,
        chunk: int,
        start_fill: Callable[["Request", KvFill], None] | None,
    ) -> None:
        check_chunk(chunk)
        if start_fill is None and not isinstance(engine, LocalPrefill):
            raise RequestError(f"engine {engine.name} cannot prefill, connect it to a prefill side")
        self.params = params
        self.chunk = chunk
        self.start_fill = start_fill
        self.job = _job(prompt, params, engine)
        self.sampler = Sampler(params, prompt)
        self.text = _Text(engine.tokenizer, params)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.arrived = time.monotonic()
        self.timing = Timing(mode=mode, why=why)
        self.store: KvStore | None = None
        self.fill: KvFill | None = None
        self.filled = self.sealed = False
        self.receiver: Receiver | None = None  # of the transfer under way, for progress only
        self.units: Iterator[None] | None = None
        self.units_done = 0
        self.cache: KvCache | None = None
        self.first_token = self.fill_started = 0.0
        self._on_cancel: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Runs `callback` when the request is cancelled: at once if it already is."""
        with self._lock:
            if not self.cancelled.is_set():
                self._on_cancel.append(callback)
                return
        callback()

    def cancel(self) -> None:
        """Nobody waits for it any more. From any thread; idempotent."""
        with self._lock:
            self.cancelled.set()
            callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            callback()


def check_room(tokens: int, context: int) -> None:
    """Raises `RequestError` for a prompt of no tokens, or of so many that none can follow."""
    if not tokens:
        raise RequestError("an empty prompt; at least one token is needed")
    if tokens >= context:
        raise RequestError(f"a prompt of {tokens} tokens leaves no free position, the context is {context}")


def _job(prompt: tuple[int, ...], params: SamplingParams, engine: Decoder) -> Job:
    context = engine.spec.context
    check_room(len(prompt), context)
    engine.spec.check_ids(prompt)
    stop_ids = frozenset() if params.ignore_eos else frozenset(stop_ids_of(engine))
    return Job(secrets.token_hex(8), prompt, min(params.max_tokens, context - len(prompt)), stop_ids)


def stop_ids_of(engine: Decoder) -> set[int]:
    """Every end-of-sequence id that the model's files or its tokenizer name."""
    return {*engine.spec.eos_ids, *(engine.tokenizer.eos_ids if engine.tokenizer else ())}


class _Text:
    """Token ids to text that is certain: whole characters, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        if params.stop and tokenizer is None:
            raise RequestError("stop strings need a tokenizer, this model folder has none")
        self._pieces = tokenizer.detokenizer() if tokenizer else None
        self._known = tokenizer.vocab_size if tokenizer else 0
        self._stop = StopText(params.stop)

    def push(self, token: int, finish: str | None) -> tuple[str, str | None]:
        """The text that became certain, and `finish`, now "stop" if a stop string was met."""
        if self._pieces is None:
            return "", finish
        # A model whose vocabulary is padded beyond its tokenizer's may draw an id that stands for nothing.
        text = self._pieces.push(token) if token < self._known else ""
        text += self._pieces.flush() if finish else ""
        text, hit = self._stop.push(text)
        if hit:
            return text, "stop"
        return text + (self._stop.flush() if finish else ""), finish
