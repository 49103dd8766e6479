"""The MLX engine: mlx-lm's models prefill, decode and fill their own stores, on an Apple GPU or a CPU.

Owns the order of work within a prefill and a step, and the choice of device. Knows nothing of requests, transfers or
sampling. Invariants: `prefill` and `extend` run the same code, so with the same span and chunk they compute the same
bits; an error of the backend leaves as a `HetsplitError` with the original chained; nothing lazy outlives a call, so
the engine may be loaded on one thread and run on another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from hetsplit.engines import Row, StepResult
from hetsplit.engines.budget import KvBudget, physical_bytes
from hetsplit.engines.checks import check_prefill, check_reserve, check_room, check_rows, check_span, own
from hetsplit.engines.mlx_store import MlxStore, backend_errors, default_kv_bytes
from hetsplit.engines.mlx_weights import build, open_mlx
from hetsplit.errors import ConfigError
from hetsplit.kv import KvBlock, KvStore
from hetsplit.spec import DType, ModelSpec
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import locate

_LAYERS_AHEAD = 2  # scheduled while an earlier layer's block is on its way; what a stop cannot take back any more
_STEPS_BETWEEN_CLEARS = 256  # MLX keeps freed memory of every size it met; mlx-lm gives it back as often


class MlxEngine:
    """A `Prefiller`, `Decoder` and `LocalPrefill`. `model`: mlx-lm's, evaluated, with floats in `dtype`.

    `kv_bytes` bounds what all stores hold together; None means half of the physical memory on a CPU and nine tenths
    of what an Apple GPU may still take. `weights_hash` and `tokenizer` are what peers compare; `source` is for people.
    """

    name = "mlx"

    def __init__(
        self,
        model: Module,
        spec: ModelSpec,
        dtype: DType,
        *,
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        weights_hash: str = "",
        source: str = "",
        kv_bytes: int | None = None,
    ) -> None:
        self.model, self.spec, self.dtype = model, spec, dtype
        self.device = device
        self.layout = spec.layout(dtype)
        self.tokenizer: Tokenizer | None = tokenizer
        self.weights_hash = weights_hash
        self.source = source
        # MLX does not survive an allocation on a CPU that fails, so none may be asked for that no machine has.
        self.budget = KvBudget(min(default_kv_bytes(device) if kv_bytes is None else kv_bytes, physical_bytes()))
        self._steps = 0

    @contextmanager
    def _running(self, doing: str) -> Iterator[None]:
        with backend_errors(doing), mx.stream(_place(self.device)):
            yield

    def reserve(self, positions: int) -> MlxStore:
        """Memory for `positions` token positions. Raises `CapacityError` naming the bytes asked for and free."""
        check_reserve(positions)
        with self._running(f"a cache of {positions} positions"):
            return MlxStore(self.layout, positions, self.budget)

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        """Yield the blocks of positions `span` of `tokens`, which begins at position 0 (`Prefiller.prefill`)."""
        check_prefill(self.spec, tokens, span, chunk)
        return self._prefill(tokens, span, chunk, stop)

    def _prefill(self, tokens: Sequence[int], span: range, chunk: int, stop: Event) -> Iterator[KvBlock]:
        if not span:
            return
        store = self.reserve(span.stop)
        try:
            for layer, part in self._compute(store, tokens, span, chunk, stop):
                with self._running("copying blocks to the host"):
                    block = store.block(layer, part)
                yield block
        finally:
            store.release()

    def extend(self, store: KvStore, tokens: Sequence[int], span: range, *, chunk: int) -> Iterator[None]:
        """Compute positions `span` of `tokens` into `store`, one layer of a chunk per `next()`.

        Positions below `span` are those the store holds already.
        """
        check_span(self.spec, tokens, span, chunk)
        check_room(store, span.stop)
        return (None for _ in self._compute(own(store, MlxStore), tokens, span, chunk, Event()))

    def _compute(
        self, store: MlxStore, tokens: Sequence[int], span: range, chunk: int, stop: Event
    ) -> Iterator[tuple[int, range]]:
        """Fill `store`; yields a layer and a chunk's positions when they are in place.

        A chunk's whole graph is laid out first and then evaluated by keys and values of one layer after the other:
        the last layer's attention and the head, which nobody asks for, never run.
        """
        doing = f"computing positions [{span.start}, {span.stop})"
        for start in range(span.start, span.stop, chunk):
            if stop.is_set():
                return
            part = range(start, min(start + chunk, span.stop))
            with self._running(doing):
                layers = store.layers(part.start, len(part))
                self.model(mx.array([list(tokens[part.start : part.stop])]), cache=layers)
            ahead = 0
            for index, layer in enumerate(layers):
                with self._running(doing):
                    for other in layers[ahead : index + 1 + _LAYERS_AHEAD]:
                        mx.async_eval(other.arrays)  # type: ignore[no-untyped-call, unused-ignore]
                    ahead = index + 1 + _LAYERS_AHEAD
                    mx.eval(layer.arrays)
                yield index, part
                if stop.is_set():
                    return
            mx.clear_cache()  # activations of this chunk's shapes

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Append each row's tokens to its cache; logits float32 `[B, V]` after each row's last token.

        Raises `CapacityError` for a row beyond its reservation, `EngineError` when the backend fails; no cache's
        length has changed then.
        """
        if not rows:
            return StepResult(np.empty((0, self.spec.vocab_size), np.float32))
        check_rows(self.spec, rows)
        caches = [own(row.cache.store, MlxStore).layers(row.cache.length, len(row.tokens)) for row in rows]
        with self._running(f"a decode step of {len(rows)} rows"):
            last = [
                self.model(mx.array([list(row.tokens)]), cache=layers)[:, -1]
                for row, layers in zip(rows, caches, strict=True)
            ]
            logits = mx.concatenate(last).astype(mx.float32)
            mx.eval(logits, [layer.arrays for layers in caches for layer in layers])
            found = np.array(logits)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        for row in rows:
            row.cache.length += len(row.tokens)
        return StepResult(found)


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: DType | str | None = None,
    role: str = "both",
    progress: Callable[[int, int], None] | None = None,
) -> MlxEngine:
    """See `hetsplit.engines.load`. `device`: auto, gpu or cpu. `dtype`: None keeps the checkpoint's, float16 too.

    A folder that MLX quantised stays quantised; its other floats, keys and values are in `dtype`, by default the
    dtype of its scales. Its weights differ from the plain model's, so a pair of both needs `mixed_weights=True`.
    """
    place = _device(device)
    wanted = None if dtype is None else _dtype(dtype)
    path = locate(model, progress=progress is not None)
    folder = open_mlx(path)
    held = wanted or folder.stored_dtype
    tokenizer = load_tokenizer(path)
    with backend_errors(f"the weights of {path.name} in {held} on {place}"), mx.stream(_place(place)):
        module = build(folder, held, progress)
    return MlxEngine(
        module,
        folder.spec,
        held,
        device=place,
        tokenizer=tokenizer,
        weights_hash=folder.weights_hash,
        source=path.name,
    )


def _place(device: str) -> mx.Device:
    return mx.Device(mx.gpu if device == "gpu" else mx.cpu)


def _device(name: str) -> str:
    """A device that is there. Raises `ConfigError` naming those that are."""
    found = ["gpu"] if mx.metal.is_available() else []
    found.append("cpu")
    if name == "auto":
        return found[0]
    if name not in found:
        raise ConfigError(f"device {name!r} is not here, allowed: auto, {', '.join(found)}")
    return name


def _dtype(name: DType | str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise ConfigError(f"dtype {str(name)!r} is not computed with, allowed: {', '.join(DType)}") from None
