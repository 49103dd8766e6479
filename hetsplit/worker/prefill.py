"""The prefill side of a worker: prompts are computed in order, blocks wait in host memory until they are sent.

Owns the queue, the staging and its bound. Runs on the compute thread (`unit`) and on the sending thread (`take`,
`messages`). Knows nothing of gRPC. Invariants: what was computed and not yet sent is bounded in bytes, over all tasks,
and a slow receiver holds at most half of it, so the next prompt goes on; a cancelled task stops between two layers.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator

from hetsplit import frames
from hetsplit.engines import Prefiller
from hetsplit.errors import EngineError, HetsplitError, PeerFailed, RequestError
from hetsplit.kv import KvBlock
from hetsplit.protocol import HEADER_BYTES, MESSAGE_BYTES, Sender
from hetsplit.worker.compute import ComputeThread

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
        self._ready = threading.Condition()
        self._staged: deque[KvBlock] = deque()
        self._ended = False
        self._error: HetsplitError | None = None
        self._submitted = self._started = time.monotonic()
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
        self._started = time.monotonic()
        self.queue_s = self._started - self._submitted
        self.blocks = engine.prefill(self.tokens, self.span, chunk=self.chunk, stop=self.stop)

    def stage(self, block: KvBlock) -> None:
        with self._ready:
            self._staged.append(block)
            self.staged_bytes += block.keys.nbytes + block.values.nbytes
            self.prefill_s = time.monotonic() - self._started
            self._ready.notify_all()

    def end(self, error: HetsplitError | None = None) -> None:
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
        """Tasks queued or computing."""
        return len(self._tasks)

    @property
    def beats(self) -> int:
        """Grows while the compute thread is alive."""
        return self._compute.beats

    def submit(self, task: PrefillTask) -> None:
        with self._lock:
            self._tasks.append(task)
            self._open.add(task)
        self._compute.wake()

    def ahead(self, task: PrefillTask) -> int:
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
        return False

    def crash(self, error: Exception) -> None:
        for task in tuple(self._tasks):
            self._drop(task, EngineError(f"the prefill thread failed: {error!r}"))

    def close(self) -> None:
        for task in tuple(self._tasks):
            self.cancel(task)
        self._compute.detach(self)
        for task in tuple(self._tasks):
            self._drop(task)

    def _advance(self, task: PrefillTask) -> None:
        try:
            if task.blocks is None:
                task.begin(self._engine)
            block = next(task.blocks, None)  # type: ignore[arg-type]
        except HetsplitError as error:
            self._drop(task, error)
            return
        if block is None:
            self._drop(task)
        else:
            task.stage(block)

    def _drop(self, task: PrefillTask, error: HetsplitError | None = None) -> None:
        with self._lock:
            if task in self._tasks:
                self._tasks.remove(task)
        if task.blocks is not None:
            task.blocks.close()  # type: ignore[attr-defined]
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
    if bad := next((t for t in tokens if not 0 <= t < engine.spec.vocab_size), None):
        raise RequestError(f"token id {bad}, allowed: 0 to {engine.spec.vocab_size - 1}")


def messages(source: PrefillSource, task: PrefillTask, sender: Sender, heartbeat_s: float) -> Iterator[bytes]:
    """The whole transfer of a submitted task as the bytes of its messages, each as soon as it can be sent.

    Blocks that already wait are joined; none is waited for. A heartbeat goes out while the compute thread is alive and
    has nothing for us yet. Closing the iterator cancels the task.
    """
    send_s = 0.0
    try:
        yield frames.encode(sender.begin())
        beats = source.beats
        while (blocks := task.take(heartbeat_s)) is not None:
            if not blocks and source.beats != beats:
                beats = source.beats
                yield frames.encode(sender.progress(source.ahead(task)))
            for group in frames.joined(_pieces(sender, blocks), MESSAGE_BYTES - HEADER_BYTES):
                start = time.monotonic()
                yield frames.encode_blocks(group)
                send_s += time.monotonic() - start
                task.sent(sum(block.keys.nbytes + block.values.nbytes for block in group))
                source.wake()
        yield frames.encode(sender.done(queue_s=task.queue_s, prefill_s=task.prefill_s, send_s=send_s))
    finally:
        source.cancel(task)


def _pieces(sender: Sender, blocks: deque[KvBlock]) -> Iterator[KvBlock]:
    while blocks:  # which lets go of each block once it is sent
        yield from sender.blocks(blocks.popleft())
