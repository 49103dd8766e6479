"""Keys and values in canonical form, and the one way by which a cache comes to exist.

Owns `KvBlock` (the canonical form: token-major, keys after RoPE in half-split order), coverage accounting, and the
passage from `KvFill` (write-only) to `KvCache` (decodable). Knows neither engines nor wires.

Invariants: within a layer, spans are gap-free and in order, from the first position that decode can still see; a
`KvCache` exists only for positions that were all written; the last `WITHHELD` positions of a fill never reach its
store, since decode computes them itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from hetsplit.errors import LocalProtocolError
from hetsplit.spec import KvLayer, KvLayout

WITHHELD = 3


def prefill_span(prompt_tokens: int) -> range:
    """The positions a prefill computes: all but the last token of the prompt."""
    return range(0, max(prompt_tokens - 1, 0))


def withheld_span(span: range) -> range:
    """The tail of a prefilled `span` that travels raw and that decode computes again."""
    return range(max(span.start, span.stop - WITHHELD), span.stop)


@dataclass(frozen=True, slots=True)
class KvBlock:
    """Keys and values `[T, G, D]` of one layer for positions `[start, start + T)`, keys after RoPE, half-split."""

    layer: int
    start: int
    keys: NDArray[Any]
    values: NDArray[Any]

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def stop(self) -> int:
        return self.start + len(self.keys)

    def part(self, start: int, stop: int) -> "KvBlock":
        """The block's share of positions `[start, stop)`; a view."""
        lo, hi = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        return KvBlock(self.layer, self.start + lo, self.keys[lo:hi], self.values[lo:hi])


def visible(block: KvBlock, layout: KvLayout, position: int) -> KvBlock:
    """The block's share that the token at `position` sees, or a later one; of no positions where it sees none."""
    return block.part(layout.layers[block.layer].seen_from(position), block.stop)


class KvStore(Protocol):
    """An engine's own memory for one fill, reserved up front for a number of positions.

    A layer with a window keeps no more than `KvLayer.capacity`: its first block may begin where the token that is
    computed next begins to see, and what `read` yields of it begins at the first position that is kept.
    """

    @property
    def positions(self) -> int: ...

    def write(self, block: KvBlock) -> None:
        """Copy a block into its place, or stage it. Called by the fill thread; never calls the engine."""
        ...

    def settle(self) -> bool:
        """Move at most one staged chunk in (engine thread); True when a further call could not move anything yet."""
        ...

    def seal(self, length: int) -> "KvCache": ...

    def read(self, span: range) -> Iterator[KvBlock]:
        """Blocks of all layers for `span`, in canonical form."""
        ...

    def release(self) -> None:
        """Give the memory back; idempotent."""
        ...


class KvCache:
    """A filled cache of `length` positions; a decoder's `step` appends to it. Made by `KvStore.seal` only."""

    __slots__ = ("length", "store")

    def __init__(self, store: KvStore, length: int) -> None:
        self.store = store
        self.length = length

    def read(self, span: range) -> Iterator[KvBlock]:
        return self.store.read(span)

    def release(self) -> None:
        self.store.release()


class Coverage:
    """Which positions of a span each layer has seen: any order between layers, gap-free within one.

    A layer with a window begins at the first position that decode sees, the withheld ones computed again.
    """

    def __init__(self, layers: Sequence[KvLayer], span: range) -> None:
        self.span = span
        decoded = withheld_span(span).start
        self.reached = [max(span.start, layer.seen_from(decoded)) for layer in layers]

    def fault(self, layer: int, start: int, count: int) -> str | None:
        """Why this block may not come next; None when it may."""
        if not 0 <= layer < len(self.reached):
            return f"layer {layer} of {len(self.reached)}"
        if count < 1:
            return f"layer {layer}: a block of {count} positions, at least 1 allowed"
        if start != self.reached[layer]:
            return f"layer {layer}: block starts at position {start}, expected {self.reached[layer]}"
        if start + count > self.span.stop:
            return f"layer {layer}: block ends at position {start + count}, the span ends at {self.span.stop}"
        return None

    def advance(self, layer: int, count: int) -> None:
        self.reached[layer] += count

    def missing(self) -> str | None:
        """Which layer is short; None when every layer reached the end."""
        for layer, reached in enumerate(self.reached):
            if reached != self.span.stop:
                return f"layer {layer} ends at position {reached}, expected {self.span.stop}"
        return None


class KvFill:
    """A cache being filled: `put` on the fill thread, then `settle` and `finish` on the engine thread.

    Positions of `span` below the withheld tail go to `store`; the tail's blocks are kept in `tail` for comparison.
    """

    def __init__(self, store: KvStore, layout: KvLayout, span: range) -> None:
        self.store = store
        self.span = span
        self.coverage = Coverage(layout.layers, span)
        self.tail: list[KvBlock] = []
        self._kept = withheld_span(span).start

    def put(self, block: KvBlock) -> None:
        """Take a block of any layer. Raises `LocalProtocolError` where it does not continue its layer."""
        if fault := self.coverage.fault(block.layer, block.start, block.count):
            raise LocalProtocolError(fault)
        if block.start < self._kept:
            self.store.write(block.part(block.start, self._kept))
        if block.stop > self._kept:
            tail = block.part(self._kept, block.stop)
            self.tail.append(KvBlock(tail.layer, tail.start, tail.keys.copy(), tail.values.copy()))
        self.coverage.advance(block.layer, block.count)

    def settle(self) -> bool:
        return self.store.settle()

    def finish(self) -> KvCache:
        """Seal the store. Raises `LocalProtocolError` when a layer is short or blocks are still staged."""
        if missing := self.coverage.missing():
            raise LocalProtocolError(f"a fill was finished early: {missing}")
        if not self.store.settle():
            raise LocalProtocolError("a fill was finished while blocks are still staged")
        return self.store.seal(self._kept)

    def release(self) -> None:
        self.store.release()
