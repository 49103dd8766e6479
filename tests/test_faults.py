"""The fault law (case O7): a hostile transfer is a named error, emits no token, leaks nothing, harms no later one.

Each of `tests.faults` is served to a real decode worker, as a pull and as a push.
"""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hetsplit import connect
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.errors import (
    CapacityError,
    EngineError,
    HetsplitError,
    PeerError,
    PeerFailed,
    RemoteProtocolError,
)
from hetsplit.protocol import BlockFrame, Message
from hetsplit.split import Split
from hetsplit.wire import Peer, Server
from hetsplit.worker import Worker
from hetsplit.worker.service import describe
from tests.faults import (
    BYTES,
    CHUNK,
    STREAMS,
    TOKENS,
    HostilePrefill,
    Script,
    bytes_script,
    good_messages,
    stream_script,
    to_bytes,
)
from tests.toy import ToyEngine, eventually, reference, toy_logits

pytestmark = pytest.mark.slow  # as a file: `make check` has a minute for all

WANT = [token for token, _ in reference(TOKENS, max_tokens=4)]


def good(messages: list[Any]) -> list[Any]:
    return messages


class Bench:
    """One decode worker that outlives all hostile transfers, with a hostile prefill side and a hostile pusher."""

    def __init__(self) -> None:
        self.engine = ToyEngine()
        self.hostile = HostilePrefill(self.engine, stream_script(self.engine, good))
        self.server = Server("127.0.0.1:0", self.hostile)
        self.worker = Worker(self.engine, role="decode")
        self.split: Split = connect(self.server.address, self.worker.address, chunk=CHUNK)
        self.peer = Peer(self.worker.address)

    def close(self) -> None:
        self.split.close()
        self.peer.close()
        self.worker.close()
        self.server.close(0)

    def check(self) -> None:
        """Nothing leaked, and a good request gives what it must."""
        assert eventually(lambda: self.engine.reserved == 0 and self.worker.live == 0)
        assert all(store.released for store in self.engine.stores)
        self.hostile.script = stream_script(self.engine, good)
        assert self.split.complete(TOKENS, max_tokens=4).ids == WANT
        assert eventually(lambda: self.engine.reserved == 0)

    def pull(self, script: Script) -> HetsplitError:
        """What a user sees of a hostile pull."""
        self.hostile.script = script
        return self._refused(lambda: list(self.split.generate(TOKENS, max_tokens=4)))

    def push(self, tampered: Callable[[str], list[bytes]]) -> tuple[HetsplitError, HetsplitError]:
        """What the pusher and the user see of a hostile push."""
        told: list[HetsplitError] = []

        def user() -> None:
            reserved = self.reserve()
            try:
                self.peer.push(iter(tampered(reserved.transfer_id)), lambda cancel: None)
            except HetsplitError as error:
                told.append(error)
            list(self.stream)

        seen = self._refused(user)
        return told[0], seen

    def reserve(self) -> pb.Reserved:
        """Asks for a pushed request, up to the moment at which its blocks may come."""
        sampling = pb.Sampling(top_p=1, repetition_penalty=1, max_tokens=4)
        identity = describe(self.engine, "prefill").identity
        request = pb.GenerateRequest(tokens=TOKENS, sampling=sampling, mode="push", chunk=CHUNK, identity=identity)
        self.stream = self.peer.generate(request)
        assert next(self.stream).WhichOneof("event") == "accepted"
        event = next(self.stream)
        assert event.WhichOneof("event") == "reserved"
        assert tuple(event.reserved.tokens) == TOKENS
        return event.reserved

    def _refused(self, request: Callable[[], object]) -> HetsplitError:
        steps, sealed = self.engine.steps, len([s for s in self.engine.stores if s.sealed is not None])
        with pytest.raises(HetsplitError) as info:
            request()
        assert self.engine.steps == steps  # so no token was emitted
        assert len([s for s in self.engine.stores if s.sealed is not None]) == sealed
        return info.value


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def of_stream(name: str, engine: ToyEngine, transfer_id: str) -> list[bytes]:
    return [to_bytes(m) for m in STREAMS[name][0](good_messages(engine, transfer_id, TOKENS, CHUNK))]


def of_bytes(name: str, engine: ToyEngine, transfer_id: str) -> list[bytes]:
    return BYTES[name][0]([to_bytes(m) for m in good_messages(engine, transfer_id, TOKENS, CHUNK)])


def test_the_untampered_transfer_is_taken(bench: Bench) -> None:
    bench.check()
    reserved = bench.reserve()
    messages = [to_bytes(m) for m in good_messages(bench.engine, reserved.transfer_id, TOKENS, CHUNK)]
    bench.peer.push(iter(messages), lambda cancel: None)
    assert [e.token.id for e in bench.stream if e.WhichOneof("event") == "token"] == WANT
    bench.check()


@pytest.mark.parametrize("name", STREAMS)
def test_a_hostile_pull(bench: Bench, name: str) -> None:
    tamper, why = STREAMS[name]
    error = bench.pull(stream_script(bench.engine, tamper))
    assert type(error) is RemoteProtocolError
    assert error.peer == bench.server.address
    assert re.search(why, str(error))
    bench.check()


@pytest.mark.parametrize("name", BYTES)
def test_hostile_bytes_in_a_pull(bench: Bench, name: str) -> None:
    tamper, why = BYTES[name]
    error = bench.pull(bytes_script(bench.engine, tamper))
    assert type(error) is RemoteProtocolError
    assert error.peer == bench.server.address
    assert re.search(why, str(error))
    bench.check()


# A push whose first message names no awaited transfer belongs to no request; the user learns of it by leaving.
LOST = {"nothing at all", "another transfer", "no Begin", "Progress first", "Done first", "a Begin of noise"}


@pytest.mark.parametrize("name", [name for name in STREAMS if name not in LOST])
def test_a_hostile_push(bench: Bench, name: str) -> None:
    told, seen = bench.push(lambda transfer_id: of_stream(name, bench.engine, transfer_id))
    for error in (told, seen):
        assert type(error) is RemoteProtocolError
        assert re.search(STREAMS[name][1], str(error))
    bench.check()


@pytest.mark.parametrize("name", [name for name in BYTES if name not in LOST])
def test_hostile_bytes_in_a_push(bench: Bench, name: str) -> None:
    told, seen = bench.push(lambda transfer_id: of_bytes(name, bench.engine, transfer_id))
    for error in (told, seen):
        assert type(error) is RemoteProtocolError
        assert re.search(BYTES[name][1], str(error))
    bench.check()


@pytest.mark.parametrize("name", sorted(LOST))
def test_a_push_that_names_no_awaited_transfer(bench: Bench, name: str) -> None:
    make = of_stream if name in STREAMS else of_bytes
    reserved = bench.reserve()
    with pytest.raises(RemoteProtocolError, match=r"must start with Begin|is not awaited|not a TransferMessage"):
        bench.peer.push(iter(make(name, bench.engine, reserved.transfer_id)), lambda cancel: None)
    assert bench.worker.live == 1  # a stranger's noise ends nobody's request
    bench.stream.cancel()
    bench.check()


@pytest.mark.parametrize("transfer_id", ["", "0" * 16, "../../etc/passwd", "ü" * 40])
def test_an_unknown_transfer(bench: Bench, transfer_id: str) -> None:
    messages = [to_bytes(m) for m in good_messages(bench.engine, transfer_id, TOKENS, CHUNK)]
    with pytest.raises(RemoteProtocolError, match="is not awaited: unknown, cancelled or already taken"):
        bench.peer.push(iter(messages), lambda cancel: None)
    bench.check()


def test_a_transfer_may_not_be_used_again(bench: Bench) -> None:
    reserved = bench.reserve()
    messages = [to_bytes(m) for m in good_messages(bench.engine, reserved.transfer_id, TOKENS, CHUNK)]
    bench.peer.push(iter(messages), lambda cancel: None)
    with pytest.raises(RemoteProtocolError, match="is not awaited"):
        bench.peer.push(iter(messages), lambda cancel: None)
    assert [e.token.id for e in bench.stream if e.WhichOneof("event") == "token"] == WANT
    with pytest.raises(RemoteProtocolError, match="is not awaited"):
        bench.peer.push(iter(messages), lambda cancel: None)
    bench.check()


def test_two_pushes_of_one_transfer_at_once(bench: Bench) -> None:
    reserved = bench.reserve()
    messages = [to_bytes(m) for m in good_messages(bench.engine, reserved.transfer_id, TOKENS, CHUNK)]
    first_is_in, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[bytes]:
        yield messages[0]
        yield messages[1]
        first_is_in.set()
        go_on.wait(10)
        yield from messages[2:]

    pusher = threading.Thread(target=lambda: bench.peer.push(slow(), lambda cancel: None))
    pusher.start()
    assert first_is_in.wait(2)
    assert eventually(lambda: bench.engine.stores[-1].written > 0)
    with pytest.raises(RemoteProtocolError, match="is not awaited"):
        bench.peer.push(iter(messages), lambda cancel: None)
    go_on.set()
    pusher.join(5)
    assert [e.token.id for e in bench.stream if e.WhichOneof("event") == "token"] == WANT
    bench.check()


def test_a_push_for_a_request_whose_user_left(bench: Bench) -> None:
    reserved = bench.reserve()
    bench.stream.cancel()
    assert eventually(lambda: bench.worker.live == 0)
    messages = [to_bytes(m) for m in good_messages(bench.engine, reserved.transfer_id, TOKENS, CHUNK)]
    with pytest.raises(RemoteProtocolError, match="is not awaited"):
        bench.peer.push(iter(messages), lambda cancel: None)
    bench.check()


def test_a_pusher_that_goes_away(bench: Bench) -> None:
    reserved = bench.reserve()
    messages = [to_bytes(m) for m in good_messages(bench.engine, reserved.transfer_id, TOKENS, CHUNK)]
    hold = threading.Event()
    cancels: list[Callable[[], object]] = []

    def half() -> Iterator[bytes]:
        yield from messages[:4]
        hold.wait(10)

    def pusher() -> None:
        with pytest.raises(PeerFailed, match="cancelled"):
            bench.peer.push(half(), cancels.append)

    thread = threading.Thread(target=pusher)
    thread.start()
    assert eventually(lambda: bench.engine.stores[-1].written > 0)
    cancels[0]()
    with pytest.raises((PeerFailed, RemoteProtocolError), match=r"went away|ended early"):
        list(bench.stream)
    hold.set()
    thread.join(5)
    bench.check()


ERRORS = [
    (EngineError("half way"), PeerFailed, "EngineError: half way"),
    (CapacityError("no room there"), CapacityError, "no room there"),
    (ValueError("surprise"), PeerFailed, "ValueError: surprise"),
]


@pytest.mark.parametrize(("error", "kind", "why"), ERRORS, ids=lambda x: getattr(x, "__name__", str(x)[:12]))
@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_a_transfer_that_ends_with_an_error(
    bench: Bench, error: Exception, kind: type[HetsplitError], why: str, after: int
) -> None:
    def script(request: pb.PrefillRequest, call: Any) -> Iterator[bytes]:
        messages = good_messages(bench.engine, request.transfer_id, tuple(request.tokens), request.chunk)
        yield from map(to_bytes, messages[:after])
        raise error

    got = bench.pull(script)
    assert type(got) is kind
    assert why in str(got)
    if isinstance(got, PeerError):
        assert got.peer == bench.server.address
    bench.check()


def test_a_finished_transfer_id_reused_by_the_prefill_side(bench: Bench) -> None:
    """Case O7 (e): a stale answer must not pass for this request's."""
    first = bench.split.complete(TOKENS, max_tokens=1)
    assert first.ids == WANT[:1]
    stale = bench.hostile.requests[-1]
    other = tuple(reversed(TOKENS))
    old = [to_bytes(m) for m in good_messages(bench.engine, stale.transfer_id, other, CHUNK)]
    error = bench.pull(lambda request, call: old)
    assert type(error) is RemoteProtocolError
    assert f"begins as {stale.transfer_id}" in str(error)
    assert len({request.transfer_id for request in bench.hostile.requests}) == len(bench.hostile.requests)
    bench.check()


def test_a_hostile_transfer_next_to_good_ones(bench: Bench) -> None:
    """What comes in for one request never reaches another."""
    bad = threading.Event()

    def script(request: pb.PrefillRequest, call: Any) -> list[bytes]:
        messages = good_messages(bench.engine, request.transfer_id, tuple(request.tokens), request.chunk)
        if len(request.tokens) == 9:
            bad.set()
            return [to_bytes(m) for m in flipped(messages)]
        return [to_bytes(m) for m in messages]

    bench.hostile.script = script
    good_ones = [bench.split.generate(TOKENS, max_tokens=4) for _ in range(4)]
    with pytest.raises(RemoteProtocolError, match="the sender says"):
        list(bench.split.generate(TOKENS[:9], max_tokens=4))
    for generation in good_ones:
        assert [token.id for token in generation] == WANT
    assert bad.is_set()
    bench.check()


def flipped(messages: list[Message]) -> list[Message]:
    return STREAMS["a flipped bit in keys"][0](messages)


def test_the_faults_are_real(bench: Bench) -> None:
    """Each tampered stream differs from the good one, and one that differs in its payload gives other tokens."""
    clean = [to_bytes(m) for m in good_messages(bench.engine, "t", TOKENS, CHUNK)]
    for name in STREAMS:
        assert of_stream(name, bench.engine, "t") != clean
    for name in BYTES:
        assert of_bytes(name, bench.engine, "t") != clean
    store = bench.engine.reserve(10)
    for message in flipped(good_messages(bench.engine, "t", TOKENS, CHUNK)):
        if isinstance(message, BlockFrame):
            keys, values = np.frombuffer(message.payload, np.float32).reshape(2, message.count, 2, 4)
            store.data[message.layer, 0, message.start : message.start + message.count] = keys
            store.data[message.layer, 1, message.start : message.start + message.count] = values
    blocks = [bench.engine.block(layer, 0, TOKENS[:9]) for layer in range(3)]
    true = np.stack([np.stack([b.keys, b.values]) for b in blocks])
    assert not np.array_equal(toy_logits(store.data[:, :, :9]), toy_logits(true))
    store.release()
