"""What a model is: `ModelSpec`, `Rope`, `KvLayout`, `DType`.

Facts only: `spec_hf` and `spec_gguf` resolve them from config files. Knows no tensor and no file. Invariant: two files
that describe one model give equal specs, whatever their spelling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, cast

import numpy as np

from hetsplit.errors import RequestError


class DType(StrEnum):
    """Element type of weights, keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def numpy(self) -> "np.dtype[Any]":
        if self is DType.BFLOAT16:
            import ml_dtypes  # slow to import, and only bfloat16 needs it

            return np.dtype(cast(type, ml_dtypes.bfloat16))
        return np.dtype(self.value)

    @property
    def size(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FLOAT32 else 2


AT_ONCE: Final = 512
"""Tokens that one forward pass appends at most to a layer with a window, where not all of its positions are kept."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Shape of one layer's cache: keys and values are each `[T, G, D]`; a window limits what attention sees."""

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def position_elements(self) -> int:
        """Elements of keys and values together for one token position."""
        return 2 * self.kv_heads * self.head_dim

    def seen_from(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def capacity(self, positions: int) -> int:
        """Positions that memory for `positions` holds at once: of a window's, those that are seen and `AT_ONCE` new."""
        return positions if self.window is None else min(positions, self.window - 1 + AT_ONCE)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a block's bytes mean: one entry per layer, and the element type."""

    layers: tuple[KvLayer, ...]
    dtype: DType

    def position_bytes(self, layer: int) -> int:
        """Bytes of one position's keys and values in `layer`."""
        return self.layers[layer].position_elements * self.dtype.size

    def span_bytes(self, positions: int) -> int:
        """Bytes that memory for `positions` positions takes, over all layers."""
        return sum(layer.capacity(positions) * self.position_bytes(i) for i, layer in enumerate(self.layers))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (https://arxiv.org/abs/2104.09864) in half-split order.

    `inv_freq` holds `D / 2` angular frequencies in radians per position with any scaling applied; cosines and sines are
    multiplied by `scale` (YaRN's attention factor).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A routed MLP: each token goes through the `used` of `count` experts that its softmax over all of them favours.

    `intermediate` is the width of one expert. `normed`: the weights of those that are used add up to 1.
    """

    count: int
    used: int
    intermediate: int
    normed: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Resolved facts of one decoder model.

    `rotary` and `windows` have one entry per layer: None where a layer does not rotate, or sees every position before
    its own; a window of `W` sees the token itself and `W - 1` before it. `biases` names the matrices that have one.
    `qk_norm`: each head of q and k is normed before RoPE. `post_norms`: what attention and the MLP give is normed
    before it is added. `attention_scale` multiplies scores. Soft caps `c` replace `x` by `c * tanh(x / c)`, in scores
    and in logits. `embed_scale` multiplies embeddings. `experts`: where the MLP is routed, in all layers. `eos_ids`
    comes from the model's config files alone; the tokenizer may add more.
    """

    architecture: str
    vocab_size: int
    width: int
    intermediate: int
    n_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    tied_head: bool
    rotary: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    attention_scale: float
    activation: str = "silu"
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    post_norms: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float = 1.0
    experts: Experts | None = None

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raises `RequestError` naming the first id outside the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(f"token id {wrong}, allowed: 0 to {self.vocab_size - 1}")

    def layout(self, dtype: DType) -> KvLayout:
        return KvLayout(tuple(KvLayer(self.kv_heads, self.head_dim, window) for window in self.windows), dtype)
