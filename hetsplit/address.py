"""Where a worker listens or is dialled: what an address may look like, who can reach it, whether it is free.

Knows neither gRPC nor who may do what (`security` does). Invariants: an address that was parsed is printable ASCII, so
it can travel in a header and in a message; no probe waits longer than `PROBE_S`.
"""

import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from hetsplit.errors import ConfigError

PROBE_S = 1.0


def parse_address(text: str) -> tuple[str, int | None]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`; `("unix:PATH", None)` for a Unix socket. Raises `ConfigError`."""
    plain = text.isascii() and text.isprintable()
    if text.startswith("unix:"):
        if len(text) == len("unix:"):
            raise ConfigError(f"address {text!r}: the path of the Unix socket is missing")
        if not plain:
            raise ConfigError(f"address {text[:80]!r}: expected unix:PATH in printable ASCII characters")
        return text, None
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = plain and not any(c in " /" for c in text)
    if not colon or not host or not plain or (not bracketed and any(c in ":[]" for c in host)):
        raise ConfigError(f"address {text[:80]!r}: expected HOST:PORT, [IPv6]:PORT or unix:PATH")
    if not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"address {text[:80]!r}: port {port[:20]!r}, allowed: 0 to 65535")
    if bracketed:
        _check_ipv6(text, host[1:-1])
    return host.strip("[]"), int(port)


def _check_ipv6(text: str, host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError as error:
        raise ConfigError(f"address {text[:80]!r}: {host[:80]!r} is no IPv6 address") from error


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address: a Unix socket, or loopback."""
    host, port = parse_address(address)
    if port is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_free(address: str) -> None:
    """Raises `ConfigError` when this process could not listen at `address`."""
    host, port = parse_address(address)
    try:
        if port is None:
            _check_socket_free(Path(host.removeprefix("unix:").removeprefix("//")))
        else:
            _check_port_free(host, port)
    except (OSError, UnicodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else f"{host!r} is no host name"
        raise ConfigError(f"cannot listen on {address}: {why}") from error


def _check_port_free(host: str, port: int) -> None:
    """Raises `OSError` when one of the host's addresses has a listener, or when none can be bound."""
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    places = [place for name in hosts for place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    faults = [fault for place in places if (fault := _bind_fault(place))]
    fault = next((f for f in faults if f.errno == errno.EADDRINUSE or len(faults) == len(places)), None)
    if fault:
        raise fault


def _bind_fault(place: Any) -> OSError | None:
    family, kind, protocol, _, where = place
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that lingers is no listener
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _check_socket_free(path: Path) -> None:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(errno.ENOENT, f"{path.parent} is no folder that can be written")
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        # One whose queue is full answers EAGAIN, at once or when the time is up: it has an owner.
        if probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
