"""The prefill side of a worker: prompts are computed in order, blocks wait in host memory until they are sent.

Owns the queue, the staging and its bound. Runs on the compute thread (`unit`) and on the sending thread (`take`,
`transfer`). Knows nothing of gRPC. Invariants: what was computed and not yet sent is bounded in bytes, over all tasks,
and a slow receiver holds at most half of it, so the next prompt goes on; a cancelled task stops between two layers.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator

from hetsplit import frames
from hetsplit.engines import Prefiller
from hetsplit.errors import EngineError, HetsplitError, PeerFailed, RequestError
from hetsplit.kv import KvBlock, visible, withheld_span
from hetsplit.protocol import HEADER_BYTES, MESSAGE_BYTES, Sender
from hetsplit.spec import KvLayout
from hetsplit.worker.compute import ComputeThread, named

STAGING_BYTES = 1 << 30
MAX_CHUNK = 1 << 16
_AT_ONCE = 2
"""Tasks that may hold engine memory: the one that computes, and one more while the first waits for its receiver."""


class PrefillTask:
    """One span to compute. Its blocks are handed over in order by `take`, and count as staged until `sent`."""

    def __init__(self, tokens: tuple[int, ...], span: range, chunk: int) -> None:
        self.tokens = tokens
        self.span = span
        self.chunk = chunk
        self.stop = threading.Event()
        self.staged_bytes = 0
        self.queue_s = self.prefill_s = 0.0
        self.layer_positions = 0  # computed so far, summed over the layers
        self._ready = threading.Condition()
        self._staged: deque[KvBlock] = deque()
        self._ended = False
        self._error: HetsplitError | None = None
        self._submitted = self._started = time.monotonic()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self.blocks: Iterator[KvBlock] | None = None

    def take(self, timeout_s: float) -> deque[KvBlock] | None:
        """What has been staged since; empty after `timeout_s` seconds without a block, None after the last one.

        Raises what the engine raised, or `PeerFailed` once the task is cancelled.
        """
        with self._ready:
            self._ready.wait_for(lambda: self._staged or self._ended, timeout_s)
            if self._error:
                raise self._error
            if not self._staged and self._ended:
                return None
            taken, self._staged = self._staged, deque()
            return taken

    def sent(self, count: int) -> None:
        """So many bytes have left."""
        with self._ready:
            self.staged_bytes -= count

    def begin(self, engine: Prefiller) -> None:
        """The first unit: waiting in the queue is over."""
        self._started = time.monotonic()
        self.queue_s = self._started - self._submitted
        self.blocks = engine.prefill(self.tokens, self.span, chunk=self.chunk, stop=self.stop)

    def pause(self) -> None:
        """There is no room for its next block; until `resume` it does not compute."""
        if self.blocks is not None and self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def stage(self, block: KvBlock, layout: KvLayout) -> None:
        """A computed block; what decode will see of it waits to be taken."""
        with self._ready:
            self.layer_positions += block.count
            block = visible(block, layout, withheld_span(self.span).start)
            if block.count:
                self._staged.append(block)
                self.staged_bytes += block.keys.nbytes + block.values.nbytes
            self.prefill_s = time.monotonic() - self._started - self._paused_s
            self._ready.notify_all()

    def end(self, error: HetsplitError | None = None) -> None:
        """No block follows; the first error counts."""
        with self._ready:
            self._ended = True
            self._error = self._error or error
            self._ready.notify_all()


class PrefillSource:
    """The compute thread's work for prefill. `close` fails what is still queued."""

    def __init__(self, engine: Prefiller, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._engine = engine
        self._staging_bytes = staging_bytes
        self._tasks: list[PrefillTask] = []  # to compute
        self._open: set[PrefillTask] = set()  # to compute or to send
        self._lock = threading.Lock()
        self._compute = ComputeThread.attach(engine, self)

    @property
    def live(self) -> int:
        """Tasks queued, computing, or computed and not yet sent."""
        with self._lock:
            return len(self._open.union(self._tasks))

    @property
    def beats(self) -> int:
        """Grows while the compute thread is alive."""
        return self._compute.beats

    def submit(self, task: PrefillTask) -> None:
        """Queue a task."""
        with self._lock:
            self._tasks.append(task)
            if not task.stop.is_set():
                self._open.add(task)
        self._compute.wake()

    def ahead(self, task: PrefillTask) -> int:
        """How many tasks are computed before this one."""
        with self._lock:
            return self._tasks.index(task) if task in self._tasks else 0

    def cancel(self, task: PrefillTask) -> None:
        """The task is over: it stops between two layers, nothing of it stays staged. Idempotent, from any thread."""
        task.stop.set()
        with self._lock:
            self._open.discard(task)
        task.end(PeerFailed("the prefill was cancelled"))
        self._compute.wake()

    def wake(self) -> None:
        """Staging has room again."""
        self._compute.wake()

    def unit(self) -> bool:
        with self._lock:
            tasks = tuple(self._tasks)
            staged = sum(task.staged_bytes for task in self._open)
        for task in tasks:
            if task.stop.is_set():
                self._drop(task)
                return True
        for task in tasks[:_AT_ONCE]:
            if staged < self._staging_bytes and task.staged_bytes < self._staging_bytes // _AT_ONCE:
                self._advance(task)
                return True
            task.pause()
        return False

    def crash(self, error: Exception) -> None:
        for task in tuple(self._tasks):
            self._drop(task, EngineError(f"the prefill thread failed: {error!r}"))

    def close(self) -> None:
        """Every task ends with an error; idempotent."""
        for task in tuple(self._tasks):
            self.cancel(task)
        self._compute.detach(self)
        for task in tuple(self._tasks):
            self._drop(task)

    def _advance(self, task: PrefillTask) -> None:
        try:
            if task.blocks is None:
                task.begin(self._engine)
            task.resume()
            block = next(task.blocks, None)  # type: ignore[arg-type]
            if block is not None:
                task.stage(block, self._engine.layout)
                return
        except Exception as error:  # whatever it is, it concerns this task only
            self._drop(task, named(error, "a prefill"))
            return
        self._drop(task)

    def _drop(self, task: PrefillTask, error: HetsplitError | None = None) -> None:
        with self._lock:
            if task in self._tasks:
                self._tasks.remove(task)
        try:
            if task.blocks is not None:
                task.blocks.close()  # type: ignore[attr-defined]
        except Exception as fault:
            error = error or named(fault, "ending a prefill")
        task.end(error)


def check_chunk(chunk: int) -> None:
    """Raises `RequestError` for a number of tokens that no step computes."""
    if not 1 <= chunk <= MAX_CHUNK:
        raise RequestError(f"chunk {chunk}, allowed: 1 to {MAX_CHUNK}")


def check_prefill(engine: Prefiller, tokens: tuple[int, ...], span: range, chunk: int) -> None:
    """Raises `RequestError` when this engine cannot compute `span` of `tokens`."""
    if not 0 <= span.start <= span.stop < max(len(tokens), 1):
        raise RequestError(f"span [{span.start}, {span.stop}) of {len(tokens)} tokens, allowed: [0, tokens - 1)")
    if span.start:
        raise RequestError(f"span starts at {span.start}, this worker computes from position 0 only")
    if len(tokens) > engine.spec.context:
        raise RequestError(f"a prompt of {len(tokens)} tokens, the prefill worker's context is {engine.spec.context}")
    check_chunk(chunk)
    engine.spec.check_ids(tokens)


def transfer(source: PrefillSource, task: PrefillTask, sender: Sender, heartbeat_s: float) -> Iterator[bytes]:
    """The whole transfer of a submitted task as the bytes of its messages, each as soon as it can be sent.

    Blocks that already wait are joined; none is waited for. A `Progress` goes out as a heartbeat while the compute
    thread is alive and has nothing for us yet, and right before blocks that had to be waited for: the time from it to
    them is the link's. Closing the iterator cancels the task.
    """
    layers = max(len(sender.layout.layers), 1)
    try:
        yield frames.encode(sender.begin())
        beats, waiting = source.beats, False
        while (blocks := task.take(heartbeat_s if waiting else 0.0)) is not None:
            if waiting and (blocks or source.beats != beats):
                beats = source.beats
                computed = min(task.layer_positions // layers, len(task.span))
                yield frames.encode(sender.progress(source.ahead(task), computed))
            waiting = not blocks
            for group in frames.joined(_pieces(sender, blocks), MESSAGE_BYTES - HEADER_BYTES):
                yield frames.encode_blocks(group)
                task.sent(sum(block.keys.nbytes + block.values.nbytes for block in group))
                source.wake()
        yield frames.encode(sender.done(queue_s=task.queue_s, prefill_s=task.prefill_s))
    finally:
        source.cancel(task)


def _pieces(sender: Sender, blocks: deque[KvBlock]) -> Iterator[KvBlock]:
    while blocks:  # which lets go of each block once it is sent
        yield from sender.blocks(blocks.popleft())
