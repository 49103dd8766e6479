"""A weight matrix and its product: how its numbers lie in memory, and which kernel reads them.

Owns the choice of the fastest form on the device that is there. Knows neither layers nor files. Invariants: products
take and give the matrix's compute dtype, contiguous rows `[T, in]` to `[T, out]`; the numbers of a `Blocks` are used as
they are stored, only its scales and minima are rounded to bfloat16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsplit.errors import ConfigError
from hetsplit.weights.blocks import BLOCK, Blocks, InBlocks, quantised

_ROWS_TO_WIDEN = 8
"""From so many rows on, a CPU without bfloat16 instructions multiplies faster in float32, the conversion included."""

_ROW_MULTIPLE = 16  # rows that torch's packing kernel takes
_ROWS_AT_ONCE = 256  # a multiple of every width that it interleaves rows by; glibc keeps what a larger one leaves

_ONEDNN_ROWS = 512  # the rows of a usual chunk; one row is as fast with it
_ONEDNN_NAMES = {"none": ("none", ""), "silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}


class Matrix(Protocol):
    """`[out, in]`, as in `torch.nn.Linear`."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
        """`activation(x @ matrix.T) * factor`, `x` `[T, in]`; `activation` is `none`, `silu` or `gelu_tanh`."""
        ...


def finished(x: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    """`activation(x) * factor`, in place where that is possible."""
    if activation == "silu":
        x = F.silu(x, inplace=True)
    elif activation == "gelu_tanh":
        x = F.gelu(x, approximate="tanh")
    return x if factor is None else x.mul_(factor)


def matrix(weight: Tensor) -> Matrix:
    """The fastest form of a matrix that keeps its numbers and their dtype; `weight` may be used up."""
    on_cpu = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    return OneDnn.of(weight) if on_cpu and has_bfloat16_products() else Dense(weight)


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 matrices by oneDNN, with instructions that are made for it."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class Dense:
    """Rows as they are. bfloat16 on a CPU that has no instructions for it: several rows are multiplied in float32."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
        if len(x) == 1:  # on a CPU faster than the product with a matrix of one row
            return finished(torch.mv(self.weight, x[0])[None], activation, factor)
        if len(x) >= _ROWS_TO_WIDEN and self._slow:
            return finished(F.linear(x.float(), self.weight.float()), activation, factor).to(x.dtype)
        return finished(F.linear(x, self.weight), activation, factor)

    @property
    def _slow(self) -> bool:
        weight = self.weight
        return weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and not has_bfloat16_products()


@dataclass(frozen=True, slots=True)
class OneDnn:
    """bfloat16 in oneDNN's order, 1.3 times as fast; an activation or factor is applied while a tile is in cache."""

    weight: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "OneDnn":
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS))

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()  # its storage is not to be seen

    def __call__(self, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
        compute = torch.ops.mkldnn._linear_pointwise
        if factor is not None and activation == "none":
            product: Tensor = compute.binary(x, factor, self.weight, None, "mul")
            return product
        name, algorithm = _ONEDNN_NAMES[activation]
        return finished(compute.default(x, self.weight, None, name, [], algorithm), "none", factor)


@dataclass(frozen=True, slots=True)
class Packed:
    """Four bits per number and plane, a bfloat16 scale and zero point per `BLOCK` columns, on a CPU.

    torch's kernel (`_weight_int4pack_mm_for_cpu`) knows 4-bit numbers. Of an 8-bit one the low and the high half are
    two planes that share scales and zero points (`Blocks.planes`).
    """

    planes: tuple[Tensor, ...]  # each [out, in / 2], as the kernel orders them
    scales: Tensor  # [in / BLOCK, out, 2]
    rows: int  # out, without what was added to make it a multiple of `_ROW_MULTIPLE`

    @classmethod
    def of(cls, parts: Sequence[InBlocks]) -> "Packed":
        """Matrices below each other, `[out, in]` with `in` a multiple of `BLOCK`; read and packed slice by slice."""
        count = max(2 if part.bits > 4 else 1 for part in parts)
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        padded = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
        planes = tuple(torch.empty(padded, columns // 2, dtype=torch.uint8) for _ in range(count))
        scales = torch.zeros(columns // BLOCK, padded, 2, dtype=torch.bfloat16)
        for start in range(0, padded, _ROWS_AT_ONCE):
            some = slice(start, min(start + _ROWS_AT_ONCE, padded))
            quants = torch.zeros(count, some.stop - start, columns, dtype=torch.int32)
            for row, blocks in _blocks(parts, some):
                split, scale, zero = map(torch.from_numpy, blocks.planes(count))
                quants[:, row : row + len(scale)] = split
                scales[:, start + row : start + row + len(scale)] = torch.stack((scale, zero), dim=-1).transpose(0, 1)
            for plane, numbers in zip(planes, quants, strict=True):
                plane[some] = torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
        return cls(planes, scales, rows)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes) + self.scales.nbytes

    def __call__(self, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
        low, *high = (torch._weight_int4pack_mm_for_cpu(x, plane, BLOCK, self.scales) for plane in self.planes)
        product = low.add_(high[0], alpha=16) if high else low
        if self.rows != product.shape[1]:
            product = product[:, : self.rows].contiguous()
        return finished(product, activation, factor)


@dataclass(frozen=True, slots=True)
class Biased:
    """A matrix whose product gets a bias `[out]` before the activation."""

    matrix: Matrix
    bias: Tensor

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
        return finished(self.matrix(x).add_(self.bias), activation, factor)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A plain matrix as blocks, each rounded when it is read (`InBlocks`)."""

    weight: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def read(self, rows: slice) -> Blocks:
        return quantised(self.weight[rows].float().numpy(), self.bits)


def _blocks(parts: Sequence[InBlocks], rows: slice) -> Iterator[tuple[int, Blocks]]:
    """The blocks of `rows` of all parts below each other, and at which of these rows they begin."""
    first = 0
    for part in parts:
        start, stop = max(rows.start - first, 0), min(rows.stop - first, part.shape[0])
        if start < stop:
            yield first + start - rows.start, part.read(slice(start, stop))
        first += part.shape[0]


def check_packable(name: str, columns: int, device: torch.device) -> None:
    """Raises `ConfigError` for a matrix that the packed kernels do not take."""
    if device.type != "cpu":
        raise ConfigError(f"packed weights (int4, int8) are computed with on cpu, not on {device.type}")
    if columns % BLOCK:
        raise ConfigError(f"tensor {name!r} has {columns} columns; packed weights need a multiple of {BLOCK}")
