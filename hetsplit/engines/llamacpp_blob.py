"""llama.cpp's sequence-state blob: where keys and values of some positions lie in it.

Owns the parsing and writing of what `llama_state_seq_get_data` gives and `llama_state_seq_set_data` takes, as llama.cpp
writes it for a unified cache (https://github.com/ggml-org/llama.cpp, src/llama-kv-cache.cpp). The
format is not documented and changes: a `BlobLayout` is made from a blob that the library itself has just written,
every field of which has to be what it should be, and a blob of the library that does not fit later is refused.
Knows no library and no engine. Numbers are little-endian.

    head         bytes that stand before everything else, the sequence's id among them
    u32          streams, 1;  u32 cells
    per cell     i32 position;  u32 sequences, 1;  i32 the sequence's id
    u32          whether values are transposed: 0 with flash attention, else 1;  u32 layers
    per layer    i32 type;  u64 bytes of a row;  the rows of keys, one per cell
    per layer    i32 type;  u64 bytes of a row;  the rows of values
      transposed i32 type;  u32 bytes of an element;  u32 elements of a row;  per element, that of every cell
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hetsplit.errors import EngineError
from hetsplit.spec import KvLayout

_F16: Final = 1  # ggml's number of the type
_HEAD_WORDS_MAX: Final = 8
_Halves = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """`head`: the 32-bit words before the number of streams; `id_at`: which of them is the sequence's id, if any.

    `rows`: elements of keys, and of values, of one position, per layer. `transposed`: the values are.
    """

    head: tuple[int, ...]
    id_at: int | None
    rows: tuple[int, ...]
    transposed: bool = False

    @classmethod
    def detect(cls, blobs: Sequence[tuple[int, bytes]], layout: KvLayout, positions: range) -> "BlobLayout":
        """From blobs of the same `positions` in sequences of different ids (pairs of id and blob).

        Raises `EngineError` naming the field that is not what this module writes.
        """
        rows = tuple(layer.kv_heads * layer.head_dim for layer in layout.layers)
        size = cls((), None, rows).size(positions)
        spare = {len(blob) - size for _, blob in blobs}
        if len(spare) != 1 or not 0 <= (head_bytes := spare.pop()) <= 4 * _HEAD_WORDS_MAX or head_bytes % 4:
            found = ", ".join(f"{len(blob):,}" for _, blob in blobs)
            raise EngineError(
                f"llama.cpp's state of {len(positions)} positions has {found} bytes, about {size:,} expected"
            )
        count = head_bytes // 4
        words = [np.frombuffer(blob[:head_bytes], "<i4").tolist() for _, blob in blobs]
        ids = [i for i in range(count) if [word[i] for word in words] == [id for id, _ in blobs]]
        transposed = np.frombuffer(blobs[0][1], "<i4", 1, offset=head_bytes + 8 + 12 * len(positions)).item() == 1
        found_layout = cls(tuple(words[0][:count]), ids[0] if len(ids) == 1 else None, rows, transposed)
        for sequence, blob in blobs:
            found_layout.parse(blob, positions, sequence)
        return found_layout

    def frame(self, positions: range, sequence: int) -> bytes:
        """What stands before the first layer."""
        head = list(self.head)
        if self.id_at is not None:
            head[self.id_at] = sequence
        cells = [word for position in positions for word in (position, 1, sequence)]
        words = [*head, 1, len(positions), *cells, int(self.transposed), len(self.rows)]
        return struct.pack(f"<{len(words)}i", *words)

    def size(self, positions: range) -> int:
        """Bytes of a blob."""
        return len(self.frame(positions, 0)) + sum(2 * (12 + 2 * row * len(positions)) for row in self.rows)

    def write(
        self, positions: range, sequence: int, keys: Sequence[_Halves], values: Sequence[_Halves]
    ) -> NDArray[Any]:
        """A blob, uint8, of `keys` and `values`, per layer `[len(positions), row]`, in llama.cpp's own order."""
        frame = self.frame(positions, sequence)
        blob = np.empty(self.size(positions), np.uint8)
        blob[: len(frame)] = np.frombuffer(frame, np.uint8)
        at = len(frame)
        for side, transposed in ((keys, False), (values, self.transposed)):
            for row, array in zip(self.rows, side, strict=True):
                assert array.shape == (len(positions), row) and array.dtype == np.float16
                blob[at : at + 12] = np.frombuffer(_kind(row, transposed), np.uint8)
                stop = at + 12 + array.nbytes
                lines = array.T if transposed else array
                blob[at + 12 : stop].view(np.float16).reshape(lines.shape)[:] = lines
                at = stop
        return blob

    def parse(self, blob: bytes | NDArray[Any], positions: range, sequence: int) -> tuple[list[_Halves], list[_Halves]]:
        """Keys and values per layer, `[len(positions), row]`, views of `blob`.

        Raises `EngineError` naming the part that is not as `write` would write it.
        """
        data = np.frombuffer(blob, np.uint8)
        frame = self.frame(positions, sequence)
        if data[: len(frame)].tobytes() != frame:
            raise EngineError(f"llama.cpp's state: {self._difference(data, frame)}")
        sides: list[list[_Halves]] = []
        at = len(frame)
        for side, transposed in (("keys", False), ("values", self.transposed)):
            sides.append([])
            for layer, row in enumerate(self.rows):
                kind = bytes(data[at : at + 12])
                stop = at + 12 + 2 * row * len(positions)
                if kind != _kind(row, transposed) or stop > len(data):
                    found, expected = (_said(one, transposed) for one in (kind, _kind(row, transposed)))
                    raise EngineError(f"llama.cpp's state: {side} of layer {layer}: {found}, expected {expected}")
                halves = data[at + 12 : stop].view(np.float16)
                shape = (len(positions), row)
                sides[-1].append(halves.reshape(shape[::-1]).T if transposed else halves.reshape(shape))
                at = stop
        if at != len(data):
            raise EngineError(f"llama.cpp's state: {len(data) - at} bytes after the last layer")
        return sides[0], sides[1]

    def _difference(self, data: NDArray[Any], frame: bytes) -> str:
        if len(data) < len(frame):
            return f"{len(data)} bytes, at least {len(frame)} expected"
        found, expected = (np.frombuffer(part, "<i4") for part in (data[: len(frame)].tobytes(), frame))
        word = int(np.flatnonzero(found != expected)[0])
        names = [f"head word {i}" for i in range(len(self.head))] + ["streams", "cells"]
        tail = {len(frame) // 4 - 2: "transposed values", len(frame) // 4 - 1: "layers"}
        name = names[word] if word < len(names) else tail.get(word, f"cell {(word - len(names)) // 3}")
        return f"{name} is {found[word]}, expected {expected[word]}"


def _kind(row: int, transposed: bool) -> bytes:
    """What stands before a layer's keys or values."""
    return struct.pack("<iII", _F16, 2, row) if transposed else struct.pack("<iQ", _F16, 2 * row)


def _said(kind: bytes, transposed: bool) -> object:
    return struct.unpack("<iII" if transposed else "<iQ", kind) if len(kind) == 12 else "nothing"
