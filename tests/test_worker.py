"""A worker from inside and from the wire: turns, staging, queues, and what a stranger's request may do to others."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hetsplit import frames
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.engines import Decoder, StepResult
from hetsplit.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    HetsplitError,
    IncompatibleError,
    PeerError,
    PeerFailed,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
    RequestError,
)
from hetsplit.kv import KvFill
from hetsplit.protocol import MESSAGE_BYTES, Begin, BlockFrame, Done, Progress, Sender
from hetsplit.result import Token
from hetsplit.sampling import SamplingParams
from hetsplit.security import Credentials, ServerSecurity
from hetsplit.wire import Peer, Timeouts, server
from hetsplit.worker import Worker, decode
from hetsplit.worker.compute import ComputeThread
from hetsplit.worker.decode import Arrival, DecodeSource
from hetsplit.worker.fill import Push
from hetsplit.worker.prefill import MAX_CHUNK, PrefillSource, PrefillTask, check_prefill, transfer
from hetsplit.worker.request import Finished, Request
from hetsplit.worker.service import describe
from tests.faults import good_messages
from tests.toy import LAYERS, ToyEngine, eventually, reference

P40 = tuple((37 * i + 5) % 97 for i in range(40))


def ids(prompt: Sequence[int], n: int) -> list[int]:
    return [token for token, _ in reference(prompt, max_tokens=n)]


# Turns.


class Units:
    """A source with so many units of work; `held`, when cleared, holds one inside."""

    def __init__(self, count: int = 0) -> None:
        self.left = count
        self.threads: set[int] = set()
        self.crashes: list[Exception] = []
        self.order: list[Units] = []
        self.held = threading.Event()
        self.held.set()
        self.fault: Exception | None = None

    def unit(self) -> bool:
        self.threads.add(threading.get_ident())
        self.held.wait(5)
        if self.fault:
            fault, self.fault = self.fault, None
            raise fault
        if not self.left:
            return False
        self.left -= 1
        self.order.append(self)
        return True

    def crash(self, error: Exception) -> None:
        self.crashes.append(error)


class On:
    """Something with a device."""

    def __init__(self, device: object) -> None:
        self.device = device


class NamedCpu:
    def __str__(self) -> str:
        return "cpu"


def test_engines_on_the_cpu_share_one_thread_and_others_do_not() -> None:
    sources = [Units(3) for _ in range(4)]
    devices = ["cpu", NamedCpu(), "cuda:0", "cuda:0"]
    threads = [ComputeThread.attach(On(device), source) for device, source in zip(devices, sources, strict=True)]
    assert eventually(lambda: not any(source.left for source in sources))
    for thread, source in zip(threads, sources, strict=True):
        thread.detach(source)
    assert sources[0].threads == sources[1].threads
    assert len({frozenset(source.threads) for source in sources}) == 3


def test_sources_take_turns() -> None:
    one, other = Units(50), Units(50)
    other.order = one.order
    one.held.clear()
    thread = ComputeThread.attach(On("cpu"), one)
    ComputeThread.attach(On("cpu"), other)
    one.held.set()
    assert eventually(lambda: len(one.order) == 100)
    thread.detach(one)
    thread.detach(other)
    late = one.order[3:97]
    assert all(a is not b for a, b in itertools.pairwise(late))


def test_a_unit_that_raises_is_told_to_its_source_only() -> None:
    bad, good = Units(1), Units(5)
    bad.fault = RuntimeError("no such kernel")
    thread = ComputeThread.attach(On("cpu"), good)
    ComputeThread.attach(On("cpu"), bad)
    assert eventually(lambda: not good.left and not bad.left)
    assert [str(error) for error in bad.crashes] == ["no such kernel"]
    assert good.crashes == []
    thread.detach(bad)
    thread.detach(good)


def test_a_source_that_cannot_even_be_told_stops_nobody_else() -> None:
    bad, good = Units(1), Units(5)
    bad.fault = RuntimeError("first")

    def crash(error: Exception) -> None:
        raise RuntimeError("second")

    bad.crash = crash  # type: ignore[method-assign]
    thread = ComputeThread.attach(On("cpu"), bad)
    assert eventually(lambda: bad.fault is None)
    assert ComputeThread.attach(On("cpu"), good) is thread
    assert eventually(lambda: not good.left and not bad.left)
    thread.detach(bad)
    thread.detach(good)


def test_detach_waits_for_the_last_unit() -> None:
    source = Units(1)
    source.held.clear()
    thread = ComputeThread.attach(On("toy"), source)
    assert eventually(lambda: source.threads)
    timer = threading.Timer(0.1, source.held.set)
    timer.start()
    thread.detach(source)
    assert source.held.is_set()
    timer.join()


def test_detach_gives_up_on_a_unit_that_never_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetsplit.worker.compute.CLOSE_S", 0.1)
    source = Units(1)
    source.held.clear()
    thread = ComputeThread.attach(On("toy"), source)
    assert eventually(lambda: source.threads)
    start = time.monotonic()
    thread.detach(source)
    assert time.monotonic() - start < 2
    assert "still runs after 0.1 s" in caplog.text
    source.held.set()


def test_detaching_twice_leaves_the_next_thread_alone() -> None:
    """Else closing a worker a second time gives the next two workers a thread each for one CPU."""
    first, second, third = Units(), Units(2), Units(2)
    thread = ComputeThread.attach(On("cpu"), first)
    thread.detach(first)
    later = ComputeThread.attach(On("cpu"), second)
    thread.detach(first)
    assert ComputeThread.attach(On("cpu"), third) is later
    later.detach(second)
    later.detach(third)


def test_beats_stop_with_the_thread() -> None:
    source = Units()
    thread = ComputeThread.attach(On("toy"), source)
    before = thread.beats
    thread.wake()
    assert eventually(lambda: thread.beats > before)
    source.held.clear()
    thread.wake()
    stuck = thread.beats
    assert not eventually(lambda: thread.beats > stuck + 1, 0.1)
    source.held.set()
    thread.detach(source)


# The prefill side.


BLOCK_BYTES = ToyEngine().layout.position_bytes(0)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(device="toy:0")


@pytest.fixture
def source(engine: ToyEngine) -> Iterator[PrefillSource]:
    source = PrefillSource(engine, staging_bytes=40 * BLOCK_BYTES)
    yield source
    source.close()


def task(prompt: Sequence[int] = P40, chunk: int = 1) -> PrefillTask:
    return PrefillTask(tuple(prompt), range(len(prompt) - 1), chunk)


def submitted(source: PrefillSource, item: PrefillTask, engine: ToyEngine) -> Iterator[bytes]:
    source.submit(item)
    return transfer(source, item, Sender("t", item.span, engine.layout), 0.05)


def settled(engine: ToyEngine, seconds: float = 2.0) -> int:
    """How many units had been computed when computing came to rest."""
    last = -1
    deadline = time.monotonic() + seconds
    while last != engine.prefilled_units and time.monotonic() < deadline:
        last = engine.prefilled_units
        threading.Event().wait(0.05)
    return last


def test_a_transfer_from_submit_to_done(source: PrefillSource, engine: ToyEngine) -> None:
    parts = [m for data in submitted(source, task(chunk=7), engine) for m in frames.decode(data)]
    assert isinstance(parts[0], Begin)
    assert isinstance(parts[-1], Done)
    blocks = [m for m in parts if isinstance(m, BlockFrame)]
    assert [(b.layer, b.start) for b in blocks] == [(x, s) for s in range(0, 39, 7) for x in range(LAYERS)]
    assert parts[-1].queue_s >= 0
    assert parts[-1].prefill_s > 0
    assert source.live == 0


def test_blocks_that_wait_are_joined(source: PrefillSource, engine: ToyEngine) -> None:
    stream = submitted(source, task(P40[:6], chunk=1), engine)
    next(stream)
    assert settled(engine) == 5 * LAYERS
    (data, done) = list(stream)
    assert len(frames.decode(data)) == 5 * LAYERS
    assert len(data) <= MESSAGE_BYTES
    assert isinstance(frames.decode(done)[0], Done)


def test_nothing_waits_for_a_block_that_is_not_computed_yet(source: PrefillSource, engine: ToyEngine) -> None:
    engine.gate_at = 2
    stream = submitted(source, task(), engine)
    next(stream)
    assert eventually(lambda: not engine.gate.is_set())
    assert [m.layer for m in frames.decode(next(stream)) if isinstance(m, BlockFrame)] == [0, 1]
    stream.close()  # type: ignore[attr-defined]


def test_staging_is_bounded_in_bytes(source: PrefillSource, engine: ToyEngine) -> None:
    """One receiver that takes nothing holds half of the room; the next prompt goes on."""
    slow = task()
    source.submit(slow)
    assert settled(engine) == 20
    assert slow.staged_bytes == 20 * BLOCK_BYTES
    quick = [m for data in submitted(source, task(P40[:5]), engine) for m in frames.decode(data)]
    assert isinstance(quick[-1], Done)
    assert slow.staged_bytes == 20 * BLOCK_BYTES
    source.cancel(slow)


def test_staging_is_bounded_over_all_receivers(source: PrefillSource, engine: ToyEngine) -> None:
    """Prompts that were computed and not yet sent count as well."""
    slow = [task(P40[:5]) for _ in range(20)]  # 12 blocks each
    for item in slow:
        source.submit(item)
    assert settled(engine) <= 40 + 1
    for item in slow:
        source.cancel(item)
    later = [m for data in submitted(source, task(P40[:5]), engine) for m in frames.decode(data)]
    assert isinstance(later[-1], Done)


def test_what_is_being_sent_still_counts(source: PrefillSource, engine: ToyEngine) -> None:
    stream = submitted(source, task(), engine)
    next(stream)
    before = settled(engine)
    next(stream)  # a first message is on its way
    assert settled(engine) <= before + 1
    stream.close()  # type: ignore[attr-defined]


def test_a_slow_receiver_gets_everything_in_the_end(source: PrefillSource, engine: ToyEngine) -> None:
    """The bound is below the size of one transfer."""
    count = 0
    for data in submitted(source, task(), engine):
        count += sum(isinstance(m, BlockFrame) for m in frames.decode(data))
        threading.Event().wait(0.001)
    assert count == 39 * LAYERS
    assert source.live == 0


def test_a_stuck_engine_sends_no_sign_of_life_and_a_busy_one_does(source: PrefillSource, engine: ToyEngine) -> None:
    engine.gate.clear()
    first = submitted(source, task(), engine)
    assert isinstance(frames.decode(next(first))[0], Begin)
    assert eventually(lambda: engine.running_prefills)
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(frames.decode(next(first))))
    reader.start()
    assert not eventually(lambda: got, 0.3)
    engine.gate.set()
    reader.join(2)
    assert isinstance(got[0], Progress)  # blocks follow
    assert isinstance(frames.decode(next(first))[0], BlockFrame)
    first.close()  # type: ignore[attr-defined]


def test_a_waiting_prompt_is_told_how_many_are_ahead(source: PrefillSource, engine: ToyEngine) -> None:
    slow = [task(), task()]
    for item in slow:
        source.submit(item)
    settled(engine)
    waiting = submitted(source, task(), engine)
    assert isinstance(frames.decode(next(waiting))[0], Begin)
    source.wake()
    assert frames.decode(next(waiting)) == [Progress(2, 0)]
    assert source.live == 3
    source.cancel(slow[0])
    assert eventually(lambda: source.live == 2)
    for item in slow:
        source.cancel(item)
    later = itertools.chain.from_iterable(map(frames.decode, waiting))
    assert isinstance(next(message for message in later if not isinstance(message, Progress)), BlockFrame)
    waiting.close()  # type: ignore[attr-defined]


def test_a_cancelled_prompt_leaves_the_queue_wherever_it_stands(source: PrefillSource, engine: ToyEngine) -> None:
    tasks = [task() for _ in range(6)]
    for item in tasks:
        source.submit(item)
    settled(engine)
    source.cancel(tasks[-1])
    assert eventually(lambda: source.live == 5)
    for item in tasks:
        source.cancel(item)
    assert eventually(lambda: source.live == 0)
    assert engine.running_prefills == 0
    with pytest.raises(PeerFailed, match="the prefill was cancelled"):
        tasks[0].take(0)


def test_closing_a_transfer_stops_its_prefill(source: PrefillSource, engine: ToyEngine) -> None:
    stream = submitted(source, task(), engine)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert eventually(lambda: source.live == 0 and engine.running_prefills == 0)
    assert engine.prefilled_units < 39 * LAYERS


def test_a_task_cancelled_before_it_was_submitted_is_never_computed(source: PrefillSource, engine: ToyEngine) -> None:
    item = task()
    source.cancel(item)
    source.submit(item)
    assert eventually(lambda: source.live == 0)
    assert engine.prefilled_units == 0


def test_close_fails_what_is_queued(engine: ToyEngine) -> None:
    source = PrefillSource(engine)
    engine.gate.clear()
    tasks = [task() for _ in range(3)]
    for item in tasks:
        source.submit(item)
    source.close()
    source.close()
    assert source.live == 0
    assert engine.running_prefills == 0
    for item in tasks:
        with pytest.raises(PeerFailed):
            item.take(0)


def test_one_prompts_engine_error_is_its_own(source: PrefillSource) -> None:
    engine = source._engine
    original = engine.prefill

    def prefill(tokens: Any, span: range, **options: Any) -> Any:
        if len(tokens) == 7:
            raise CapacityError("no device memory for 7")
        return original(tokens, span, **options)

    engine.prefill = prefill  # type: ignore[method-assign]
    bad, good = task(P40[:7]), task(P40[:5])
    source.submit(bad)
    source.submit(good)
    with pytest.raises(CapacityError, match="no device memory for 7"):
        bad.take(2)
    assert eventually(lambda: good.staged_bytes == 12 * BLOCK_BYTES)


@pytest.mark.parametrize("where", ["first", "later", "block", "close"])
def test_whatever_an_engine_raises_fails_its_own_prompt_only(source: PrefillSource, where: str) -> None:
    engine = source._engine
    original = engine.prefill

    def prefill(tokens: Any, span: range, **options: Any) -> Any:
        return broken(original(tokens, span, **options)) if len(tokens) == 7 else original(tokens, span, **options)

    def broken(blocks: Iterator[Any]) -> Iterator[Any]:
        if where == "first":
            raise OSError("the driver is gone")
        yield next(blocks)
        if where == "later":
            raise OSError("the driver is gone")
        if where == "block":
            yield None.__class__
        try:
            yield next(blocks)
        except GeneratorExit:
            raise OSError("the driver is gone") from None

    engine.prefill = prefill  # type: ignore[method-assign]
    before, bad, after = task(P40[:5]), task(P40[:7]), task(P40[:5])
    engine.gate.clear()  # type: ignore[attr-defined]
    for item in (before, bad, after):
        source.submit(item)
    if where == "close":
        engine.gate.set()  # type: ignore[attr-defined]
        assert eventually(lambda: bad.staged_bytes)
        source.cancel(bad)
        assert eventually(lambda: source.live == 2)
    else:
        engine.gate.set()  # type: ignore[attr-defined]
        with pytest.raises(
            EngineError, match=r"a prefill failed: (OSError\('the driver is gone|AttributeError)"
        ) as info:
            while bad.take(2) is not None:
                pass
        assert isinstance(info.value.__cause__, OSError | AttributeError)
    assert eventually(lambda: before.staged_bytes == after.staged_bytes == 12 * BLOCK_BYTES)


def test_waiting_for_room_is_not_computing(source: PrefillSource, engine: ToyEngine) -> None:
    """Else a slow link would look like a slow engine."""
    stream = submitted(source, task(), engine)
    next(stream)
    start = time.monotonic()
    settled(engine)
    threading.Event().wait(0.3)  # nothing is taken
    full_s = time.monotonic() - start
    done = [m for data in stream for m in frames.decode(data)][-1]
    assert isinstance(done, Done)
    assert 0 < done.prefill_s < full_s - 0.2


def test_progress_says_how_much_is_computed(source: PrefillSource, engine: ToyEngine) -> None:
    item = task()
    stream = map(frames.decode, transfer(source, item, Sender("t", item.span, engine.layout), 0.02))
    for layer in (0, 1, 2, 0):
        item.stage(engine.block(layer, 4 if layer == 0 and item.layer_positions else 0, P40[:4]), engine.layout)
    assert [type(m) for batch in (next(stream), next(stream)) for m in batch] == [Begin] + [BlockFrame] * 4
    assert next(stream) == [Progress(0, 5)]  # by sixteen positions of three layers
    source.cancel(item)


BAD_PREFILLS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [1] * 10, "start": 0, "stop": 10}, r"span \[0, 10\) of 10 tokens"),
    ({"tokens": [1] * 10, "start": 5, "stop": 4}, r"span \[5, 4\) of 10 tokens"),
    ({"tokens": [1] * 10, "start": 1, "stop": 9}, "span starts at 1, this worker computes from position 0 only"),
    ({"tokens": [], "start": 0, "stop": 1}, r"span \[0, 1\) of 0 tokens"),
    ({"tokens": [1, 97], "start": 0, "stop": 1}, "token id 97, allowed: 0 to 96"),
    ({"tokens": [2**32 - 1], "start": 0, "stop": 0}, "token id 4294967295"),
    ({"tokens": [1] * 600, "start": 0, "stop": 599}, "a prompt of 600 tokens, the prefill worker's context is 512"),
    ({"chunk": 0}, f"chunk 0, allowed: 1 to {MAX_CHUNK}"),
    ({"chunk": MAX_CHUNK + 1}, f"chunk {MAX_CHUNK + 1}, allowed"),
]


@pytest.mark.parametrize(("changes", "why"), BAD_PREFILLS, ids=lambda x: str(x)[:40])
def test_a_prefill_request_is_checked(changes: dict[str, Any], why: str) -> None:
    asked = {"tokens": [1, 2], "start": 0, "stop": 1, "chunk": 8, **changes}
    span = range(asked["start"], asked["stop"])
    with pytest.raises(RequestError, match=why):
        check_prefill(ToyEngine(), tuple(asked["tokens"]), span, asked["chunk"])


# The decode side, without a wire.


@pytest.fixture
def decode_engine() -> ToyEngine:
    return ToyEngine(device="toy:1", capacity=100)


def a_request(engine: ToyEngine, n: int = 40, start_fill: Any = None, **params: Any) -> Request:
    return Request(
        P40[:n], SamplingParams(**params), engine, mode="local", why="", chunk=8, start_fill=start_fill
    )  # fmt: skip


def outcome(request: Request) -> list[int] | HetsplitError:
    """A request's tokens, or its error."""
    tokens: list[int] = []
    while True:
        event = request.events.get(timeout=5)
        if isinstance(event, Token):
            tokens.append(event.id)
        elif isinstance(event, Finished):
            return tokens
        elif isinstance(event, HetsplitError):
            return event


def test_a_full_queue_refuses(decode_engine: ToyEngine) -> None:
    source = DecodeSource(decode_engine, max_active=1, max_waiting=2)
    decode_engine.gate.clear()
    requests = [a_request(decode_engine, max_tokens=2) for _ in range(6)]
    source.submit(requests[0])
    assert eventually(lambda: decode_engine.reserved > 0)
    for request in requests[1:]:
        source.submit(request)
    decode_engine.gate.set()
    results = [outcome(request) for request in requests]
    refused = [r for r in results if isinstance(r, CapacityError)]
    assert len(refused) == 3
    assert "2 requests are waiting, at most 2 may" in str(refused[0])
    assert [r for r in results if r not in refused] == [ids(P40, 2)] * 3
    source.close()
    assert decode_engine.reserved == 0


def test_at_most_so_many_share_a_step(decode_engine: ToyEngine) -> None:
    decode_engine.capacity = 10**6
    source = DecodeSource(decode_engine, max_active=3, max_waiting=100)
    requests = [a_request(decode_engine, max_tokens=60) for _ in range(10)]
    for request in requests:
        source.submit(request)
    assert [outcome(request) for request in requests] == [ids(P40, 60)] * 10
    assert max(decode_engine.batches) == 3
    source.close()


def test_what_never_fits_holds_nobody_behind_it(decode_engine: ToyEngine) -> None:
    source = DecodeSource(decode_engine)
    decode_engine.gate.clear()
    first = a_request(decode_engine, 40, max_tokens=3)
    source.submit(first)
    requests = [a_request(decode_engine, 40, max_tokens=61), a_request(decode_engine, 9, max_tokens=3)]
    for request in requests:
        source.submit(request)
    decode_engine.gate.set()
    assert outcome(first) == ids(P40, 3)
    start = time.monotonic()
    error = outcome(requests[0])
    assert isinstance(error, CapacityError)
    assert "101 positions asked, 100 free" in str(error)
    assert outcome(requests[1]) == ids(P40[:9], 3)
    assert time.monotonic() - start < 0.4  # without waiting for the thread's next look around
    source.close()


def test_room_that_a_cancelled_fill_still_holds_is_waited_for(decode_engine: ToyEngine) -> None:
    """The store of a cancelled request is not free before its fill thread let go, and that is no reason to refuse."""
    source = DecodeSource(decode_engine)
    held = a_request(decode_engine, 40, start_fill=lambda request, fill: None, max_tokens=50)
    source.submit(held)
    assert isinstance(held.events.get(timeout=2), KvFill)
    source.cancel(held)
    assert isinstance(outcome(held), PeerFailed)
    assert (source.live, decode_engine.reserved) == (0, 90)
    waiting = a_request(decode_engine, 40, max_tokens=3)
    source.submit(waiting)
    assert eventually(lambda: source.live == 1)
    threading.Event().wait(0.05)
    source.failed(held, PeerFailed("let go"))
    assert outcome(waiting) == ids(P40, 3)
    assert decode_engine.reserved == 0
    source.close()


def test_a_fill_is_awaited_before_anyone_hears_of_it(decode_engine: ToyEngine) -> None:
    """Else a quick peer pushes a transfer that is not awaited yet."""
    unheard: list[bool] = []
    source = DecodeSource(decode_engine)
    start = lambda request, fill: unheard.append(request.events.empty())  # noqa: E731
    request = a_request(decode_engine, 9, start_fill=start, max_tokens=2)
    request.on_cancel(lambda: source.failed(request, PeerFailed("over")))
    source.submit(request)
    assert isinstance(request.events.get(timeout=2), KvFill)
    assert unheard == [True]
    source.close()


class Told:
    """A decode source whose request ends, and cancels its call, at the very moment it is told of its fill."""

    def wake(self) -> None:
        pass

    def __init__(self) -> None:
        self.said: list[object] = []

    def failed(self, request: Request, error: HetsplitError) -> None:
        self.said.append(error)
        request.cancel()

    def filled(self, request: Request, arrival: Arrival) -> None:
        self.said.append(arrival.done)
        request.cancel()


@pytest.mark.parametrize("keep", [2, None], ids=["cut", "whole"])
def test_a_push_that_was_told_of_is_not_cancelled_before_it_answers(decode_engine: ToyEngine, keep: int | None) -> None:
    source, cancelled = Told(), []
    push = Push(source, decode_engine.layout, 30.0)  # type: ignore[arg-type]
    request = a_request(decode_engine, 10, start_fill=push)
    fill = KvFill(decode_engine.reserve(12), decode_engine.layout, range(9))
    push(request, fill)
    batches = iter([[message] for message in good_messages(decode_engine, request.job.id, P40[:10])[:keep]])
    with contextlib.nullcontext() if keep is None else pytest.raises(RemoteProtocolError, match="ended early"):
        push.run(batches, lambda: cancelled.append(True))
    assert len(source.said) == 1
    assert isinstance(source.said[0], Done if keep is None else RemoteProtocolError)
    assert request.cancelled.is_set()
    assert cancelled == []


def test_a_store_is_not_released_while_its_fill_runs(decode_engine: ToyEngine) -> None:
    fills: list[KvFill] = []
    source = DecodeSource(decode_engine)
    request = a_request(decode_engine, 9, start_fill=lambda request, fill: fills.append(fill), max_tokens=2)
    source.submit(request)
    assert eventually(lambda: fills)
    source.cancel(request)
    assert isinstance(outcome(request), PeerFailed)
    fills[0].put(decode_engine.block(0, 0, P40[:4]))  # would fail in a released store
    source.failed(request, PeerFailed("over"))
    assert eventually(lambda: decode_engine.reserved == 0)
    source.close()


def test_a_fill_that_completes_after_its_request_left(decode_engine: ToyEngine) -> None:
    fills: list[KvFill] = []
    source = DecodeSource(decode_engine)
    request = a_request(decode_engine, 9, start_fill=lambda request, fill: fills.append(fill), max_tokens=2)
    source.submit(request)
    assert eventually(lambda: fills)
    source.cancel(request)
    for layer in range(LAYERS):
        fills[0].put(decode_engine.block(layer, 0, P40[:8]))
    source.filled(request, Arrival(Done((), 0.0, 0.0), 0, 0.0, 0.0))
    assert eventually(lambda: decode_engine.reserved == 0)
    assert decode_engine.stores[0].sealed is None
    assert decode_engine.steps == 0
    source.close()


def test_a_crash_tells_everyone_and_the_next_request_works(decode_engine: ToyEngine) -> None:
    source = DecodeSource(decode_engine)
    source._scheduler.next_batch = lambda: {}[1]  # type: ignore[method-assign]
    request = a_request(decode_engine, max_tokens=2)
    source.submit(request)
    error = outcome(request)
    assert isinstance(error, EngineError)
    assert "the decode thread failed: KeyError" in str(error)
    assert decode_engine.reserved == 0
    del source._scheduler.next_batch
    source.submit(request := a_request(decode_engine, max_tokens=2))
    assert outcome(request) == ids(P40, 2)
    source.close()


class Breaking(ToyEngine):
    """Raises what no engine should, at the point `at`, for requests of 9 tokens (12 positions) only."""

    at = ""

    def _break(self, where: str, positions: int = 12) -> None:
        if where == self.at and positions == 12:
            raise OSError(f"the driver is gone at {where}")

    def reserve(self, positions: int) -> Any:
        self._break("reserve", positions)
        store = super().reserve(positions)
        settle, seal, release = store.settle, store.seal, store.release
        store.settle = lambda: self._break("settle", positions) or settle()  # type: ignore[method-assign]
        store.seal = lambda length: self._break("seal", positions) or seal(length)  # type: ignore[method-assign]
        store.release = lambda: (release(), self._break("release", positions))[0]  # type: ignore[method-assign]
        return store

    def extend(self, store: Any, tokens: Any, span: range, *, chunk: int) -> Any:
        if len(tokens) == 9:
            self._break("extend")
        return self._extend(store, tokens, span, chunk)

    def _extend(self, store: Any, tokens: Any, span: range, chunk: int) -> Any:
        for unit in super().extend(store, tokens, span, chunk=chunk):
            if len(tokens) == 9:
                self._break("unit")
            yield unit

    def step(self, rows: Sequence[Any]) -> StepResult:
        result = super().step(rows)
        if any(row.cache.store.positions == 12 for row in rows):
            self._break("step")
        return result


@pytest.mark.parametrize("at", ["reserve", "extend", "unit", "seal", "step", "sample", "release"])
def test_whatever_an_engine_raises_is_the_requests_own(at: str) -> None:
    engine = Breaking(device="toy:1")
    source = DecodeSource(engine, max_active=1 if at == "step" else 4)
    companion = a_request(engine, 40, max_tokens=200)
    bad, later = a_request(engine, 9, max_tokens=3), a_request(engine, 8, max_tokens=3)
    engine.at = at
    if at == "sample":
        bad.sampler.sample = lambda logits: {}[1]  # type: ignore[method-assign]
    for request in (companion, bad, later):
        source.submit(request)
    error = outcome(bad)
    if at == "release":  # its tokens were fine
        assert error == ids(P40[:9], 3)
    else:
        assert isinstance(error, EngineError)
        assert isinstance(error.__cause__, OSError | KeyError)
    assert outcome(companion) == ids(P40, 200)
    assert outcome(later) == ids(P40[:8], 3)
    assert engine.reserved == 0
    source.close()


@pytest.mark.parametrize("at", ["start", "settle"])
def test_whatever_a_fill_raises_is_the_requests_own(at: str) -> None:
    engine = Breaking(device="toy:1", staging=True)
    engine.at = at
    source = DecodeSource(engine)

    def start_fill(request: Request, fill: KvFill) -> None:
        if at == "start":
            raise RuntimeError("can't start new thread")
        source.filled(request, Arrival(Done((), 0.0, 0.0), 0, 0.0, 0.0))

    companion = a_request(engine, 40, max_tokens=100)
    bad = a_request(engine, 9, start_fill=start_fill, max_tokens=3)
    for request in (companion, bad):
        source.submit(request)
    error = outcome(bad)
    assert isinstance(error, EngineError)
    assert isinstance(error.__cause__, RuntimeError | OSError)
    assert outcome(companion) == ids(P40, 100)
    assert eventually(lambda: engine.reserved == 0)
    assert not source._filling
    source.close()


def test_a_long_local_prefill_keeps_no_other_fill_waiting() -> None:
    """Blocks that have arrived go first, and local prefills take turns."""
    engine = ToyEngine(device="toy:1", staging=True, capacity=10**6)
    source = DecodeSource(engine)
    order: list[int] = []
    extend = engine.extend

    def counted(store: Any, tokens: Any, span: range, *, chunk: int) -> Iterator[None]:
        for unit in extend(store, tokens, span, chunk=chunk):
            order.append(len(tokens))
            yield unit

    engine.extend = counted  # type: ignore[method-assign]
    step, before = engine.step, []

    def stepped(rows: Any) -> StepResult:
        before.append(len(order))
        return step(rows)

    engine.step = stepped  # type: ignore[method-assign]

    def start_fill(request: Request, fill: KvFill) -> None:
        for start in range(0, 15, 5):
            for layer in range(LAYERS):
                fill.put(engine.block(layer, start, request.job.prompt[start : start + 5]))
        source.filled(request, Arrival(Done((), 0.0, 0.0), 0, 0.0, 0.0))

    engine.gate.clear()
    long, short = a_request(engine, 40, max_tokens=2), a_request(engine, 20, max_tokens=2)
    filled = a_request(engine, 16, start_fill=start_fill, max_tokens=1)
    for request in (long, short, filled):
        source.submit(request)
    engine.gate.set()
    assert outcome(filled) == ids(P40[:16], 1)
    assert outcome(short) == ids(P40[:20], 2)
    assert outcome(long) == ids(P40, 2)
    assert before[0] < 8  # a few units, far from the 15 of the long one
    both = order[2 : 2 * order.count(20)]
    assert all(a != b for a, b in itertools.pairwise(both)), order
    source.close()


def test_requests_settle_side_by_side() -> None:
    """A transfer whose blocks keep coming keeps no other one from being sealed."""
    engine = ToyEngine(device="toy:1", staging=True)
    source = DecodeSource(engine)
    started: dict[int, tuple[Request, KvFill]] = {}
    start_fill = lambda request, fill: started.update({len(request.job.prompt): (request, fill)})  # noqa: E731
    endless, quick = (a_request(engine, n, start_fill=start_fill, max_tokens=2) for n in (40, 9))
    for request in (endless, quick):
        source.submit(request)
    assert eventually(lambda: len(started) == 2)
    endless.store.settle = lambda: time.sleep(0.001) or False  # type: ignore[union-attr, method-assign, func-returns-value]
    request, fill = started[9]
    for layer in range(LAYERS):
        fill.put(engine.block(layer, 0, P40[:8]))
    source.filled(request, Arrival(Done((), 0.0, 0.0), 0, 0.0, 0.0))
    assert outcome(quick) == ids(P40[:9], 2)
    source.cancel(endless)
    source.failed(endless, PeerFailed("over"))
    assert eventually(lambda: engine.reserved == 0)
    source.close()


def test_time_lost_in_peers_that_failed_is_queue_time(decode_engine: ToyEngine) -> None:
    source = DecodeSource(decode_engine)
    started: list[KvFill] = []
    request = a_request(decode_engine, 9, start_fill=lambda request, fill: started.append(fill), max_tokens=1)
    source.submit(request)
    assert eventually(lambda: started)
    threading.Event().wait(0.3)
    for layer in range(LAYERS):
        started[0].put(decode_engine.block(layer, 0, P40[:8]))
    source.filled(request, Arrival(Done((), 0.0, 0.0), 5, 0.01, 0.0, lost_s=0.28))
    assert outcome(request) == ids(P40[:9], 1)
    assert request.timing.queue_s >= 0.28
    assert 0.01 < request.timing.exposed_transfer_s < 0.2
    assert (request.timing.transfer_s, request.timing.sent_bytes) == (0.01, 5)
    source.close()


def test_staged_blocks_settle_while_the_fill_goes_on() -> None:
    """On a GPU the copy into place must not wait for the end of the transfer."""
    prefill, decode = ToyEngine(device="toy:0"), ToyEngine(device="toy:1", staging=True)
    prefill.gate_at = 4 * LAYERS
    with Worker(prefill, role="prefill") as one, Worker(decode, role="decode", prefill=[one.address]) as two:
        peer = Peer(two.address)
        events = peer.generate(generate(mode="split", chunk=4))
        next(events)
        assert eventually(lambda: decode.stores and decode.stores[0].settled == 4 * LAYERS)
        prefill.gate_at = -1
        prefill.gate.set()
        assert [event.token.id for event in events if event.HasField("token")] == ids(P40, 3)
        assert decode.stores[0].settled == 9 * LAYERS  # the last chunk holds withheld positions only
        peer.close()


def test_close_ends_every_request(decode_engine: ToyEngine) -> None:
    source = DecodeSource(decode_engine)
    fills: list[Any] = []
    requests = [a_request(decode_engine, 9, start_fill=lambda *a: fills.append(a), max_tokens=2) for _ in range(3)]
    for request in requests:
        request.on_cancel(lambda request=request: source.failed(request, PeerFailed("gone")))
        source.submit(request)
    assert eventually(lambda: len(fills) == 3)
    source.close()
    assert all(isinstance(outcome(request), PeerFailed) for request in requests)
    assert decode_engine.reserved == 0
    source.close()


# Through the wire: what a stranger may ask.


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(ToyEngine(context=256)) as worker:
        yield worker


@pytest.fixture(scope="module")
def peer(worker: Worker) -> Iterator[Peer]:
    peer = Peer(worker.address)
    yield peer
    peer.close()


def generate(**changes: Any) -> pb.GenerateRequest:
    sampling = pb.Sampling(**{"top_p": 1, "repetition_penalty": 1, "max_tokens": 3, **changes.pop("sampling", {})})
    return pb.GenerateRequest(**{"tokens": P40, "mode": "local", "chunk": 8, "sampling": sampling, **changes})


def tokens_of(stream: Iterator[pb.GenerateEvent]) -> list[int]:
    return [event.token.id for event in stream if event.WhichOneof("event") == "token"]


BAD_GENERATES: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "fast"}, "mode 'fast', allowed: auto, split, push, local"),
    "no mode": ({"mode": ""}, "mode ''"),
    "chunk 0": ({"chunk": 0}, "chunk 0, allowed: 1 to 65536"),
    "chunk huge": ({"chunk": 2**32 - 1}, "chunk 4294967295, allowed"),
    "no prompt": ({"tokens": []}, "an empty prompt"),
    "text": ({"tokens": [], "text": "hello"}, "needs a tokenizer"),
    "chat": ({"tokens": [], "messages": [pb.ChatMessage(role="user", content="x")]}, "needs a tokenizer"),
    "token id": ({"tokens": [1, 2**32 - 1]}, "token id 4294967295, allowed: 0 to 96"),
    "context": ({"tokens": [1] * 256}, "a prompt of 256 tokens leaves no free position, the context is 256"),
    "no tokens asked": ({"sampling": {"max_tokens": 0}}, "max_tokens is 0"),
    "temperature": ({"sampling": {"temperature": float("nan")}}, "temperature is nan"),
    "top_p": ({"sampling": {"top_p": 0}}, "top_p is 0"),
    "logprobs": ({"sampling": {"logprobs": 98}}, "logprobs is 98"),
    "stop": ({"sampling": {"stop": ["x"]}}, "stop strings need a tokenizer"),
    "too many stops": ({"sampling": {"stop": ["x"] * 17}}, "stop has 17 entries"),
    "split with nobody": ({"mode": "split"}, "mode 'split' without a prefill worker"),
    "a stranger's address": ({"mode": "split", "prefill": ["10.0.0.2:1"]}, "does not dial 10.0.0.2:1; allowed: loop"),
    "a bad address": ({"mode": "split", "prefill": ["nonsense"]}, "address 'nonsense': expected HOST:PORT"),
}


@pytest.mark.parametrize("name", BAD_GENERATES)
def test_a_bad_request_is_told_and_hurts_no_other(worker: Worker, peer: Peer, name: str) -> None:
    changes, why = BAD_GENERATES[name]
    companion = peer.generate(generate(sampling={"max_tokens": 100}))
    next(companion)
    with pytest.raises(RequestError, match=why):
        list(peer.generate(generate(**changes)))
    assert tokens_of(companion) == ids(P40, 100)
    assert eventually(lambda: worker.live == 0)


def test_sampling_that_was_never_filled_in_is_refused(peer: Peer) -> None:
    with pytest.raises(RequestError, match="top_p is 0"):
        list(peer.generate(pb.GenerateRequest(tokens=P40, mode="local", chunk=8)))


def test_a_bad_prefill_over_the_wire(worker: Worker, peer: Peer) -> None:
    identity = peer.describe().identity
    for changes, why in BAD_PREFILLS:
        asked = {"tokens": [1, 2], "start": 0, "stop": 1, "chunk": 8, **changes}
        if len(asked["tokens"]) == 600:
            why = why.replace("512", "256")
        with pytest.raises(RequestError, match=why):
            list(peer.prefill(pb.PrefillRequest(identity=identity, **asked)))
    assert eventually(lambda: worker.live == 0)


def test_a_prefill_of_another_model_is_refused(peer: Peer) -> None:
    request = pb.PrefillRequest(tokens=[1, 2], stop=1, chunk=8, identity=peer.describe().identity)
    request.identity.weights = "other"
    with pytest.raises(IncompatibleError, match="the decode side holds another model: weights: 'toy' here, 'other' th"):
        list(peer.prefill(request))
    request.mixed_weights = True
    assert isinstance(list(peer.prefill(request))[-1][-1], Done)
    request.identity.protocol = 99
    with pytest.raises(IncompatibleError, match="protocol: 1 here, 99 there"):
        list(peer.prefill(request))
    request.ClearField("identity")
    with pytest.raises(IncompatibleError, match="protocol: 1 here, 0 there"):
        list(peer.prefill(request))


def test_a_push_of_another_model_is_refused(peer: Peer) -> None:
    with pytest.raises(IncompatibleError, match="the pushing side holds another model: protocol"):
        list(peer.generate(generate(mode="push")))
    identity = peer.describe().identity
    identity.layers[1].head_dim = 8
    with pytest.raises(IncompatibleError, match="the pushing side holds another model: layers"):
        list(peer.generate(generate(mode="push", identity=identity)))


def test_one_token_prompts_prefill_nothing(worker: Worker, peer: Peer) -> None:
    request = pb.PrefillRequest(tokens=[1], chunk=8, identity=peer.describe().identity, transfer_id="t")
    parts = [message for batch in peer.prefill(request) for message in batch]
    assert [type(part) for part in parts if not isinstance(part, Progress)] == [Begin, Done]
    assert isinstance(parts[-1], Done)
    assert [layer.positions for layer in parts[-1].layers] == [0] * LAYERS


def test_the_first_event_says_what_was_accepted(peer: Peer) -> None:
    stream = peer.generate(generate(tokens=[1] * 250, sampling={"max_tokens": 99}))
    accepted = next(stream).accepted
    assert (accepted.prompt_tokens, accepted.max_tokens) == (250, 6)
    assert len(tokens_of(stream)) == 6


def test_a_reserved_push_that_never_comes() -> None:
    engine = ToyEngine()
    with Worker(engine, timeouts=Timeouts(silence_s=0.2)) as worker:
        peer = Peer(worker.address)
        stream = peer.generate(generate(mode="push", identity=peer.describe().identity))
        with pytest.raises(PeerTimeout, match=r"the sender pushed nothing for 0.2 s after room was reserved"):
            list(stream)
        assert eventually(lambda: engine.reserved == 0 and worker.live == 0)
        peer.close()


# Roles, addresses, starting and closing.


def test_a_description(worker: Worker, peer: Peer) -> None:
    facts = peer.describe()
    assert (facts.role, facts.engine, facts.device, facts.dtype, facts.model) == (
        "both",
        "toy",
        "cpu",
        "float32",
        "toy",
    )
    assert (facts.context, facts.live) == (256, 0)
    assert facts.version
    assert facts.identity == describe(ToyEngine(), "prefill").identity


def test_live_counts_both_roles() -> None:
    engine = ToyEngine(device="toy:0")
    engine.gate.clear()
    with Worker(engine) as worker:
        peer = Peer(worker.address)
        stream = peer.generate(generate(mode="split", prefill=[worker.address]))
        next(stream)
        assert eventually(lambda: worker.live == 2)
        assert peer.describe().live == 2  # a stuck engine keeps nobody from asking
        stream.cancel()
        assert eventually(lambda: worker.live == 0)
        peer.close()


@pytest.mark.parametrize(
    ("role", "call"), [("decode", "prefill"), ("prefill", "generate"), ("prefill", "push"), ("prefill", "pair")]
)
def test_a_call_of_the_other_role_is_refused(role: str, call: str) -> None:
    with Worker(ToyEngine(), role=role) as worker:
        peer = Peer(worker.address)
        calls: dict[str, Any] = {
            "prefill": lambda: list(peer.prefill(pb.PrefillRequest(tokens=[1, 2], stop=1, chunk=8))),
            "generate": lambda: list(peer.generate(generate())),
            "push": lambda: peer.push(iter([b""]), lambda cancel: None),
            "pair": lambda: peer.pair(pb.PairRequest()),
        }
        asked = "prefill" if call == "prefill" else "decode"
        with pytest.raises(IncompatibleError, match=f"this worker has role {role}, {asked} was asked of it"):
            calls[call]()
        peer.close()


class PrefillOnly:
    def __init__(self) -> None:
        engine = ToyEngine()
        for name in ("spec", "layout", "name", "tokenizer", "weights_hash", "device", "source", "prefill"):
            setattr(self, name, getattr(engine, name))


BAD_WORKERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nothing": (None, {}, "engine None, expected an engine"),
    "an address that is none": (ToyEngine(), {"address": 5}, "address 5, expected text"),
    "one prefill address": (ToyEngine(), {"prefill": "127.0.0.1:1"}, "prefill '127.0.0.1:1', expected a list"),
    "a prefill that is none": (ToyEngine(), {"prefill": [5]}, r"prefill \[5\], expected a list of addresses"),
    "any_prefill": (ToyEngine(), {"any_prefill": "no"}, "any_prefill 'no', allowed: True, False"),
    "timeouts": (ToyEngine(), {"timeouts": 5}, "a int where Timeouts is expected"),
    "role": (ToyEngine(), {"role": "encode"}, "role 'encode', allowed: prefill, decode, both"),
    "no decode": (PrefillOnly(), {"role": "decode"}, "engine toy has no role decode"),
    "not both": (PrefillOnly(), {}, "engine toy has no role decode"),
    "address": (ToyEngine(), {"address": "localhost"}, "address 'localhost'"),
    "open": (ToyEngine(), {"address": "0.0.0.0:0"}, "refusing to listen on 0.0.0.0:0 without TLS and a token"),
    "half TLS": (ToyEngine(), {"security": ServerSecurity(cert=b"x")}, "TLS needs both files"),
    "a prefill address": (ToyEngine(), {"prefill": ["nonsense"]}, "address 'nonsense'"),
    "an open prefill address": (ToyEngine(), {"prefill": ["10.0.0.2:1"]}, "refusing to dial 10.0.0.2:1"),
}


@pytest.mark.parametrize("name", BAD_WORKERS)
def test_a_worker_that_cannot_start(name: str) -> None:
    engine, options, why = BAD_WORKERS[name]
    with pytest.raises(ConfigError, match=why):
        Worker(engine, **options)


def test_a_worker_that_closes_takes_no_call_before_it_ends_those_that_run() -> None:
    """Else a request that comes in between is admitted by a source that nobody runs, and waits."""
    engine = ToyEngine()
    worker = Worker(engine)
    refused: list[HetsplitError] = []
    end = worker.service.close
    peer = Peer(worker.address)
    peer.describe()

    def close() -> None:
        with pytest.raises(PeerError) as info:
            list(peer.generate(generate()))
        refused.append(info.value)
        end()

    worker.service.close = close  # type: ignore[method-assign]
    worker.close()
    assert isinstance(refused[0], PeerUnavailable)
    assert engine.steps == 0
    peer.close()


def test_every_push_that_is_admitted_finds_its_two_calls() -> None:
    assert server.MAX_CALLS >= 2 * (decode.MAX_ACTIVE + decode.MAX_WAITING) + 8


def test_only_a_push_is_sent_its_prompt_again() -> None:
    with Worker(ToyEngine(), role="prefill") as one, Worker(ToyEngine(), role="decode", prefill=[one.address]) as two:
        peer = Peer(two.address)
        kinds = {event.WhichOneof("event") for event in peer.generate(generate(mode="split"))}
        assert kinds - {"progress"} == {"accepted", "token", "finished"}
        peer.close()


def test_a_port_in_use_leaves_the_first_worker_alone() -> None:
    """Case O13."""
    with Worker(ToyEngine()) as first:
        with pytest.raises(ConfigError, match="(?i)address already in use"):
            Worker(ToyEngine(weights_hash="other"), address=first.address)
        peer = Peer(first.address)
        assert peer.describe().identity.weights == "toy"
        assert tokens_of(peer.generate(generate())) == ids(P40, 3)
        peer.close()


def test_a_worker_closes_twice_and_another_goes_on() -> None:
    first = Worker(ToyEngine())
    first.close()
    with Worker(ToyEngine()) as second:
        first.close()
        peer = Peer(second.address)
        assert tokens_of(peer.generate(generate())) == ids(P40, 3)
        peer.close()
    peer = Peer(first.address)
    with pytest.raises(PeerUnavailable):
        peer.describe()
    peer.close()


def test_a_decode_worker_dials_loopback_and_what_it_was_told() -> None:
    stranger = "203.0.113.7:5"
    known = Credentials(insecure=True)
    request = pb.PairRequest(prefill=[stranger])
    with Worker(ToyEngine(), role="decode") as shut, Worker(ToyEngine(), role="prefill") as prefill:
        peer = Peer(shut.address)
        with pytest.raises(
            RequestError, match=r"does not dial 203.0.113.7:5; .*--prefill addresses \(none\).*--any-pre"
        ):
            peer.pair(request)
        assert len(peer.pair(pb.PairRequest(prefill=[prefill.address])).prefill) == 1
        peer.close()
    short = Timeouts(connect_s=0.2)
    for options in ({"any_prefill": True}, {"prefill": [stranger]}):
        with Worker(ToyEngine(), role="decode", credentials=known, timeouts=short, **options) as told:  # type: ignore[arg-type]
            peer = Peer(told.address)
            # It is dialled; that nobody is there is another matter.
            with pytest.raises((PeerError, IncompatibleError)):
                peer.pair(request)
            with pytest.raises((PeerError, IncompatibleError)) as info:
                list(peer.generate(generate(mode="split", prefill=[stranger])))
            assert "does not dial" not in str(info.value)
            peer.close()


def test_a_worker_uses_its_own_prefill_addresses_by_itself() -> None:
    with (
        Worker(ToyEngine(), role="prefill") as prefill,
        Worker(ToyEngine(device="toy:1"), role="decode", prefill=[prefill.address]) as decode,
    ):
        peer = Peer(decode.address)
        events = list(peer.generate(generate(mode="auto")))
        assert tokens_of(iter(events)) == ids(P40, 3)
        timing = events[-1].finished.timing
        assert (timing.mode, timing.why) == ("split", "a prefill worker is known")
        peer.close()


def test_auto_without_a_prefill_worker_is_local(peer: Peer) -> None:
    events = list(peer.generate(generate(mode="auto")))
    assert events[-1].finished.timing.mode == "local"
    assert events[-1].finished.timing.why == "no prefill worker is known"


def test_a_token_opens_a_worker_and_its_prefill_side() -> None:
    token = "0123456789abcdef"
    guard = ServerSecurity(token=token)
    with (
        Worker(ToyEngine(), role="prefill", security=guard) as prefill,
        Worker(ToyEngine(), role="decode", security=guard, credentials=Credentials(token=token)) as decode,
    ):
        peer = Peer(decode.address, Credentials(token=token))
        assert tokens_of(peer.generate(generate(mode="split", prefill=[prefill.address]))) == ids(P40, 3)
        peer.close()


def test_an_engine_that_decodes_only_says_so_for_a_local_request() -> None:
    class DecodeOnly(PrefillOnly):
        def __init__(self) -> None:
            super().__init__()
            engine = ToyEngine()
            del self.prefill
            self.reserve, self.step = engine.reserve, engine.step

    engine = DecodeOnly()
    assert isinstance(engine, Decoder)
    with Worker(engine, role="decode") as worker:  # type: ignore[arg-type]
        peer = Peer(worker.address)
        for mode in ("local", "auto"):
            with pytest.raises(RequestError, match="engine toy cannot prefill, connect it to a prefill side"):
                list(peer.generate(generate(mode=mode)))
        peer.close()


def test_errors_of_the_engine_thread_are_told() -> None:
    class Broken(ToyEngine):
        def reserve(self, positions: int) -> Any:
            raise EngineError("the allocator is gone")

    with Worker(Broken()) as worker:
        peer = Peer(worker.address)
        with pytest.raises(PeerFailed, match="EngineError: the allocator is gone"):
            list(peer.generate(generate()))
        assert worker.live == 0
        peer.close()
