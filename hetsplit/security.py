"""Who may talk to whom: addresses, tokens and certificate files, and the rule that nothing but loopback is open.

Owns the refusal to listen on or dial another address without TLS and a token. Knows no gRPC. Certificates are read,
never made here.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from hetsplit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client brings: the CA that signed its peers' certificates (PEM), and the shared token."""

    ca: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    insecure: bool = False

    def __post_init__(self) -> None:
        check_token(self.token, "token")


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """What a worker brings: certificate chain and key (PEM), and the token that callers must show."""

    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    insecure: bool = False

    def __post_init__(self) -> None:
        check_token(self.token, "token")


def check_token(token: str | None, where: str) -> None:
    """Raises `ConfigError` for a token that is easily guessed or cannot travel in a header; None is no token."""
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(f"{where}: expected at least 16 printable ASCII characters without spaces")


def parse_address(text: str) -> tuple[str, int | None]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`; `("unix:PATH", None)` for a Unix socket. Raises `ConfigError`."""
    if text.startswith("unix:"):
        if len(text) == len("unix:"):
            raise ConfigError(f"address {text!r}: the path of the Unix socket is missing")
        return text, None
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = text.isascii() and text.isprintable() and not any(c in " /" for c in text)
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
        raise ConfigError(f"address {text!r}: {host!r} is no IPv6 address") from error


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address: a Unix socket, or loopback."""
    host, port = parse_address(address)
    if port is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen(address: str, security: ServerSecurity) -> None:
    """Raises `ConfigError` naming the flags when a worker would be open to others."""
    if (security.cert is None) != (security.key is None):
        raise ConfigError("TLS needs both files: --tls-cert and --tls-key")
    if is_local(address) or security.insecure:
        return
    wanted = {"--tls-cert F --tls-key F": security.cert, "--token-file F": security.token}
    missing = [flag for flag, value in wanted.items() if value is None]
    if missing:
        raise ConfigError(
            f"refusing to listen on {address} without TLS and a token: give {' and '.join(missing)}, "
            "listen on 127.0.0.1 or unix:PATH, or accept the risk with --insecure"
        )


def check_dial(address: str, credentials: Credentials) -> None:
    """Raises `ConfigError` when a prompt or a token would leave this machine in the clear."""
    if is_local(address) or credentials.insecure:
        return
    wanted = {
        "the CA certificate (tls=, --tls-ca F)": credentials.ca,
        "the token (token=, --token-file F)": credentials.token,
    }
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        raise ConfigError(f"refusing to dial {address} without {' and '.join(missing)}; --insecure accepts the risk")


def read_pem(path: str | Path, what: str) -> bytes:
    """A PEM file's bytes. Raises `ConfigError` naming `what` and the file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{what} {path}: not a PEM file")
    return data


def read_token(path: str | Path) -> str:
    """The token in a file: one line of at least 16 printable ASCII characters. Raises `ConfigError`."""
    try:
        token = Path(path).read_text("utf-8", "replace").strip()
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}") from error
    check_token(token, f"token file {path}")
    return token
