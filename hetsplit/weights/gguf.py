"""The GGUF format: proving a file's header.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Knows nothing of
models and does not decode blocks. Every count, length and offset is checked against bounds and the file's size
before it is used. Invariant: tensors of a file that was read are aligned, inside the file, and do not overlap.
"""

import math
import mmap
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from hetsplit.errors import ConfigError
from hetsplit.weights.files import StoredTensor, TensorFile, map_file

_HEADER_MAX = 64 * 2**20
_COUNT_MAX = 2**16
_ITEMS_MAX = 2**22
_KEY_MAX = 2**16 - 1
_NAME_MAX = 127
_RANK_MAX = 4
_ELEMENTS_MAX = 2**42
_ALIGNMENTS: Final = tuple(2**power for power in range(3, 17))
_SCALARS: Final = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY, _BOOL = 8, 9, 7


def read_gguf(path: Path) -> TensorFile:
    """Map a file and prove its header. Raises `ConfigError` naming the field.

    `metadata` has plain values, lists, and `Strings`. Tensor shapes are row-major (the file's order reversed), types
    are ggml's names, offsets count from the file's start.
    """
    data, mtime_ns = map_file(path)
    cursor = _Cursor(path, data)
    n_tensors, n_metadata = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    for index in range(n_metadata):
        cursor.field = f"metadata entry {index}"
        key = cursor.string("key", _KEY_MAX)
        if key in metadata:
            raise cursor.fault(f"the key {key!r} is there twice")
        cursor.field = f"metadata {key!r}"
        metadata[key] = cursor.value(cursor.u32("type"))
    alignment = metadata.get("general.alignment", 32)
    if alignment not in _ALIGNMENTS or isinstance(alignment, bool):
        raise ConfigError(f"{path}: general.alignment is {alignment!r}; a power of two from 8 to 65536 is allowed")
    found = [_read_tensor(cursor, index, alignment) for index in range(n_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors = [StoredTensor(t.name, t.type, t.shape, start + t.offset, t.size) for t in found]
    _prove_tensors(path, tensors, len(data))
    return TensorFile(path, data, mtime_ns, metadata, {tensor.name: tensor for tensor in tensors})


class _Cursor:
    """A reading position in a header that may lie. `field` names what is being read, for messages."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = min(len(data), _HEADER_MAX)
        self.position = 0
        self.items_left = _ITEMS_MAX
        self.field = "header"

    def fault(self, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: GGUF {self.field}: {message}")

    def take(self, size: int, part: str) -> int:
        """Step over `size` bytes; gives where they start."""
        if size > self.end - self.position:
            raise self.fault(f"{part} needs {size} bytes, {self.end - self.position} of the header are left")
        self.position += size
        return self.position - size

    def u32(self, part: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, part))[0])

    def u64(self, part: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, part))[0])

    def count(self, part: str, low: int, high: int, *, wide: bool = True) -> int:
        value = self.u64(part) if wide else self.u32(part)
        if not low <= value <= high:
            raise self.fault(f"{part} is {value}; {low} to {high} is allowed")
        return value

    def text(self, raw: bytes, part: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"{part} is not valid UTF-8: {raw[:40]!r}") from error

    def string(self, part: str, limit: int = _HEADER_MAX) -> str:
        size = self.u64(f"{part} length")
        if size > limit:
            raise self.fault(f"{part} length is {size}; at most {limit} is allowed")
        start = self.take(size, part)
        return self.text(self.data[start : start + size], part)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string("string value")
        if kind == _ARRAY:
            return self.array()
        return self.scalars(kind, 1)[0]

    def array(self) -> Sequence[Any]:
        kind = self.u32("array item type")
        if kind == _ARRAY:
            raise self.fault("arrays inside arrays are not supported")
        count = self.count("array length", 0, self.items_left)
        self.items_left -= count
        return self.strings(count) if kind == _STRING else self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.fault(f"value type {kind} is not known; 0 to 12 is allowed")
        dtype = np.dtype("u1" if kind == _BOOL else _SCALARS[kind])
        start = self.take(count * dtype.itemsize, "value")
        values = np.frombuffer(self.data, dtype, count, start)
        if kind == _BOOL and np.any(values > 1):
            raise self.fault(f"a boolean is {values.max()}; 0 or 1 is allowed")
        return list((values.astype(np.bool_) if kind == _BOOL else values).tolist())

    def strings(self, count: int) -> "Strings":
        """`string` for a whole vocabulary: one loop without calls."""
        data, end, position = self.data, self.end, self.position
        starts = array("Q")
        read_length = struct.Struct("<Q").unpack_from
        for index in range(count):
            if end - position < 8:
                raise self.fault(f"the length of string {index} of {count} needs 8 bytes, {end - position} are left")
            (size,) = read_length(data, position)
            position += 8
            if size > end - position:
                raise self.fault(f"string {index} of {count} needs {size} bytes, {end - position} are left")
            self.text(data[position : position + size], "a string")
            starts.append(position)
            position += size
        self.position = position
        return Strings(data, starts)


class Strings(Sequence[str]):
    """Strings that stay in the file until they are asked for: a vocabulary is large, and most readers need its length.

    `starts` says where the bytes of each begin, after their count.
    """

    def __init__(self, data: mmap.mmap, starts: "array[int]") -> None:
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        (size,) = struct.unpack_from("<Q", self._data, start - 8)
        return self._data[start : start + size].decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version; then how many tensors and how many metadata entries follow."""
    start = cursor.take(4, "magic")
    if cursor.data[start : start + 4] != b"GGUF":
        raise cursor.fault(f"magic is {cursor.data[start : start + 4]!r}, b'GGUF' expected")
    version = cursor.u32("version")
    if version not in (2, 3):
        swapped = " (big-endian?)" if version & 0xFFFF == 0 else ""
        raise cursor.fault(f"version is {version}{swapped}; 2 and 3, little-endian, are supported")
    return cursor.count("tensor count", 0, _COUNT_MAX), cursor.count("metadata count", 0, _COUNT_MAX)


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> StoredTensor:
    """One tensor's entry; its offset still counts from the start of the data section."""
    cursor.field = f"tensor {index}"
    name = cursor.string("name", _NAME_MAX)
    cursor.field = f"tensor {name!r}"
    rank = cursor.count("number of dimensions", 1, _RANK_MAX, wide=False)
    shape = tuple(cursor.count(f"dimension {axis}", 1, _ELEMENTS_MAX) for axis in range(rank))[::-1]
    elements = math.prod(shape)
    if elements > _ELEMENTS_MAX:
        raise cursor.fault(f"dimensions {shape} make {elements} elements; at most {_ELEMENTS_MAX} are allowed")
    kind = cursor.u32("type")
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise cursor.fault(f"type {kind} is not known") from None
    if shape[-1] % block:
        raise cursor.fault(
            f"row length {shape[-1]} is no multiple of {GGMLQuantizationType(kind).name}'s block, {block}"
        )
    offset = cursor.u64("offset")
    if offset % alignment:
        raise cursor.fault(f"offset {offset} is no multiple of the alignment, {alignment}")
    return StoredTensor(name, GGMLQuantizationType(kind).name, shape, offset, elements // block * block_bytes)


def _prove_tensors(path: Path, tensors: list[StoredTensor], end: int) -> None:
    names: set[str] = set()
    reached = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        where = f"{path}: GGUF tensor {tensor.name!r}"
        if tensor.name in names:
            raise ConfigError(f"{where}: the name is there twice")
        if tensor.offset < reached:
            raise ConfigError(f"{where}: offset {tensor.offset} overlaps another tensor, which ends at {reached}")
        names.add(tensor.name)
        reached = tensor.offset + tensor.size
        if reached > end:
            raise ConfigError(f"{where}: offset and size end at byte {reached}, the file has {end}; is it cut?")
