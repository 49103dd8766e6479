"""The serving end: `Server`, the `Service` that it serves, and a handler's view of its `Call`."""

import hmac
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import grpc

from hetsplit import frames
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.address import check_free, parse_address
from hetsplit.errors import AuthError, ConfigError, PeerFailed, PeerTimeout, PeerUnavailable
from hetsplit.protocol import Message
from hetsplit.security import ServerSecurity, check_listen
from hetsplit.wire.shared import KEEPALIVE, SERVICE, Silence, Timeouts, abort

MAX_CALLS = 264
"""Two for each push that a decode worker admits, running or waiting, and a few to ask how it is."""

_SERVER_OPTIONS = (
    *KEEPALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class Call:
    """A handler's view of the call it serves."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def on_end(self, callback: Callable[[], None]) -> None:
        """Runs `callback` when the call ends in any way: at once if it already has."""
        if not self._context.add_callback(callback):
            callback()

    def cancel(self) -> None:
        """End it; the caller is told that it was cancelled."""
        self._context.cancel()


class Service(Protocol):
    """What a worker serves; methods raise the error tree, and streams may too."""

    def describe(self) -> pb.Description: ...
    def pair(self, request: pb.PairRequest) -> pb.PairReply: ...
    def prefill(self, request: pb.PrefillRequest, call: Call) -> Iterator[bytes]: ...
    def push(self, messages: Iterator[list[Message]], call: Call) -> None: ...
    def generate(self, request: pb.GenerateRequest, call: Call) -> Iterator[pb.GenerateEvent]: ...


class Server:
    """Serves `service` at `address` (port 0: any free port) until `close`. Raises `ConfigError` where it cannot."""

    def __init__(
        self,
        address: str,
        service: Service,
        security: ServerSecurity = ServerSecurity(),
        timeouts: Timeouts = Timeouts(),
        *,
        max_calls: int = MAX_CALLS,
    ) -> None:
        check_listen(address, security)
        # More threads than calls: a handler that waits can never keep an accepted call from running.
        self._pool = ThreadPoolExecutor(max_calls + 8, "hetsplit-rpc")
        self._router = _Router(service, security.token, timeouts.silence_s)
        self._grpc = grpc.server(
            self._pool,
            handlers=[self._router],
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_calls,
        )
        self.address = self._bind(address, security)
        self._grpc.start()

    def refuse(self) -> None:
        """Takes no further calls; those that run go on until `close`."""
        self._router.closing = True  # gRPC's own stop would answer some calls with CANCELLED, which names nobody

    def close(self, grace_s: float = 0.5) -> None:
        """Ends running calls after `grace_s` seconds."""
        self._grpc.stop(grace_s).wait(grace_s + 5)
        self._pool.shutdown(wait=False)

    def _bind(self, address: str, security: ServerSecurity) -> str:
        _, port = parse_address(address)
        # gRPC itself would replace the socket file of a live worker, and is content with one of a name's addresses.
        check_free(address)
        tls = port is not None and security.cert is not None
        try:
            if tls:
                bound = self._grpc.add_secure_port(
                    address, grpc.ssl_server_credentials([(security.key, security.cert)])
                )
            else:
                bound = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            why = "no folder for the socket, or a path of over 107 bytes" if port is None else "not of this machine"
            why += ", or a certificate and key that do not fit" if tls else ""
            raise ConfigError(f"cannot listen on {address}: {why} ({error})") from error
        return address if port is None else f"{address.rpartition(':')[0]}:{bound}"


class _Router(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds a call's handler; a caller without the token is refused before its request is read."""

    def __init__(self, service: Service, token: str | None, silence_timeout_s: float) -> None:
        self._expected = f"Bearer {token}".encode() if token else None
        self._silence_s = silence_timeout_s
        self._service = service
        self._handlers = {
            SERVICE + "Describe": _unary(lambda request, call: service.describe(), pb.DescribeRequest),
            SERVICE + "Pair": _unary(lambda request, call: service.pair(request), pb.PairRequest),
            SERVICE + "Prefill": self._streaming(service.prefill, pb.PrefillRequest, None),
            SERVICE + "Generate": self._streaming(
                service.generate, pb.GenerateRequest, pb.GenerateEvent.SerializeToString
            ),
            SERVICE + "Push": grpc.stream_unary_rpc_method_handler(
                self._push, request_deserializer=None, response_serializer=pb.PushReply.SerializeToString
            ),
        }
        # Streaming, since a unary handler would first wait for the request.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)
        self._farewell = grpc.stream_stream_rpc_method_handler(_bid_farewell)
        self.closing = False

    def service(self, handler_call_details: Any) -> Any:
        if self._expected is not None:
            shown = dict(handler_call_details.invocation_metadata).get("authorization", "")
            if not hmac.compare_digest(str(shown).encode(), self._expected):
                return self._refusal
        if self.closing:
            return self._farewell
        return self._handlers.get(handler_call_details.method)

    def _streaming(self, handler: Any, request: Any, serializer: Any) -> Any:
        def serve(message: Any, context: Any) -> Iterator[Any]:
            # A receiver that takes nothing for too long loses its call; the handler may take its time.
            silence = Silence(self._silence_s, context.cancel)
            silence.pause()
            try:
                for item in handler(message, Call(context)):
                    silence.touch()
                    yield item
                    silence.pause()
            except Exception as error:
                abort(context, error)
            finally:
                silence.close()

        return grpc.unary_stream_rpc_method_handler(
            serve, request_deserializer=request.FromString, response_serializer=serializer
        )

    def _push(self, messages: Iterator[bytes], context: Any) -> pb.PushReply:
        silence = Silence(self._silence_s, context.cancel)

        def received() -> Iterator[list[Message]]:
            gone: grpc.RpcError | None = None
            try:
                for data in messages:
                    silence.pause()
                    yield frames.decode(data)
                    silence.touch()
            except grpc.RpcError as error:
                gone = error
            # A call that was cancelled may also look like a stream that ended.
            if silence.expired:
                raise PeerTimeout(f"the sender was silent for {silence.limit_s:g} s") from gone
            if gone:
                raise PeerFailed("the sender went away") from gone

        try:
            self._service.push(received(), Call(context))
        except Exception as error:
            abort(context, error)
        finally:
            silence.close()
        return pb.PushReply()


def _unary(handler: Any, request: Any) -> Any:
    def serve(message: Any, context: Any) -> Any:
        try:
            return handler(message, Call(context))
        except Exception as error:
            abort(context, error)

    return grpc.unary_unary_rpc_method_handler(
        serve, request_deserializer=request.FromString, response_serializer=lambda reply: reply.SerializeToString()
    )


def _bid_farewell(messages: Iterator[bytes], context: Any) -> NoReturn:
    abort(context, PeerUnavailable("the worker is closing"))


def _refuse(messages: Iterator[bytes], context: Any) -> NoReturn:
    abort(context, AuthError("no token, or a wrong one; the worker was started with --token-file"))
