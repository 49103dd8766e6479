"""A worker: one engine in one or both roles behind gRPC.

Owns start and end: what is opened here is closed here. The parts: `compute` (the thread that runs engines), `prefill`
and `decode` (its work), `fill` (how a cache gets filled), `service` (the calls).
"""

from collections.abc import Sequence
from types import TracebackType

from hetsplit.engines import Decoder, Prefiller
from hetsplit.errors import ConfigError
from hetsplit.security import Credentials, ServerSecurity, check_dial
from hetsplit.wire import Server, Timeouts
from hetsplit.worker.service import Dialling, WorkerService

ROLES = ("prefill", "decode", "both")


class Worker:
    """Serves `engine` at `address` until `close`; a context manager. `.address` is the real one (port 0: any free).

    `prefill` are the addresses that a decode worker dials by itself; besides these it dials loopback only, unless
    `any_prefill`. Raises `ConfigError`: an engine that lacks the role, an address in use, or one that others can reach
    or that is to be dialled without TLS and a token.
    """

    def __init__(
        self,
        engine: Prefiller | Decoder,
        *,
        address: str = "127.0.0.1:0",
        role: str = "both",
        prefill: Sequence[str] = (),
        any_prefill: bool = False,
        security: ServerSecurity = ServerSecurity(),
        credentials: Credentials = Credentials(),
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        _check_role(engine, role)
        for known in prefill:
            check_dial(known, credentials)
        self.service = WorkerService(engine, role, Dialling(tuple(prefill), any_prefill, credentials, timeouts))
        try:
            self._server = Server(address, self.service, security, timeouts)
        except BaseException:
            self.service.close()
            raise
        self.address = self._server.address

    @property
    def live(self) -> int:
        """Requests and prefills in any state."""
        return self.service.live

    def close(self) -> None:
        """Ends running requests with an error for their callers; idempotent."""
        self.service.close()
        self._server.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_role(engine: Prefiller | Decoder, role: str) -> None:
    if role not in ROLES:
        raise ConfigError(f"role {role!r}, allowed: {', '.join(ROLES)}")
    for name, protocol in (("prefill", Prefiller), ("decode", Decoder)):
        if role in (name, "both") and not isinstance(engine, protocol):
            raise ConfigError(f"engine {engine.name} has no role {name}")
