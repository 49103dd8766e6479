"""Model files to parameters: finding a checkpoint, proving it, and giving its tensors one at a time.

Owns what safetensors folders and GGUF files look like; everything is checked before any tensor data is read. Knows
neither devices nor the forward pass. Invariant: tensors come under canonical names, in canonical shape and row
order, whatever the file's convention.

Canonical names; matrices are `[out, in]`, row-major, q and k rows in half-split rotary order: `embed [V, E]`;
`layers.{i}.attn_norm [E]`, `.q [H*D, E]`, `.k` and `.v [G*D, E]`, `.o [E, H*D]`, `.mlp_norm [E]`, `.gate` and
`.up [I, E]`, `.down [E, I]`; `norm [E]`; `head [V, E]`, absent when `spec.tied_head`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hetsplit.errors import ConfigError
from hetsplit.spec import DType, ModelSpec

if TYPE_CHECKING:  # a tokenizer reads GGUF metadata through this package; it must not have to load torch
    import torch

    from hetsplit.weights.checkpoint import StoredBlocks

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*"]


class Checkpoint(Protocol):
    """A proven checkpoint. `stored_dtype` is what most weights are stored as; GGUF quants count as bfloat16."""

    @property
    def path(self) -> Path: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def stored_dtype(self) -> DType: ...
    @property
    def stored_in_blocks(self) -> bool:
        """Whether `weights` gives matrices as `StoredBlocks`."""
        ...

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Canonical name and CPU tensor, one at a time: a view of the mapped file, or dequantised to float32.

        Raises `ConfigError` when a tied model ships a head that differs from its embedding.
        """
        ...

    def weights(self) -> "Iterator[tuple[str, torch.Tensor | StoredBlocks]]":
        """As `tensors`, but a matrix that is stored in simple blocks comes as a `StoredBlocks`, not decoded."""
        ...

    def fingerprint(self) -> str:
        """Hex hash of tensor names and stored bytes, whatever the shards; cached by path, size and mtime."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Prove a Hugging Face folder (safetensors) or a GGUF file. Raises `ConfigError` naming the file and the fault."""
    from hetsplit.weights.checkpoint import open_folder, open_gguf  # loads torch

    if path.is_dir():
        return open_folder(path)
    if path.suffix.lower() == ".gguf":
        return open_gguf(path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    raise ConfigError(f"{path} is neither a folder with config.json and safetensors nor a .gguf file")


def locate(model: str | Path, *, progress: bool = False) -> Path:
    """The path of `model`: a folder, a .gguf file, or a Hugging Face repository `org/name`, downloaded when needed.

    `progress` shows the hub's own bars on standard error. Raises `ConfigError` when there is no such path or
    repository, and when the hub cannot be reached.
    """
    if not isinstance(model, str | Path):
        allowed = "a folder, a .gguf file, or a repository id of the form org/name"
        raise ConfigError(f"model is {model!r:.80} ({type(model).__name__}); allowed: {allowed}")
    try:
        str(model).encode()  # peers and tokenizer files are told the path as text
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, UnicodeError) as error:  # too long, a home that nobody has, not UTF-8
        why = error.strerror if isinstance(error, OSError) else str(error)
        text = ascii(str(model))
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ConfigError(f"model {shown}: no path that can be used: {why}") from error
    if not isinstance(model, str) or not _REPOSITORY.fullmatch(model):
        raise ConfigError(f"{model}: no such folder or file, and no repository id of the form org/name")
    return _download(model, progress)


def _download(repository: str, progress: bool) -> Path:
    import huggingface_hub  # slow to load, needed for repositories only
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    bars = None if progress else Silent
    try:
        found = huggingface_hub.snapshot_download(
            repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, tqdm_class=bars
        )
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{repository}: no such path here, not in the local cache, and the hub cannot be reached (offline?); "
            "give a folder or a .gguf file"
        ) from error
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"{repository}: no such path here, and the hub says: {error}") from error
    return Path(found)
