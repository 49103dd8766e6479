"""The hash by which peers know that they hold the same weights, and its cache on disk.

Knows neither formats nor models. Invariant: the hash depends on tensor names, types, shapes and stored bytes alone,
so neither sharding nor the order within a file changes it. The cache holds nothing else and may be deleted at will.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import xxhash

from hetsplit.weights.files import StoredTensor, TensorFile

Stored = Mapping[str, tuple[TensorFile, StoredTensor]]


def fingerprint(stored: Stored) -> str:
    """XXH3-128, hex, over the sorted tensors. Cached by each file's resolved path, size and mtime."""
    files = {file.path: file for file, _ in stored.values()}
    paths = "\n".join(sorted(str(path.resolve()) for path in files))
    entry = _cache_folder() / "fingerprints" / f"{xxhash.xxh3_64_hexdigest(paths.encode())}.json"
    state = _state(stored)
    if (known := _recall(entry, state)) is not None:
        return known
    found = _computed(stored)
    _remember(entry, state, found)
    return found


def _computed(stored: Stored) -> str:
    total = xxhash.xxh3_128()
    for name, (file, tensor) in sorted(stored.items()):
        data = memoryview(file.data)[tensor.offset : tensor.offset + tensor.size]
        total.update(f"{name} {tensor.type} {tensor.shape}\n".encode())
        total.update(xxhash.xxh3_128_digest(data))
        file.let_go(tensor)
    return total.hexdigest()


def _state(stored: Stored) -> str:
    """What must be unchanged for a cached hash to hold."""
    rows = [
        (name, tensor.type, tensor.shape, tensor.offset, str(file.path.resolve()), len(file.data), file.mtime_ns)
        for name, (file, tensor) in sorted(stored.items())
    ]
    return xxhash.xxh3_128_hexdigest(repr(rows).encode())


def _cache_folder() -> Path:
    """`$XDG_CACHE_HOME/hetsplit`, by default `~/.cache/hetsplit`."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~"), ".cache")) / "hetsplit"


def _recall(entry: Path, state: str) -> str | None:
    try:
        known = json.loads(entry.read_text())
        return str(known["fingerprint"]) if known["state"] == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(entry: Path, state: str, found: str) -> None:
    """Best effort: a folder that cannot be written costs the next start a hash, no more."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, suffix=".tmp", delete=False) as file:
            json.dump({"state": state, "fingerprint": found}, file)
        os.replace(file.name, entry)
    except OSError:
        return
