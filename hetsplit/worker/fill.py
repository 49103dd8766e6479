"""Filling a reserved cache from a peer: pull (we dial) and push (the peer dials).

Runs on a fill thread, or on the handler thread of a push. Owns the order in which prefill peers are tried. Knows
nothing of engines. Invariant: whatever happens ends in exactly one `DecodeSource.filled` or `failed`.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.errors import (
    CapacityError,
    HetsplitError,
    PeerError,
    PeerFailed,
    PeerTimeout,
    RemoteProtocolError,
    RequestError,
)
from hetsplit.kv import KvFill
from hetsplit.protocol import Begin, BlockFrame, Message, Receiver
from hetsplit.spec import KvLayout
from hetsplit.wire import Peer, Silence
from hetsplit.worker.decode import Arrival, DecodeSource
from hetsplit.worker.request import Request

log = logging.getLogger(__name__)


def receive(messages: Iterable[list[Message]], receiver: Receiver, wake: Callable[[], None]) -> float:
    """Feed a whole transfer into its fill; gives its `transfer_s`, see `Timing`.

    Raises `RemoteProtocolError` unless it is complete and correct.
    """
    transfer_s, before = 0.0, time.monotonic()
    for batch in messages:
        now = time.monotonic()
        if any(isinstance(message, BlockFrame) for message in batch):
            transfer_s += now - before
        before = now
        for message in batch:
            receiver.feed(message)
        wake()
    receiver.end()
    return transfer_s


class Pull:
    """Starts a request's fill by dialling prefill peers in order; the next one is tried when one fails."""

    def __init__(
        self, source: DecodeSource, layout: KvLayout, identity: pb.Identity, peers: Sequence[Peer], mixed_weights: bool
    ) -> None:
        self._source = source
        self._layout = layout
        self._identity = identity
        self._peers = peers
        self._mixed_weights = mixed_weights

    def __call__(self, request: Request, fill: KvFill) -> None:
        name = f"hetsplit-fill-{request.job.id}"
        threading.Thread(target=self._run, args=(request, fill), name=name, daemon=True).start()

    def _run(self, request: Request, fill: KvFill) -> None:
        try:
            self._try_peers(request, fill)
        except HetsplitError as error:
            self._source.failed(request, error)
        except Exception as error:  # the top of a thread
            log.exception("a fill failed")
            self._source.failed(request, PeerFailed(f"the fill failed: {error!r}"))

    def _try_peers(self, request: Request, fill: KvFill) -> None:
        lost_s = 0.0
        for position, peer in enumerate(self._peers):
            start = time.monotonic()
            try:
                self._pull(request, KvFill(fill.store, self._layout, fill.span), peer, lost_s)
                return
            except (PeerError, CapacityError, RequestError) as error:  # another may have room, or a longer context
                if position + 1 == len(self._peers) or request.cancelled.is_set():
                    raise
                lost_s += time.monotonic() - start
                log.warning("prefill at %s failed, trying the next: %s", peer.address, error)

    def _pull(self, request: Request, fill: KvFill, peer: Peer, lost_s: float) -> None:
        transfer_id = secrets.token_hex(8)
        stream = peer.prefill(
            pb.PrefillRequest(
                transfer_id=transfer_id,
                tokens=request.job.prompt,
                start=fill.span.start,
                stop=fill.span.stop,
                chunk=request.chunk,
                identity=self._identity,
                mixed_weights=self._mixed_weights,
            )
        )
        request.on_cancel(stream.cancel)
        request.receiver = receiver = Receiver(transfer_id, fill.span, self._layout, fill)
        try:
            transfer_s = receive(stream, receiver, self._source.wake)
        except PeerError as error:
            error.peer = error.peer or peer.address
            raise
        finally:
            stream.cancel()
        request.fill = fill
        assert receiver.done is not None
        self._source.filled(request, Arrival(receiver.done, receiver.bytes, transfer_s, peer.rtt_s, lost_s))


class Push:
    """Starts a request's fill by waiting for the peer's push, which `run` takes on its handler thread."""

    def __init__(self, source: DecodeSource, layout: KvLayout, silence_timeout_s: float) -> None:
        self._source = source
        self._layout = layout
        self._silence_s = silence_timeout_s
        self._waiting: dict[str, tuple[Request, KvFill, Silence]] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Request, fill: KvFill) -> None:
        late = PeerTimeout(f"the sender pushed nothing for {self._silence_s:g} s after room was reserved")
        gone = PeerFailed("the request was cancelled before its push began")
        silence = Silence(self._silence_s, lambda: self._give_up(request, late))
        with self._lock:
            self._waiting[request.job.id] = request, fill, silence
        request.on_cancel(lambda: self._give_up(request, gone))

    def run(self, batches: Iterator[list[Message]], cancel: Callable[[], object]) -> None:
        """Take one whole transfer. What it raises has been told to the request as well."""
        first = next(batches, [])
        if not first or not isinstance(first[0], Begin):
            raise RemoteProtocolError("a push must start with Begin")
        request, fill = self._claim(first[0].transfer_id)
        rtt_s = time.monotonic() - request.fill_started
        request.receiver = receiver = Receiver(request.job.id, fill.span, self._layout, fill)
        over = threading.Event()  # from then on the call ends by itself, and says how
        request.on_cancel(lambda: over.is_set() or cancel())
        try:
            transfer_s = receive(itertools.chain([first], batches), receiver, self._source.wake)
        except Exception as error:
            over.set()
            named = error if isinstance(error, HetsplitError) else PeerFailed(f"the push broke off: {error!r}")
            self._source.failed(request, named)
            raise
        over.set()
        assert receiver.done is not None
        self._source.filled(request, Arrival(receiver.done, receiver.bytes, transfer_s, rtt_s))

    def _claim(self, transfer_id: str) -> tuple[Request, KvFill]:
        with self._lock:
            waiting = self._waiting.pop(transfer_id, None)
        if waiting is None:
            raise RemoteProtocolError(f"transfer {transfer_id!r} is not awaited: unknown, cancelled or already taken")
        request, fill, silence = waiting
        silence.close()
        return request, fill

    def _give_up(self, request: Request, error: HetsplitError) -> None:
        with self._lock:
            waiting = self._waiting.pop(request.job.id, None)
        if waiting is not None:
            waiting[2].close()
            self._source.failed(request, error)
