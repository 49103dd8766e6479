"""Resolving configs and GGUF metadata: spellings agree, and what is not supported is refused by name."""

from typing import Any

import numpy as np
import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hetsplit.errors import ConfigError
from hetsplit.spec import DType, KvLayer, ModelSpec
from hetsplit.spec_gguf import spec_from_gguf
from hetsplit.spec_hf import MODEL_TYPES, spec_from_hf
from tests.models import LLAMA3_ROPE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 90,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 97,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 90,
}
LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


def hf(changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> ModelSpec:
    return spec_from_hf(CONFIG | (changes or {}), generation)


def from_gguf(changes: dict[str, Any] | None = None, **options: Any) -> ModelSpec:
    return spec_from_gguf(GGUF | (changes or {}), **({"tied_head": False} | options))


def test_facts_of_a_llama() -> None:
    spec = hf()
    assert (spec.architecture, spec.vocab_size, spec.width, spec.intermediate) == ("llama", 97, 32, 64)
    assert (spec.n_layers, spec.heads, spec.kv_heads, spec.head_dim) == (2, 4, 2, 8)
    assert (spec.norm_eps, spec.context, spec.tied_head, spec.bos_id, spec.eos_ids) == (1e-5, 256, False, 1, (90,))
    assert spec.layout(DType.BFLOAT16).layers == (KvLayer(2, 8),) * 2


def test_one_model_has_one_spec_whatever_the_container() -> None:
    assert from_gguf() == hf()
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert hf(mistral) == hf()
    assert hf(mistral | {"sliding_window": 256}) == hf()


def test_kv_heads_default_to_heads_unless_the_class_says_otherwise() -> None:
    silent = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert spec_from_hf(silent).kv_heads == 4
    mistral = silent | {"model_type": "mistral", "architectures": None, "num_attention_heads": 16, "hidden_size": 64}
    assert spec_from_hf(mistral | {"sliding_window": None}).kv_heads == MistralConfig().num_key_value_heads == 8
    assert from_gguf({"llama.attention.head_count_kv": None}).kv_heads == 4


def test_a_mistral_config_that_is_silent_about_its_window_has_the_class_default() -> None:
    mistral = {"model_type": "mistral", "architectures": None, "max_position_embeddings": 8192}
    assert hf(mistral).windows == (MistralConfig().sliding_window,) * 2 == (4096, 4096)
    assert hf(mistral).layout(DType.FLOAT32).layers == (KvLayer(2, 8, 4096),) * 2


SILENT: dict[str, type[PreTrainedConfig]] = {
    **{"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "phi3": Phi3Config},
    **{"smollm3": SmolLM3Config, "gemma2": Gemma2Config, "gemma3_text": Gemma3TextConfig, "mixtral": MixtralConfig},
    "qwen3_moe": Qwen3MoeConfig,
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_a_silent_config_means_is_what_its_class_assumes(model_type: str) -> None:
    """A config of sizes alone gives the spec of the config that transformers completes from it."""
    sizes = {"vocab_size": 300000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 14}
    sizes |= {"num_attention_heads": 32, "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None}
    written = SILENT[model_type](**sizes).to_dict()
    assert spec_from_hf({"model_type": model_type, **sizes}) == spec_from_hf(written)


def test_layers_of_a_kind_of_their_own() -> None:
    gemma = {"model_type": "gemma2", "architectures": None, "sliding_window": 16}
    assert hf(gemma | {"num_hidden_layers": 4}).windows == (16, None, 16, None)
    three = hf(gemma | {"model_type": "gemma3_text", "num_hidden_layers": 7, "rope_local_base_freq": 100.0})
    assert three.windows == (16, 16, 16, 16, 16, None, 16)
    assert [rope.inv_freq[-1] for rope in three.rotary[4:6]] == pytest.approx([100**-0.992, 1e6**-0.992], rel=1e-2)
    smol = hf({"model_type": "smollm3", "architectures": None, "num_hidden_layers": 5})
    assert [rope is None for rope in smol.rotary] == [False, False, False, True, False]
    assert hf(gemma | {"layer_types": ["full_attention", "sliding_attention"]}).windows == (None, 16)
    assert hf({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}) == hf()


# Rotary embedding.


def reference_frequencies(rope: dict[str, Any]) -> np.ndarray:
    config = LlamaConfig(
        **{key: CONFIG[key] for key in ("hidden_size", "num_attention_heads")},
        max_position_embeddings=256,
        rope_parameters=rope,
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None)[0].numpy()


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 10000.0, "rope_scaling": LLAMA3},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "llama3", **{k: LLAMA3[k] for k in LLAMA3 if k != "rope_type"}},
        },
        {"rope_theta": 10000.0, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 10000, "rope_parameters": LLAMA3},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}, "original_max_position_embeddings": 64},
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3_ROPE},
    ],
)
def test_llama3_scaling_in_every_spelling(spelling: dict[str, Any]) -> None:
    wanted = reference_frequencies(dict(LLAMA3_ROPE))
    np.testing.assert_allclose(hf(spelling).rotary[0].inv_freq, wanted, rtol=1e-6)
    assert not np.allclose(hf().rotary[0].inv_freq, wanted, rtol=1e-2)  # the scaling acts at this size


@pytest.mark.parametrize("head_dim", [2, 64, 128])
@pytest.mark.parametrize("factors", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 0.5, 2.0, 100)])
def test_llama3_scaling_at_real_sizes(head_dim: int, factors: tuple[float, float, float, int]) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **dict(zip(names, factors, strict=True))}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=dict(rope))
    wanted = ROPE_INIT_FUNCTIONS["llama3"](config, None)[0].numpy()
    found = hf({"head_dim": head_dim, "rope_parameters": rope}).rotary[0].inv_freq
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_gguf_factors_divide_the_frequencies() -> None:
    plain = np.array(from_gguf().rotary[0].inv_freq)
    wanted = reference_frequencies(dict(LLAMA3_ROPE))
    found = from_gguf(rope_factors=(plain / wanted).astype(np.float32).tolist()).rotary[0].inv_freq
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_default_frequencies_and_where_theta_is_read() -> None:
    assert hf().rotary[0].inv_freq == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)
    for spelling in ({"rope_theta": 100.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}):
        assert hf(spelling).rotary[0].inv_freq == pytest.approx([1.0, 100**-0.25, 0.1, 100**-0.75], rel=1e-6)
    assert from_gguf({"llama.rope.freq_base": 100.0}) == hf({"rope_theta": 100})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}, YARN, YARN | {"beta_fast": 8, "beta_slow": 2}],
)
def test_stretched_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    (found, *_) = hf({"rope_parameters": rope, "head_dim": 64}).rotary
    config = LlamaConfig(head_dim=64, max_position_embeddings=256, rope_parameters=dict(rope))
    wanted, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None)
    np.testing.assert_allclose(found.inv_freq, wanted.numpy(), rtol=1e-6)
    assert found.scale == pytest.approx(scale, rel=1e-6) and (scale != 1) == (rope["rope_type"] == "yarn")


def test_yarn_is_the_same_from_either_container() -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    found = from_gguf({f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert found == hf({"rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}})
    wanted = hf({"rope_parameters": YARN | {"attention_factor": 2.5}}).rotary[0].scale
    assert wanted == 2.5
    linear = hf({"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert from_gguf({"llama.rope.scaling.factor": 2.0}) == linear
    assert from_gguf({"llama.rope.scale_linear": 2.0}) == linear


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su", "proportional", 3, ["llama3"]])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_unknown_rope_types_are_refused_by_name(kind: object, block: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hf({block: {key: kind, "factor": 2.0}})
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"factor": 8.0}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"mscale": 1.0}}, "mscale"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor is missing"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor is '8'"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor is 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor is 4.0"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, "original_max_position_embeddings"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'"),
        ({"rope_scaling": {"type": "llama3", "rope_type": "default"}}, "rope_type"),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0}}, "factor"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    ],
)
def test_faulty_rope_blocks_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hf(changes)
    assert words in str(caught.value)


# Refusals.


GEMMA2, MISTRAL, MIXTRAL, QWEN3_MOE, SMOLLM3 = (
    {"model_type": name, "architectures": None} for name in ("gemma2", "mistral", "mixtral", "qwen3_moe", "smollm3")
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaModel"]}, "architectures"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (GEMMA2 | {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; a list of 2"),
        (GEMMA2 | {"layer_types": ["full_attention", "linear_attention"]}, "sliding_attention"),
        (SMOLLM3 | {"layer_types": ["sliding_attention"] * 2}, "where use_sliding_window is false"),
        (MIXTRAL | {"num_local_experts": 8, "num_experts": 4}, "num_experts is 4; num_local_experts is 8"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}, "truncate is False"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "no_rope_layers is [1]; a list of 2"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (QWEN3_MOE | {"num_experts": 4}, "num_experts_per_tok is 8"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "bidirectional"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "width 32 is no multiple of 5"),
        ({"head_dim": 7}, "head width is 7"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"vocab_size": "97"}, "vocab_size is '97'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; an integer from 1 to 4096"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [1, [2]]}, "eos_token_id is [1, [2]]"),
        ({"bos_token_id": True}, "bos_token_id is True"),
    ],
)
def test_configs_that_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hf(changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        "max_position_embeddings",
    ],
)
def test_missing_config_fields_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: the required field {name} is missing"):
        spec_from_hf({key: value for key, value in CONFIG.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture is 'gpt2'; supported: llama, qwen2"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale is 2.0"),
        ({"split.count": 3}, "split.count is 3"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "original_context_length is missing"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0"),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, "unequal head widths"),
        ({"llama.attention.key_length": 16}, "unequal head widths"),
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "unequal head widths"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count is [4, 4]"),
        ({"llama.attention.head_count_kv": 3}, "4 heads are no multiple of 3"),
        ({"llama.attention.sliding_window": 128}, "llama.attention.sliding_window is 128"),
        ({"llama.vocab_size": None}, "llama.vocab_size is missing"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
    ],
)
def test_gguf_metadata_that_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_gguf(changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("factors", [[1.0], [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, float("nan"), 1.0], [1.0, 1.0, 1.0, -1.0]])
def test_faulty_rope_factors_are_refused(factors: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs.weight must hold 4 positive"):
        from_gguf(rope_factors=factors)


def test_rope_scaling_that_does_nothing_is_accepted() -> None:
    for changes in (
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
    ):
        assert from_gguf(changes) == from_gguf()


def test_the_head_width_is_read_where_it_is_stated() -> None:
    assert hf({"head_dim": 16}).head_dim == 16
    assert hf({"head_dim": None}).head_dim == 8
    lengths = {"llama.attention.key_length": 16, "llama.attention.value_length": 16, "llama.rope.dimension_count": 16}
    assert from_gguf(lengths) == hf({"head_dim": 16})
    assert from_gguf({"llama.rope.dimension_count": None}).head_dim == 8
    assert hf({"head_dim": 16}).layout(DType.FLOAT32).span_bytes(40) == 2 * 2 * 2 * 40 * 16 * 4


def test_a_gguf_without_vocab_size_counts_its_tokens() -> None:
    tokens = {"llama.vocab_size": None, "tokenizer.ggml.tokens": [str(i) for i in range(97)]}
    assert from_gguf(tokens).vocab_size == 97


# End ids.


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        (90, {"eos_token_id": [84, 90]}, (84, 90)),
        (None, {"eos_token_id": 84}, (84,)),
        ([90, 84], None, (84, 90)),
        (90, {}, (90,)),
        (90, {"eos_token_id": None}, (90,)),
        (None, None, ()),
        ([], {"eos_token_id": []}, ()),
        (0, None, (0,)),
    ],
)
def test_end_ids_are_the_union_of_both_files(config: object, generation: Any, wanted: tuple[int, ...]) -> None:
    assert hf({"eos_token_id": config}, generation).eos_ids == wanted


def test_gguf_end_ids_of_every_kind() -> None:
    more = {"tokenizer.ggml.eot_token_id": 84, "tokenizer.ggml.eom_token_id": 90}
    assert from_gguf(more).eos_ids == (84, 90)
    assert from_gguf({"tokenizer.ggml.eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize("bad", [97, 10**6, -1])
def test_ids_beyond_the_vocabulary_are_dropped_with_a_warning(bad: int) -> None:
    with pytest.warns(UserWarning, match=rf"eos_token_id {bad} is dropped: the vocabulary is 0 to 96"):
        assert hf({"eos_token_id": [84, bad]}).eos_ids == (84,)
    with pytest.warns(UserWarning, match=f"generation_config.json: eos_token_id {bad}"):
        assert hf({}, {"eos_token_id": bad}).eos_ids == (90,)
    with pytest.warns(UserWarning, match=f"bos_token_id {bad}"):
        assert hf({"bos_token_id": bad}).bos_id is None
    with pytest.warns(UserWarning, match=f"eos_token_id {bad}"):
        assert from_gguf({"tokenizer.ggml.eos_token_id": bad}).eos_ids == ()


def test_a_wrong_kind_of_id_in_the_generation_config_names_that_file() -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is 'x'"):
        hf({}, {"eos_token_id": "x"})
