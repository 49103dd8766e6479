"""One transfer: its messages, its table of states, and the identity that two peers must share. No I/O.

Owns the rules of the hand-off: what may follow what, which block may come next, counts and checksums. Knows nothing
of gRPC or of protobuf bytes (`frames`). Invariants: a `Receiver` is complete only when every layer reached the span's
end and every layer's digest agreed; after a fault it accepts nothing more.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from hetsplit.errors import (
    ConfigError,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    brief,
)
from hetsplit.kv import Coverage, KvBlock, KvFill
from hetsplit.spec import DType, KvLayer, KvLayout, ModelSpec, Rope

VERSION = 1
CODECS = ("raw",)
MESSAGE_BYTES = 2 * 1024 * 1024
"""No message of a transfer is larger, headers included: half of gRPC's default limit."""

HEADER_BYTES = 64
"""Room left in a message for one block's headers; four varints of at most five bytes and their tags fit."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Resolved facts that two peers must share; `weights` may differ where the caller allows it."""

    protocol: int
    architecture: str
    width: int
    heads: int
    intermediate: int
    rotary: tuple[Rope | None, ...]
    layers: tuple[KvLayer, ...]
    tokenizer: str
    weights: str

    @classmethod
    def of(cls, spec: ModelSpec, layout: KvLayout, tokenizer: str, weights: str) -> "Identity":
        shape = (spec.architecture, spec.width, spec.heads, spec.intermediate)
        return cls(VERSION, *shape, spec.rotary, layout.layers, tokenizer, weights)

    def difference(self, other: "Identity", *, mixed_weights: bool = False) -> str | None:
        """The first field in which `other` differs, with both values; None when the two may share a cache."""
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "rotary":
                if fault := _rotary_difference(mine, theirs):
                    return fault
            elif mine != theirs and not (name == "weights" and mixed_weights):
                hint = " (the same model in another precision? then mixed_weights=True)" if name == "weights" else ""
                return f"{name}: {brief(mine)} here, {brief(theirs)} there{hint}"
        return None


def _rotary_difference(mine: tuple[Rope | None, ...], theirs: tuple[Rope | None, ...]) -> str | None:
    """Of the first layer whose frequencies or scale are not within 1e-6."""
    if len(mine) != len(theirs):
        return f"rotary: {len(mine)} layers here, {len(theirs)} there"
    for layer, pair in enumerate(zip(mine, theirs, strict=True)):
        if fault := _rope_difference(*pair):
            return f"rotary of layer {layer}: {fault}"
    return None


def _rope_difference(a: Rope | None, b: Rope | None) -> str | None:
    if a is None or b is None:
        return None if a is b else f"{_rotates(a)} here, {_rotates(b)} there"
    if len(a.inv_freq) != len(b.inv_freq):
        return f"inv_freq: {len(a.inv_freq)} RoPE frequencies here, {len(b.inv_freq)} there"
    for i, (one, other) in enumerate(zip(a.inv_freq, b.inv_freq, strict=True)):
        if not math.isclose(one, other, rel_tol=1e-6):
            return f"inv_freq[{i}]: {one!r} here, {other!r} there (RoPE base or scaling)"
    return None if math.isclose(a.scale, b.scale, rel_tol=1e-6) else f"scale: {a.scale!r} here, {b.scale!r} there"


def _rotates(rope: Rope | None) -> str:
    return "no RoPE" if rope is None else "RoPE"


@dataclass(frozen=True, slots=True)
class Begin:
    """Opens a transfer: who asked for it, which span comes, in which element type and codec."""

    transfer_id: str
    start: int
    stop: int
    dtype: str
    codec: str = "raw"


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """A received block: keys then values in the transfer's element type, still bytes."""

    layer: int
    start: int
    count: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Progress:
    """The sender is alive; `ahead` requests come before this one, 0 when it is being computed.

    `computed` positions of the span have their keys and values in every layer. One also goes out when blocks follow
    after a pause, so that the receiver can time them.
    """

    ahead: int
    computed: int = 0


@dataclass(frozen=True, slots=True)
class LayerSum:
    """What one layer's blocks add up to. `digest` is xxh3_64 over each block's start, count and payload."""

    positions: int
    blocks: int
    digest: int


@dataclass(frozen=True, slots=True)
class Done:
    """Closes a transfer: sums per layer, and the sender's own clock (seconds)."""

    layers: tuple[LayerSum, ...]
    queue_s: float
    prefill_s: float


Message = Begin | BlockFrame | Progress | Done


class State(Enum):
    OPEN = auto()
    STREAMING = auto()
    DONE = auto()
    FAILED = auto()


TRANSITIONS: dict[tuple[State, type], State] = {
    (State.OPEN, Begin): State.STREAMING,
    (State.STREAMING, Progress): State.STREAMING,
    (State.STREAMING, BlockFrame): State.STREAMING,
    (State.STREAMING, Done): State.DONE,
}
"""The whole life of a transfer, the same for both ends; anything else is a fault."""


@dataclass(slots=True)
class _Sum:
    positions: int = 0
    blocks: int = 0
    hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def add(self, start: int, count: int, *payload: memoryview) -> None:
        self.positions += count
        self.blocks += 1
        self.hash.update(struct.pack("<II", start, count))
        for part in payload:
            self.hash.update(part)

    def total(self) -> LayerSum:
        return LayerSum(self.positions, self.blocks, self.hash.intdigest())


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """The array's bytes, little-endian, as a flat view (a copy only where it is not contiguous)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class _Transfer:
    """What both ends keep: the state, the sums, and which class a broken rule raises."""

    fault: type[ProtocolError]

    def __init__(self, transfer_id: str, span: range, layout: KvLayout) -> None:
        self.transfer_id = transfer_id
        self.span = span
        self.layout = layout
        self.state = State.OPEN
        self.bytes = 0
        self._sums = [_Sum() for _ in layout.layers]

    def _enter(self, kind: type) -> None:
        following = TRANSITIONS.get((self.state, kind))
        if following is None:
            self._fail(f"{kind.__name__} while the transfer is {self.state.name}")
        self.state = following

    def _fail(self, why: str) -> NoReturn:
        self.state = State.FAILED
        raise self.fault(f"transfer {self.transfer_id}: {why}")


class Sender(_Transfer):
    """The sending end: turns an engine's blocks into legal messages. Raises `LocalProtocolError`."""

    fault = LocalProtocolError

    def __init__(self, transfer_id: str, span: range, layout: KvLayout) -> None:
        super().__init__(transfer_id, span, layout)
        self._coverage = Coverage(layout.layers, span)
        self._room = [(MESSAGE_BYTES - HEADER_BYTES) // layout.position_bytes(i) for i in range(len(layout.layers))]
        if 0 in self._room:
            layer = self._room.index(0)
            raise ConfigError(
                f"layer {layer}: one position takes {layout.position_bytes(layer)} bytes, "
                f"at most {MESSAGE_BYTES - HEADER_BYTES} can travel"
            )

    def begin(self) -> Begin:
        self._enter(Begin)
        return Begin(self.transfer_id, self.span.start, self.span.stop, self.layout.dtype.value)

    def progress(self, ahead: int, computed: int = 0) -> Progress:
        self._enter(Progress)
        return Progress(ahead, computed)

    def blocks(self, block: KvBlock) -> Iterator[KvBlock]:
        """The block in pieces that each fit into one message."""
        self._enter(BlockFrame)
        if fault := self._coverage.fault(block.layer, block.start, block.count):
            self._fail(fault)
        layer = self.layout.layers[block.layer]
        shape = (block.count, layer.kv_heads, layer.head_dim)
        for name, array in (("keys", block.keys), ("values", block.values)):
            if array.shape != shape or array.dtype != self.layout.dtype.numpy:
                want = f"{shape} {self.layout.dtype}"
                self._fail(f"layer {block.layer}: {name} are {array.shape} {array.dtype}, expected {want}")
        self._coverage.advance(block.layer, block.count)
        room = self._room[block.layer]
        for start in range(block.start, block.stop, room):
            piece = block.part(start, start + room)
            keys, values = raw_bytes(piece.keys), raw_bytes(piece.values)
            self._sums[block.layer].add(piece.start, piece.count, keys, values)
            self.bytes += keys.nbytes + values.nbytes
            yield piece

    def done(self, *, queue_s: float, prefill_s: float) -> Done:
        self._enter(Done)
        if missing := self._coverage.missing():
            self._fail(f"done too early: {missing}")
        return Done(tuple(s.total() for s in self._sums), queue_s, prefill_s)


class Receiver(_Transfer):
    """The receiving end: proves each message and puts its block into `fill`. Raises `RemoteProtocolError`."""

    fault = RemoteProtocolError

    def __init__(self, transfer_id: str, span: range, layout: KvLayout, fill: KvFill) -> None:
        super().__init__(transfer_id, span, layout)
        self.fill = fill
        self.done: Done | None = None
        self.ahead = 0
        self._dtype = layout.dtype

    def feed(self, message: Message) -> None:
        self._enter(type(message))
        match message:
            case Begin():
                self._begin(message)
            case BlockFrame():
                self._block(message)
            case Progress():
                self._progress(message)
            case Done():
                self._done(message)

    def end(self) -> None:
        """The stream ended; only a complete transfer may."""
        if self.state is not State.DONE:
            reached = min(self.fill.coverage.reached, default=self.span.start)
            self._fail(f"the stream ended early, at position {reached} of {self.span.stop}, without Done")

    def _begin(self, begin: Begin) -> None:
        expected = (self.transfer_id, self.span.start, self.span.stop)
        if (begin.transfer_id, begin.start, begin.stop) != expected:
            self._fail(f"begins as {begin.transfer_id} [{begin.start}, {begin.stop}), expected {expected}")
        if begin.codec not in CODECS:
            self._fail(f"codec {begin.codec!r}, allowed: {', '.join(CODECS)}")
        try:
            self._dtype = DType(begin.dtype)
        except ValueError:
            self._fail(f"dtype {begin.dtype!r}, allowed: {', '.join(DType)}")

    def _block(self, frame: BlockFrame) -> None:
        if fault := self.fill.coverage.fault(frame.layer, frame.start, frame.count):
            self._fail(fault)
        layer = self.layout.layers[frame.layer]
        expected = frame.count * layer.position_elements * self._dtype.size
        if len(frame.payload) != expected:
            self._fail(f"layer {frame.layer}: a payload of {len(frame.payload)} bytes, expected {expected}")
        self._sums[frame.layer].add(frame.start, frame.count, frame.payload)
        self.bytes += expected
        shape = (2, frame.count, layer.kv_heads, layer.head_dim)
        keys, values = np.frombuffer(frame.payload, self._dtype.numpy).reshape(shape)
        self.fill.put(KvBlock(frame.layer, frame.start, keys, values))

    def _progress(self, progress: Progress) -> None:
        if progress.computed > len(self.span):
            self._fail(f"Progress says {progress.computed} positions, the span has {len(self.span)}")
        self.ahead = progress.ahead

    def _done(self, done: Done) -> None:
        if missing := self.fill.coverage.missing():
            self._fail(f"Done too early: {missing}")
        if len(done.layers) != len(self._sums):
            self._fail(f"Done sums up {len(done.layers)} layers, expected {len(self._sums)}")
        for layer, (mine, theirs) in enumerate(zip(self._sums, done.layers, strict=True)):
            if mine.total() != theirs:
                self._fail(f"layer {layer}: received {mine.total()}, the sender says {theirs}")
        for name in ("queue_s", "prefill_s"):
            if not 0 <= getattr(done, name) < math.inf:
                self._fail(f"Done says {name} {getattr(done, name)}, allowed: finite seconds of at least 0")
        self.done = done
