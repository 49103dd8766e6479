"""A worker: one engine in one or both roles behind gRPC.

Owns start and end: what is opened here is closed here. The parts: `compute` (the thread that runs engines), `prefill`
and `decode` (its work), `request` (one generation), `fill` (how a cache gets filled), `service` (the calls).
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
        _check_types(address, prefill, any_prefill, security, credentials, timeouts)
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
        """Takes no further calls and ends running requests with an error for their callers; idempotent."""
        self._server.refuse()
        self.service.close()
        self._server.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_types(address: object, prefill: object, any_prefill: object, *rest: object) -> None:
    if not isinstance(address, str):
        raise ConfigError(f"address {address!r}, expected text: HOST:PORT, [IPv6]:PORT or unix:PATH")
    if not isinstance(prefill, list | tuple) or not all(isinstance(known, str) for known in prefill):
        raise ConfigError(f"prefill {prefill!r}, expected a list of addresses")
    if not isinstance(any_prefill, bool):
        raise ConfigError(f"any_prefill {any_prefill!r}, allowed: True, False")
    for value, kind in zip(rest, (ServerSecurity, Credentials, Timeouts), strict=True):
        if not isinstance(value, kind):
            raise ConfigError(f"a {type(value).__name__} where {kind.__name__} is expected")


def _check_role(engine: Prefiller | Decoder, role: str) -> None:
    if not isinstance(engine, Prefiller | Decoder):
        raise ConfigError(f"engine {engine!r}, expected an engine that prefills or decodes")
    if role not in ROLES:
        raise ConfigError(f"role {role!r}, allowed: {', '.join(ROLES)}")
    for name, protocol in (("prefill", Prefiller), ("decode", Decoder)):
        if role in (name, "both") and not isinstance(engine, protocol):
            raise ConfigError(f"engine {engine.name} has no role {name}")
