"""Laws of the scheduler as a pure state machine."""

import random
import sys
import threading

import pytest

from hetsplit.errors import CapacityError
from hetsplit.scheduler import Job, Running, Scheduler


def job(name: str, max_tokens: int = 4, stop: frozenset[int] = frozenset(), prompt: int = 3) -> Job:
    return Job(name, tuple(range(prompt)), max_tokens, stop)


def running(scheduler: Scheduler, item: Job) -> Running:
    scheduler.admit(item)
    scheduler.fill(item)
    scheduler.run(item, item.prompt[-1:])
    return next(row for row in scheduler.next_batch() if row.job is item)


class Model:
    """What the scheduler should hold, kept in plain lists; checked after every operation."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.max_active, self.max_waiting = self.rng.randint(1, 4), self.rng.randint(1, 5)
        self.scheduler = Scheduler(max_active=self.max_active, max_waiting=self.max_waiting)
        self.waiting: list[Job] = []
        self.filling: list[Job] = []
        self.running: list[Job] = []
        self.admitted: list[Job] = []
        self.filled: list[Job] = []
        self.produced: dict[str, int] = {}
        self.count = 0

    def check(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler) == len(self.waiting) + len(self.filling) + len(self.running)
        assert scheduler.active() == len(self.filling) + len(self.running) <= self.max_active
        assert len(self.waiting) <= self.max_waiting
        assert [scheduler.ahead(j.id) for j in self.waiting] == list(range(len(self.waiting)))
        assert {scheduler.ahead(j.id) for j in self.filling + self.running} <= {0}
        room = scheduler.active() < self.max_active
        assert scheduler.next_waiting() is (self.waiting[0] if room and self.waiting else None)
        assert {row.job.id for row in scheduler.next_batch()} == {j.id for j in self.running}
        assert self.filled == [j for j in self.admitted if j in self.filled]  # first come, first filled

    def admit(self) -> None:
        self.count += 1
        new = job(str(self.count), self.rng.randint(1, 4), frozenset({0}))
        if len(self.waiting) == self.max_waiting:
            with pytest.raises(CapacityError, match=f"{self.max_waiting} requests are waiting, at most"):
                self.scheduler.admit(new)
            return
        self.scheduler.admit(new)
        self.waiting.append(new)
        self.admitted.append(new)

    def fill(self) -> None:
        if item := self.scheduler.next_waiting():
            self.scheduler.fill(item)
            self.waiting.remove(item)
            self.filling.append(item)
            self.filled.append(item)

    def run(self) -> None:
        if self.filling:
            item = self.rng.choice(self.filling)  # fills end in any order
            self.scheduler.run(item, [1, 2])
            self.filling.remove(item)
            self.running.append(item)
            self.produced[item.id] = 0

    def step(self) -> None:
        for row in self.scheduler.next_batch():
            first = self.produced[row.job.id] == 0
            assert row.pending == ([1, 2] if first else [7])
            token = 0 if self.rng.random() < 0.2 else 7
            self.produced[row.job.id] += 1
            finish = self.scheduler.commit(row, token)
            spent = self.produced[row.job.id] == row.job.max_tokens
            assert finish == ("stop" if token == 0 else "length" if spent else None)
            if finish:
                self.running.remove(row.job)

    def drop(self) -> None:
        everyone = self.waiting + self.filling + self.running
        if everyone and self.rng.random() < 0.3:
            item = self.rng.choice(everyone)
            self.scheduler.drop(item)
            self.scheduler.drop(item)
            for state in (self.waiting, self.filling, self.running):
                if item in state:
                    state.remove(item)


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_keep_the_invariants(seed: int) -> None:
    model = Model(seed)
    for _ in range(200):
        model.rng.choice([model.admit, model.admit, model.fill, model.fill, model.run, model.step, model.drop])()
        model.check()
    while len(model.scheduler):  # and everyone gets through
        model.fill()
        model.run()
        model.step()
        model.check()


@pytest.mark.parametrize("max_tokens", [1, 2, 16])
def test_exactly_max_tokens_are_produced(max_tokens: int) -> None:
    """Case O6: nobody else counts."""
    scheduler = Scheduler(max_active=1, max_waiting=1)
    row = running(scheduler, job("a", max_tokens))
    finishes = [scheduler.commit(row, 5) for _ in range(max_tokens)]
    assert finishes == [None] * (max_tokens - 1) + ["length"]
    assert row.produced == max_tokens
    assert len(scheduler) == 0


def test_a_stop_id_ends_a_job_and_counts() -> None:
    scheduler = Scheduler(max_active=1, max_waiting=1)
    row = running(scheduler, job("a", 3, frozenset({9})))
    assert scheduler.commit(row, 8) is None
    assert scheduler.commit(row, 9) == "stop"
    assert row.produced == 2
    assert scheduler.next_batch() == []


def test_a_stop_id_on_the_last_token_is_a_stop() -> None:
    scheduler = Scheduler(max_active=1, max_waiting=1)
    assert scheduler.commit(running(scheduler, job("a", 1, frozenset({9}))), 9) == "stop"


def test_the_first_step_takes_the_rest_of_the_prompt_and_then_one_token_each() -> None:
    scheduler = Scheduler(max_active=2, max_waiting=2)
    item = job("a", 3)
    scheduler.admit(item)
    scheduler.fill(item)
    assert scheduler.next_batch() == []
    scheduler.run(item, item.prompt)
    (row,) = scheduler.next_batch()
    assert row.pending == [0, 1, 2]
    scheduler.commit(row, 42)
    assert scheduler.next_batch()[0].pending == [42]


def test_requests_join_and_leave_between_steps() -> None:
    scheduler = Scheduler(max_active=3, max_waiting=3)
    first, second = running(scheduler, job("a", 2)), running(scheduler, job("b", 1))
    batch = scheduler.next_batch()
    assert batch == [first, second]
    assert [scheduler.commit(row, 5) for row in batch] == [None, "length"]
    third = running(scheduler, job("c", 1))
    assert scheduler.next_batch() == [first, third]


def test_an_unknown_job_has_nobody_ahead() -> None:
    assert Scheduler(max_active=1, max_waiting=1).ahead("nobody") == 0


def test_another_thread_may_ask_who_is_ahead() -> None:
    """Handlers report queue positions while the compute thread admits and drops."""
    scheduler = Scheduler(max_active=1, max_waiting=1000)
    failures: list[Exception] = []
    over = threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                scheduler.ahead("last")
        except Exception as error:
            failures.append(error)

    jobs = [job(str(i)) for i in range(300)]
    scheduler.admit(job("first"))
    thread = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(20):
            for item in jobs:
                scheduler.admit(item)
            scheduler.admit(job("last"))
            for item in jobs:
                scheduler.drop(item)
            scheduler.drop(job("last"))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join(10)
    assert failures == []
