"""What an engine must offer: the `Prefiller`, `Decoder` and `LocalPrefill` protocols; and finding and loading engines.

One thread per engine runs every method below except `KvStore.write`. Engines convert at their own border: what they
yield and take is always the canonical form of `kv`. Knows nothing of transfers, requests or sampling.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import Event
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hetsplit.errors import ConfigError
from hetsplit.kv import KvBlock, KvCache, KvStore
from hetsplit.spec import DType, KvLayout, ModelSpec
from hetsplit.tokenizer import Tokenizer

GROUP = "hetsplit.engines"
"""The entry points by which engines register: a name, and `module:load`, a `Loader`."""

ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a decode batch: `tokens` (at least one) are appended at `cache.length`."""

    cache: KvCache
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits`: float32 `[B, V]`, those after each row's last token."""

    logits: NDArray[np.float32]


@runtime_checkable
class Prefiller(Protocol):
    """An engine that can compute a prompt's keys and values. `weights_hash` and `tokenizer` are what peers compare."""

    name: str
    spec: ModelSpec
    layout: KvLayout
    tokenizer: Tokenizer | None
    weights_hash: str

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        """Yield `span`'s blocks, chunk-major and layer-minor, each as soon as its keys and values exist.

        Ends early, without an error, once `stop` is set. A yielded buffer is not reused while it is referenced.
        Raises `CapacityError` before the first block when there is no memory for the span.
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """An engine that can append tokens to caches. `weights_hash` and `tokenizer` are what peers compare."""

    name: str
    spec: ModelSpec
    layout: KvLayout
    tokenizer: Tokenizer | None
    weights_hash: str

    def reserve(self, positions: int) -> KvStore:
        """Memory for `positions` token positions. Raises `CapacityError`."""
        ...

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Append each row's tokens to its cache and give the logits after the last one."""
        ...


@runtime_checkable
class LocalPrefill(Protocol):
    """An engine that can fill its own store."""

    def extend(self, store: KvStore, tokens: Sequence[int], span: range, *, chunk: int) -> Iterator[None]:
        """Compute `span` into `store`, one unit of work per `next()`."""
        ...


class Engine(Prefiller, Decoder, LocalPrefill, Protocol):
    """An engine for every role. One that serves a single role offers that role's part; workers check it.

    Optional: `source`, what was loaded, for people; `device`, such as "cuda:0", for people too, and because engines on
    "cpu", the default, take turns on one thread of their process.
    """


class Loader(Protocol):
    """What an engine registers. Raises `ConfigError` for a model, device or dtype that it cannot serve, by name."""

    def __call__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: DType | str | None = None,
        role: str = "both",
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine: ...


def installed() -> dict[str, EntryPoint]:
    """Every engine that a package in this environment registers, by name; its library may still be missing."""
    return {point.name: point for point in entry_points(group=GROUP)}


def loader(engine: str) -> Loader:
    """The engine's `load`. Raises `ConfigError` for an unknown name, and naming the extra of a missing library."""
    known = installed()
    if engine not in known:
        raise ConfigError(f"engine {engine!r} is unknown, allowed: {', '.join(sorted(known)) or 'none'}")
    try:
        found: Loader = known[engine].load()
    except ImportError as error:
        ours = known[engine].value.startswith("hetsplit.")
        cure = f"pip install 'hetsplit[{engine}]'" if ours else f"install what {known[engine].value} needs"
        raise ConfigError(f"engine {engine!r} is not installed ({error}); {cure}") from error
    return found


def load(
    model: str | Path,
    *,
    engine: str = "torch",
    device: str = "auto",
    dtype: DType | str | None = None,
    role: str = "both",
    progress: Callable[[int, int], None] | None = None,
) -> "Engine":
    """Load a model into an engine.

    `model`: a Hugging Face folder, a .gguf file or a repository id `org/name`. `engine`: `torch`, `transformers`,
    `llamacpp`, `mlx`, or one that another package registers. `device`: `auto` takes the best that is here. `dtype`:
    `bfloat16`, `float32` or `float16`, as far as the engine has it; None means the checkpoint's own, where float16 is
    loaded as bfloat16, and float32 on a device without bfloat16. With the torch engine on a CPU `int8` and `int4` pack
    weights for decode, and None packs those that a GGUF file stores in simple blocks. `role`: `both`, `prefill` or
    `decode`, what the engine will be used for; of packed and plain weights one role keeps one. `progress` hears
    (tensors done, tensors in all).

    Raises `ConfigError` naming what cannot be used and what can.
    """
    if role not in ROLES:
        raise ConfigError(f"role {role!r} is unknown, allowed: {', '.join(ROLES)}")
    return loader(engine)(model, device=device, dtype=dtype, role=role, progress=progress)
