"""The safetensors format: proving a file's header.

Format: https://github.com/huggingface/safetensors#format. Knows nothing of models. Invariant: in a file that was
read, tensors fill the data section without gap or overlap.
"""

import math
import struct
from pathlib import Path
from typing import Any, Final

from hetsplit.errors import ConfigError
from hetsplit.weights.files import StoredTensor, TensorFile, map_file, parse_json

_HEADER_MAX = 16 * 2**20
_RANK_MAX = 8
_SIZES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


def read_safetensors(path: Path) -> TensorFile:
    """Map a file and prove its header. Raises `ConfigError` naming the file and, where there is one, the tensor."""
    data, mtime_ns = map_file(path)
    if len(data) < 8:
        raise ConfigError(f"{path}: {len(data)} bytes; a safetensors file has at least 8")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_HEADER_MAX, len(data) - 8):
        raise ConfigError(
            f"{path}: header length {length}, at most {min(_HEADER_MAX, len(data) - 8)} is allowed in this file"
        )
    header = parse_json(data[8 : 8 + length], f"{path} header")
    metadata = header.pop("__metadata__", {})
    tensors = [_stored(path, name, entry, 8 + length) for name, entry in header.items()]
    _prove_coverage(path, tensors, 8 + length, len(data))
    return TensorFile(path, data, mtime_ns, metadata, {tensor.name: tensor for tensor in tensors})


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{where}: its entry must hold dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _SIZES:
        raise ConfigError(f"{where}: dtype {kind!r} is not known")
    if not _are_counts(shape) or len(shape) > _RANK_MAX:
        raise ConfigError(f"{where}: shape must be a list of at most {_RANK_MAX} non-negative integers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ConfigError(f"{where}: data_offsets must be two non-negative integers")
    size = math.prod(shape) * _SIZES[kind]
    if offsets[1] - offsets[0] != size:
        raise ConfigError(f"{where}: data_offsets span {offsets[1] - offsets[0]} bytes, its shape needs {size}")
    return StoredTensor(name, kind, tuple(shape), start + offsets[0], size)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _prove_coverage(path: Path, tensors: list[StoredTensor], start: int, end: int) -> None:
    reached = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != reached:
            raise ConfigError(f"{path}: tensor {tensor.name!r} starts at byte {tensor.offset}, expected {reached}")
        reached += tensor.size
        if reached > end:
            raise ConfigError(f"{path}: tensor {tensor.name!r} ends at byte {reached}, the file has {end}; is it cut?")
    if reached != end:
        raise ConfigError(f"{path}: the file has {end} bytes, its tensors end at {reached}")
