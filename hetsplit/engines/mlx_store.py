"""Keys and values in MLX's memory: one store per sequence, and the canonical form's border.

Owns the layout, `[1, G, capacity, D]` per layer for keys and for values, which mlx-lm's models use as it is. The
capacity is a multiple of `STEP`, so that freed memory fits the next cache. Knows nothing of the forward pass.

MLX's memory is host memory, on Apple GPUs too, so a received block is copied once: from the message into its place,
through numpy views that exist until the forward pass first uses the store. After that blocks are staged. Invariants:
memory is reserved when a store is made and counted until it is released; another thread than the engine's calls
`write` only, which runs no MLX operation; no view is alive while the forward pass runs, since MLX updates an array in
place only when nobody else holds it; every array is evaluated before another thread may see it, since an MLX array
that is still lazy belongs to the thread that made it.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from hetsplit.engines.budget import KvBudget, physical_bytes
from hetsplit.engines.checks import check_block
from hetsplit.errors import CapacityError, EngineError, HetsplitError
from hetsplit.kv import KvBlock, KvCache
from hetsplit.spec import DType, KvLayout

STEP = 256
"""Positions by which capacity grows; mlx-lm's own caches use the same."""

MLX_DTYPE: Final = {DType.FLOAT32: mx.float32, DType.BFLOAT16: mx.bfloat16, DType.FLOAT16: mx.float16}
_NO_MEMORY = ("unable to allocate", "out of memory", "outofmemory", "insufficient memory", "maximum allowed buffer")


@contextmanager
def backend_errors(doing: str) -> Iterator[None]:
    """MLX's errors as `CapacityError` where memory ran out, else as `EngineError`, the original chained."""
    try:
        yield
    except HetsplitError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in _NO_MEMORY):
            raise CapacityError(f"no memory for {doing}") from error
        raise EngineError(f"MLX failed in {doing}: {error}") from error


def default_kv_bytes(device: str) -> int:
    """On an Apple GPU nine tenths of what it may still take, else half of the physical memory."""
    if device == "gpu":
        return (int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory()) * 9 // 10
    return physical_bytes() // 2


class LayerKv:
    """One layer's keys and values `[1, G, capacity, D]`, as mlx-lm's models use a cache: appended at `offset`."""

    __slots__ = ("keys", "offset", "values")

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values = keys, values
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.put(start, keys, values)
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def put(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Lazily; the old content's memory is reused when it is computed."""
        self.keys[..., start : start + keys.shape[2], :] = keys
        self.values[..., start : start + keys.shape[2], :] = values

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        assert not return_array and window_size is None, "models that ask for more are refused at load"
        return None if count == 1 else "causal"

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


@dataclass(frozen=True, slots=True)
class _Staged:
    """A copy of a block, `[1, G, T, D]`."""

    layer: int
    start: int
    keys: NDArray[Any]
    values: NDArray[Any]


class MlxStore:
    """Memory for `positions` token positions (a `KvStore`). Raises `CapacityError` when there is no room for them."""

    def __init__(self, layout: KvLayout, positions: int, budget: KvBudget) -> None:
        self.layout, self.positions = layout, positions
        capacity = -(-positions // STEP) * STEP
        nbytes = layout.span_bytes(capacity)
        self._give_back = budget.lend(self, nbytes, f"a cache of {positions} positions")
        self._sealed = False
        self._staged: deque[_Staged] = deque()
        self._lock = threading.Lock()  # between a block's copy into the memory and the memory's change of hands
        try:
            with backend_errors(f"a cache of {positions} positions, {nbytes:,} bytes"):
                self._layers: list[LayerKv] | None = [
                    LayerKv(*(mx.zeros(_shape(layout, i, capacity), MLX_DTYPE[layout.dtype]) for _ in range(2)))
                    for i in range(len(layout.layers))
                ]
                mx.eval([layer.arrays for layer in self._layers])
                self._views: list[list[NDArray[Any]]] | None = [
                    [_raw(side) for side in layer.arrays] for layer in self._layers
                ]
        except HetsplitError:
            self._give_back()
            raise

    def layers(self, start: int, count: int) -> list[LayerKv]:
        """The caches for a forward pass over positions `[start, start + count)`. From here on `write` stages."""
        if start + count > self.positions:
            raise CapacityError(f"positions up to {start + count} asked, {self.positions} are reserved")
        layers = self._held()
        with self._lock:
            self._views = None
        for layer in layers:
            layer.offset = start
        return layers

    def _held(self) -> list[LayerKv]:
        if self._layers is None:
            raise EngineError("a released store was used")
        return self._layers

    def write(self, block: KvBlock) -> None:
        """Copy a block of any float dtype into its place, or stage a copy of it once the store is computed with.

        Raises `EngineError` for a block of another shape or layer, for a number that float16 cannot hold where the
        store is float16, and after `seal` or `release`; `CapacityError` for positions that are not reserved.
        """
        self._check(block)
        keys, values = (self._converted(array) for array in (block.keys, block.values))
        with self._lock:
            if (views := self._views) is not None:
                for side, array in zip(views[block.layer], (keys, values), strict=True):
                    side[0, :, block.start : block.stop] = array
                return
        self._staged.append(_Staged(block.layer, block.start, *(np.array(a[None], order="C") for a in (keys, values))))

    def _check(self, block: KvBlock) -> None:
        self._held()
        if self._sealed:
            raise EngineError("a block was written to a sealed store")
        check_block(self.layout, self.positions, block)

    def _converted(self, array: NDArray[Any]) -> NDArray[Any]:
        """`[G, T, D]` in the store's dtype, 16-bit floats shown as integers; a view where nothing is to convert."""
        with np.errstate(over="ignore"):
            found = array.astype(self.layout.dtype.numpy, copy=False)
        if found is not array and found.dtype == np.float16 and not np.isfinite(found).all():
            largest = np.abs(array.astype(np.float32)).max()
            raise EngineError(
                f"a block holds {largest:g}, float16 holds at most 65504; load this engine with dtype bfloat16 or "
                "float32"
            )
        return (found.view(np.uint16) if found.itemsize == 2 else found).transpose(1, 0, 2)

    def settle(self) -> bool:
        """Move at most one staged block in (engine thread); True when nothing is staged any more."""
        staged = self._staged
        if staged:
            block, dtype = staged.popleft(), MLX_DTYPE[self.layout.dtype]
            layer = self._held()[block.layer]
            with backend_errors("copying a block into place"):
                layer.put(block.start, *(mx.array(side).view(dtype) for side in (block.keys, block.values)))
                mx.eval(layer.arrays)
        return not staged

    def seal(self, length: int) -> KvCache:
        """The cache of the first `length` positions, which the caller has filled."""
        self._held()
        if not 0 <= length <= self.positions:
            raise EngineError(f"a cache of {length} positions, {self.positions} are reserved")
        if self._staged:
            raise EngineError(f"a store was sealed while {len(self._staged)} blocks are still staged")
        self._sealed = True
        with self._lock:
            self._views = None
        return KvCache(self, length)

    def read(self, span: range) -> Iterator[KvBlock]:
        """One block per layer for `span`, in buffers of its own (engine thread)."""
        if not 0 <= span.start <= span.stop <= self.positions:
            raise EngineError(f"a read of [{span.start}, {span.stop}), {self.positions} positions are reserved")
        for layer in range(len(self.layout.layers)):
            yield self.block(layer, span)

    def block(self, layer: int, span: range) -> KvBlock:
        """A copy of a layer's keys and values for `span`."""
        arrays = self._held()[layer].arrays
        with backend_errors("reading keys and values"):
            mx.eval(arrays)
            found = [_raw(side)[0, :, span.start : span.stop].transpose(1, 0, 2).copy() for side in arrays]
        keys, values = (array.view(self.layout.dtype.numpy) for array in found)
        return KvBlock(layer, span.start, keys, values)

    def release(self) -> None:
        with self._lock:
            self._layers = self._views = None
        self._staged = deque()  # not emptied: `settle` may be reading it
        self._give_back()


def _shape(layout: KvLayout, layer: int, capacity: int) -> tuple[int, int, int, int]:
    return 1, layout.layers[layer].kv_heads, capacity, layout.layers[layer].head_dim


def _raw(array: mx.array) -> NDArray[Any]:
    """An evaluated array's own memory, 16-bit floats shown as integers: numpy's buffers know no bfloat16."""
    return np.array(array.view(mx.uint16) if array.itemsize == 2 else array, copy=False)
