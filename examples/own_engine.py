"""An engine to copy: Llama models in plain numpy, in float32 on the CPU. The pyproject.toml of the package that holds
it makes `hetsplit.load(model, engine="own")` find it:

    [project.entry-points."hetsplit.engines"]
    own = "own_engine:load"

`hetsplit.engines` says what each method has to do, and `hetsplit.conformance` proves that it does. Letters: `T` tokens,
`L` layers, `H` query heads, `G` key/value heads, `D` head width, `E` model width.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetsplit.engines import Row, StepResult
from hetsplit.engines.budget import KvBudget, physical_bytes
from hetsplit.engines.checks import check_block, check_prefill, check_reserve, check_room, check_rows, check_span, own
from hetsplit.errors import ConfigError, EngineError
from hetsplit.kv import KvBlock, KvCache, KvStore
from hetsplit.spec import DType, KvLayout, Rope
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import Checkpoint, locate, open_checkpoint

LAYER = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")  # named in `hetsplit.weights`
Floats = NDArray[np.float32]


class OwnStore:
    """Keys and values `[L, 2, positions, G, D]`, which is the canonical form: a block is written by one copy."""

    def __init__(self, layout: KvLayout, positions: int, budget: KvBudget) -> None:
        self.layout, self.positions, self.sealed = layout, positions, False
        self._give_back = budget.lend(self, layout.span_bytes(positions), f"a cache of {positions} positions")
        shape = (len(layout.layers), 2, positions, layout.layers[0].kv_heads, layout.layers[0].head_dim)
        self._memory: Floats | None = np.empty(shape, np.float32)

    @property
    def memory(self) -> Floats:
        if self._memory is None:
            raise EngineError("a released store was used")
        return self._memory

    def write(self, block: KvBlock) -> None:  # called by another thread than the engine's, while rows decode
        if self.sealed:
            raise EngineError("a block was written to a sealed store")
        check_block(self.layout, self.positions, block)
        self.memory[block.layer, 0, block.start : block.stop] = block.keys.astype(np.float32)
        self.memory[block.layer, 1, block.start : block.stop] = block.values.astype(np.float32)

    def settle(self) -> bool:
        return True  # a store on another device would move what is staged

    def seal(self, length: int) -> KvCache:
        check_room(self, length)
        self.sealed = self.memory is not None
        return KvCache(self, length)

    def read(self, span: range) -> Iterator[KvBlock]:
        return (self.block(layer, span) for layer in range(len(self.layout.layers)))

    def block(self, layer: int, span: range) -> KvBlock:  # a view: a position is written once
        return KvBlock(layer, span.start, *self.memory[layer, :, span.start : span.stop])

    def release(self) -> None:
        self._memory = None
        self._give_back()


class OwnEngine:
    """A `Prefiller`, `Decoder` and `LocalPrefill`."""

    name, device = "own", "cpu"

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
        self.spec, self.tokenizer = checkpoint.spec, tokenizer
        self.layout = self.spec.layout(DType.FLOAT32)
        self.weights_hash = checkpoint.fingerprint()
        self.budget = KvBudget(physical_bytes() // 2)  # of all stores together
        self.weights: dict[str, Floats] = {name: value.float().numpy() for name, value in checkpoint.tensors()}
        known = {"embed", "norm", "head"} | {f"layers.{i}.{part}" for i in range(self.spec.n_layers) for part in LAYER}
        rope = self.spec.rotary[0]
        plain = self.spec.architecture == "llama" and not self.weights.keys() - known and not any(self.spec.windows)
        if rope is None or set(self.spec.rotary) != {Rope(rope.inv_freq)} or not plain:
            raise ConfigError(f"{checkpoint.path}: the own engine computes plain Llama models only")
        self.inv_freq = np.array(rope.inv_freq, np.float32)

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        check_prefill(self.spec, tokens, span, chunk)
        if not span:
            return
        store = self.reserve(span.stop)  # it gives its room back when it is dropped
        for layer, part in self._chunks(store, tokens, span, chunk):
            yield store.block(layer, part)
            if stop.is_set():
                return

    def extend(self, store: KvStore, tokens: Sequence[int], span: range, *, chunk: int) -> Iterator[None]:
        check_span(self.spec, tokens, span, chunk)
        check_room(store, span.stop)
        return (None for _ in self._chunks(own(store, OwnStore), tokens, span, chunk))

    def reserve(self, positions: int) -> OwnStore:
        check_reserve(positions)
        return OwnStore(self.layout, positions, self.budget)

    def step(self, rows: Sequence[Row]) -> StepResult:
        check_rows(self.spec, rows)
        for row in rows:  # before anything is computed: a step that fails changes nothing
            check_room(row.cache.store, row.cache.length + len(row.tokens))
        last = np.empty((len(rows), self.spec.width), np.float32)
        for i, row in enumerate(rows):  # a fast engine multiplies all rows by a matrix at once
            x = self.weights["embed"][list(row.tokens)]
            for _ in self._layers(x, own(row.cache.store, OwnStore).memory, row.cache.length):
                pass
            last[i] = x[-1]
        for row in rows:
            row.cache.length += len(row.tokens)
        return StepResult(self._norm(last, "norm") @ self.weights.get("head", self.weights["embed"]).T)

    def _chunks(self, store: OwnStore, tokens: Sequence[int], span: range, chunk: int) -> Iterator[tuple[int, range]]:
        """Fill `store`, which holds what is below `span`; yields a layer and the positions that are in place."""
        for start in range(span.start, span.stop, chunk):
            part = range(start, min(start + chunk, span.stop))
            for layer in self._layers(self.weights["embed"][list(tokens[start : part.stop])], store.memory, start):
                yield layer, part
                if layer == self.spec.n_layers - 1:
                    break  # nobody asks for more of the last layer than its keys and values

    def _layers(self, x: Floats, memory: Floats, start: int) -> Iterator[int]:
        """Run the layers over `x` `[T, E]` in place; yields each when its keys and values are, before attention."""
        stop = start + len(x)
        angles = np.outer(np.arange(start, stop, dtype=np.float32), self.inv_freq)[:, None]  # [T, 1, D / 2]
        for i in range(self.spec.n_layers):
            w = {part: self.weights[f"layers.{i}.{part}"].T for part in LAYER}
            normed = self._norm(x, f"layers.{i}.attn_norm")
            q, k, v = ((normed @ w[part]).reshape(len(x), -1, self.spec.head_dim) for part in "qkv")
            memory[i, :, start:stop] = rotate(k, angles), v
            yield i
            x += attend(rotate(q, angles), *memory[i, :, :stop]) @ w["o"]
            normed = self._norm(x, f"layers.{i}.mlp_norm")
            gate = normed @ w["gate"]
            x += (gate * np.exp(-np.logaddexp(0, -gate)) * (normed @ w["up"])) @ w["down"]  # silu that cannot overflow

    def _norm(self, x: Floats, name: str) -> Floats:
        rms: Floats = np.sqrt(np.mean(x * x, -1, keepdims=True) + self.spec.norm_eps)
        return x / rms * self.weights[name]


def rotate(x: Floats, angles: Floats) -> Floats:
    """RoPE in half-split order: number `i` of a head and number `i + D / 2` are a pair. `x` is `[T, heads, D]`."""
    one, other = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((one * cos - other * sin, other * cos + one * sin), -1)


def attend(q: Floats, keys: Floats, values: Floats) -> Floats:
    """`q` `[T, H, D]` of the last `T` positions over `keys` and `values` `[positions, G, D]`; gives `[T, H D]`."""
    heads = q.reshape(len(q), keys.shape[1], -1, q.shape[2]).transpose(1, 2, 0, 3)  # [G, H / G, T, D]
    scores = heads @ keys.transpose(1, 2, 0)[:, None] / q.shape[2] ** 0.5  # [G, H / G, T, positions]
    scores += np.triu(np.full(scores.shape[-2:], -np.inf, np.float32), len(keys) - len(q) + 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    seen = weights / weights.sum(-1, keepdims=True) @ values.transpose(1, 0, 2)[:, None]  # [G, H / G, T, D]
    return np.asarray(seen.transpose(2, 0, 1, 3).reshape(len(q), -1))


def load(model: str | Path, *, device: str = "auto", dtype: str | None = None, **_: Any) -> OwnEngine:
    """What the entry point names. It is given `role` and `progress` too, which change nothing here."""
    if device not in ("auto", "cpu") or dtype not in (None, "float32"):
        raise ConfigError(f"device {device!r} and dtype {dtype!r}: the own engine knows cpu and float32 only")
    path = locate(model)
    return OwnEngine(open_checkpoint(path), load_tokenizer(path))
