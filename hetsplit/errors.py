"""The error tree: every failure that a caller may see, with its exit, HTTP and gRPC code as data.

Knows nothing of gRPC or HTTP libraries; `wire` and `cli` read the codes from the classes. A message names the
value that was wrong and what was allowed.

    HetsplitError
      ConfigError (ValueError)       bad flag, model folder or file, unsupported architecture
      RequestError (ValueError)      bad sampling value, prompt longer than the context
      AuthError                      no or wrong token or certificate
      IncompatibleError              peers disagree on model, layout or version
      CapacityError                  no room now
      PeerError (.peer)              the other side
        PeerUnavailable  PeerTimeout  PeerFailed
        ProtocolError -> LocalProtocolError, RemoteProtocolError
        HandoffMismatch
      EngineError                    the backend failed; the original is chained
"""

from typing import ClassVar


def brief(value: object) -> str:
    """A wrong value as a message shows it: its repr, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class HetsplitError(Exception):
    """Root of every error hetsplit raises on purpose."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"


class ConfigError(HetsplitError, ValueError):
    """A flag, a model folder or file, or an architecture that cannot be used."""

    exit_code = 2


class RequestError(HetsplitError, ValueError):
    """A request that can never succeed: a bad sampling value, a prompt over the context."""

    exit_code = 2
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class AuthError(HetsplitError):
    """No or wrong token, or a certificate that does not verify."""

    exit_code = 3
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class IncompatibleError(HetsplitError):
    """Peers disagree on model, layout or version; the message names the field and both values."""

    exit_code = 3
    http_status = 502
    grpc_status = "FAILED_PRECONDITION"


class CapacityError(HetsplitError):
    """No room now; the same request may succeed later."""

    exit_code = 4
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class PeerError(HetsplitError):
    """The other side failed. `peer` is its address, or None where the error arose before one was known."""

    exit_code = 4
    http_status = 502
    grpc_status = "ABORTED"

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerUnavailable(PeerError):
    """Nobody answers at that address."""

    grpc_status = "UNAVAILABLE"


class PeerTimeout(PeerError):
    """The peer was silent for longer than allowed."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class PeerFailed(PeerError):
    """The peer reported a failure of its own."""


class ProtocolError(PeerError):
    """A transfer broke the protocol's rules."""

    grpc_status = "DATA_LOSS"


class LocalProtocolError(ProtocolError):
    """This side tried to break the rules: a fault in hetsplit or in an engine."""

    http_status = 500
    grpc_status = "INTERNAL"


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules: a cut, reordered, short, long or corrupted transfer."""


class HandoffMismatch(PeerError):
    """The received cache disagrees with what this side computes."""

    grpc_status = "DATA_LOSS"


class EngineError(HetsplitError):
    """The backend failed; the original error is chained."""

    exit_code = 5
