"""What both ends of gRPC share: time-outs, `Silence`, and how an error becomes a status and comes back as itself."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from hetsplit import errors
from hetsplit.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    HetsplitError,
    IncompatibleError,
    PeerError,
    PeerFailed,
    PeerTimeout,
    PeerUnavailable,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""A side that lets the other wait says so at least this often."""

REQUEST_BYTES = 4 * 1024 * 1024
"""gRPC's default limit of what a worker receives in one message."""

SERVICE = "/hetsplit.v1.Worker/"
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

TRAVELS: dict[str, type[HetsplitError]] = {
    name: getattr(errors, name)
    for name in (
        "RequestError",
        "AuthError",
        "IncompatibleError",
        "CapacityError",
        "PeerUnavailable",
        "PeerTimeout",
        "PeerFailed",
        "RemoteProtocolError",
        "HandoffMismatch",
    )
}
"""The classes that arrive as themselves; any other arrives as `PeerFailed` naming it."""

_HANDSHAKE = (
    "Tls handshake failed",
    "Ssl handshake failed",
    "Custom verification check failed",
    "Failed to create security handshaker",
)
"""gRPC's words where TLS fails. Each has a space, which no address has in gRPC's messages."""

_BY_CODE: dict[grpc.StatusCode, type[HetsplitError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerTimeout,
    grpc.StatusCode.UNAUTHENTICATED: AuthError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.UNIMPLEMENTED: IncompatibleError,
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds until a peer that does not answer, or one that falls silent in a call, is given up."""

    connect_s: float = 3.0
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "silence_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < 86_400):
                raise ConfigError(f"{name} {value!r}, allowed: above 0 and below 86400 seconds")


class Silence:
    """Cancels a call on which nothing moved for `limit_s` seconds; `touch` says that something did.

    `pause` stops the clock until the next `touch`: nobody waits.
    """

    def __init__(self, limit_s: float, cancel: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self.expired = False
        self._cancel = cancel
        self._last = time.monotonic()
        self._closed = False
        self._lock = threading.Lock()
        self._arm(limit_s)

    def touch(self) -> None:
        """Something moved; the clock starts anew."""
        self._last = time.monotonic()

    def pause(self) -> None:
        """Nobody waits: the clock stands until `touch`."""
        self._last = math.inf

    def close(self) -> None:
        """The call is over; idempotent."""
        with self._lock:
            self._closed = True
            self._timer.cancel()

    def _arm(self, delay_s: float) -> None:
        self._timer = threading.Timer(delay_s, self._check)
        self._timer.daemon = True
        self._timer.start()

    def _check(self) -> None:
        left = self.limit_s - (time.monotonic() - self._last)
        with self._lock:
            if self._closed:
                return
            if left > 0:
                self._arm(min(left, self.limit_s))
                return
            self.expired = True
        self._cancel()


def from_rpc(error: grpc.RpcError, peer: str) -> HetsplitError:
    """The error that a failed call stands for: the class that travelled, else what the status code says."""
    metadata = dict(error.trailing_metadata() or ())
    details = error.details() or error.code().name
    kind = TRAVELS.get(str(metadata.get("hetsplit-error")))
    if kind is None:
        kind, details = _by_status(error.code(), details), f"{peer}: {details}{_hint(error.code(), details)}"
    if issubclass(kind, PeerError):
        return kind(details, peer=str(metadata.get("hetsplit-peer", peer)))
    return kind(details)


def _by_status(code: grpc.StatusCode, details: str) -> type[HetsplitError]:
    """Connections that fail are all UNAVAILABLE; only the text tells why."""
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(phrase in details for phrase in _HANDSHAKE):
            return AuthError
        if "timed out" in details:
            return PeerTimeout
    return _BY_CODE.get(code, PeerFailed)


def _hint(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return " (what answers there is no hetsplit worker of this version)"
    if code is grpc.StatusCode.CANCELLED:
        return " (the call was given up)"
    if "failed to connect" in details and "Socket closed" in details:
        return " (does the worker use TLS? then tls=, --tls-ca F)"
    return ""


def abort(context: Any, error: Exception) -> NoReturn:
    """End a call with an error's class in trailing metadata. The top of a handler thread."""
    if not isinstance(error, HetsplitError):
        log.error("a handler failed", exc_info=error)
    kind = type(error).__name__
    details = str(error)[:2000]
    if kind not in TRAVELS:
        kind, details = "PeerFailed", f"{type(error).__name__}: {details}"
    metadata = [("hetsplit-error", kind)]
    if isinstance(error, PeerError) and error.peer:
        metadata.append(("hetsplit-peer", error.peer))
    context.set_trailing_metadata(metadata)
    context.abort(grpc.StatusCode[TRAVELS[kind].grpc_status], details)
    raise AssertionError("abort returned")
