"""Keys and values in torch's memory: one store per sequence, and the canonical form's border.

Owns the layout, `[L, G, capacity, D]` for keys and for values, so that grouped-query attention reads each head as one
contiguous run. Layers that share a window have memory of their own, which moves on with it: its first position is that
of the first block, or 0, and what is seen no more is overwritten when there is no room behind. Knows nothing of the
forward pass. Invariants: memory is reserved when a store is made and counted until it is released; another thread than
the engine's calls `write` only, which runs no torch operation; no segment sees a position that is not in memory.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetsplit.engines.budget import KvBudget, physical_bytes
from hetsplit.engines.checks import check_block
from hetsplit.errors import CapacityError, EngineError, HetsplitError
from hetsplit.kv import KvBlock, KvCache
from hetsplit.model import TORCH_DTYPE, Memory, Segment, places_of
from hetsplit.spec import DType, KvLayout

_NO_MEMORY = ("out of memory", "enough memory", "allocate memory")


@contextmanager
def backend_errors(doing: str) -> Iterator[None]:
    """torch's errors as `CapacityError` where memory ran out, else as `EngineError`, the original chained."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY):
            raise CapacityError(f"no memory for {doing}") from error
        raise EngineError(f"torch failed in {doing}: {error}") from error


def default_kv_bytes(device: torch.device) -> int:
    """On a GPU nine tenths of what is free now, else half of the physical memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 9 // 10
    if device.type == "mps":
        return (torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()) * 9 // 10
    return physical_bytes() // 2


class TorchStore:
    """Memory for `positions` token positions (a `KvStore`). Raises `CapacityError` when there is no room for them."""

    def __init__(self, layout: KvLayout, positions: int, device: torch.device, budget: KvBudget) -> None:
        self.layout, self.positions = layout, positions
        nbytes = layout.span_bytes(positions)
        self._give_back = budget.lend(self, nbytes, f"a cache of {positions} positions")
        self._device = device
        self._sealed = False
        self._staged: deque[KvBlock] = deque()
        windows = tuple(layer.window for layer in layout.layers)
        self._places = tuple(zip(windows, places_of(windows), strict=True))
        try:
            with backend_errors(f"a cache of {positions} positions, {nbytes:,} bytes"):
                made = {window: _memory(layout, window, positions, device) for window in dict.fromkeys(windows)}
        except HetsplitError:
            self._give_back()
            raise
        self._memory: dict[int | None, Memory] | None = made
        self._raw = None
        if device.type == "cpu":
            self._raw = {window: (_raw(memory.keys), _raw(memory.values)) for window, memory in made.items()}
        self._begun: set[int | None] = {None}  # the others begin where the first block does

    def segment(self, start: int, count: int) -> Segment:
        """Where the forward pass finds and puts keys and values of `[start, start + count)` (engine thread).

        Raises `CapacityError` for positions that are not reserved, or more than `at_once`; `EngineError` where
        positions that are seen are not in memory.
        """
        if start + count > self.positions:
            raise CapacityError(f"positions up to {start + count} asked, {self.positions} are reserved")
        if count > self.at_once:
            raise CapacityError(f"{count} tokens at once, a layer with a window takes {self.at_once}")
        held = self._held()
        seen = {window: max(0, start + 1 - window) for window in held if window is not None}
        for window, first in seen.items():
            if (kept := held[window].first) > first:
                raise EngineError(f"position {start} sees positions from {first} on, kept are those from {kept} on")
        for window, first in seen.items():
            if start + count - held[window].first > held[window].keys.shape[2]:
                held[window] = _moved(held[window], first, start)
        self._begun.update(seen)
        return Segment(dict(held), start, count)

    @property
    def at_once(self) -> int:
        """Tokens that one forward pass may append."""
        rooms = ((layer.capacity(self.positions), layer.window or 1) for layer in self.layout.layers)
        return min(capacity - (window - 1 if capacity < self.positions else 0) for capacity, window in rooms)

    def _held(self) -> dict[int | None, Memory]:
        if self._memory is None:
            raise EngineError("a released store was used")
        return self._memory

    def write(self, block: KvBlock) -> None:
        """Copy a block of any float dtype into its place, or stage a copy of it where the memory is a GPU's.

        Raises `EngineError` for a block of another shape or layer, and after `seal` or `release`; `CapacityError`
        for positions that are not reserved.
        """
        self._check(block)
        keys, values = self._converted(block.keys), self._converted(block.values)
        window, at = self._places[block.layer]
        place = self._place(block, window)
        if (raw := self._raw) is None:
            self._staged.append(KvBlock(block.layer, block.start, keys.copy(), values.copy()))
            return
        for side, array in zip(raw[window], (keys, values), strict=True):
            side[at, :, place] = array.view(side.dtype).transpose(1, 0, 2)

    def _place(self, block: KvBlock, window: int | None) -> slice:
        """Where a block's positions lie in its layer's memory."""
        held = self._held()
        if window not in self._begun:
            self._begun.add(window)
            held[window] = replace(held[window], first=block.start)
        first, capacity = held[window].first, held[window].keys.shape[2]
        if not first <= block.start <= block.stop <= first + capacity:
            what = f"positions [{block.start}, {block.stop}) of layer {block.layer}"
            raise EngineError(f"{what} were written, its window keeps [{first}, {first + capacity})")
        return slice(block.start - first, block.stop - first)

    def _check(self, block: KvBlock) -> None:
        self._held()
        if self._sealed:
            raise EngineError("a block was written to a sealed store")
        check_block(self.layout, self.positions, block)

    def _converted(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(self.layout.dtype.numpy, copy=False)

    def settle(self) -> bool:
        """Move at most one staged block to the device (engine thread); True when nothing is staged any more."""
        staged = self._staged
        if staged:
            block = staged.popleft()
            with backend_errors("copying a block into place"):
                for place, array in zip(
                    self.views(block.layer, range(block.start, block.stop)), (block.keys, block.values), strict=True
                ):
                    tensor = torch.from_numpy(_raw_numpy(array)).view(place.dtype)
                    place.copy_(tensor.to(self._device))
        return not staged

    def seal(self, length: int) -> KvCache:
        """The cache of the first `length` positions, which the caller has filled."""
        self._held()
        if not 0 <= length <= self.positions:
            raise EngineError(f"a cache of {length} positions, {self.positions} are reserved")
        if self._staged:
            raise EngineError(f"a store was sealed while {len(self._staged)} blocks are still staged")
        self._sealed = True
        return KvCache(self, length)

    def read(self, span: range) -> Iterator[KvBlock]:
        """One block per layer for `span`, in buffers of its own, as far as its window keeps it (engine thread)."""
        if not 0 <= span.start <= span.stop <= self.positions:
            raise EngineError(f"a read of [{span.start}, {span.stop}), {self.positions} positions are reserved")
        for layer, (window, _) in enumerate(self._places):
            start = min(max(span.start, self._held()[window].first), span.stop)
            yield KvBlock(layer, start, *map(to_numpy, self.views(layer, range(start, span.stop))))

    def views(self, layer: int, span: range) -> tuple[Tensor, Tensor]:
        """A layer's keys and values `[T, G, D]`, strided views of the memory, which has to hold `span`."""
        window, at = self._places[layer]
        memory = self._held()[window]
        place = slice(span.start - memory.first, span.stop - memory.first)
        keys, values = (side[at, :, place].transpose(0, 1) for side in (memory.keys, memory.values))
        return keys, values

    def release(self) -> None:
        self._memory = None
        self._raw = None
        self._staged = deque()  # not emptied: `settle` may be reading it
        self._give_back()


def _memory(layout: KvLayout, window: int | None, positions: int, device: torch.device) -> Memory:
    layers = [layer for layer in layout.layers if layer.window == window]
    (heads, width), *others = {(layer.kv_heads, layer.head_dim) for layer in layers}
    assert not others, "the forward pass knows layers of one shape only"
    shape = (len(layers), heads, layers[0].capacity(positions), width)
    keys, values = (torch.empty(shape, dtype=TORCH_DTYPE[layout.dtype], device=device) for _ in range(2))
    return Memory(keys, values)


def _moved(memory: Memory, first: int, stop: int) -> Memory:
    """Positions `[first, stop)` moved to the front."""
    for side in (memory.keys, memory.values):
        kept = side[:, :, first - memory.first : stop - memory.first].clone()
        side[:, :, : stop - first] = kept
    return replace(memory, first=first)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """A contiguous copy on the host."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
    return as_numpy(own)


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A host tensor's memory as an array; torch itself knows no numpy bfloat16."""
    if tensor.dtype is torch.bfloat16:
        return _raw(tensor).view(DType.BFLOAT16.numpy)
    array: NDArray[Any] = tensor.numpy()
    return array


def _raw(tensor: Tensor) -> NDArray[Any]:
    """The same memory with 16-bit floats shown as integers, which numpy copies fastest."""
    array: NDArray[Any] = (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()
    return array


def _raw_numpy(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.int16) if array.itemsize == 2 else array
