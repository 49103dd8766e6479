"""Who may talk to whom: tokens and certificate files, and the rule that nothing but loopback is open.

Owns the refusal to listen on or dial another address without TLS and a token. Knows no gRPC. Certificates are read,
never made here.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hetsplit.address import is_local, parse_address
from hetsplit.errors import ConfigError

__all__ = [
    "Credentials",
    "ServerSecurity",
    "check_dial",
    "check_listen",
    "check_token",
    "is_local",
    "parse_address",
    "read_pem",
    "read_token",
]


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
