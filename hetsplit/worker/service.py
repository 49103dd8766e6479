"""What a worker serves: the five calls of the proto, on top of a prefill and a decode source.

Owns the checks that come before work: identity, role, prompt, and which addresses may be dialled. Knows gRPC only
through `wire`. Invariant: nothing here computes; handlers wait with a deadline or a heartbeat.
"""

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import hetsplit
from hetsplit import messages
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.engines import Decoder, Prefiller
from hetsplit.errors import ConfigError, HetsplitError, IncompatibleError, PeerError, PeerFailed, RequestError
from hetsplit.kv import KvFill
from hetsplit.protocol import Identity, Message, Sender
from hetsplit.result import Token
from hetsplit.security import Credentials, is_local
from hetsplit.wire import HEARTBEAT_S, Call, Peer, Timeouts
from hetsplit.worker.decode import DecodeSource
from hetsplit.worker.fill import Pull, Push
from hetsplit.worker.prefill import PrefillSource, PrefillTask, check_prefill, transfer
from hetsplit.worker.request import Finished, Request

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Prefill addresses that one decode worker keeps a channel to."""

MODES = ("auto", "split", "push", "local")


def identity_of(engine: Prefiller | Decoder) -> Identity:
    """The facts that an engine's peers must share."""
    fingerprint = engine.tokenizer.fingerprint if engine.tokenizer else ""
    return Identity.of(engine.spec, engine.layout, fingerprint, engine.weights_hash)


def check_identity(mine: Identity, theirs: Identity, peer: str, *, mixed_weights: bool) -> None:
    """Raises `IncompatibleError` naming the peer, the field and both values."""
    if fault := mine.difference(theirs, mixed_weights=mixed_weights):
        raise IncompatibleError(f"{peer} holds another model: {fault}")


def describe(engine: Prefiller | Decoder, role: str, live: int = 0) -> pb.Description:
    """What a worker, or the pushing side, says of itself."""
    template = engine.tokenizer.template_fingerprint if engine.tokenizer else None
    return pb.Description(
        identity=messages.identity_to_pb(identity_of(engine)),
        role=role,
        engine=engine.name,
        device=str(getattr(engine, "device", "")),
        dtype=engine.layout.dtype.value,
        model=str(getattr(engine, "source", "")),
        version=hetsplit.__version__,
        context=engine.spec.context,
        template=template or "",
        live=live,
    )


@dataclass(frozen=True, slots=True)
class Dialling:
    """Which prefill workers a decode worker may dial, and how."""

    prefill: Sequence[str] = ()
    any_prefill: bool = False
    credentials: Credentials = Credentials()
    timeouts: Timeouts = Timeouts()


class WorkerService:
    """A `wire.Service` in either role, or both."""

    def __init__(self, engine: Prefiller | Decoder, role: str, dialling: Dialling) -> None:
        self._engine = engine
        self._role = role
        self._dialling = dialling
        self._identity = identity_of(engine)
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._prefill = PrefillSource(engine) if role != "decode" and isinstance(engine, Prefiller) else None
        self._decode = DecodeSource(engine) if role != "prefill" and isinstance(engine, Decoder) else None
        if self._decode:
            self._push = Push(self._decode, engine.layout, dialling.timeouts.silence_s)

    @property
    def live(self) -> int:
        """Requests and prefills in any state."""
        return (self._prefill.live if self._prefill else 0) + (self._decode.live if self._decode else 0)

    def close(self) -> None:
        """Ends running requests with an error for their callers; idempotent."""
        for source in (self._decode, self._prefill):
            if source:
                source.close()
        with self._lock:
            peers = tuple(self._peers.values())
        for peer in peers:
            peer.close()

    def describe(self) -> pb.Description:
        """What this worker is, and how busy."""
        return describe(self._engine, self._role, self.live)

    def pair(self, request: pb.PairRequest) -> pb.PairReply:
        """Compares this decode worker with its prefill side. Raises `IncompatibleError`, or why none answers."""
        self._decoding()
        reply = pb.PairReply(decode=self.describe())
        if request.push:
            self._compare(request.pushed, "the pushing side", request.mixed_weights, reply)
            return reply
        peers = [self._peer(address) for address in self._addresses(request.prefill)]
        failures: list[PeerError] = []
        with ThreadPoolExecutor(len(peers) or 1) as pool:  # at once: one that does not answer delays no other
            for peer, answer in zip(peers, [pool.submit(peer.describe) for peer in peers], strict=True):
                try:
                    description = answer.result()
                except PeerError as error:
                    failures.append(error)
                    continue
                self._compare(description, peer.address, request.mixed_weights, reply)
                reply.prefill.append(description)
        if failures and not reply.prefill:
            raise failures[0]
        reply.warnings.extend(f"prefill worker {failure.peer}: {failure}" for failure in failures)
        return reply

    def prefill(self, request: pb.PrefillRequest, call: Call) -> Iterator[bytes]:
        """A transfer of the asked span, as it is computed."""
        if self._prefill is None or not isinstance(self._engine, Prefiller):
            raise IncompatibleError(f"this worker has role {self._role}, prefill was asked of it")
        theirs = messages.identity_from_pb(request.identity)
        check_identity(self._identity, theirs, "the decode side", mixed_weights=request.mixed_weights)
        tokens, span = tuple(request.tokens), range(request.start, request.stop)
        check_prefill(self._engine, tokens, span, request.chunk)
        source, task = self._prefill, PrefillTask(tokens, span, request.chunk)
        sender = Sender(request.transfer_id, span, self._engine.layout)
        call.on_end(lambda: source.cancel(task))
        source.submit(task)
        yield from transfer(source, task, sender, HEARTBEAT_S)

    def push(self, batches: Iterator[list[Message]], call: Call) -> None:
        """Takes a transfer into the cache that was reserved for it."""
        self._decoding()
        self._push.run(batches, call.cancel)

    def generate(self, request: pb.GenerateRequest, call: Call) -> Iterator[pb.GenerateEvent]:
        """A request's events: accepted, perhaps progress, for a push reserved, tokens, finished."""
        source = self._decoding()
        generation = self._request(request, source)
        call.on_end(lambda: source.cancel(generation))
        job = generation.job
        accepted = pb.Accepted(prompt_tokens=len(job.prompt), max_tokens=job.max_tokens)
        yield pb.GenerateEvent(accepted=accepted)
        source.submit(generation)
        yield from self._events(generation, source)

    def _events(self, generation: Request, source: DecodeSource) -> Iterator[pb.GenerateEvent]:
        beats = source.beats
        while True:
            try:
                event = generation.events.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                if generation.cancelled.is_set():
                    raise PeerFailed("the request was cancelled") from None
                if source.beats != beats:  # a stuck compute thread must look silent
                    beats = source.beats
                    ahead, done, total = source.progress(generation)
                    progress = pb.RequestProgress(ahead=ahead, done=done, total=total)
                    yield pb.GenerateEvent(progress=progress)
                continue
            match event:
                case Token():
                    yield pb.GenerateEvent(token=messages.token_to_pb(event))
                case KvFill() if generation.timing.mode == "push":
                    reserved = pb.Reserved(transfer_id=generation.job.id, tokens=generation.job.prompt)
                    yield pb.GenerateEvent(reserved=reserved)
                case Finished():
                    log.info("%s: %d prompt tokens, %s", generation.job.id, len(generation.job.prompt), event.timing)
                    timing = messages.timing_to_pb(event.timing)
                    yield pb.GenerateEvent(finished=pb.Finished(timing=timing))
                    return
                case HetsplitError():
                    raise event

    def _request(self, request: pb.GenerateRequest, source: DecodeSource) -> Request:
        assert isinstance(self._engine, Decoder)
        mode, why = self._mode(request)
        start_fill: Pull | Push | None = None
        if mode == "push":
            theirs = messages.identity_from_pb(request.identity)
            check_identity(self._identity, theirs, "the pushing side", mixed_weights=request.mixed_weights)
            start_fill = self._push
        elif mode == "split":
            peers = [self._peer(address) for address in self._addresses(request.prefill)]
            mine = messages.identity_to_pb(self._identity)
            start_fill = Pull(source, self._engine.layout, mine, peers, request.mixed_weights)
        return Request(
            self._prompt(request),
            messages.sampling_from_pb(request.sampling),
            self._engine,
            mode=mode,
            why=why,
            chunk=request.chunk,
            start_fill=start_fill,
        )

    def _mode(self, request: pb.GenerateRequest) -> tuple[str, str]:
        known = bool(self._addresses(request.prefill))
        if request.mode not in MODES:
            raise RequestError(f"mode {request.mode!r}, allowed: {', '.join(MODES)}")
        if request.mode == "auto":
            return ("split", "a prefill worker is known") if known else ("local", "no prefill worker is known")
        if request.mode == "split" and not known:
            raise RequestError("mode 'split' without a prefill worker: none in the request, none from --prefill")
        return request.mode, "asked for"

    def _prompt(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        if request.tokens:
            return tuple(request.tokens)
        if not request.messages and not request.text:
            return ()
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer, this model folder has none; send token ids")
        if request.messages:
            chat = [{"role": m.role, "content": m.content} for m in request.messages]
            return tuple(tokenizer.encode_chat(chat))
        return tuple(tokenizer.encode(request.text))

    def _decoding(self) -> DecodeSource:
        if self._decode is None:
            raise IncompatibleError(f"this worker has role {self._role}, decode was asked of it")
        return self._decode

    def _addresses(self, asked: Sequence[str]) -> Sequence[str]:
        return tuple(asked) or tuple(self._dialling.prefill)

    def _peer(self, address: str) -> Peer:
        """A prefill worker that may be dialled. Raises `RequestError`: the address came with a request."""
        try:
            return self._dialled(address)
        except ConfigError as error:
            raise RequestError(str(error)) from error

    def _dialled(self, address: str) -> Peer:
        dialling = self._dialling
        if not (address in dialling.prefill or dialling.any_prefill or is_local(address)):
            known = ", ".join(dialling.prefill) or "none"
            raise RequestError(
                f"this worker does not dial {address}; allowed: loopback and its --prefill addresses ({known}), "
                "or any with --any-prefill"
            )
        with self._lock:
            if address not in self._peers:
                if len(self._peers) >= MAX_PEERS:
                    raise RequestError(f"{address} would be prefill address {MAX_PEERS + 1}, allowed: {MAX_PEERS}")
                self._peers[address] = Peer(address, dialling.credentials, dialling.timeouts)
            return self._peers[address]

    def _compare(self, theirs: pb.Description, peer: str, mixed_weights: bool, reply: pb.PairReply) -> None:
        identity = messages.identity_from_pb(theirs.identity)
        check_identity(self._identity, identity, peer, mixed_weights=mixed_weights)
        if theirs.role == "decode":
            raise IncompatibleError(f"{peer} has role decode, prefill is needed")
        mine = reply.decode.template
        if theirs.template != mine:
            reply.warnings.append(f"{peer} has another chat template; the decode side's is used")
