"""The compute thread: the only thread that runs an engine.

Owns turns between sources of work: each gets one unit at a time, so a prefill never keeps a decode step waiting for
longer than one unit. Engines that share the CPU cores share one thread in a process (two OpenMP teams would fight).
Knows nothing of what a unit does.
"""

import logging
import threading
import time
from typing import Protocol

from hetsplit.errors import EngineError, HetsplitError

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long closing waits for what still runs."""


def named(error: Exception, doing: str) -> HetsplitError:
    """What an engine's caller hears: `error` when it is one of our tree, else an `EngineError` with it chained."""
    if isinstance(error, HetsplitError):
        return error
    log.error("%s failed", doing, exc_info=error)
    told = EngineError(f"{doing} failed: {error!r}")
    told.__cause__ = error
    return told


class Source(Protocol):
    """Something that has work for an engine."""

    def unit(self) -> bool:
        """Do one unit of work; False when there is nothing to do until `ComputeThread.wake`."""
        ...

    def crash(self, error: Exception) -> None:
        """`unit` raised, and whom it concerns is unknown: tell every caller."""
        ...


class ComputeThread:
    """Runs while a source is attached. `beats` grows as long as it is alive and not stuck in a unit."""

    _shared: "dict[object, ComputeThread]" = {}  # noqa: RUF012
    _lock = threading.Lock()

    @classmethod
    def attach(cls, engine: object, source: Source) -> "ComputeThread":
        """Start giving turns to `source` on the thread that runs `engine`."""
        key: object = "cpu" if str(getattr(engine, "device", "cpu")) == "cpu" else id(engine)
        with cls._lock:
            compute = cls._shared.get(key)
            if compute is None:
                compute = cls._shared[key] = cls(key)
            compute._sources = (*compute._sources, source)
            if not compute._thread.is_alive():
                compute._thread.start()
        compute.wake()
        return compute

    def __init__(self, key: object) -> None:
        self.beats = 0
        self._key = key
        self._sources: tuple[Source, ...] = ()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hetsplit-compute-{key}", daemon=True)

    def wake(self) -> None:
        """There may be work. From any thread."""
        self._wake.set()

    def detach(self, source: Source) -> None:
        """No further turns for `source`; returns when its last unit has ended, or after `CLOSE_S` seconds."""
        with self._lock:
            self._sources = tuple(s for s in self._sources if s is not source)
            if not self._sources and self._shared.get(self._key) is self:
                del self._shared[self._key]
        beats, deadline = self.beats, time.monotonic() + CLOSE_S
        while threading.current_thread() is not self._thread and self._thread.is_alive() and self.beats < beats + 2:
            if time.monotonic() > deadline:
                log.warning("a unit of the compute thread still runs after %g s, closing goes on without it", CLOSE_S)
                return
            self.wake()
            self._thread.join(0.005)

    def _run(self) -> None:
        while self._sources:
            self._wake.clear()
            worked = [self._turn(source) for source in self._sources]
            self.beats += 1
            if not any(worked):
                self._wake.wait(0.5)

    @staticmethod
    def _turn(source: Source) -> bool:
        try:
            return source.unit()
        except Exception as error:
            log.exception("a compute unit failed")
            try:
                source.crash(error)
            except Exception:  # the other sources go on
                log.exception("its callers could not be told")
            return True
