"""`ModelSpec` from a Hugging Face `config.json`.

Owns the families' field names, what each class assumes where a config is silent, and the refusal, by name, of what is
not supported. A family is one entry of `_FAMILIES`, and what its config says in words of its own. Opens no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetsplit.errors import ConfigError, brief
from hetsplit.rope import Frequencies, as_rope, frequencies, llama3, yarn, yarn_scale
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

_ACTIVATIONS: Final = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class _Family:
    """`causal_lm` is the class that a config names; `silent` holds what that class assumes.

    `reads`: the fields that this class reads and some other does not.
    """

    causal_lm: str
    architecture: str
    silent: Mapping[str, Any]
    reads: tuple[str, ...]
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False


_LLAMA: Final = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN: Final = _LLAMA | {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False}
_GEMMA: Final = {
    **{"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256},
    **{"query_pre_attn_scalar": 256, "num_key_value_heads": 4, "sliding_window": 4096},
}
_QWEN_READS: Final = ("hidden_act", "sliding_window", "use_sliding_window")
_GEMMA_READS: Final = (
    *("attention_bias", "final_logit_softcapping", "hidden_activation", "layer_types", "query_pre_attn_scalar"),
    "sliding_window",
)
_FAMILIES: Final = {
    "llama": _Family("LlamaForCausalLM", "llama", _LLAMA, reads=("attention_bias", "hidden_act", "mlp_bias")),
    "mistral": _Family(
        "MistralForCausalLM",
        "llama",
        _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096},
        reads=("hidden_act", "sliding_window"),
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN | {"max_window_layers": 28},
        reads=(*_QWEN_READS, "layer_types", "max_window_layers"),
        biases=("q", "k", "v"),
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _QWEN | {"head_dim": 128, "max_window_layers": 28},
        reads=(*_QWEN_READS, "attention_bias", "layer_types", "max_window_layers"),
        qk_norm=True,
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        "phi3",
        {"rms_norm_eps": 1e-5, "hidden_act": "silu"},
        reads=("hidden_act", "sliding_window"),
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        _LLAMA
        | {"num_key_value_heads": 4, "default_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True}
        | {"use_sliding_window": False},
        reads=(
            *("attention_bias", "hidden_act", "layer_types", "mlp_bias", "no_rope_layer_interval", "no_rope_layers"),
            *("sliding_window", "use_sliding_window"),
        ),
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=(*_GEMMA_READS, "attn_logit_softcapping"),
        post_norms=True,
        scaled_embedding=True,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        "gemma3",
        _GEMMA,
        reads=(*_GEMMA_READS, "rope_local_base_freq", "sliding_window_pattern"),
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        "llama",
        {"rms_norm_eps": 1e-5, "hidden_act": "silu", "num_key_value_heads": 8, "default_theta": 1e6}
        | {"num_experts": 8, "num_experts_per_tok": 2},
        reads=("hidden_act", "num_experts", "num_experts_per_tok", "num_local_experts", "sliding_window"),
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        _QWEN
        | {"num_key_value_heads": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8},
        reads=(
            *(*_QWEN_READS, "attention_bias", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"),
            *("norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"),
        ),
        qk_norm=True,
    ),
}
_SWITCHES: Final = frozenset(name for family in _FAMILIES.values() for name in family.reads)
MODEL_TYPES: Final = tuple(_FAMILIES)
"""The values of `model_type` that are supported."""


def spec_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Resolve a Hugging Face `config.json` and, for more end ids, a `generation_config.json`.

    Raises `ConfigError` naming the field that is missing, wrong or not supported. Warns about, and drops, token
    ids beyond the vocabulary.
    """
    fields = Fields(config, "config.json")
    model_type = _model_type(fields)
    family = _FAMILIES[model_type]
    read = {name: value for name, value in config.items() if name in family.reads or name not in _SWITCHES}
    _refuse_variants(Fields(read, "config.json"))
    fields = Fields({**family.silent, **read}, "config.json")
    heads = fields.integer("num_attention_heads", HEADS_MAX)
    width = fields.integer("hidden_size")
    stated = fields.get("head_dim") is not None
    head_dim = fields.integer("head_dim", HEADS_MAX) if stated else derived_head_dim(fields, width, heads)
    vocab = fields.integer("vocab_size")
    context = fields.integer("max_position_embeddings", CONTEXT_MAX)
    n_layers = fields.integer("num_hidden_layers", LAYERS_MAX)
    sliding = _sliding(fields, n_layers)
    stated_window = fields.integer("sliding_window", CONTEXT_MAX) if any(sliding) else context
    window = stated_window if stated_window < context else None  # one of the whole context is none
    ends = [(fields.where, fields.get("eos_token_id"))]
    if generation_config:
        ends.append(("generation_config.json", generation_config.get("eos_token_id")))
    spec = ModelSpec(
        architecture=family.architecture,
        vocab_size=vocab,
        width=width,
        intermediate=fields.integer("intermediate_size"),
        n_layers=n_layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", HEADS_MAX, default=heads),
        head_dim=head_dim,
        norm_eps=decimal(fields.number("rms_norm_eps")),
        context=context,
        tied_head=fields.flag("tie_word_embeddings"),
        rotary=_rotary(fields, head_dim, sliding),
        windows=tuple(window if slides else None for slides in sliding),
        bos_id=next(iter(token_ids([(fields.where, fields.get("bos_token_id"))], "bos_token_id", vocab)), None),
        eos_ids=token_ids(ends, "eos_token_id", vocab),
        attention_scale=fields.number("query_pre_attn_scalar", default=float(head_dim)) ** -0.5,
        activation=_activation(fields),
        biases=_biases(fields, family),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        attention_cap=_cap(fields, "attn_logit_softcapping"),
        logit_cap=_cap(fields, "final_logit_softcapping"),
        embed_scale=width**0.5 if family.scaled_embedding else 1.0,
        experts=_experts(fields),
    )
    return proven(spec, "config.json")


def _model_type(fields: Fields) -> str:
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise fields.fault("model_type", f"supported: {', '.join(_FAMILIES)}")
    causal_lm = _FAMILIES[name].causal_lm
    if fields.get("architectures") not in (None, [], [causal_lm]):
        raise fields.fault("architectures", f"supported: {causal_lm}")
    return name


def _refuse_variants(fields: Fields) -> None:
    if fields.flag("use_bidirectional_attention"):
        raise fields.fault("use_bidirectional_attention", "supported: false")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            raise ConfigError(f"config.json: {name}: quantized checkpoints are not supported, only float ones and GGUF")
    experts = fields.get("num_local_experts")
    if experts is not None and fields.get("num_experts") not in (None, experts):
        raise fields.fault("num_experts", f"num_local_experts is {brief(experts)}")


def _activation(fields: Fields) -> str:
    name = "hidden_activation" if fields.get("hidden_activation") is not None else "hidden_act"
    value = fields.get(name)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise fields.fault(name, f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _biases(fields: Fields, family: _Family) -> tuple[str, ...]:
    found = dict.fromkeys(family.biases)
    if fields.flag("attention_bias"):
        found |= dict.fromkeys(("q", "k", "v", "o"))
    if fields.flag("mlp_bias"):
        found |= dict.fromkeys(("gate", "up", "down"))
    return tuple(found)


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else fields.number(name)


def _experts(fields: Fields) -> Experts | None:
    """Mixtral's experts are as wide as its `intermediate_size`, and always normed."""
    mixtral = fields.get("model_type") == "mixtral"
    count = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    if fields.get(count) is None:
        return None
    if fields.get("mlp_only_layers") not in (None, []):
        raise fields.fault("mlp_only_layers", "supported: [] or null")
    if fields.integer("decoder_sparse_step", default=1) != 1:
        raise fields.fault("decoder_sparse_step", "supported: 1")
    total = fields.integer(count, HEADS_MAX)
    return Experts(
        count=total,
        used=fields.integer("num_experts_per_tok", total),
        intermediate=fields.integer("intermediate_size" if mixtral else "moe_intermediate_size"),
        normed=mixtral or fields.flag("norm_topk_prob"),
    )


def _sliding(fields: Fields, n_layers: int) -> tuple[bool, ...]:
    """Which layers have a window: as `layer_types` says, or as the class makes it up where it is silent."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in known for kind in kinds):
            raise fields.fault("layer_types", f"a list of {n_layers} is allowed, each one of: {', '.join(known)}")
        if any(known[kind] for kind in kinds) and fields.values.get("use_sliding_window", True) is False:
            raise fields.fault("layer_types", "only full_attention is allowed where use_sliding_window is false")
        return tuple(known[kind] for kind in kinds)
    if fields.get("sliding_window") is None or fields.values.get("use_sliding_window", True) is False:
        return (False,) * n_layers
    model_type = fields.get("model_type")
    if model_type == "smollm3":
        return tuple(not rotates for rotates in _rotated(fields, n_layers))
    if model_type == "gemma2":
        return tuple(layer % 2 == 0 for layer in range(n_layers))
    if model_type == "gemma3_text":
        every = fields.integer("sliding_window_pattern", default=6)
        return tuple((layer + 1) % every != 0 for layer in range(n_layers))
    first = fields.integer("max_window_layers") if fields.get("max_window_layers") is not None else 0
    return tuple(layer >= first for layer in range(n_layers))


def _rotary(fields: Fields, head_dim: int, sliding: tuple[bool, ...]) -> tuple[Rope | None, ...]:
    """One entry per layer. Gemma 3 rotates layers with a window faster; SmolLM3 leaves some layers out."""
    if fields.get("model_type") == "gemma3_text":
        local, everywhere = _gemma3_ropes(fields, head_dim)
        return tuple(local if slides else everywhere for slides in sliding)
    rope = _rope(_rope_block(fields), fields, head_dim)
    return tuple(rope if rotates else None for rotates in _rotated(fields, len(sliding)))


def _rotated(fields: Fields, n_layers: int) -> tuple[bool, ...]:
    flags = fields.get("no_rope_layers")  # which do have it, whatever the name says
    if flags is not None:
        if not isinstance(flags, list) or len(flags) != n_layers or any(flag not in (0, 1) for flag in flags):
            raise fields.fault("no_rope_layers", f"a list of {n_layers} is allowed, 1 for a layer with RoPE, or 0")
        return tuple(bool(flag) for flag in flags)
    if fields.get("no_rope_layer_interval") is None:
        return (True,) * n_layers
    every = fields.integer("no_rope_layer_interval")
    return tuple((layer + 1) % every != 0 for layer in range(n_layers))


def _gemma3_ropes(fields: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """For layers with a window and without; newer configs keep a block for each kind."""
    blocks = fields.get("rope_parameters")
    nested = isinstance(blocks, dict) and any(isinstance(block, dict) for block in blocks.values())
    local = {"rope_theta": fields.get("rope_local_base_freq") or 1e4}
    everywhere = {"rope_theta": fields.get("rope_theta") or 1e6}
    if nested:
        local |= blocks.get("sliding_attention") or {}
        everywhere |= blocks.get("full_attention") or {}
    elif blocks is not None:
        raise fields.fault("rope_parameters", "an object with sliding_attention and full_attention is allowed")
    if fields.get("rope_scaling") is not None and not nested:
        everywhere |= _merged(fields, {"rope_scaling": fields.get("rope_scaling")})
    where = "config.json rope parameters"
    ropes = [_rope(Fields(block, where), fields, head_dim) for block in (local, everywhere)]
    return ropes[0], ropes[1]


_ROPE_KEYS: Final = {"rope_type", "rope_theta", "partial_rotary_factor"}
_KNOWN_ROPES: Final = {
    "default": _ROPE_KEYS,
    "linear": _ROPE_KEYS | {"factor"},
    "llama3": _ROPE_KEYS | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _ROPE_KEYS
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"},
}


def _merged(config: Fields, sources: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
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
    return merged


def _rope_block(config: Fields) -> Fields:
    """All spellings of the rope block as one: `rope_scaling` or `rope_parameters`, with `rope_type` or `type`."""
    sources = {"config": {"rope_theta": config.get("rope_theta")}}
    sources |= {name: config.get(name) for name in ("rope_scaling", "rope_parameters")}
    return Fields(_merged(config, sources), "config.json rope parameters")


def _rope(block: Fields, config: Fields, head_dim: int) -> Rope:
    kind = block.values.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _KNOWN_ROPES:
        raise ConfigError(f"config.json: rope type {brief(kind)} is not supported; {', '.join(_KNOWN_ROPES)} are")
    if unknown := set(block.values) - _KNOWN_ROPES[kind]:
        raise ConfigError(
            f"config.json: rope parameters of type {kind} hold {sorted(map(str, unknown))}, not supported"
        )
    for fields in (config, block):
        if fields.number("partial_rotary_factor", default=1.0) != 1:
            raise fields.fault("partial_rotary_factor", "only 1 is supported")
    theta = block.number("rope_theta", default=config.number("default_theta", default=DEFAULT_THETA))
    return _scaled(kind, frequencies(theta, head_dim), theta, block, config)


def _scaled(kind: str, inv_freq: Frequencies, theta: float, block: Fields, config: Fields) -> Rope:
    if kind == "default":
        return as_rope(inv_freq)
    factor = block.number("factor")
    if kind == "linear":
        return as_rope(inv_freq / factor)
    name = "original_max_position_embeddings"
    holder = block if block.get(name) is not None else config
    context = config.integer("max_position_embeddings") if kind == "yarn" else None
    original = holder.integer(name, CONTEXT_MAX, default=context)
    if kind == "llama3":
        low, high = (block.number(name) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise block.fault("high_freq_factor", f"more than low_freq_factor ({low}) is allowed")
        return as_rope(llama3(inv_freq, factor, low, high, original))
    if block.get("truncate") not in (None, True):
        raise block.fault("truncate", "supported: true")
    fast, slow = block.number("beta_fast", default=32), block.number("beta_slow", default=1)
    scale = block.number("attention_factor", default=yarn_scale(factor))
    return as_rope(yarn(inv_freq, theta, factor, original, fast, slow), scale)
