"""What commands can refuse before any weights are loaded: addresses, files, peers, another model, too long a prompt.

Owns no state and decides nothing that a later part does not decide again; it only says no within seconds instead of
after a long load. Knows headers and tokenizers of models, never tensors.
"""

import errno
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetsplit.errors import ConfigError, IncompatibleError, PeerError, RequestError
from hetsplit.messages import identity_from_pb
from hetsplit.protocol import Identity
from hetsplit.security import Credentials, ServerSecurity, check_dial, check_listen, parse_address
from hetsplit.spec import DType
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import Checkpoint, locate, open_checkpoint
from hetsplit.wire import Peer
from hetsplit.worker.prefill import MAX_CHUNK
from hetsplit.worker.service import check_identity

NO_MODEL = "-"


@dataclass(frozen=True, slots=True)
class Sides:
    """Who prefills and who decodes: `model` in this process, or the worker at an address."""

    model: str
    prefill: tuple[str, ...]
    decode: str | None
    mode: str
    mixed_weights: bool
    credentials: Credentials

    @property
    def role(self) -> str | None:
        """What `model` is loaded for: "prefill", "decode" or "both"; None when it is not loaded."""
        if self.decode is None:
            return "decode" if self.prefill and self.mode != "local" else "both"
        return None if self.prefill or self.mode == "local" or self.model == NO_MODEL else "prefill"

    @property
    def dialled(self) -> tuple[str, ...]:
        """The workers that this process dials. With two addresses it is the decode worker that dials the others."""
        if self.decode is not None:
            return (self.decode,)
        return () if self.mode == "local" else self.prefill


def check_sides(sides: Sides, chunk: int | None) -> None:
    """Options that contradict each other, or addresses that must not be dialled. Raises `ConfigError`."""
    if sides.model == NO_MODEL and sides.decode is None:
        raise ConfigError(f"MODEL {NO_MODEL} (none in this process) is allowed with --decode ADDR only")
    if sides.mode == "split" and sides.decode is None and not sides.prefill:
        raise ConfigError("--mode split needs another side: --prefill ADDR or --decode ADDR")
    if chunk is not None and not 1 <= chunk <= MAX_CHUNK:
        raise ConfigError(f"--chunk {chunk}, allowed: 1 to {MAX_CHUNK}")
    for address in (*sides.prefill, *sides.dialled):
        parse_address(address)
    for address in sides.dialled:
        check_dial(address, sides.credentials)


def check_request(sides: Sides, prompt: str, *, chat: bool) -> None:
    """Dials the workers and reads the model's headers, as far as `sides` has them, and compares.

    Raises `ConfigError` (the model's files), `PeerUnavailable`, `PeerTimeout`, `AuthError`, `IncompatibleError`, and
    `RequestError` for a prompt that leaves no free position in the context.
    """
    if sides.model == NO_MODEL:
        return
    checkpoint, tokenizer = inspect(sides.model)
    spec = checkpoint.spec
    contexts = [spec.context] if sides.role else []
    if sides.dialled:
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        mine = Identity.of(spec, spec.layout(DType.FLOAT32), fingerprint, checkpoint.fingerprint())
        contexts += _check_peers(sides, mine)
    check_prompt(tokenizer, prompt, chat=chat, context=min(contexts))


def check_prompt(tokenizer: Tokenizer | None, prompt: str, *, chat: bool, context: int) -> None:
    """Raises `RequestError` for a prompt that cannot be encoded or leaves no free position in the context."""
    if tokenizer is None:
        raise RequestError("a prompt of text needs a tokenizer, this model folder has none")
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    if not prompt or not tokens:
        raise RequestError("an empty prompt; at least one token is needed")
    if len(tokens) >= context:
        raise RequestError(f"a prompt of {len(tokens)} tokens leaves no free position, the context is {context}")


def inspect(model: str) -> tuple[Checkpoint, Tokenizer | None]:
    """A model's proven headers and its tokenizer. Raises `ConfigError`."""
    path = locate(model)
    return open_checkpoint(path), load_tokenizer(path)


def _check_peers(sides: Sides, mine: Identity) -> list[int]:
    """The contexts of the workers that answer. One must; those that do must hold `mine` and have the role."""
    wanted = "prefill" if sides.decode is None else "decode"
    failures: list[PeerError] = []
    contexts: list[int] = []
    for address in sides.dialled:
        peer = Peer(address, sides.credentials)
        try:
            theirs = peer.describe()
        except PeerError as error:
            failures.append(error)
            continue
        finally:
            peer.close()
        check_identity(mine, identity_from_pb(theirs.identity), address, mixed_weights=sides.mixed_weights)
        if theirs.role not in (wanted, "both"):
            raise IncompatibleError(f"{address} has role {theirs.role}, {wanted} is needed")
        contexts.append(theirs.context)
    if not contexts:
        raise failures[0]
    return contexts


def check_worker(
    listen: str, role: str, prefill: tuple[str, ...], security: ServerSecurity, dials: Credentials
) -> None:
    """Whether a worker may and can listen there, and dial its prefill workers. Raises `ConfigError`."""
    check_listen(listen, security)
    if prefill and role == "prefill":
        raise ConfigError("--prefill is for a worker that decodes, this one has --role prefill")
    for address in prefill:
        check_dial(address, dials)
    check_free(listen)


def check_free(address: str) -> None:
    """Raises `ConfigError` when this process could not listen at `address`."""
    host, port = parse_address(address)
    try:
        if port is None:
            _check_socket_free(Path(host.removeprefix("unix:").removeprefix("//")))
        else:
            _check_port_free(host, port)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{host!r} is no host name"
        raise ConfigError(f"cannot listen on {address}: {why}") from error


def _check_port_free(host: str, port: int) -> None:
    """Raises `OSError` when one of the host's addresses has a listener, or when none can be bound."""
    places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
        if probe.connect_ex(str(path)) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def check_certificate(cert: str, key: str) -> None:
    """Raises `ConfigError` unless both PEM files can be read and belong together."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} are no certificate and its key: {error}") from error
