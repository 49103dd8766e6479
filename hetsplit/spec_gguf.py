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
class _Windows:
    """All layers have one but every `full_every`-th (0: all have).

    `silent`: the window of a file that states none, 0 for no window, None where each file has to. `theta`: layers with
    a window rotate by a base of their own, which is this one where a file states none, and without scaling.
    """

    full_every: int
    silent: int | None
    theta: float | None = None


@dataclass(frozen=True)
class _Architecture:
    """`interleaved`: converters write rows of q and k in pairs of neighbours.

    `reads`: the keys that this one has and some other does not. `wide_layers`: a model of so many layers scales scores
    by its width for each head, others by the width of a head. Caps are those of a silent file.
    """

    interleaved: bool = False
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    unrotated_every: int = 0
    windows: _Windows | None = None
    reads: tuple[str, ...] = ()
    activation: str = "silu"
    post_norms: bool = False
    scaled_embedding: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    wide_layers: int = 0


_PATTERN: Final = "attention.sliding_window_pattern"
_ARCHITECTURES: Final = {
    "llama": _Architecture(interleaved=True),
    "qwen2": _Architecture(biases=("q", "k", "v")),
    "qwen3": _Architecture(qk_norm=True),
    "qwen3moe": _Architecture(qk_norm=True),
    # llama.cpp computes it without its windows; the model itself has them, and converters always write the key.
    "phi3": _Architecture(windows=_Windows(full_every=0, silent=None)),
    "smollm3": _Architecture(interleaved=True, unrotated_every=4),
    "gemma2": _Architecture(
        windows=_Windows(full_every=2, silent=4096),
        reads=(_PATTERN, "attn_logit_softcapping", "final_logit_softcapping"),
        activation="gelu_tanh",
        post_norms=True,
        scaled_embedding=True,
        attention_cap=50.0,
        logit_cap=30.0,
        wide_layers=46,
    ),
    "gemma3": _Architecture(
        qk_norm=True,
        windows=_Windows(full_every=6, silent=0, theta=10000.0),
        reads=(_PATTERN, "final_logit_softcapping", "rope.freq_base_swa"),
        activation="gelu_tanh",
        post_norms=True,
        scaled_embedding=True,
        wide_layers=62,
    ),
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
    _refuse_variants(fields, name, architecture)
    heads = fields.integer(f"{name}.attention.head_count", HEADS_MAX)
    width = fields.integer(f"{name}.embedding_length")
    head_dim = _head_dim(fields, name, width, heads)
    tokens = fields.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else 0
    vocab = fields.integer(f"{name}.vocab_size", default=listed or None)
    context = fields.integer(f"{name}.context_length", CONTEXT_MAX)
    n_layers = fields.integer(f"{name}.block_count", LAYERS_MAX)
    window, sliding = _windows(fields, name, architecture.windows, context, n_layers)
    experts = _experts(fields, name)
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
        rotary=_rotary(fields, name, architecture, head_dim, rope_factors, sliding),
        windows=tuple(window if slides else None for slides in sliding),
        bos_id=next(iter(token_ids(bos, "tokenizer.ggml.bos_token_id", vocab)), None),
        eos_ids=token_ids(ends, "tokenizer.ggml.eos_token_id", vocab),
        attention_scale=float(width // heads if n_layers == architecture.wide_layers else head_dim) ** -0.5,
        activation=architecture.activation,
        biases=architecture.biases,
        qk_norm=architecture.qk_norm,
        post_norms=architecture.post_norms,
        attention_cap=_cap(fields, f"{name}.attn_logit_softcapping", architecture.attention_cap),
        logit_cap=_cap(fields, f"{name}.final_logit_softcapping", architecture.logit_cap),
        embed_scale=width**0.5 if architecture.scaled_embedding else 1.0,
        experts=experts,
    )
    return proven(spec, "GGUF metadata")


def _windows(
    fields: Fields, name: str, rule: _Windows | None, context: int, n_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window, None for one of the whole context, and which layers have it."""
    key = f"{name}.attention.sliding_window"
    low = 1 if rule and rule.silent else 0  # where silence means a window, 0 does not mean none
    stated = fields.integer(key, CONTEXT_MAX, low=low, default=rule.silent if rule else 0)
    window = stated if stated < context else None
    if rule is None:
        if window:
            raise fields.fault(
                key, f"{name} files define no windows: only 0 (none), or {context} (the context) or more"
            )
        return None, (False,) * n_layers
    every = fields.integer(f"{name}.{_PATTERN}", low=0, default=rule.full_every)
    return window, tuple(stated > 0 and (every == 0 or (layer + 1) % every != 0) for layer in range(n_layers))


def _rotary(
    fields: Fields,
    name: str,
    architecture: _Architecture,
    head_dim: int,
    factors: Sequence[float] | None,
    sliding: tuple[bool, ...],
) -> tuple[Rope | None, ...]:
    """One entry per layer."""
    theta = architecture.windows.theta if architecture.windows else None
    kinds = ("none", "linear", "yarn") if theta is None else ("none", "linear")
    everywhere = local = _rope(fields, name, head_dim, factors, kinds)
    if theta is not None:
        local = as_rope(frequencies(fields.number(f"{name}.rope.freq_base_swa", default=theta), head_dim))
    every = architecture.unrotated_every
    ropes = [local if slides else everywhere for slides in sliding]
    return tuple(None if every and layer % every == 0 else rope for layer, rope in enumerate(ropes, 1))


def _rope(fields: Fields, name: str, head_dim: int, factors: Sequence[float] | None, kinds: tuple[str, ...]) -> Rope:
    key = f"{name}.rope.scaling"
    kind = fields.get(f"{key}.type")
    if kind not in (None, *kinds):
        raise fields.fault(f"{key}.type", f"supported: {', '.join(kinds)}")
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


def _cap(fields: Fields, key: str, silent: float | None) -> float | None:
    return silent if fields.get(key) is None else decimal(fields.number(key))


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


def _refuse_variants(fields: Fields, name: str, architecture: _Architecture) -> None:
    known = {f"{name}.{key}" for key in (*_KEYS, *architecture.reads)}
    unknown = [key for key in fields.values if key.startswith(f"{name}.") and key not in known]
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
