"""Keys and values in a llama.cpp context: one sequence per store, and the canonical form's border.

Owns the cells and sequence ids of one context with a unified cache, and the way of blocks into it and out of it.
llama.cpp holds keys of the rope type NORM interleaved: its index `2i` is half-split index `i`, `2i + 1` is `i + D / 2`.
Knows nothing of the forward pass. Invariants: cells are reserved when a store is made and counted until it is
released; another thread than the engine's calls `write` and `release` only, which never call the library: what they
leave is done by the engine thread at its next call. Setting a sequence's state first removes the whole sequence, so a
chunk goes into a sequence of its own, and its cells are then shared with the store's.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from hetsplit.engines.budget import KvBudget
from hetsplit.engines.checks import check_block
from hetsplit.engines.llamacpp_blob import BlobLayout
from hetsplit.errors import CapacityError, EngineError
from hetsplit.kv import KvBlock, KvCache
from hetsplit.spec import KvLayout

SEQUENCES: Final = 64
"""Sequence ids of a context."""

MOVING: Final = SEQUENCES - 1
"""The one through which chunks go in and out."""

_Halves = NDArray[np.float16]


class Cells:
    """The cache of a context: which sequences are free, what is in them. `cells`: token positions of all together.

    `free` frees the context: at `close()`, or when the engine and its stores are all dropped. After that nothing works.
    """

    def __init__(
        self, context: Any, layout: KvLayout, cells: int, *, interleaved: bool, free: Callable[[], object]
    ) -> None:
        self.close = weakref.finalize(self, free)
        self.context, self.layout, self.interleaved = context, layout, interleaved
        self.budget = KvBudget(cells * layout.span_bytes(1))
        self.memory = llama_cpp.llama_get_memory(context)
        self._free = list(range(MOVING))[::-1]
        self._released: deque[int] = deque()
        self.blob: BlobLayout | None = None

    def check_open(self) -> None:
        if not self.close.alive:
            raise EngineError("a llama.cpp engine was used after it was closed")

    def take(self) -> int:
        """A sequence id whose sequence is empty. Raises `CapacityError`."""
        self.reap()
        if not self._free:
            raise CapacityError(f"all {MOVING} sequences of the llama.cpp context are in use")
        return self._free.pop()

    def give(self, sequence: int) -> None:
        """Any thread: the sequence is emptied when the engine thread comes by."""
        self._released.append(sequence)

    def reap(self) -> None:
        """Empty the sequences that were given back (engine thread)."""
        self.check_open()
        while self._released:
            sequence = self._released.popleft()
            self.trim(sequence, 0)
            self._free.append(sequence)

    def trim(self, sequence: int, length: int) -> None:
        """Keep a sequence's first `length` positions."""
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, length, -1)

    def dump(self, sequence: int, span: range) -> tuple[list[_Halves], list[_Halves]]:
        """Keys and values of `span` per layer, `[T, row]`, in llama.cpp's order."""
        assert self.blob is not None
        return self.blob.parse(self.dump_bytes(sequence, span), span, MOVING)

    def dump_bytes(self, sequence: int, span: range, through: int = MOVING) -> NDArray[np.uint8]:
        """The blob of `span`, shared with the sequence `through` for as long as that takes."""
        self.check_open()
        llama_cpp.llama_memory_seq_cp(self.memory, sequence, through, span.start, span.stop)
        try:
            size = llama_cpp.llama_state_seq_get_size(self.context, through)
            blob = np.empty(size, np.uint8)
            written = llama_cpp.llama_state_seq_get_data(self.context, _pointer(blob), size, through)
        finally:
            self.trim(through, 0)
        if written != size:
            raise EngineError(f"llama.cpp wrote {written:,} of {size:,} bytes of state")
        return blob

    def join(self, sequence: int, span: range, keys: Sequence[_Halves], values: Sequence[_Halves]) -> None:
        """Put keys and values of `span` at the end of a sequence, in halves where no run of cells is long enough."""
        assert self.blob is not None
        blob = self.blob.write(span, MOVING, keys, values)
        if llama_cpp.llama_state_seq_set_data(self.context, _pointer(blob), blob.nbytes, MOVING):
            llama_cpp.llama_memory_seq_cp(self.memory, MOVING, sequence, -1, -1)
            self.trim(MOVING, 0)
            return
        self.trim(MOVING, 0)
        if len(span) == 1:
            raise EngineError(f"llama.cpp took no state of position {span.start}, though its cell is reserved")
        half = len(span) // 2
        for part in (slice(0, half), slice(half, len(span))):
            self.join(sequence, span[part], [side[part] for side in keys], [side[part] for side in values])


class LlamaStore:
    """Cells for `positions` token positions (a `KvStore`). Raises `CapacityError` when there are not as many."""

    def __init__(self, cells: Cells, positions: int) -> None:
        self.layout, self.positions = cells.layout, positions
        nbytes = cells.layout.span_bytes(positions)
        cells.budget.take(nbytes, f"a cache of {positions} positions")
        try:
            self.sequence = cells.take()
        except CapacityError:
            cells.budget.give(nbytes)
            raise
        # A store that is dropped counts as released.
        self._give_back = weakref.finalize(self, _released, cells, self.sequence, nbytes)
        self._give_back.atexit = False
        self._cells = cells
        self._staged: tuple[deque[KvBlock], ...] = tuple(deque() for _ in self.layout.layers)
        self._reached = [0] * len(self.layout.layers)  # positions that blocks were written for
        self.held = 0  # positions in the sequence
        self._sealed = False

    @property
    def alive(self) -> bool:
        return bool(self._give_back.alive)

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineError("a released store was used")

    def write(self, block: KvBlock) -> None:
        """Stage a block of any float dtype, as float16.

        Raises `EngineError` for a block of another shape or layer, for one that does not continue its layer, for a
        number beyond float16, and after `seal` or `release`; `CapacityError` for positions that are not reserved.
        """
        self._check(block)
        if not block.count:
            return
        keys, values = self._converted(block, "keys", block.keys), self._converted(block, "values", block.values)
        self._staged[block.layer].append(KvBlock(block.layer, block.start, keys, values))
        self._reached[block.layer] = block.stop

    def _check(self, block: KvBlock) -> None:
        self.check_alive()
        if self._sealed:
            raise EngineError("a block was written to a sealed store")
        check_block(self.layout, self.positions, block)
        if block.start != self._reached[block.layer]:
            reached = self._reached[block.layer]
            raise EngineError(f"layer {block.layer}: a block starts at position {block.start}, expected {reached}")

    def _converted(self, block: KvBlock, side: str, array: NDArray[Any]) -> _Halves:
        """A copy as float16, keys in llama.cpp's order, `[T, row]`."""
        with np.errstate(over="ignore"):
            halves = array.astype(np.float32).astype(np.float16)
        if not np.isfinite(halves).all():
            at = tuple(np.argwhere(~np.isfinite(halves))[0].tolist())
            where = f"{side} of layer {block.layer}, position {block.start + at[0]}"
            raise EngineError(f"{where}: {float(array[at]):g} is beyond float16, 65504 at most")
        if side == "keys" and self._cells.interleaved:
            halves = _interleave(halves)
        return halves.reshape(block.count, -1)

    def settle(self) -> bool:
        """Move at most one staged chunk into the context (engine thread); True when no other has all its layers."""
        self.check_alive()
        self._cells.reap()
        layers = self._staged
        if all(layers):
            stop = min(staged[0].stop for staged in layers)
            span = range(self.held, stop)
            parts = [self._next(staged, stop) for staged in layers]
            self._cells.join(self.sequence, span, [part.keys for part in parts], [part.values for part in parts])
            self.held = stop
        return not all(layers)

    @staticmethod
    def _next(staged: deque[KvBlock], stop: int) -> KvBlock:
        """The first staged block up to `stop`; what is left of it stays staged."""
        block = staged[0]
        if block.stop == stop:
            return staged.popleft()
        staged[0] = block.part(stop, block.stop)
        return block.part(block.start, stop)

    def grown(self, length: int) -> None:
        """The forward pass has appended up to position `length`."""
        self.held = length
        self._reached = [length] * len(self._reached)

    def trim(self, length: int) -> None:
        """Drop what lies beyond `length`: what a step left that failed."""
        if self.held > length:
            self._cells.trim(self.sequence, length)
            self.grown(length)

    def seal(self, length: int) -> KvCache:
        """The cache of the first `length` positions, which the caller has filled."""
        self.check_alive()
        if staged := sum(len(blocks) for blocks in self._staged):
            raise EngineError(f"a store was sealed while {staged} blocks are still staged")
        if not 0 <= length <= self.held:
            raise EngineError(f"a cache of {length} positions, {self.held} of {self.positions} are filled")
        self._sealed = True
        return KvCache(self, length)

    def read(self, span: range) -> Iterator[KvBlock]:
        """One block per layer for `span` (engine thread)."""
        self.check_alive()
        if not 0 <= span.start <= span.stop <= self.held:
            raise EngineError(f"a read of [{span.start}, {span.stop}), {self.held} positions are filled")
        if not span:
            return
        sides = self._cells.dump(self.sequence, span)
        for index, (layer, keys, values) in enumerate(zip(self.layout.layers, *sides, strict=True)):
            shape = (len(span), layer.kv_heads, layer.head_dim)
            keys, values = keys.reshape(shape), values.reshape(shape)
            yield KvBlock(index, span.start, _half_split(keys) if self._cells.interleaved else keys, values)

    def release(self) -> None:
        """Any thread."""
        self._staged = tuple(deque() for _ in self.layout.layers)  # not emptied: `settle` may be reading it
        self._give_back()


def _released(cells: Cells, sequence: int, nbytes: int) -> None:
    cells.give(sequence)
    cells.budget.give(nbytes)


def _interleave(keys: _Halves) -> _Halves:
    """`[T, G, D]` from half-split order to neighbouring pairs."""
    tokens, heads, width = keys.shape
    return keys.reshape(tokens, heads, 2, width // 2).swapaxes(2, 3).reshape(keys.shape)


def _half_split(keys: _Halves) -> _Halves:
    """`[T, G, D]` from neighbouring pairs to half-split order."""
    tokens, heads, width = keys.shape
    return keys.reshape(tokens, heads, width // 2, 2).swapaxes(2, 3).reshape(keys.shape)


def _pointer(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte))
