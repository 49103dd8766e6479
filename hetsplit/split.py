"""The user's object: `connect` two sides, then generate.

Owns what it opens: workers for engine objects, channels, and the prefill of a push. Knows no engine's inside. Two
engine objects in one process still talk through gRPC on loopback, so there is one request path.
"""

import logging
import operator
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any

from hetsplit import messages
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.engines import Decoder, LocalPrefill, Prefiller
from hetsplit.errors import (
    ConfigError,
    HetsplitError,
    LocalProtocolError,
    PeerError,
    PeerFailed,
    RemoteProtocolError,
    RequestError,
)
from hetsplit.kv import prefill_span
from hetsplit.protocol import Sender
from hetsplit.result import Completion, Timing, Token
from hetsplit.sampling import SamplingParams
from hetsplit.security import Credentials, ServerSecurity, parse_address, read_pem
from hetsplit.wire import HEARTBEAT_S, Peer, Stream, Timeouts
from hetsplit.worker import Worker
from hetsplit.worker.compute import named
from hetsplit.worker.prefill import MAX_CHUNK, PrefillSource, PrefillTask, check_prefill, transfer
from hetsplit.worker.service import describe

log = logging.getLogger(__name__)

MODES = ("auto", "split", "local")
CHUNK = 512

Side = Prefiller | Decoder | str
Prompt = str | Sequence[int]


def connect(
    prefill: Prefiller | str | Sequence[str] | None,
    decode: Decoder | str,
    *,
    mode: str = "auto",
    mixed_weights: bool = False,
    tls: str | Path | bytes | None = None,
    token: str | None = None,
    insecure: bool = False,
    chunk: int = CHUNK,
    connect_timeout_s: float = 3.0,
    silence_timeout_s: float = 30.0,
) -> "Split":
    """Join a prefill side and a decode side; each is an engine object or the address of a worker.

    `prefill` may be a list of addresses, tried in order, or None: the decode worker's own `--prefill` addresses, else a
    local prefill. Addresses of prefill workers resolve from the decode side. `mode`: "split" (a peer's failure is an
    error), "local" (the decode side prefills), "auto" (split where a prefill side is known, else local). `tls` is the
    CA certificate (PEM file or bytes) and `token` the shared token that a worker off loopback asks for.

    Raises `ConfigError` (arguments), `PeerUnavailable`, `PeerTimeout`, `AuthError`, `IncompatibleError`.
    """
    if mode not in MODES:
        raise ConfigError(f"mode {mode!r}, allowed: {', '.join(MODES)}")
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not 1 <= chunk <= MAX_CHUNK:
        raise ConfigError(f"chunk {chunk!r}, allowed: 1 to {MAX_CHUNK}")
    if mode == "split" and prefill is None and not isinstance(decode, str):
        raise ConfigError("mode 'split' needs a prefill side; prefill is None")
    timeouts = Timeouts(connect_timeout_s, silence_timeout_s)
    if silence_timeout_s < 2 * HEARTBEAT_S:
        allowed = (
            f"allowed: at least {2 * HEARTBEAT_S:g}, since a busy side gives a sign of life each {HEARTBEAT_S:g} s"
        )
        raise ConfigError(f"silence_timeout_s {silence_timeout_s}, {allowed}")
    for name, flag in (("mixed_weights", mixed_weights), ("insecure", insecure)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} {flag!r}, allowed: True, False")
    if token is not None and not isinstance(token, str):
        raise ConfigError(f"token is {type(token).__name__}, expected text or None")
    if tls is not None and not isinstance(tls, str | Path | bytes):
        raise ConfigError(f"tls {tls!r}, expected a PEM file, its bytes, or None")
    ca = read_pem(tls, "CA certificate") if isinstance(tls, str | Path) else tls
    return Split(
        prefill,
        decode,
        mode=mode,
        mixed_weights=mixed_weights,
        credentials=Credentials(ca, token, insecure),
        chunk=chunk,
        timeouts=timeouts,
    )


class Split:
    """Two joined sides; made by `connect`. Thread-safe; a context manager."""

    def __init__(
        self,
        prefill: Prefiller | str | Sequence[str] | None,
        decode: Decoder | str,
        *,
        mode: str,
        mixed_weights: bool,
        credentials: Credentials,
        chunk: int,
        timeouts: Timeouts,
    ) -> None:
        self._closing: list[Callable[[], None]] = []
        self._closed = False
        self._mode = mode
        self._mixed_weights = mixed_weights
        self._chunk = chunk
        self._push: _Pusher | None = None
        self._addresses: list[str] = []
        try:
            self._open(prefill, decode, credentials, timeouts)
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Prompt, **sampling: Any) -> "Generation":
        """Stream the tokens that continue a prompt of text or token ids.

        `sampling` are the fields of `SamplingParams`. Bad arguments raise `RequestError` here, not at the first token;
        closing the iterator cancels the request on both sides.
        """
        request = self._request(sampling)
        if isinstance(prompt, str):
            request.text = _valid(prompt, "prompt")
        else:
            request.tokens.extend(_token_ids(prompt))
        if not request.text and not request.tokens:
            raise RequestError("an empty prompt; at least one token is needed")
        return self._start(request)

    def chat(self, messages: Sequence[Mapping[str, str]], **sampling: Any) -> "Generation":
        """Stream the answer to a conversation: mappings with `role` and `content`, rendered by the decode side.

        Otherwise as `generate`.
        """
        request = self._request(sampling)
        request.messages.extend(_chat_messages(messages))
        return self._start(request)

    def complete(self, prompt: Prompt, **sampling: Any) -> Completion:
        """`generate` to the end."""
        return self.generate(prompt, **sampling).completion()

    def close(self) -> None:
        """End running requests and everything that `connect` opened; idempotent."""
        self._closed = True
        while self._closing:
            self._closing.pop()()

    def __enter__(self) -> "Split":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(
        self,
        prefill: Prefiller | str | Sequence[str] | None,
        decode: Decoder | str,
        credentials: Credentials,
        timeouts: Timeouts,
    ) -> None:
        """Turn each side into an address; a prefill engine beside the address of a decode worker pushes.

        Workers of this process listen on loopback, where any user could call them: they ask for a token of their own.
        """
        own = Credentials(token=secrets.token_hex(16))
        guard = ServerSecurity(token=own.token)
        engine = self._prefill_side(prefill)
        if not isinstance(decode, str | Decoder):
            raise ConfigError(f"decode is {decode!r}, expected an engine that decodes or an address")
        if prefill is None and not isinstance(decode, str | LocalPrefill):
            raise ConfigError(f"engine {decode.name} cannot prefill, a prefill side is needed; prefill is None")
        if engine and not isinstance(decode, str):
            worker = self._serve(Worker(engine, role="prefill", security=guard, timeouts=timeouts))
            self._addresses = [worker.address]
        if isinstance(decode, str):
            self._decode = self._dial(decode, credentials, timeouts)
        else:
            dialling = own if engine else credentials
            worker = self._serve(
                Worker(
                    decode,
                    role="decode",
                    prefill=self._addresses,
                    security=guard,
                    credentials=dialling,
                    timeouts=timeouts,
                )
            )
            self._decode = self._dial(worker.address, own, timeouts)
        if engine and isinstance(decode, str):
            self._push = _Pusher(engine, self._decode, self._chunk)
            self._closing.append(self._push.close)
        self._pair()

    def _prefill_side(self, prefill: object) -> Prefiller | None:
        """The engine, or None after keeping the addresses."""
        if prefill is None or isinstance(prefill, Prefiller):
            return prefill
        if not _is_addresses(prefill):
            raise ConfigError(f"prefill is {prefill!r}, expected an engine that prefills, an address, a list, or None")
        self._addresses = [prefill] if isinstance(prefill, str) else list(prefill)  # type: ignore[call-overload]
        if not self._addresses:
            raise ConfigError("prefill is an empty list, expected an engine, an address, a list, or None")
        for address in self._addresses:
            parse_address(address)
        return None

    def _serve(self, worker: Worker) -> Worker:
        self._closing.append(worker.close)
        return worker

    def _dial(self, address: str, credentials: Credentials, timeouts: Timeouts) -> Peer:
        peer = Peer(address, credentials, timeouts)
        self._closing.append(peer.close)
        return peer

    def _pair(self) -> None:
        """Disagreement shows here, before the first request."""
        request = pb.PairRequest(prefill=self._addresses, mixed_weights=self._mixed_weights)
        if self._push:
            request.push = True
            request.pushed.CopyFrom(self._push.description)
        self.description = self._decode.describe()
        if self._mode == "local":
            return
        reply = self._decode.pair(request)
        if self._mode == "split" and not (self._push or reply.prefill):
            raise ConfigError("mode 'split' needs a prefill side; prefill is None and the decode worker knows none")
        for text in reply.warnings:
            warnings.warn(text, stacklevel=5)

    def _start(self, request: pb.GenerateRequest) -> "Generation":
        return Generation(self._decode.generate(request), self._push if request.mode == "push" else None)

    def _request(self, options: Mapping[str, Any]) -> pb.GenerateRequest:
        if self._closed:
            raise RequestError("this Split is closed")
        mode = "push" if self._push and self._mode != "local" else self._mode
        request = pb.GenerateRequest(
            sampling=messages.sampling_to_pb(SamplingParams.from_options(**options)),
            mode=mode,
            prefill=self._addresses,
            mixed_weights=self._mixed_weights,
            chunk=self._chunk,
        )
        if self._push and mode == "push":
            request.identity.CopyFrom(self._push.description.identity)
        return request


class Generation(Iterator[Token]):
    """One running request. After the last token `timing` is filled; `close` (or leaving early) cancels everywhere.

    Iterating raises the error tree; a stream that ends without its last event is a `RemoteProtocolError`. A closed
    generation has no further tokens. `on_progress(ahead, done, total)`, where set, hears about once a second until the
    first token: how many requests are ahead, and how many positions of those to prefill have arrived.
    """

    def __init__(self, stream: Stream[pb.GenerateEvent], push: "_Pusher | None") -> None:
        self.on_progress: Callable[[int, int, int], None] | None = None
        self.timing: Timing | None = None
        self._stream = stream
        self._push = push
        self._pushing: _Pushing | None = None
        self._closed = False
        self._finish: str | None = None
        self._begun = False
        first = next(stream, pb.GenerateEvent())
        if first.WhichOneof("event") != "accepted":
            self.close()
            raise RemoteProtocolError("the decode side's first event is not Accepted")
        self.prompt_tokens: int = first.accepted.prompt_tokens
        self.max_tokens: int = first.accepted.max_tokens

        while push and self._pushing is None:  # a push that waits for the first `next` might come too late
            self._take(self._event())

    def __next__(self) -> Token:
        while (token := self._take(self._event())) is None:
            pass
        return token

    def completion(self) -> Completion:
        """The rest of the request, to its end. Raises `PeerFailed` when it was closed before."""
        tokens = tuple(self)
        if self.timing is None or self._finish is None:
            raise PeerFailed("the request was closed before its end")
        text = "".join(token.text for token in tokens)
        return Completion(text, tokens, self._finish, self.prompt_tokens, self.timing)

    def close(self) -> None:
        """Cancel the request on both sides; idempotent, and nothing after the end."""
        self._closed = True
        self._stream.cancel()
        if self._pushing:
            self._pushing.cancel()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self.close()

    def _take(self, event: pb.GenerateEvent) -> Token | None:
        match event.WhichOneof("event"):
            case "token":
                token = messages.token_from_pb(event.token)
                self._finish, self._begun = token.finish, True
                return token
            case "progress" if self.on_progress and not self._begun:
                progress = event.progress
                self.on_progress(progress.ahead, progress.done, progress.total)
            case "finished":
                self.timing = messages.timing_from_pb(event.finished.timing)
            case "reserved" if self._push:
                self._pushing = self._push.start(event.reserved, cancel=self._stream.cancel)
        return None

    def _event(self) -> pb.GenerateEvent:
        try:
            return next(self._stream)
        except StopIteration:
            if self.timing is None or self._finish is None:
                raise RemoteProtocolError("the stream of tokens ended early, without its last event") from None
            raise
        except HetsplitError as error:
            if self._closed:
                raise StopIteration from None
            raise self._cause(error) from error

    def _cause(self, error: HetsplitError) -> HetsplitError:
        """A push that failed on this side says more than the decode side's report of it."""
        pushed = self._pushing.outcome() if self._pushing else None
        here = not isinstance(pushed, PeerError) or isinstance(pushed, LocalProtocolError) or self._stream.cancelled
        return pushed if pushed and here else error


class _Pusher:
    """The prefill side of a push: an engine of this process and the decode worker that takes its blocks."""

    def __init__(self, engine: Prefiller, decode: Peer, chunk: int) -> None:
        self.description = describe(engine, "prefill")
        self.engine = engine
        self.decode = decode
        self._chunk = chunk
        self.source = PrefillSource(engine)

    def start(self, reserved: pb.Reserved, cancel: Callable[[], None]) -> "_Pushing":
        """Push into the cache that was reserved; `cancel` ends the request should that fail."""
        tokens = tuple(reserved.tokens)
        task = PrefillTask(tokens, prefill_span(len(tokens)), self._chunk)
        return _Pushing(self, task, Sender(reserved.transfer_id, task.span, self.engine.layout), cancel)

    def close(self) -> None:
        self.source.close()


class _Pushing:
    """One push under way, on a thread of its own."""

    def __init__(self, side: _Pusher, task: PrefillTask, sender: Sender, cancel_request: Callable[[], None]) -> None:
        self._error: HetsplitError | None = None
        self._side = side
        self._task = task
        self._sender = sender
        self._cancel_request = cancel_request
        self._cancel_call: Callable[[], object] = bool
        name = f"hetsplit-push-{sender.transfer_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._side.source.cancel(self._task)
        self._cancel_call()

    def outcome(self) -> HetsplitError | None:
        """Why the push failed, once its request has: it ends at the same moment."""
        self._thread.join(1.0)
        return self._error

    def _run(self) -> None:
        side, task = self._side, self._task
        try:
            check_prefill(side.engine, task.tokens, task.span, task.chunk)
            side.source.submit(task)
            side.decode.push(transfer(side.source, task, self._sender, HEARTBEAT_S), self._started)
        except Exception as error:  # the top of a thread
            self._error = named(error, "a push")
            self._cancel_request()
        finally:
            side.source.cancel(task)

    def _started(self, cancel: Callable[[], object]) -> None:
        self._cancel_call = cancel


def _is_addresses(side: object) -> bool:
    return isinstance(side, str) or (isinstance(side, list | tuple) and all(isinstance(x, str) for x in side))


def _valid(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode at character {error.start}: {error.reason}") from error
    return text


def _token_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes | Mapping | Set) or not hasattr(prompt, "__iter__"):
        raise RequestError(f"prompt is {type(prompt).__name__}, expected text or token ids")
    return [_token_id(token, i) for i, token in enumerate(prompt)]


def _token_id(token: object, i: int) -> int:
    try:
        number = operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(token, bool) or not 0 <= number < 1 << 32:
        raise RequestError(f"prompt[{i}] is {repr(token)[:80]}, expected a token id")
    return number


def _chat_messages(chat: Sequence[Mapping[str, str]]) -> list[pb.ChatMessage]:
    if not isinstance(chat, list | tuple) or not chat:
        got = "an empty one" if isinstance(chat, list | tuple) else type(chat).__name__
        raise RequestError(f"messages: expected a non-empty list of mappings with role and content, got {got}")
    for i, message in enumerate(chat):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise RequestError(f"messages[{i}]: expected a mapping with text in {key!r}, got {message!r}")
            _valid(message[key], f"messages[{i}] {key}")
    return [pb.ChatMessage(role=m["role"], content=m["content"]) for m in chat]
