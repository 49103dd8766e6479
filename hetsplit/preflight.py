"""What commands can refuse before any weights are loaded: addresses, files, peers, another model, too long a prompt.

Owns no state and decides nothing that a later part does not decide again; it only says no within seconds instead of
after a long load. Knows headers and tokenizers of models, never tensors.
"""

import ssl
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.address import check_free, parse_address
from hetsplit.engines import loader
from hetsplit.errors import ConfigError, IncompatibleError, PeerError, RequestError
from hetsplit.messages import identity_from_pb
from hetsplit.protocol import Identity
from hetsplit.security import Credentials, ServerSecurity, check_dial, check_listen
from hetsplit.spec import DType
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import Checkpoint, locate, open_checkpoint
from hetsplit.wire import HEARTBEAT_S, Peer, Timeouts
from hetsplit.worker.prefill import MAX_CHUNK
from hetsplit.worker.request import check_room
from hetsplit.worker.service import check_identity

NO_MODEL = "-"


@dataclass(frozen=True, slots=True)
class Sides:
    """Who prefills and who decodes: `model` in this process, loaded by `engine`, or the worker at an address."""

    model: str
    prefill: tuple[str, ...]
    decode: str | None
    mode: str
    mixed_weights: bool
    credentials: Credentials
    timeouts: Timeouts = Timeouts()
    engine: str = "torch"

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


def timeouts(connect_s: float, silence_s: float) -> Timeouts:
    """The time-outs of `--connect-timeout` and `--silence-timeout`. Raises `ConfigError`."""
    if silence_s < 2 * HEARTBEAT_S:
        why = f"since a busy side gives a sign of life each {HEARTBEAT_S:g} s"
        raise ConfigError(f"--silence-timeout {silence_s:g}, allowed: at least {2 * HEARTBEAT_S:g}, {why}")
    try:
        return Timeouts(connect_s, silence_s)
    except ConfigError as error:
        raise ConfigError(f"--connect-timeout or --silence-timeout: {error}") from error


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


def check_request(sides: Sides, prompt: str, *, chat: bool, progress: bool = False) -> None:
    """Dials the workers, then reads the model's headers, as far as `sides` has them, and compares.

    What answers within seconds comes first, the hash over all weights last. `progress` as in `locate`. Raises
    `ConfigError` (the engine, the model's files), `PeerUnavailable`, `PeerTimeout`, `AuthError`, `IncompatibleError`,
    and `RequestError` for a prompt that leaves no free position in the context.
    """
    peers = _described(sides)
    if sides.model == NO_MODEL:
        return
    if sides.role and sides.engine != "torch":
        loader(sides.engine)
        _check_prompt_alone(sides, prompt, peers, chat=chat, progress=progress)
        return
    checkpoint, tokenizer = inspect(sides.model, progress=progress)
    spec = checkpoint.spec
    fingerprint = tokenizer.fingerprint if tokenizer else ""
    header = Identity.of(spec, spec.layout(DType.FLOAT32), fingerprint, "")
    _compare(header, peers, mixed_weights=True)
    contexts = [spec.context] if sides.role else []
    contexts += [description.context for description in peers.values()]
    check_prompt(tokenizer, prompt, chat=chat, context=min(contexts))
    if peers and not sides.mixed_weights:
        _compare(replace(header, weights=checkpoint.fingerprint()), peers, mixed_weights=False)


def _check_prompt_alone(
    sides: Sides, prompt: str, peers: Mapping[str, pb.Description], *, chat: bool, progress: bool
) -> None:
    """Other engines may read files that `inspect` does not; they prove them when they load."""
    tokenizer = load_tokenizer(locate(sides.model, progress=progress))
    context = min((theirs.context for theirs in peers.values()), default=sys.maxsize)
    check_prompt(tokenizer, prompt, chat=chat, context=context)


def check_prompt(tokenizer: Tokenizer | None, prompt: str, *, chat: bool, context: int) -> None:
    """Raises `RequestError` for a prompt that cannot be encoded or leaves no free position in the context."""
    if tokenizer is None:
        raise RequestError("a prompt of text needs a tokenizer, this model folder has none")
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    check_room(len(tokens) if prompt else 0, context)


def inspect(model: str, *, progress: bool = False) -> tuple[Checkpoint, Tokenizer | None]:
    """A model's proven headers and its tokenizer; `progress` as in `locate`. Raises `ConfigError`."""
    path = locate(model, progress=progress)
    return open_checkpoint(path), load_tokenizer(path)


def _described(sides: Sides) -> dict[str, pb.Description]:
    """What the workers that answer say of themselves, by address. One must answer; each that does must have the role.

    A decode worker is also asked whether its prefill workers answer, which it alone can know.
    """
    if not sides.dialled:
        return {}
    wanted = "prefill" if sides.decode is None else "decode"
    found: dict[str, pb.Description] = {}
    failures: list[PeerError] = []
    with ExitStack() as closing, ThreadPoolExecutor(len(sides.dialled)) as pool:  # at once: none delays another
        peers = [Peer(address, sides.credentials, sides.timeouts) for address in sides.dialled]
        for peer in peers:
            closing.callback(peer.close)
        for peer, answer in zip(peers, [pool.submit(peer.describe) for peer in peers], strict=True):
            try:
                found[peer.address] = answer.result()
            except PeerError as error:
                failures.append(error)
        if not found:
            raise failures[0]
        for address, theirs in found.items():
            if theirs.role not in (wanted, "both"):
                raise IncompatibleError(f"{address} has role {theirs.role}, {wanted} is needed")
        if sides.decode is not None and sides.prefill and sides.mode != "local":
            peers[0].pair(pb.PairRequest(prefill=sides.prefill, mixed_weights=sides.mixed_weights))
    return found


def _compare(mine: Identity, peers: Mapping[str, pb.Description], *, mixed_weights: bool) -> None:
    for address, theirs in peers.items():
        check_identity(mine, identity_from_pb(theirs.identity), address, mixed_weights=mixed_weights)


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


def check_certificate(cert: str, key: str) -> None:
    """Raises `ConfigError` unless both PEM files can be read and belong together."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} are no certificate and its key: {error}") from error
