"""`ModelSpec` from GGUF metadata.

Owns the keys of each architecture, what llama.cpp assumes where a file is silent, and the refusal, by name, of what is
not supported. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Opens no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hetsplit.errors import ConfigError
from hetsplit.rope import as_rope, frequencies, yarn, yarn_scale
from hetsplit.spec import Experts, ModelSpec, Rope
from hetsplit.spec_fields import (
    CONTEXT_MAX,
    DEFAULT_THETA,
    HEADS_MAX,
    LAYERS_MAX,
    Fields,
    decimal,
    derived_head_dim,
    proven,
    token_ids,
)


@dataclass(frozen=True)
class _Architecture:
    """`interleaved`: converters write rows of q and k in pairs of neighbours."""

    interleaved: bool = False
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    unrotated_every: int = 0


_ARCHITECTURES: Final = {
    "llama": _Architecture(interleaved=True),
    "qwen2": _Architecture(biases=("q", "k", "v")),
    "qwen3": _Architecture(qk_norm=True),
    "qwen3moe": _Architecture(qk_norm=True),
    "phi3": _Architecture(),
    "smollm3": _Architecture(interleaved=True, unrotated_every=4),
}


def interleaved(architecture: str) -> bool:
    """Whether files of an architecture hold rows of q and k with each head's rotary pairs as neighbours."""
    return _ARCHITECTURES[architecture].interleaved


def spec_from_gguf(
    metadata: Mapping[str, Any], *, tied_head: bool, rope_factors: Sequence[float] | None = None
) -> ModelSpec:
    """Resolve GGUF metadata. `tied_head`: the file has no `output.weight`; `rope_factors`: `rope_freqs.weight`.

    Raises `ConfigError` naming the field that is missing, wrong or not supported. Warns about, and drops, token ids
    beyond the vocabulary.
    """
    name = metadata.get("general.architecture")
    fields = Fields(metadata, "GGUF metadata")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise fields.fault("general.architecture", f"supported: {', '.join(_ARCHITECTURES)}")
    architecture = _ARCHITECTURES[name]
    _refuse_variants(fields, name)
    heads = fields.integer(f"{name}.attention.head_count", HEADS_MAX)
    width = fields.integer(f"{name}.embedding_length")
    head_dim = _head_dim(fields, name, width, heads)
    tokens = fields.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else 0
    vocab = fields.integer(f"{name}.vocab_size", default=listed or None)
    context = fields.integer(f"{name}.context_length", CONTEXT_MAX)
    n_layers = fields.integer(f"{name}.block_count", LAYERS_MAX)
    if fields.integer(f"{name}.attention.sliding_window", CONTEXT_MAX, default=context) < context:
        allowed = f"windows of GGUF files are not supported: only {context} (the context) or more, or none"
        raise fields.fault(f"{name}.attention.sliding_window", allowed)
    experts = _experts(fields, name)
    rope = _rope(fields, name, head_dim, rope_factors)
    every = architecture.unrotated_every
    ends = [(fields.where, fields.get(f"tokenizer.ggml.{kind}_token_id")) for kind in ("eos", "eot", "eom")]
    bos = [(fields.where, fields.get("tokenizer.ggml.bos_token_id"))]
    spec = ModelSpec(
        architecture=name,
        vocab_size=vocab,
        width=width,
        intermediate=fields.integer(f"{name}.feed_forward_length"),
        n_layers=n_layers,
        heads=heads,
        kv_heads=fields.integer(f"{name}.attention.head_count_kv", HEADS_MAX, default=heads),
        head_dim=head_dim,
        norm_eps=decimal(fields.number(f"{name}.attention.layer_norm_rms_epsilon")),
        context=context,
        tied_head=tied_head,
        rotary=tuple(None if every and (layer + 1) % every == 0 else rope for layer in range(n_layers)),
        windows=(None,) * n_layers,
        bos_id=next(iter(token_ids(bos, "tokenizer.ggml.bos_token_id", vocab)), None),
        eos_ids=token_ids(ends, "tokenizer.ggml.eos_token_id", vocab),
        attention_scale=float(head_dim) ** -0.5,
        biases=architecture.biases,
        qk_norm=architecture.qk_norm,
        experts=experts,
    )
    return proven(spec, "GGUF metadata")


def _rope(fields: Fields, name: str, head_dim: int, factors: Sequence[float] | None) -> Rope:
    key = f"{name}.rope.scaling"
    kind = fields.get(f"{key}.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise fields.fault(f"{key}.type", "supported: none, linear, yarn")
    theta = fields.number(f"{name}.rope.freq_base", default=DEFAULT_THETA)
    inv_freq = frequencies(theta, head_dim)
    if factors is not None:
        divisors = np.asarray(factors, dtype=np.float64)
        if divisors.shape != inv_freq.shape or not np.all((divisors > 0) & np.isfinite(divisors)):
            raise ConfigError(f"GGUF: rope_freqs.weight must hold {len(inv_freq)} positive finite factors")
        inv_freq = inv_freq / divisors
    if kind == "none":
        return as_rope(inv_freq)
    factor = fields.number(f"{key}.factor", default=fields.number(f"{name}.rope.scale_linear", default=1.0))
    if kind != "yarn":
        if fields.number(f"{key}.attn_factor", default=1.0) != 1:
            raise fields.fault(f"{key}.attn_factor", "supported: 1, or yarn")
        return as_rope(inv_freq / factor)
    original = fields.integer(f"{key}.original_context_length", CONTEXT_MAX)
    fast = fields.number(f"{key}.yarn_beta_fast", default=32)
    slow = fields.number(f"{key}.yarn_beta_slow", default=1)
    scale = yarn_scale(factor) * fields.number(f"{key}.attn_factor", default=1.0)
    return as_rope(yarn(inv_freq, theta, factor, original, fast, slow), scale)


def _experts(fields: Fields, name: str) -> Experts | None:
    count = fields.get(f"{name}.expert_count")
    if count in (None, 0):
        return None
    total = fields.integer(f"{name}.expert_count", HEADS_MAX)
    width = f"{name}.expert_feed_forward_length"
    return Experts(
        count=total,
        used=fields.integer(f"{name}.expert_used_count", total),
        intermediate=fields.integer(width if fields.get(width) is not None else f"{name}.feed_forward_length"),
        normed=True,  # llama.cpp norms them in every architecture of these
    )


_KEYS: Final = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "tensor_data_layout"),
}


def _refuse_variants(fields: Fields, name: str) -> None:
    prefix = f"{name}."
    unknown = [key for key in fields.values if key.startswith(prefix) and key[len(prefix) :] not in _KEYS]
    if unknown:
        raise fields.fault(unknown[0], "this hyperparameter is not supported")
    if fields.get("split.count") not in (None, 0, 1):
        raise fields.fault("split.count", "a GGUF in several files is not supported; merge it first")


def _head_dim(fields: Fields, name: str, width: int, heads: int) -> int:
    names = (f"{name}.attention.key_length", f"{name}.attention.value_length", f"{name}.rope.dimension_count")
    found = {key: fields.integer(key, HEADS_MAX) for key in names if fields.get(key) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(f"{fields.where}: unequal head widths are not supported: {found}")
    return next(iter(found.values())) if found else derived_head_dim(fields, width, heads)
