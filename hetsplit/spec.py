"""What a model is: `ModelSpec`, `KvLayout`, `DType`, resolved from the plain dicts that config files give.

Owns the reading of Hugging Face configs and GGUF metadata into facts, and the refusal, by name, of what is not
supported. Knows no tensor and opens no file. Invariant: two files that describe one model give equal specs,
whatever their spelling.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from hetsplit.errors import ConfigError, RequestError, brief

_COUNT_MAX = 2**24
_LAYERS_MAX = 4096
_HEADS_MAX = 4096
_CONTEXT_MAX = 2**31 - 1
_DEFAULT_THETA = 10000.0


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


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a block's bytes mean: one entry per layer, and the element type."""

    layers: tuple[KvLayer, ...]
    dtype: DType

    def position_bytes(self, layer: int) -> int:
        """Bytes of one position's keys and values in `layer`."""
        return self.layers[layer].position_elements * self.dtype.size

    def span_bytes(self, positions: int) -> int:
        """Bytes of `positions` positions over all layers."""
        return positions * sum(self.position_bytes(i) for i in range(len(self.layers)))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Resolved facts of one decoder model.

    `inv_freq` holds `D / 2` angular frequencies in radians per position with any RoPE scaling applied. `eos_ids`
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
    inv_freq: tuple[float, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raises `RequestError` naming the first id outside the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(f"token id {wrong}, allowed: 0 to {self.vocab_size - 1}")

    def layout(self, dtype: DType) -> KvLayout:
        return KvLayout((KvLayer(self.kv_heads, self.head_dim),) * self.n_layers, dtype)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelSpec":
        """Resolve a Hugging Face `config.json` and, for more end ids, a `generation_config.json`.

        Raises `ConfigError` naming the field that is missing, wrong or not supported. Warns about, and drops, token
        ids beyond the vocabulary.
        """
        fields = _Fields(config, "config.json")
        model_type = _hf_model_type(fields)
        fields = _Fields({**_HF_DEFAULTS[model_type], **config}, "config.json")
        _refuse_hf_variants(fields)
        heads = fields.integer("num_attention_heads", _HEADS_MAX)
        width = fields.integer("hidden_size")
        stated = fields.get("head_dim") is not None
        head_dim = fields.integer("head_dim", _HEADS_MAX) if stated else _derived_head_dim(fields, width, heads)
        vocab = fields.integer("vocab_size")
        context = fields.integer("max_position_embeddings", _CONTEXT_MAX)
        _refuse_window(fields, "sliding_window", context)
        ends = [(fields.where, fields.get("eos_token_id"))]
        if generation_config:
            ends.append(("generation_config.json", generation_config.get("eos_token_id")))
        spec = cls(
            architecture="llama",
            vocab_size=vocab,
            width=width,
            intermediate=fields.integer("intermediate_size"),
            n_layers=fields.integer("num_hidden_layers", _LAYERS_MAX),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", _HEADS_MAX, default=heads),
            head_dim=head_dim,
            norm_eps=_decimal(fields.number("rms_norm_eps")),
            context=context,
            tied_head=fields.flag("tie_word_embeddings"),
            inv_freq=_as_tuple(_hf_frequencies(fields, head_dim)),
            bos_id=next(iter(_token_ids([(fields.where, fields.get("bos_token_id"))], "bos_token_id", vocab)), None),
            eos_ids=_token_ids(ends, "eos_token_id", vocab),
        )
        return _proven(spec, "config.json")

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, tied_head: bool, rope_factors: Sequence[float] | None = None
    ) -> "ModelSpec":
        """Resolve GGUF metadata. `tied_head`: the file has no `output.weight`; `rope_factors`: `rope_freqs.weight`.

        Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Raises `ConfigError` naming the field
        that is missing, wrong or not supported. Warns about, and drops, token ids beyond the vocabulary.
        """
        fields = _Fields(metadata, "GGUF metadata")
        _refuse_gguf_variants(fields)
        heads = fields.integer("llama.attention.head_count", _HEADS_MAX)
        width = fields.integer("llama.embedding_length")
        head_dim = _gguf_head_dim(fields, width, heads)
        tokens = fields.get("tokenizer.ggml.tokens")
        listed = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else 0
        vocab = fields.integer("llama.vocab_size", default=listed or None)
        context = fields.integer("llama.context_length", _CONTEXT_MAX)
        _refuse_window(fields, "llama.attention.sliding_window", context)
        ends = [(fields.where, fields.get(f"tokenizer.ggml.{kind}_token_id")) for kind in ("eos", "eot", "eom")]
        bos = [(fields.where, fields.get("tokenizer.ggml.bos_token_id"))]
        spec = cls(
            architecture="llama",
            vocab_size=vocab,
            width=width,
            intermediate=fields.integer("llama.feed_forward_length"),
            n_layers=fields.integer("llama.block_count", _LAYERS_MAX),
            heads=heads,
            kv_heads=fields.integer("llama.attention.head_count_kv", _HEADS_MAX, default=heads),
            head_dim=head_dim,
            norm_eps=_decimal(fields.number("llama.attention.layer_norm_rms_epsilon")),
            context=context,
            tied_head=tied_head,
            inv_freq=_as_tuple(_gguf_frequencies(fields, head_dim, rope_factors)),
            bos_id=next(iter(_token_ids(bos, "tokenizer.ggml.bos_token_id", vocab)), None),
            eos_ids=_token_ids(ends, "tokenizer.ggml.eos_token_id", vocab),
        )
        return _proven(spec, "GGUF metadata")


class _Fields:
    """Checked reading of one dict. A null counts as absent. `where` names the dict in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def fault(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {brief(self.get(name))}; {allowed}")

    def integer(self, name: str, high: int = _COUNT_MAX, *, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.missing(name)
        if not isinstance(value, int) or isinstance(value, bool) or not (1 <= value <= high):
            raise self.fault(name, f"an integer from 1 to {high} is allowed")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.missing(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.fault(name, "a positive finite number is allowed")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; False when absent."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self.fault(name, "true or false is allowed")
        return bool(value)

    def missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self.where}: the required field {name} is missing")


def _decimal(value: float) -> float:
    """The shortest decimal of `value` as float32, so that 1e-5 read from JSON and from a float32 field agree."""
    return float(str(np.float32(value)))


def _as_tuple(inv_freq: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in inv_freq.astype(np.float32))


def _derived_head_dim(fields: _Fields, width: int, heads: int) -> int:
    if width % heads:
        raise ConfigError(f"{fields.where}: no head width is given and width {width} is no multiple of {heads} heads")
    return width // heads


def _refuse_window(fields: _Fields, name: str, context: int) -> None:
    if fields.integer(name, _CONTEXT_MAX, default=context) < context:
        raise fields.fault(name, f"attention windows are not supported: only {context} (the context) or more, or null")


def _token_ids(found: Sequence[tuple[str, Any]], name: str, vocab: int) -> tuple[int, ...]:
    """The sorted union of ids that files give as an integer, a list or null; those beyond the vocabulary dropped."""
    ids: set[int] = set()
    for where, value in found:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ConfigError(
                    f"{where}: {name} is {brief(value)}; an integer, a list of integers or null is allowed"
                )
            if 0 <= token < vocab:
                ids.add(token)
            else:
                warnings.warn(f"{where}: {name} {token} is dropped: the vocabulary is 0 to {vocab - 1}", stacklevel=4)
    return tuple(sorted(ids))


def _proven(spec: ModelSpec, where: str) -> ModelSpec:
    if spec.heads % spec.kv_heads:
        raise ConfigError(f"{where}: {spec.heads} heads are no multiple of {spec.kv_heads} key/value heads")
    return spec


# Rotary position embedding (https://arxiv.org/abs/2104.09864).


def _frequencies(theta: float, head_dim: int, where: str) -> NDArray[np.float64]:
    if head_dim % 2:
        raise ConfigError(f"{where}: the head width is {head_dim}; rotary embedding needs an even number")
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _llama3_scaled(inv_freq: NDArray[np.float64], block: _Fields, config: _Fields) -> NDArray[np.float64]:
    """Llama 3.1's scaling: long wavelengths slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (block.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise block.fault("high_freq_factor", f"more than low_freq_factor ({low}) is allowed")
    name = "original_max_position_embeddings"
    original = (block if block.get(name) is not None else config).integer(name, _CONTEXT_MAX)
    turns = original * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq


_ROPE_KEYS: Final = {
    "default": {"rope_type", "rope_theta", "partial_rotary_factor"},
    "llama3": {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"}
    | {"original_max_position_embeddings"},
}


def _hf_rope_block(config: _Fields) -> _Fields:
    """All spellings of the rope block as one: `rope_scaling` or `rope_parameters`, with `rope_type` or `type`."""
    merged: dict[str, Any] = {}
    sources: dict[str, Any] = {"config": {"rope_theta": config.get("rope_theta")}}
    sources |= {name: config.get(name) for name in ("rope_scaling", "rope_parameters")}
    for source, block in sources.items():
        if not isinstance(block, dict | None):
            raise config.fault(source, "an object or null is allowed")
        for spelling, value in (block or {}).items():
            key = "rope_type" if spelling == "type" else spelling
            if value is None:
                continue
            if key in merged and merged[key] != value:
                raise ConfigError(f"config.json: {key} is {brief(merged[key])} and, in {source}, {brief(value)}")
            merged[key] = value
    return _Fields(merged, "config.json rope parameters")


def _hf_frequencies(config: _Fields, head_dim: int) -> NDArray[np.float64]:
    block = _hf_rope_block(config)
    kind = block.values.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(f"config.json: rope type {brief(kind)} is not supported; default and llama3 are")
    if unknown := set(block.values) - _ROPE_KEYS[kind]:
        raise ConfigError(
            f"config.json: rope parameters of type {kind} hold {sorted(map(str, unknown))}, not supported"
        )
    for fields in (config, block):
        if fields.number("partial_rotary_factor", default=1.0) != 1:
            raise fields.fault("partial_rotary_factor", "only 1 is supported")
    inv_freq = _frequencies(block.number("rope_theta", default=_DEFAULT_THETA), head_dim, "config.json")
    return _llama3_scaled(inv_freq, block, config) if kind == "llama3" else inv_freq


def _gguf_frequencies(fields: _Fields, head_dim: int, factors: Sequence[float] | None) -> NDArray[np.float64]:
    kind = fields.get("llama.rope.scaling.type")
    for name in ("llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.rope.scaling.attn_factor"):
        if kind != "none" and fields.number(name, default=1.0) != 1:
            raise fields.fault(name, f"rope scaling of type {kind or 'linear'} is not supported")
    if kind not in (None, "none") and fields.get("llama.rope.scaling.factor") is None:
        raise fields.fault("llama.rope.scaling.type", "only none, or a factor of 1, is supported")
    theta = fields.number("llama.rope.freq_base", default=_DEFAULT_THETA)
    inv_freq = _frequencies(theta, head_dim, fields.where)
    if factors is None:
        return inv_freq
    divisors = np.asarray(factors, dtype=np.float64)
    if divisors.shape != inv_freq.shape or not np.all((divisors > 0) & np.isfinite(divisors)):
        raise ConfigError(f"GGUF: rope_freqs.weight must hold {len(inv_freq)} positive finite factors")
    return inv_freq / divisors


# What a Hugging Face class assumes where its config is silent.
_HF_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "mistral": {"rms_norm_eps": 1e-6, "hidden_act": "silu", "num_key_value_heads": 8, "sliding_window": 4096},
}
_HF_CLASSES: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


def _hf_model_type(fields: _Fields) -> str:
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in _HF_CLASSES:
        raise fields.fault("model_type", f"supported: {', '.join(_HF_CLASSES)}")
    if fields.get("architectures") not in (None, [], [_HF_CLASSES[name]]):
        raise fields.fault("architectures", f"supported: {_HF_CLASSES[name]}")
    return name


def _refuse_hf_variants(fields: _Fields) -> None:
    if fields.get("hidden_act") != "silu":
        raise fields.fault("hidden_act", "supported: silu")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            raise fields.fault(name, "biases are not supported")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            raise ConfigError(f"config.json: {name}: quantized checkpoints are not supported, only float ones and GGUF")


_GGUF_KEYS: Final = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count"),
    *("tensor_data_layout",),
}


def _refuse_gguf_variants(fields: _Fields) -> None:
    if fields.get("general.architecture") != "llama":
        raise fields.fault("general.architecture", "supported: llama")
    unknown = [key for key in fields.values if key.startswith("llama.") and key[len("llama.") :] not in _GGUF_KEYS]
    if unknown:
        raise fields.fault(unknown[0], "this hyperparameter is not supported")
    if fields.get("llama.expert_count") not in (None, 0):
        raise fields.fault("llama.expert_count", "mixtures of experts are not supported")
    if fields.get("split.count") not in (None, 0, 1):
        raise fields.fault("split.count", "a GGUF in several files is not supported; merge it first")


def _gguf_head_dim(fields: _Fields, width: int, heads: int) -> int:
    names = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    found = {name: fields.integer(name, _HEADS_MAX) for name in names if fields.get(name) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(f"{fields.where}: unequal head widths are not supported: {found}")
    return next(iter(found.values())) if found else _derived_head_dim(fields, width, heads)
