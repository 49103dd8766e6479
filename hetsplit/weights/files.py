"""Files on disk: mapping them, reading JSON from them, and what a tensor in one is.

Knows no format beyond JSON. Invariant: a `TensorFile` is made by a reader that has proved every tensor's bytes to
lie inside `data`.
"""

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetsplit.errors import ConfigError

_JSON_MAX = 32 * 2**20
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: `size` bytes at byte `offset`, row-major `shape`, `type` as the format spells it."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A mapped file whose header was proved."""

    path: Path
    data: mmap.mmap
    mtime_ns: int
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def let_go(self, tensor: StoredTensor) -> None:
        """Give back the memory that reading a tensor took. Its bytes stay readable: they come from the disk again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.size - start)


def map_file(path: Path) -> tuple[mmap.mmap, int]:
    """The file's bytes (a private mapping: writes never reach the disk) and its mtime in ns. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise ConfigError(f"{path}: the file is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise ConfigError(f"{path}: this is a Git LFS pointer, not the file it stands for; run `git lfs pull`")
    return data, status.st_mtime_ns


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError`."""
    data, _ = map_file(path)
    if len(data) > _JSON_MAX:
        raise ConfigError(f"{path}: {len(data)} bytes of JSON, at most {_JSON_MAX} are allowed")
    return parse_json(data[:], str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object that `text` spells. Raises `ConfigError` naming `where`; a key given twice is refused."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a JSON {type(value).__name__}, an object is allowed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found
