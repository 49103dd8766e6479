"""The dialling end: `Peer`, and `Stream`, a call that yields. Raises the error tree only."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.experimental

from hetsplit import frames
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.errors import HetsplitError, PeerFailed, PeerTimeout, PeerUnavailable, RequestError
from hetsplit.protocol import Message
from hetsplit.security import Credentials, check_dial, parse_address
from hetsplit.wire.shared import KEEPALIVE, REQUEST_BYTES, SERVICE, Silence, Timeouts, from_rpc

T = TypeVar("T")

_CHANNEL_OPTIONS = (
    *KEEPALIVE,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)


class Stream(Iterator[T]):
    """A running server-streaming call. Iterating raises the error tree only; `cancel` works from any thread.

    Only the time inside `next` counts as the peer's silence: a reader may take as long as it likes.
    """

    def __init__(self, call: Any, peer: "Peer", silence_timeout_s: float) -> None:
        self.cancelled = False
        self._call = call
        self._peer = peer  # which also keeps the channel open
        self._silence = Silence(silence_timeout_s, call.cancel)
        self._silence.pause()

    def __next__(self) -> T:
        self._silence.touch()
        try:
            item: T = next(self._call)
        except StopIteration:
            self._silence.close()
            raise
        except grpc.RpcError as error:
            self._silence.close()
            raise self._mapped(error) from error
        except BaseException:
            self.cancel()
            raise
        self._silence.pause()
        return item

    def cancel(self) -> None:
        """End the call on both sides; idempotent."""
        self.cancelled = True
        self._silence.close()
        self._call.cancel()

    def _mapped(self, error: grpc.RpcError) -> HetsplitError:
        peer = self._peer.address
        if self._silence.expired:
            return PeerTimeout(f"{peer} was silent for {self._silence.limit_s:g} s", peer=peer)
        return from_rpc(error, peer)


class Peer:
    """A worker at `address`, dialled when first used. Every method raises the error tree only."""

    def __init__(self, address: str, credentials: Credentials = Credentials(), timeouts: Timeouts = Timeouts()) -> None:
        check_dial(address, credentials)
        self.address = address
        self.rtt_s = 0.0
        self._timeout_s = timeouts.connect_s
        self._silence_s = timeouts.silence_s
        self._metadata = (("authorization", f"Bearer {credentials.token}"),) if credentials.token else ()
        self._channel = _channel(address, credentials, timeouts.connect_s)

    def describe(self) -> pb.Description:
        """Also measures `rtt_s`, the round trip of a small call, in seconds."""
        if not self.rtt_s:  # the first call pays for the connection
            self._unary("Describe", pb.DescribeRequest(), pb.Description, self._timeout_s)
        start = time.monotonic()
        description: pb.Description = self._unary("Describe", pb.DescribeRequest(), pb.Description, self._timeout_s)
        self.rtt_s = time.monotonic() - start
        return description

    def pair(self, request: pb.PairRequest) -> pb.PairReply:
        """Asks a decode worker to compare itself with its prefill side, which it dials within its own time-out."""
        timeout_s = self._timeout_s + Timeouts().connect_s + 1.0
        reply: pb.PairReply = self._unary("Pair", request, pb.PairReply, timeout_s)
        return reply

    def prefill(self, request: pb.PrefillRequest) -> Stream[list[Message]]:
        """A transfer of the asked span, as the peer computes it."""
        return _Frames(self._streaming("Prefill", request, _keep), self, self._silence_s)

    def generate(self, request: pb.GenerateRequest) -> Stream[pb.GenerateEvent]:
        """A request's events."""
        return Stream(self._streaming("Generate", request, pb.GenerateEvent.FromString), self, self._silence_s)

    def push(self, messages: Iterator[bytes], on_start: Callable[[Callable[[], object]], None]) -> None:
        """Sends a whole transfer and waits until it is taken. `on_start` gets the function that cancels it.

        An error that `messages` raises is raised here, ahead of what the call says.
        """
        method = self._channel.stream_unary(
            SERVICE + "Push", request_serializer=None, response_deserializer=pb.PushReply.FromString
        )
        feed = _Feed(messages, Silence(self._silence_s, lambda: call.cancel()))  # noqa: PLW0108, bound below
        try:
            call = self._invoke(method.future, feed)
            on_start(call.cancel)
            call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if feed.error:
                raise feed.error from error
            if feed.silence.expired:
                why = f"{self.address} took nothing for {self._silence_s:g} s"
                raise PeerTimeout(why, peer=self.address) from error
            raise _pushed(error, self.address) from error
        finally:
            feed.silence.close()
        if feed.error:
            raise feed.error

    def close(self) -> None:
        """Ends the calls that run; idempotent."""
        self._channel.close()

    def _unary(self, name: str, request: Any, reply: Any, timeout_s: float) -> Any:
        method = self._channel.unary_unary(
            SERVICE + name, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
        )
        try:
            return self._invoke(method, request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():
                why = f"{self.address} did not answer within {timeout_s:g} s"
                raise PeerTimeout(why, peer=self.address) from error
            raise from_rpc(error, self.address) from error

    def _streaming(self, name: str, request: Any, deserializer: Any) -> Any:
        if (size := request.ByteSize()) > REQUEST_BYTES:
            raise RequestError(f"a request of {size} bytes, at most {REQUEST_BYTES} can travel")
        method = self._channel.unary_stream(
            SERVICE + name, request_serializer=type(request).SerializeToString, response_deserializer=deserializer
        )
        return self._invoke(method, request)

    def _invoke(self, method: Any, *request: Any, **options: Any) -> Any:
        try:
            return method(*request, metadata=self._metadata, **options)
        except ValueError as error:  # gRPC's answer on a closed channel
            raise PeerUnavailable(f"{self.address}: the connection is closed", peer=self.address) from error


class _Frames(Stream[list[Message]]):
    """The bulk lane's stream: bytes as they came, decoded by hand."""

    def __next__(self) -> list[Message]:
        data: Any = super().__next__()
        try:
            return frames.decode(data)
        except HetsplitError:
            self.cancel()
            raise


class _Feed(Iterator[bytes]):
    """A push's messages as gRPC's consumer thread pulls them; keeps the error that cut them short.

    The time that a message takes to come about is not the receiver's silence.
    """

    def __init__(self, messages: Iterator[bytes], silence: Silence) -> None:
        self._messages = messages
        self.silence = silence
        self.error: Exception | None = None

    def __next__(self) -> bytes:
        self.silence.pause()
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise StopIteration from error  # gRPC would log a traceback; the peer sees a transfer without Done
        finally:
            self.silence.touch()


def _keep(data: bytes) -> bytes:
    return data


def _channel(address: str, credentials: Credentials, connect_s: float) -> Any:
    _, port = parse_address(address)
    options = (
        *_CHANNEL_OPTIONS,
        ("grpc.min_reconnect_backoff_ms", math.ceil(connect_s * 1000)),  # how long one attempt may take
        # A worker that was restarted is found again at once; the default waits for up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    )
    if credentials.ca is None or port is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(credentials.ca), options=options)


def _pushed(error: Exception, peer: str) -> HetsplitError:
    if isinstance(error, grpc.RpcError):
        return from_rpc(error, peer)
    return PeerFailed("the push was cancelled", peer=peer)
