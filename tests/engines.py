"""Every engine with one model, for tests that pair them; those whose library is missing here are skipped."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from hetsplit.engines import Engine, loader
from hetsplit.errors import ConfigError
from tests.models import llama82, save_folder, save_gguf

NAMES = ("torch", "transformers", "llamacpp", "mlx")
PAIRS = [(one, other) for one in NAMES for other in NAMES]
READS_GGUF = ("torch", "llamacpp")


def load_or_skip(name: str, path: Path, **options: Any) -> Engine:
    try:
        load = loader(name)
    except ConfigError as error:
        pytest.skip(str(error))
    return load(path, **options)


def site_of(module: Path, entry_points: str, folder: Path) -> Path:
    """A folder for `sys.path` that holds `module` as an installed package would leave it there."""
    package = folder / f"{module.stem}-0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: 0.1\n")
    (package / "entry_points.txt").write_text(entry_points)
    shutil.copy(module, folder)
    return folder


def without_vocabulary(writer: gguf.GGUFWriter) -> None:
    """llama.cpp wants to be told that a file has none."""
    writer.add_tokenizer_model("no_vocab")


class TinyEngines:
    """`engine(name)`: each engine once, on the CPU, with llama82 in float32 (llama.cpp: keys and values in float16)."""

    def __init__(self, folder: Path) -> None:
        self.gguf = save_gguf(llama82(), folder / "tiny.gguf", fields=without_vocabulary)
        self.folder = save_folder(llama82(), folder / "tiny")
        self._loaded: dict[str, Engine] = {}

    def __call__(self, name: str) -> Engine:
        if name not in self._loaded:
            dtype = None if name == "llamacpp" else "float32"
            path = self.gguf if name in READS_GGUF else self.folder
            self._loaded[name] = load_or_skip(name, path, device="cpu", dtype=dtype)
        return self._loaded[name]
