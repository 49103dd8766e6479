"""The decode loop: requests wait for room, are filled, and then share steps until they finish.

Owns a request's life on the decode side and its timing. Runs on the compute thread; other threads hand it work through
`submit`, `filled`, `failed` and `cancel`. Knows nothing of gRPC or peers: a `Request` brings the function that starts
its fill. Invariants: engine and scheduler are touched by the compute thread alone; a store is released only when no
fill writes into it any more; a failed fill emits no token.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hetsplit.engines import Decoder, LocalPrefill, Row
from hetsplit.errors import CapacityError, EngineError, HetsplitError, PeerFailed, RequestError
from hetsplit.kv import KvCache, KvFill, KvStore, prefill_span, withheld_span
from hetsplit.protocol import Done
from hetsplit.result import Timing, Token
from hetsplit.sampling import Sampled, Sampler, SamplingParams
from hetsplit.scheduler import Job, Running, Scheduler
from hetsplit.tokenizer import StopText, Tokenizer
from hetsplit.worker.compute import ComputeThread
from hetsplit.worker.prefill import check_chunk

MAX_ACTIVE = 64
MAX_WAITING = 60  # with those that are active fewer than the calls a worker takes
CLOSE_S = 2.0
SETTLE_S = 0.005
"""How long staged blocks may keep the running rows waiting, per step."""


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
        self.filled = False
        self.units: Iterator[None] | None = None
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
        with self._lock:
            self.cancelled.set()
            callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            callback()


def _job(prompt: tuple[int, ...], params: SamplingParams, engine: Decoder) -> Job:
    context = engine.spec.context
    if not prompt:
        raise RequestError("an empty prompt; at least one token is needed")
    if len(prompt) >= context:
        raise RequestError(f"a prompt of {len(prompt)} tokens leaves no free position, the context is {context}")
    if bad := next((t for t in prompt if not 0 <= t < engine.spec.vocab_size), None):
        raise RequestError(f"token id {bad}, allowed: 0 to {engine.spec.vocab_size - 1}")
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


class DecodeSource:
    """The compute thread's work for decode."""

    def __init__(self, engine: Decoder, *, max_active: int = MAX_ACTIVE, max_waiting: int = MAX_WAITING) -> None:
        self._engine = engine
        self._scheduler = Scheduler(max_active=max_active, max_waiting=max_waiting)
        self._requests: dict[str, Request] = {}
        self._filling: set[Request] = set()  # another thread may be writing into their stores
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._compute = ComputeThread.attach(engine, self)

    @property
    def live(self) -> int:
        """Requests in any state."""
        return len(self._requests)

    @property
    def beats(self) -> int:
        """Grows while the compute thread is alive."""
        return self._compute.beats

    def wake(self) -> None:
        """A fill thread has written; there may be something to settle."""
        self._compute.wake()

    def ahead(self, request: Request) -> int:
        return self._scheduler.ahead(request.job.id)

    # From any thread.

    def submit(self, request: Request) -> None:
        self._call(lambda: self._submit(request))

    def filled(self, request: Request, done: Done, sent_bytes: int, rtt_s: float) -> None:
        """The fill thread proved coverage; what is staged may be settled."""
        self._call(lambda: self._filled(request, done, sent_bytes, rtt_s))

    def failed(self, request: Request, error: HetsplitError) -> None:
        """The fill thread gave up and will not write into the store again."""
        self._call(lambda: self._fill_failed(request, error))

    def cancel(self, request: Request) -> None:
        request.cancel()
        self._call(lambda: self._leave(request, PeerFailed("the request was cancelled")))

    def close(self) -> None:
        """Ends every request with an error, and gives fills `CLOSE_S` seconds to let go of their stores."""
        for request in tuple(self._requests.values()):
            self.cancel(request)
        deadline = time.monotonic() + CLOSE_S
        while (self._requests or self._filling) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._compute.detach(self)

    def _call(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._compute.wake()

    # On the compute thread.

    def unit(self) -> bool:
        worked = self._take_inbox() | self._reserve_next() | self._fill_one()
        batch = self._scheduler.next_batch()
        if not batch:
            return worked
        logits = self._step(batch)
        if logits is not None:
            for running, row in zip(batch, logits, strict=True):
                self._commit(running, row)
        return True

    def crash(self, error: Exception) -> None:
        for request in tuple(self._requests.values()):
            request.cancel()
            self._leave(request, EngineError(f"the decode thread failed: {error!r}"))

    def _take_inbox(self) -> bool:
        worked = False
        while not self._inbox.empty():
            self._inbox.get()()
            worked = True
        return worked

    def _submit(self, request: Request) -> None:
        if request.cancelled.is_set():
            return
        self._requests[request.job.id] = request
        try:
            self._scheduler.admit(request.job)
        except CapacityError as error:
            self._leave(request, error)

    def _reserve_next(self) -> bool:
        job = self._scheduler.next_waiting()
        if job is None:
            return False
        request = self._requests[job.id]
        try:
            request.store = self._engine.reserve(len(job.prompt) + job.max_tokens)
            self._start(request, request.store)
        except CapacityError as error:
            if self._scheduler.active() or self._filling:
                return False  # they will give room back
            self._leave(request, error)
        except HetsplitError as error:
            self._leave(request, error)
        return True

    def _start(self, request: Request, store: KvStore) -> None:
        self._scheduler.fill(request.job)
        request.fill_started = time.monotonic()
        request.timing = replace(request.timing, queue_s=request.fill_started - request.arrived)
        span = prefill_span(len(request.job.prompt))
        if request.start_fill is None:
            assert isinstance(self._engine, LocalPrefill)
            # The same chunks as a peer would compute, so that the text does not depend on who prefilled.
            request.units = self._engine.extend(store, request.job.prompt, span, chunk=request.chunk)
            return
        request.fill = fill = KvFill(store, self._engine.layout, span)
        self._filling.add(request)
        request.start_fill(request, fill)
        request.events.put(fill)  # last: whoever reads it may push at once

    def _filled(self, request: Request, done: Done, sent_bytes: int, rtt_s: float) -> None:
        self._filling.discard(request)
        if request.job.id not in self._requests:
            self._release(request)
            return
        waited_s = time.monotonic() - request.fill_started
        request.timing = replace(
            request.timing,
            queue_s=request.timing.queue_s + done.queue_s,
            prefill_s=done.prefill_s,
            transfer_s=done.send_s,
            exposed_transfer_s=max(0.0, waited_s - done.queue_s - done.prefill_s - rtt_s),
            sent_bytes=sent_bytes,
        )
        request.filled = True

    def _fill_failed(self, request: Request, error: HetsplitError) -> None:
        self._filling.discard(request)
        if request.job.id in self._requests:
            self._leave(request, error)
        else:
            self._release(request)

    def _fill_one(self) -> bool:
        """Work for the first request whose fill needs the engine: staged blocks, or a unit of a local prefill."""
        for request in self._requests.values():
            if request.cache is not None or request.store is None:
                continue
            try:
                worked = self._compute_unit(request) if request.units else self._settle(request, request.store)
            except HetsplitError as error:
                self._leave(request, error)
                return True
            if worked:
                return True
        return False

    def _compute_unit(self, request: Request) -> bool:
        assert request.units is not None and request.store is not None
        if next(request.units, request) is request:
            span = prefill_span(len(request.job.prompt))
            prefill_s = time.monotonic() - request.fill_started
            request.timing = replace(request.timing, prefill_s=prefill_s)
            self._run(request, request.store.seal(withheld_span(span).start))
        return True

    def _settle(self, request: Request, store: KvStore) -> bool:
        """Move staged blocks in while others still arrive; seal the store once all have."""
        deadline = time.monotonic() + SETTLE_S
        filled = request.filled  # asked first: what was staged before is seen below
        while not (settled := store.settle()) and time.monotonic() < deadline:
            pass
        if settled and filled:
            assert request.fill is not None
            self._run(request, request.fill.finish())
        return not settled or filled

    def _run(self, request: Request, cache: KvCache) -> None:
        request.cache, request.units = cache, None
        self._scheduler.run(request.job, request.job.prompt[cache.length :])

    def _step(self, batch: list[Running]) -> np.ndarray | None:
        rows = []
        for running in batch:
            cache = self._requests[running.job.id].cache
            assert cache is not None
            rows.append(Row(cache, running.pending))
        try:
            return self._engine.step(rows).logits
        except HetsplitError as error:
            for running in batch:
                self._leave(self._requests[running.job.id], error)
            return None

    def _commit(self, running: Running, logits: np.ndarray) -> None:
        request = self._requests[running.job.id]
        try:
            sampled = request.sampler.sample(logits)
        except HetsplitError as error:
            self._leave(request, error)
            return
        finish = self._scheduler.commit(running, sampled.id)
        self._emit(request, sampled, finish)

    def _emit(self, request: Request, sampled: Sampled, finish: str | None) -> None:
        now = time.monotonic()
        request.first_token = request.first_token or now
        text, finish = request.text.push(sampled.id, finish)
        request.events.put(Token(sampled.id, text, finish, sampled.logprob, sampled.top))
        if finish:
            request.timing = replace(
                request.timing,
                first_token_s=request.first_token - request.arrived,
                decode_s=now - request.first_token,
            )
            self._leave(request, None)

    def _leave(self, request: Request, error: HetsplitError | None) -> None:
        """The request is over: its last event goes out, its room is given back. Idempotent."""
        self._scheduler.drop(request.job)
        if self._requests.pop(request.job.id, None) is None:
            return
        if request in self._filling:
            request.cancel()  # the fill thread answers with `failed` or `filled`, and the store is released then
        else:
            self._release(request)
        request.events.put(error or Finished(request.timing))

    def _release(self, request: Request) -> None:
        if request.units is not None:
            request.units.close()  # type: ignore[attr-defined]
            request.units = None
        if request.store is not None:
            request.store.release()
        request.store = request.fill = request.cache = None
