"""What only a real loopback server shows: errors that travel, tokens, TLS, deadlines, cancellation, limits."""

import contextlib
import datetime
import gc
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc._cython import cygrpc

from hetsplit import errors
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    EngineError,
    HetsplitError,
    IncompatibleError,
    LocalProtocolError,
    PeerError,
    PeerFailed,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
    RequestError,
)
from hetsplit.protocol import MESSAGE_BYTES, Begin, Message, Progress
from hetsplit.security import Credentials, ServerSecurity
from hetsplit.wire import REQUEST_BYTES, TRAVELS, Call, Peer, Server, Silence, Timeouts, server
from tests.faults import to_bytes
from tests.toy import eventually

TOKEN = "0123456789abcdef"
SHORT = Timeouts(connect_s=1.0, silence_s=0.3)


class Echo:
    """A service whose calls run the functions it was given."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self.calls = calls

    def describe(self) -> pb.Description:
        return self.calls.get("describe", lambda: pb.Description(model="echo"))()

    def pair(self, request: pb.PairRequest) -> pb.PairReply:
        return self.calls["pair"](request)

    def prefill(self, request: pb.PrefillRequest, call: Call) -> Iterator[bytes]:
        yield from self.calls["prefill"](request, call)

    def push(self, messages: Iterator[list[Message]], call: Call) -> None:
        self.calls["push"](messages, call)

    def generate(self, request: pb.GenerateRequest, call: Call) -> Iterator[pb.GenerateEvent]:
        yield from self.calls["generate"](request, call)


@contextlib.contextmanager
def joined(
    timeouts: Timeouts = Timeouts(), *, address: str = "127.0.0.1:0", max_calls: int = 128, **calls: Callable[..., Any]
) -> Iterator[Peer]:
    server = Server(address, Echo(**calls), timeouts=timeouts, max_calls=max_calls)
    peer = Peer(server.address, timeouts=timeouts)
    try:
        yield peer
    finally:
        peer.close()
        server.close(0)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


def push(peer: Peer, messages: Iterator[bytes]) -> None:
    peer.push(messages, lambda cancel: None)


def event(ahead: int = 0) -> pb.GenerateEvent:
    return pb.GenerateEvent(progress=pb.RequestProgress(ahead=ahead))


# Errors that travel.


def each_way(peer: Peer) -> list[Callable[[], Any]]:
    return [
        lambda: peer.pair(pb.PairRequest()),
        lambda: list(peer.prefill(pb.PrefillRequest())),
        lambda: list(peer.generate(pb.GenerateRequest())),
        lambda: push(peer, iter([b""])),
    ]


def caught(call: Callable[[], Any]) -> HetsplitError:
    with pytest.raises(HetsplitError) as info:
        call()
    return info.value


def errors_of(error: Exception) -> list[HetsplitError]:
    fails = raising(error)
    with joined(pair=fails, prefill=fails, generate=fails, push=fails) as peer:
        address = peer.address
        found = [caught(call) for call in each_way(peer)]
    for got in found:
        if isinstance(got, PeerError) and got.peer != "10.0.0.9:1":
            assert got.peer == address
    return found


@pytest.mark.parametrize("name", TRAVELS)
def test_each_class_that_travels_comes_back_as_itself(name: str) -> None:
    for got in errors_of(TRAVELS[name]("why: 4 of 5, größer")):
        assert type(got) is TRAVELS[name]
        assert str(got) == "why: 4 of 5, größer"


@pytest.mark.parametrize("kind", [k for k in TRAVELS.values() if issubclass(k, PeerError)], ids=lambda k: k.__name__)
def test_the_peer_that_failed_is_still_named(kind: type[PeerError]) -> None:
    for got in errors_of(kind("why", peer="10.0.0.9:1")):
        assert isinstance(got, PeerError)
        assert got.peer == "10.0.0.9:1"


OTHERS = [EngineError("out of memory"), LocalProtocolError("bad block"), ConfigError("bad flag"), KeyError("x")]


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: type(e).__name__)
def test_any_other_error_comes_back_as_the_peers_failure(error: Exception) -> None:
    for got in errors_of(error):
        assert type(got) is PeerFailed
        assert str(got) == f"{type(error).__name__}: {error}"


def test_every_class_of_the_tree_was_thought_of() -> None:
    tree = {k.__name__ for k in vars(errors).values() if isinstance(k, type) and issubclass(k, HetsplitError)}
    abstract = {"HetsplitError", "PeerError", "ProtocolError"}
    assert tree - abstract - TRAVELS.keys() == {"ConfigError", "EngineError", "LocalProtocolError"}


def test_an_error_may_come_after_messages() -> None:
    def prefill(request: pb.PrefillRequest, call: Call) -> Iterator[bytes]:
        yield to_bytes(Begin("t", 0, 1, "float32"))
        raise CapacityError("no room")

    with joined(prefill=prefill) as peer:
        stream = peer.prefill(pb.PrefillRequest())
        assert next(stream) == [Begin("t", 0, 1, "float32")]
        with pytest.raises(CapacityError, match="no room"):
            next(stream)


def test_a_long_message_is_cut() -> None:
    assert len(str(errors_of(RequestError("x" * 100_000))[0])) <= 2000


def test_malformed_bytes_of_a_prefill_end_the_call() -> None:
    ended = threading.Event()

    def prefill(request: pb.PrefillRequest, call: Call) -> Iterator[bytes]:
        call.on_end(ended.set)
        while True:
            yield b"\xff"

    with joined(prefill=prefill) as peer:
        with pytest.raises(RemoteProtocolError, match="not a TransferMessage"):
            next(peer.prefill(pb.PrefillRequest()))
        assert ended.wait(2)


def test_malformed_bytes_of_a_push_are_the_pushers_error() -> None:
    with joined(push=lambda messages, call: list(messages)) as peer, pytest.raises(RemoteProtocolError, match="not a"):
        push(peer, iter([b"\xff"]))


# Push.


def test_a_push_arrives_in_order() -> None:
    got: list[Message] = []
    sent = [Progress(i) for i in range(100)]
    with joined(push=lambda messages, call: got.extend(m for batch in messages for m in batch)) as peer:
        push(peer, map(to_bytes, sent))
    assert got == sent


def test_what_a_pushs_source_raises_is_raised_here(caplog: pytest.LogCaptureFixture) -> None:
    def messages() -> Iterator[bytes]:
        yield to_bytes(Progress(1))
        raise EngineError("the device is gone")

    with joined(push=lambda messages, call: list(messages)) as peer, pytest.raises(EngineError, match="device is gone"):
        push(peer, messages())
    assert not caplog.records  # gRPC logs a traceback for what an iterator raises


def test_a_push_can_be_cancelled_from_another_thread() -> None:
    cancels: list[Callable[[], object]] = []
    outcome: list[BaseException] = []
    arrived, gone = threading.Event(), threading.Event()

    def taken(messages: Iterator[list[Message]], call: Call) -> None:
        try:
            for _ in messages:
                arrived.set()
        except PeerFailed as error:
            assert str(error) == "the sender went away"
        finally:
            gone.set()

    hold = threading.Event()

    def endless() -> Iterator[bytes]:
        yield to_bytes(Progress(0))
        hold.wait(10)

    with joined(push=taken) as peer:
        thread = threading.Thread(target=lambda: outcome.append(caught(lambda: peer.push(endless(), cancels.append))))
        thread.start()
        assert arrived.wait(2)
        cancels[0]()
        thread.join(2)
        assert gone.wait(2)
        hold.set()
    assert [str(error) for error in outcome] == ["the push was cancelled"]


def test_a_sender_that_falls_silent_loses_its_push() -> None:
    seen: list[HetsplitError] = []
    hold = threading.Event()

    def taken(messages: Iterator[list[Message]], call: Call) -> None:
        seen.append(caught(lambda: list(messages)))
        raise seen[0]

    def stuck() -> Iterator[bytes]:
        yield to_bytes(Progress(0))
        hold.wait(10)

    server = Server("127.0.0.1:0", Echo(push=taken), timeouts=SHORT)
    peer = Peer(server.address)
    try:
        with pytest.raises(PeerFailed, match="the call was given up"):
            push(peer, stuck())
        assert eventually(lambda: seen)
        assert isinstance(seen[0], PeerTimeout)
        assert "the sender was silent for 0.3 s" in str(seen[0])
    finally:
        hold.set()
        peer.close()
        server.close(0)


def test_a_receiver_that_takes_nothing_loses_the_push() -> None:
    release = threading.Event()
    server = Server("127.0.0.1:0", Echo(push=lambda messages, call: release.wait(10)))
    peer = Peer(server.address, timeouts=SHORT)

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(MESSAGE_BYTES)

    try:
        with pytest.raises(PeerTimeout, match=r"took nothing for 0.3 s"):
            push(peer, endless())
    finally:
        release.set()
        peer.close()
        server.close(0)


# Addresses.


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "unix:{}/w.sock"])
def test_each_kind_of_address_works(address: str, tmp_path: Path) -> None:
    with joined(address=address.format(tmp_path)) as peer:
        assert peer.describe().model == "echo"
        assert 0 < peer.rtt_s < 5
        if not address.startswith("unix:"):
            assert peer.address.rpartition(":")[0] == address.rpartition(":")[0]
            assert int(peer.address.rpartition(":")[2]) > 0


PAIRS = [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("[::1]", "localhost"), ("127.0.0.1", "0.0.0.0")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_port_in_use_is_refused(first: str, second: str) -> None:
    """Case O13: gRPC alone would share the port, or be content with the other address of a name."""
    with joined(address=f"{first}:0") as peer:
        address = f"{second}:{peer.address.rpartition(':')[2]}"
        start = time.monotonic()
        why = f"cannot listen on {address.replace('[', '.')}: (?i:address already in use)"
        with pytest.raises(ConfigError, match=why):
            Server(address, Echo(), ServerSecurity(insecure=True))
        assert time.monotonic() - start < 5
        assert peer.describe().model == "echo"


def test_a_port_is_free_again_after_close() -> None:
    with joined() as peer:
        assert peer.describe().model == "echo"
        address = peer.address
    with joined(address=address) as peer:
        assert peer.describe().model == "echo"


def test_a_unix_socket_in_use_is_refused_and_a_stale_one_is_not(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "w.sock"))
    with joined(address=address) as peer:
        with pytest.raises(ConfigError, match=r"w.sock: (?i:address already in use)"):
            Server(address, Echo())
        assert peer.describe().model == "echo"


BAD_LISTENS = [
    ("unix:/no/such/folder/w.sock", "is no folder that can be written"),
    ("unix:/tmp/" + "x" * 200, "over 107 bytes"),
    ("203.0.113.7:0", "Cannot assign requested address"),
    ("nonsense", "expected HOST:PORT"),
]


@pytest.mark.parametrize(("address", "why"), BAD_LISTENS, ids=lambda x: x[:20])
def test_an_address_that_cannot_be_listened_on(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Server(address, Echo(), ServerSecurity(insecure=True))


# Peers that are not there, or are something else.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_there() -> None:
    address = f"127.0.0.1:{free_port()}"
    peer = Peer(address)
    start = time.monotonic()
    for call in (peer.describe, *each_way(peer)):
        with pytest.raises(PeerUnavailable, match="refused") as info:
            call()
        assert info.value.peer == address
    assert time.monotonic() - start < 2
    peer.close()


def test_a_worker_that_comes_back_is_found_again() -> None:
    with joined() as peer:
        address = peer.address
        again = Peer(address)
        again.describe()
    with pytest.raises(PeerUnavailable):
        again.describe()
    with joined(address=address):
        assert eventually(lambda: works(again))
    again.close()


def works(peer: Peer) -> bool:
    try:
        peer.describe()
    except (PeerUnavailable, CapacityError):
        return False
    return True


def test_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = Peer(f"127.0.0.1:{listener.getsockname()[1]}", timeouts=Timeouts(connect_s=0.3))
        for call in (peer.describe, *each_way(peer)):
            start = time.monotonic()
            with pytest.raises(PeerTimeout, match=r"within 0.3 s|timed out"):
                call()
            assert time.monotonic() - start < 2
        peer.close()


def test_a_worker_that_accepts_but_never_answers() -> None:
    release = threading.Event()
    with joined(SHORT, describe=lambda: release.wait(10)) as peer:
        with pytest.raises(PeerTimeout, match=f"{peer.address} did not answer within 1 s") as info:
            peer.describe()
        assert info.value.peer == peer.address
        release.set()


def test_another_grpc_server() -> None:
    pool = ThreadPoolExecutor(1)
    other = grpc.server(pool)
    peer = Peer(f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}")
    other.start()
    for call in (peer.describe, *each_way(peer)):
        with pytest.raises(IncompatibleError, match=f"{peer.address}.*no hetsplit worker of this version"):
            call()
    peer.close()
    other.stop(0).wait(5)
    pool.shutdown()


def test_a_call_that_this_version_does_not_know() -> None:
    with joined() as peer, pytest.raises(IncompatibleError, match="no hetsplit worker of this version"):
        peer._unary("Later", pb.DescribeRequest(), pb.Description, 1.0)


def test_a_listener_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        peer = Peer(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(PeerUnavailable, match=r"HTTP/2|closed|reset"):
            peer.describe()
        peer.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_a_closed_peer_is_a_named_error() -> None:
    with joined() as peer:
        peer.close()
        peer.close()
        for call in (peer.describe, *each_way(peer)):
            with pytest.raises(PeerUnavailable, match="the connection is closed"):
                call()


def test_a_request_too_large_to_travel_is_the_callers_error() -> None:
    with joined(generate=lambda request, call: [event(len(request.text))]) as peer:
        big = pb.GenerateRequest(text="x" * 1_000_000)
        assert [e.progress.ahead for e in peer.generate(big)] == [1_000_000]
        big.text = "x" * REQUEST_BYTES
        with pytest.raises(RequestError, match=rf"a request of \d+ bytes, at most {REQUEST_BYTES} can travel"):
            peer.generate(big)
        big.text = "x" * (REQUEST_BYTES - 100)
        assert [e.progress.ahead for e in peer.generate(big)] == [REQUEST_BYTES - 100]


def test_a_message_of_the_largest_size_travels_both_ways() -> None:
    """Case O12: no limit of gRPC is lifted, and none is met."""
    filler = b"\x4a" + b"\xfc\xff\x7f" + bytes(MESSAGE_BYTES - 4)  # an unknown field of just under 2 MiB
    assert len(filler) == MESSAGE_BYTES
    count: list[int] = []
    with joined(
        prefill=lambda request, call: [filler] * 5,
        push=lambda messages, call: count.append(len(list(messages))),
    ) as peer:
        assert list(peer.prefill(pb.PrefillRequest())) == [[]] * 5
        push(peer, iter([filler] * 5))
    assert count == [5]


# Tokens.


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    calls = {
        "pair": lambda request: pb.PairReply(),
        "prefill": lambda request, call: [],
        "generate": lambda request, call: [],
        "push": lambda messages, call: None,
    }
    server = Server("127.0.0.1:0", Echo(**calls), ServerSecurity(token=TOKEN))
    yield server
    server.close(0)


def test_the_right_token_opens_every_call(guarded: Server) -> None:
    peer = Peer(guarded.address, Credentials(token=TOKEN))
    for call in (peer.describe, *each_way(peer)):
        call()
    peer.close()


@pytest.mark.parametrize("token", [None, "f" * 16, TOKEN + "0", TOKEN[:-1] + "F", TOKEN.upper()])
def test_another_token_opens_none(guarded: Server, token: str | None) -> None:
    peer = Peer(guarded.address, Credentials(token=token))
    for call in (peer.describe, *each_way(peer)):
        with pytest.raises(AuthError, match="no token, or a wrong one"):
            call()
    peer.close()


def test_a_token_that_nobody_asks_for_does_no_harm() -> None:
    with joined() as peer:
        other = Peer(peer.address, Credentials(token=TOKEN))
        assert other.describe().model == "echo"
        other.close()


@pytest.mark.parametrize("method", ["Describe", "Push", "Generate", "Unknown"])
def test_a_caller_without_the_token_is_refused_before_it_sends_anything(guarded: Server, method: str) -> None:
    """Else a stranger could hold every place by opening calls and saying nothing."""
    with grpc.insecure_channel(guarded.address) as channel:
        hold = threading.Event()

        def nothing() -> Iterator[bytes]:
            hold.wait(10)
            yield b""

        call = channel.stream_unary(f"/hetsplit.v1.Worker/{method}").future(nothing())
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        hold.set()


# TLS.


def certificate(name: str, issuer: tuple[x509.Name, Any] | None = None) -> tuple[x509.Name, Any, bytes, bytes]:
    """A CA, or a certificate for 127.0.0.1 that `issuer` signed: its name, key object, and both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0] if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([here]), critical=False)
    signed = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return subject, key, signed.public_bytes(serialization.Encoding.PEM), secret


class Tls:
    def __init__(self) -> None:
        name, key, self.ca, _ = certificate("hetsplit test CA")
        _, _, self.cert, self.key = certificate("worker", (name, key))
        self.other_ca = certificate("another CA")[2]
        _, _, _, self.other_key = certificate("worker", (name, key))


@pytest.fixture(scope="module")
def tls() -> Tls:
    return Tls()


@pytest.fixture(scope="module")
def secured(tls: Tls) -> Iterator[Server]:
    server = Server("127.0.0.1:0", Echo(), ServerSecurity(tls.cert, tls.key, TOKEN))
    yield server
    server.close(0)


def describe_with(server: Server, credentials: Credentials) -> pb.Description:
    peer = Peer(server.address, credentials)
    try:
        return peer.describe()
    finally:
        peer.close()


def test_the_right_ca_works(tls: Tls, secured: Server) -> None:
    assert describe_with(secured, Credentials(tls.ca, TOKEN)).model == "echo"


def test_the_token_still_counts(tls: Tls, secured: Server) -> None:
    with pytest.raises(AuthError, match="no token, or a wrong one"):
        describe_with(secured, Credentials(tls.ca, "f" * 16))


def test_another_ca_is_an_auth_error(tls: Tls, secured: Server) -> None:
    with pytest.raises(AuthError, match=r"(?i)certificate"):
        describe_with(secured, Credentials(tls.other_ca, TOKEN))


def test_another_host_is_an_auth_error(tls: Tls) -> None:
    """The certificate is for 127.0.0.1."""
    server = Server("[::1]:0", Echo(), ServerSecurity(tls.cert, tls.key, TOKEN))
    with pytest.raises(AuthError, match=r"(?i)hostname"):
        describe_with(server, Credentials(tls.ca, TOKEN))
    server.close(0)


def test_a_plaintext_client_of_a_tls_worker_is_told(secured: Server) -> None:
    with pytest.raises(PeerUnavailable, match="does the worker use TLS"):
        describe_with(secured, Credentials(token=TOKEN))


def test_a_tls_client_of_a_plaintext_worker(tls: Tls) -> None:
    with joined() as peer, pytest.raises(AuthError, match=r"(?i)handshake"):
        describe_with(peer, Credentials(tls.ca, TOKEN))  # type: ignore[arg-type]


def test_a_key_of_another_certificate(tls: Tls) -> None:
    with pytest.raises(ConfigError, match="a certificate and key that do not fit"):
        Server("127.0.0.1:0", Echo(), ServerSecurity(tls.cert, tls.other_key, TOKEN))


def test_dialling_and_listening_follow_the_rule() -> None:
    with pytest.raises(ConfigError, match=r"refusing to dial 10.0.0.2:1"):
        Peer("10.0.0.2:1")
    with pytest.raises(ConfigError, match=r"refusing to listen on 0.0.0.0:0"):
        Server("0.0.0.0:0", Echo())


# Deadlines and cancellation.


def test_a_server_that_streams_nothing_is_given_up() -> None:
    ended = threading.Event()

    def silent(request: object, call: Call) -> Iterator[Any]:
        call.on_end(ended.set)
        ended.wait(10)
        return iter(())

    server = Server("127.0.0.1:0", Echo(prefill=silent, generate=silent))
    peer = Peer(server.address, timeouts=SHORT)
    for call in (lambda: peer.prefill(pb.PrefillRequest()), lambda: peer.generate(pb.GenerateRequest())):
        ended.clear()
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match=f"{peer.address} was silent for 0.3 s") as info:
            next(call())
        assert 0.25 < time.monotonic() - start < 2
        assert info.value.peer == peer.address
        assert ended.wait(2)
    peer.close()
    server.close(0)


def test_any_message_counts_as_a_sign_of_life() -> None:
    pulse = threading.Event()

    def slow(request: object, call: Call) -> Iterator[pb.GenerateEvent]:
        for i in range(5):
            pulse.wait(0.15)
            yield event(i)

    with joined(SHORT, generate=slow) as peer:
        assert [e.progress.ahead for e in peer.generate(pb.GenerateRequest())] == [0, 1, 2, 3, 4]


def test_a_reader_may_take_its_time() -> None:
    """Only waiting for the peer is its silence."""
    idle = threading.Event()
    server = Server("127.0.0.1:0", Echo(generate=lambda request, call: map(event, range(3))))
    peer = Peer(server.address, timeouts=SHORT)
    stream = peer.generate(pb.GenerateRequest())
    idle.wait(0.4)
    for want in range(3):
        assert next(stream).progress.ahead == want
        idle.wait(0.4)
    assert list(stream) == []
    peer.close()
    server.close(0)


def test_a_client_that_stops_reading_frees_the_call() -> None:
    ended = threading.Event()
    sent: list[int] = []

    def endless(request: object, call: Call) -> Iterator[bytes]:
        call.on_end(ended.set)
        while True:
            sent.append(1)
            yield to_bytes(Begin("x" * (MESSAGE_BYTES - 100), 0, 0, ""))

    server = Server("127.0.0.1:0", Echo(prefill=endless), timeouts=SHORT)
    peer = Peer(server.address)
    stream = peer.prefill(pb.PrefillRequest())
    next(stream)
    assert ended.wait(5)
    assert len(sent) < 20  # flow control held it back
    with pytest.raises(PeerFailed):
        list(stream)
    peer.close()
    server.close(0)


@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
def test_cancelling_reaches_the_other_side(how: str) -> None:
    ended = threading.Event()

    def waiting(request: object, call: Call) -> Iterator[pb.GenerateEvent]:
        call.on_end(ended.set)
        yield event()
        ended.wait(10)

    with joined(generate=waiting) as peer:
        stream = peer.generate(pb.GenerateRequest())
        next(stream)
        if how == "cancel":
            stream.cancel()
            assert stream.cancelled
            with pytest.raises(PeerFailed):
                next(stream)
        elif how == "close":
            peer.close()
        else:
            stream.cancel()
            del stream
            gc.collect()
        assert ended.wait(2)


def test_a_stream_can_be_cancelled_from_another_thread() -> None:
    ended = threading.Event()

    def waiting(request: object, call: Call) -> Iterator[pb.GenerateEvent]:
        call.on_end(ended.set)
        ended.wait(10)
        return iter(())

    with joined(generate=waiting) as peer:
        stream = peer.generate(pb.GenerateRequest())
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        with pytest.raises(PeerFailed):
            next(stream)
        assert ended.wait(2)
        timer.join()


def test_on_end_runs_at_once_when_the_call_is_over() -> None:
    order: list[str] = []
    over = threading.Event()

    def prefill(request: object, call: Call) -> Iterator[bytes]:
        call.on_end(over.set)
        call.cancel()
        assert over.wait(5)
        call.on_end(lambda: order.append("late"))
        order.append("after")
        yield b""

    with joined(prefill=prefill) as peer:
        with pytest.raises(PeerFailed):
            list(peer.prefill(pb.PrefillRequest()))
        assert eventually(lambda: order == ["late", "after"])


def test_a_stream_keeps_its_channel_open() -> None:
    with joined(generate=lambda request, call: map(event, range(3))) as peer:
        stream = Peer(peer.address).generate(pb.GenerateRequest())
        gc.collect()
        assert len(list(stream)) == 3


# Limits.


def test_waiting_handlers_never_starve_another_call_and_the_excess_is_refused() -> None:
    release, inside = threading.Event(), threading.Semaphore(0)

    def waiting(request: object, call: Call) -> Iterator[pb.GenerateEvent]:
        inside.release()
        release.wait(10)
        yield event()

    with joined(max_calls=5, generate=waiting) as peer:
        streams = [peer.generate(pb.GenerateRequest()) for _ in range(4)]
        for _ in streams:
            assert inside.acquire(timeout=2)
        assert peer.describe().model == "echo"  # the fifth place
        streams.append(peer.generate(pb.GenerateRequest()))
        assert inside.acquire(timeout=2)
        for call in (peer.describe, *each_way(peer)):
            with pytest.raises(CapacityError, match=r"(?i)limit exceeded"):
                call()
        release.set()
        assert [len(list(stream)) for stream in streams] == [1] * 5
        assert eventually(lambda: works(peer))


def test_a_server_that_closes_ends_its_calls() -> None:
    hold, started = threading.Event(), threading.Event()

    def waiting(request: object, call: Call) -> Iterator[pb.GenerateEvent]:
        call.on_end(hold.set)
        started.set()
        hold.wait(10)
        yield event()

    server = Server("127.0.0.1:0", Echo(generate=waiting))
    peer = Peer(server.address)
    stream = peer.generate(pb.GenerateRequest())
    assert started.wait(2)
    start = time.monotonic()
    server.close(0.1)
    assert time.monotonic() - start < 3
    with pytest.raises(PeerError):
        next(stream)
    peer.close()


@pytest.mark.parametrize("field", ["connect_s", "silence_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 86_400, "3", None])
def test_timeouts_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} .* allowed: above 0 and below 86400 seconds"):
        Timeouts(**{field: value})  # type: ignore[arg-type]


def test_silence_fires_once_and_only_when_nothing_moved() -> None:
    fired = threading.Event()
    silence = Silence(0.1, fired.set)
    silence.pause()
    assert not fired.wait(0.3)
    silence.touch()
    assert fired.wait(1)
    assert silence.expired
    other = Silence(0.05, fired.clear)
    other.close()
    assert not threading.Event().wait(0.1)
    assert fired.is_set()
    assert not other.expired


def test_a_silence_that_is_closed_starts_no_other_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if that happens while it is winding up."""
    silence = Silence(10, lambda: None)
    arm = silence._arm

    def winding(delay_s: float) -> None:
        closing.start()
        closing.join(0.2)
        arm(delay_s)

    closing = threading.Thread(target=silence.close)
    monkeypatch.setattr(silence, "_arm", winding)
    silence._check()
    closing.join(2)
    assert silence._timer.finished.is_set()


def test_an_address_is_no_reason(tmp_path: Path) -> None:
    """Only gRPC's own words make an AuthError of a connection that fails."""
    for address in (f"unix:{tmp_path}/ssl.sock", f"unix:{tmp_path}/Tls handshake failed", "ssl-certificate.invalid:5"):
        peer = Peer(address, Credentials(insecure=True))
        with pytest.raises(PeerUnavailable):
            peer.describe()
        peer.close()


def test_what_a_pushs_source_raises_that_is_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    def messages() -> Iterator[bytes]:
        yield to_bytes(Progress(1))
        raise OSError("the driver is gone")

    with joined(push=lambda messages, call: list(messages)) as peer, pytest.raises(OSError, match="driver is gone"):
        push(peer, messages())
    assert not caplog.records


def test_a_server_that_refuses_lets_running_calls_end() -> None:
    release, inside = threading.Event(), threading.Event()

    def waiting(request: object, call: Call) -> Iterator[pb.GenerateEvent]:
        inside.set()
        release.wait(10)
        yield event()

    server = Server("127.0.0.1:0", Echo(generate=waiting))
    peer = Peer(server.address)
    stream = peer.generate(pb.GenerateRequest())
    assert inside.wait(2)
    server.refuse()
    with pytest.raises(PeerUnavailable):
        peer.describe()
    release.set()
    assert len(list(stream)) == 1
    peer.close()
    server.close(0)


def test_every_option_is_one_that_grpc_has() -> None:
    """It ignores a name that it does not know, and with it whatever we relied on."""
    sources = "".join(path.read_text() for path in Path(server.__file__).parent.glob("*.py"))
    names = re.findall(r'"(grpc\.[a-z0-9_.]+)"', sources)
    library = Path(cygrpc.__file__).read_bytes()
    assert len(names) > 10
    assert [name for name in names if name.encode() + b"\0" not in library] == []
