"""Continuous batching as a pure state machine: who waits, who is being filled, who runs. No thread, tensor or clock.

Owns the order of requests and the token budget. Knows neither engines nor text. Invariants: a job is in exactly one
state; requests join and leave the batch only between steps; the order of admission is the order of filling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetsplit.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Job:
    """What the scheduler knows of a request. `max_tokens` is already clamped to the context."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]


@dataclass(slots=True)
class Waiting:
    job: Job


@dataclass(slots=True)
class Filling:
    job: Job


@dataclass(slots=True)
class Running:
    """`pending` are the tokens that the next step appends; `produced` counts those already sampled."""

    job: Job
    pending: list[int]
    produced: int = 0


class Scheduler:
    """Admits at most `max_waiting` jobs, and keeps at most `max_active` in filling and running together."""

    def __init__(self, *, max_active: int, max_waiting: int) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._states: dict[str, Waiting | Filling | Running] = {}  # in order of admission

    def admit(self, job: Job) -> None:
        """Queue a job. Raises `CapacityError` when the queue is full."""
        waiting = sum(isinstance(state, Waiting) for state in self._states.values())
        if waiting >= self._max_waiting:
            raise CapacityError(f"{waiting} requests are waiting, at most {self._max_waiting} may")
        self._states[job.id] = Waiting(job)

    def ahead(self, job_id: str) -> int:
        """How many jobs wait before this one; 0 when it is no longer waiting. From any thread: reads one snapshot."""
        waiting = [key for key, state in tuple(self._states.items()) if isinstance(state, Waiting)]
        return waiting.index(job_id) if job_id in waiting else 0

    def active(self) -> int:
        return sum(not isinstance(state, Waiting) for state in self._states.values())

    def next_waiting(self) -> Job | None:
        """The job whose turn it is, when there is room for one more."""
        if self.active() >= self._max_active:
            return None
        return next((state.job for state in self._states.values() if isinstance(state, Waiting)), None)

    def fill(self, job: Job) -> None:
        """Waiting to Filling: its room is reserved."""
        self._states[job.id] = Filling(job)

    def run(self, job: Job, pending: Sequence[int]) -> None:
        """Filling to Running: its cache is sealed, `pending` prompt tokens remain."""
        self._states[job.id] = Running(job, list(pending))

    def next_batch(self) -> list[Running]:
        return [state for state in self._states.values() if isinstance(state, Running)]

    def commit(self, row: Running, token: int) -> str | None:
        """Take a row's sampled token; "stop" or "length" when it was the last one, and the job is gone then."""
        row.pending = [token]
        row.produced += 1
        finish = "stop" if token in row.job.stop_ids else "length" if row.produced >= row.job.max_tokens else None
        if finish:
            self.drop(row.job)
        return finish

    def drop(self, job: Job) -> None:
        """Forget a job, whatever its state; idempotent."""
        self._states.pop(job.id, None)

    def __len__(self) -> int:
        return len(self._states)
