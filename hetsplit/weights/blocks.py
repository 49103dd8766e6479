"""Quantised matrices as blocks of small integers: `Blocks`, GGUF's simple formats as such, and quantising floats.

Invariant: an element is `scale * quant + minimum` with the scale and minimum of its block of `BLOCK` columns. Formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Knows no torch and no file.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Columns that share a scale."""

STORED_AS_BLOCKS: Final = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""GGUF's types that are `Blocks`, with their bits."""


class InBlocks(Protocol):
    """A matrix `[out, in]` whose blocks of `bits` bits per number are had for some rows at a time."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bits(self) -> int: ...
    def read(self, rows: slice) -> "Blocks": ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """`[out, in]`: `quants` uint8 of `bits` bits each, `scales` and `minima` float32 `[out, in / BLOCK]`."""

    quants: NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32]
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.quants.shape

    def read(self, rows: slice) -> "Blocks":
        """Some of the rows; views."""
        return Blocks(self.quants[rows], self.scales[rows], self.minima[rows], self.bits)

    def floats(self) -> NDArray[np.float32]:
        """The numbers that the blocks stand for, `[out, in]`."""
        spread = self.quants.reshape(len(self.quants), -1, BLOCK).astype(np.float32)
        spread *= self.scales[..., None]
        spread += self.minima[..., None]
        return spread.reshape(self.quants.shape)

    def planes(self, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
        """Quants of 4 bits `[count, out, in]`, scales and zero points `[out, in / BLOCK]` that the planes share.

        An element is the sum over its planes `p` of `16**p * (scale * (quant[p] - 8) + zero)`.
        """
        if self.bits > 4:
            quants = np.stack((self.quants & 15, self.quants >> 4))
            offset = 8 + 16 * 8  # what the planes take away
        else:
            quants = np.stack((self.quants, *(np.full_like(self.quants, 8) for _ in range(count - 1))))
            offset = 8
        return quants, self.scales, (self.minima + offset * self.scales) / sum(16**plane for plane in range(count))


def from_gguf(raw: NDArray[np.uint8], kind: str) -> Blocks:
    """The blocks of stored rows `[out, bytes]` of type `kind` (one of `STORED_AS_BLOCKS`), their quants as they are."""
    bits = STORED_AS_BLOCKS[kind]
    header = 4 if kind == "Q4_1" else 2
    blocks = raw.reshape(len(raw), -1, header + BLOCK * bits // 8)
    scales = _halves(blocks[..., :2])
    if kind == "Q8_0":
        quants = np.bitwise_xor(blocks[..., 2:], np.uint8(0x80))  # signed -128 to 127 as 0 to 255
        return Blocks(quants.reshape(len(raw), -1), scales, -128 * scales, bits)
    minima = _halves(blocks[..., 2:4]) if kind == "Q4_1" else -8 * scales
    nibbles = np.concatenate((blocks[..., header:] & 15, blocks[..., header:] >> 4), axis=-1)
    return Blocks(nibbles.reshape(len(raw), -1), scales, minima, bits)


def quantised(values: NDArray[np.float32], bits: int) -> Blocks:
    """Round `[out, in]` to `bits` (4 or 8) per number, each block from its own minimum to its maximum."""
    spread = values.reshape(len(values), -1, BLOCK)
    minima, top = spread.min(axis=-1), 2**bits - 1
    scales = (spread.max(axis=-1) - minima) / top
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    quants = np.rint((spread - minima[..., None]) * inverse[..., None]).clip(0, top).astype(np.uint8)
    return Blocks(quants.reshape(values.shape), scales, minima, bits)


def _halves(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float16 in the last two bytes, as float32 without that axis."""
    return raw.copy().view("<f2")[..., 0].astype(np.float32)
