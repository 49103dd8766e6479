"""The decode loop: requests wait for room, are filled, and then share steps until they finish.

Owns a request's life on the decode side and its timing. Runs on the compute thread; other threads hand it work through
`submit`, `filled`, `failed` and `cancel`. Knows nothing of gRPC or peers: a `Request` brings the function that starts
its fill. Invariants: engine and scheduler are touched by the compute thread alone; a store is released only when no
fill writes into it any more; a failed fill emits no token.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetsplit.engines import Decoder, LocalPrefill, Row
from hetsplit.errors import CapacityError, EngineError, HetsplitError, PeerFailed
from hetsplit.kv import KvCache, KvFill, KvStore, prefill_span, withheld_span
from hetsplit.protocol import Done
from hetsplit.result import Token
from hetsplit.sampling import Sampled
from hetsplit.scheduler import Running, Scheduler
from hetsplit.worker.compute import CLOSE_S, ComputeThread, named
from hetsplit.worker.request import Finished, Request

log = logging.getLogger(__name__)

MAX_ACTIVE = 64
MAX_WAITING = 64
SETTLE_S = 0.005
"""How long staged blocks, of all requests together, may keep the running rows waiting, per step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a fill thread tells of a complete transfer. `lost_s` went into peers that failed before."""

    done: Done
    sent_bytes: int
    transfer_s: float
    rtt_s: float
    lost_s: float = 0.0


class DecodeSource:
    """The compute thread's work for decode."""

    def __init__(self, engine: Decoder, *, max_active: int = MAX_ACTIVE, max_waiting: int = MAX_WAITING) -> None:
        self._engine = engine
        self._scheduler = Scheduler(max_active=max_active, max_waiting=max_waiting)
        self._requests: dict[str, Request] = {}
        self._filling: set[Request] = set()  # another thread may be writing into their stores
        self._arriving: deque[Request] = deque()  # filled by a peer and not sealed, the next one to settle first
        self._local: deque[Request] = deque()  # filled by this engine, the next one to compute first
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

    def progress(self, request: Request) -> tuple[int, int, int]:
        """Requests ahead on both sides, positions whose keys and values are here, positions to prefill in all.

        A local prefill is counted as if each of its units were one layer of a chunk.
        """
        ahead, total = self._scheduler.ahead(request.job.id), len(prefill_span(len(request.job.prompt)))
        if request.sealed:
            return 0, total, total
        if receiver := request.receiver:
            return ahead + receiver.ahead, min(receiver.fill.coverage.reached, default=0), total
        chunks = request.units_done // max(self._engine.spec.n_layers, 1)
        return ahead, min(chunks * request.chunk, total), total

    # From any thread.

    def submit(self, request: Request) -> None:
        """Queue a request; a full queue is its last event."""
        self._call(lambda: self._submit(request))

    def filled(self, request: Request, arrival: Arrival) -> None:
        """The fill thread proved coverage; what is staged may be settled."""
        self._call(lambda: self._filled(request, arrival))

    def failed(self, request: Request, error: HetsplitError) -> None:
        """The fill thread gave up and will not write into the store again."""
        self._call(lambda: self._fill_failed(request, error))

    def cancel(self, request: Request) -> None:
        """The request is over, its room is given back. From any thread; idempotent."""
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
        worked = self._take_inbox() | self._reserve_next() | self._settle_arrived() | self._compute_local()
        batch = self._scheduler.next_batch()
        if not batch:
            return worked
        logits = self._step(batch)
        if logits is not None:
            for running, row in zip(batch, logits, strict=True):
                request = self._requests[running.job.id]
                self._guarded(request, "sampling", partial(self._commit, running, row))
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
            store = request.store = self._engine.reserve(len(job.prompt) + job.max_tokens)
        except CapacityError as error:
            if self._scheduler.active() or self._filling:
                return False  # they will give room back
            self._leave(request, error)
        except Exception as error:
            self._leave(request, named(error, "reserving room"))
        else:
            self._scheduler.fill(job)
            self._guarded(request, "starting a fill", partial(self._start, request, store))
        return True

    def _guarded(self, request: Request, doing: str, work: Callable[[], bool]) -> bool:
        """Whatever `work` raises concerns this request only."""
        try:
            return work()
        except Exception as error:
            self._leave(request, named(error, doing))
            return True

    def _start(self, request: Request, store: KvStore) -> bool:
        request.fill_started = time.monotonic()
        request.timing = replace(request.timing, queue_s=request.fill_started - request.arrived)
        span = prefill_span(len(request.job.prompt))
        if request.start_fill is None:
            assert isinstance(self._engine, LocalPrefill)
            # The same chunks as a peer would compute, so that the text does not depend on who prefilled.
            request.units = self._engine.extend(store, request.job.prompt, span, chunk=request.chunk)
            self._local.append(request)
            return True
        request.fill = fill = KvFill(store, self._engine.layout, span)
        self._filling.add(request)
        try:
            request.start_fill(request, fill)
        except Exception:
            self._filling.discard(request)  # no thread will say so
            raise
        self._arriving.append(request)
        request.events.put(fill)  # last: whoever reads it may push at once
        return True

    def _filled(self, request: Request, arrival: Arrival) -> None:
        self._filling.discard(request)
        if request.job.id not in self._requests:
            self._release(request)
            return
        done, waited_s = arrival.done, time.monotonic() - request.fill_started - arrival.lost_s
        request.timing = replace(
            request.timing,
            queue_s=request.timing.queue_s + arrival.lost_s + done.queue_s,
            prefill_s=done.prefill_s,
            transfer_s=arrival.transfer_s,
            exposed_transfer_s=max(0.0, waited_s - done.queue_s - done.prefill_s - arrival.rtt_s),
            sent_bytes=arrival.sent_bytes,
        )
        request.filled = True

    def _fill_failed(self, request: Request, error: HetsplitError) -> None:
        self._filling.discard(request)
        if request.job.id in self._requests:
            self._leave(request, error)
        else:
            self._release(request)

    def _settle_arrived(self) -> bool:
        """Move staged blocks in while others still arrive, a chunk of each request in turn; seal what is complete."""
        deadline = time.monotonic() + SETTLE_S
        worked, idle = False, 0
        while idle < len(self._arriving) and time.monotonic() < deadline:
            request = self._arriving.popleft()
            if request.job.id not in self._requests:
                continue
            moved = self._guarded(request, "settling a cache", partial(self._settle, request))
            if request.cache is None:
                self._arriving.append(request)
            worked |= moved
            idle = 0 if moved else idle + 1
        return worked

    def _settle(self, request: Request) -> bool:
        """One staged chunk; False when there is nothing more to do for now."""
        assert request.store is not None and request.fill is not None
        filled = request.filled  # asked first: what was staged before is seen below
        settled = request.store.settle()
        if settled and filled:
            self._run(request, request.fill.finish())
        return not settled or filled

    def _compute_local(self) -> bool:
        """One unit of one local prefill, in turn."""
        while self._local:
            request = self._local.popleft()
            if request.units is None:
                continue  # it has left
            self._guarded(request, "a local prefill", partial(self._compute_unit, request))
            if request.units is not None:
                self._local.append(request)
            return True
        return False

    def _compute_unit(self, request: Request) -> bool:
        assert request.units is not None and request.store is not None
        if next(request.units, request) is request:
            span = prefill_span(len(request.job.prompt))
            prefill_s = time.monotonic() - request.fill_started
            request.timing = replace(request.timing, prefill_s=prefill_s)
            self._run(request, request.store.seal(withheld_span(span).start))
        request.units_done += 1
        return True

    def _run(self, request: Request, cache: KvCache) -> None:
        request.cache, request.units, request.sealed = cache, None, True
        self._scheduler.run(request.job, request.job.prompt[cache.length :])

    def _step(self, batch: list[Running]) -> np.ndarray | None:
        rows = []
        for running in batch:
            cache = self._requests[running.job.id].cache
            assert cache is not None
            rows.append(Row(cache, running.pending))
        try:
            logits = self._engine.step(rows).logits
            if len(logits) != len(batch):
                raise EngineError(f"a step of {len(batch)} rows gave logits for {len(logits)}")
            return logits
        except Exception as error:
            told = named(error, "a decode step")
            for running in batch:
                self._leave(self._requests[running.job.id], told)
            return None

    def _commit(self, running: Running, logits: np.ndarray) -> bool:
        request = self._requests[running.job.id]
        sampled = request.sampler.sample(logits)
        finish = self._scheduler.commit(running, sampled.id)
        self._emit(request, sampled, finish)
        return True

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
        units, store = request.units, request.store
        request.units = request.store = request.fill = request.cache = request.receiver = None
        try:
            if units is not None:
                units.close()  # type: ignore[attr-defined]
        except Exception:  # an engine's; the store is given back all the same
            log.exception("ending a local prefill failed")
        try:
            if store is not None:
                store.release()
        except Exception:
            log.exception("giving a store back failed")
