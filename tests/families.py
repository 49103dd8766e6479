"""Tiny random models of every supported family, and GGUF files of those that the format defines."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from tests.models import add_sizes, interleaved, write_tensors

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "tie_word_embeddings": True}
CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}

# Name: transformers' class, without its ending ForCausalLM, and fields of its config.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 11}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "gemma2": ("Gemma2", GEMMA | CAPS),
    "gemma3": ("Gemma3Text", GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "gemma2-of-gguf": ("Gemma2", GEMMA | CAPS | {"query_pre_attn_scalar": 16}),
    "gemma3-of-gguf": (
        "Gemma3Text",
        GEMMA
        | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "final_logit_softcapping": 15.0}
        | {"rope_parameters": {"sliding_attention": LOCAL_ROPE, "full_attention": LINEAR | {"rope_theta": 50000.0}}},
    ),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-as-they-are": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
# Those that GGUF defines: the architecture's name, and how its converters order q and k.
GGUF_ARCHITECTURES = {
    "llama-yarn": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "phi3": ("phi3", False),
    "phi3-window": ("phi3", False),
    "smollm3": ("smollm3", True),
    "mixtral": ("llama", True),
    "qwen3-moe": ("qwen3moe", False),
    "gemma2-of-gguf": ("gemma2", False),
    "gemma3-of-gguf": ("gemma3", False),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model, norms and biases random too, so that none can be left out."""
    kind, own = FAMILIES[name]
    config = {
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"initializer_range": 0.5, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    }
    torch.manual_seed(0)
    causal_lm = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    model: PreTrainedModel = causal_lm(getattr(transformers, f"{kind}Config")(**(config | own | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save_family_gguf(name: str, folder: Path, path: Path, fields: Callable[[GGUFWriter], None] | None = None) -> Path:
    """`folder`'s model as the GGUF file that a converter makes of it, in F32; names are the gguf package's own.

    `fields` may add metadata.
    """
    architecture, pairs = GGUF_ARCHITECTURES[name]
    config = transformers.AutoConfig.from_pretrained(folder)
    writer = GGUFWriter(path, architecture)
    add_sizes(writer, config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if local := config.rope_parameters.get("sliding_attention"):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if fields:
        fields(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if pairs else {}
    tensors = _gguf_tensors(folder, architecture, config.num_hidden_layers)
    for tensor, values in tensors.items():
        if count := heads.get(tensor.split(".")[-2]):
            tensors[tensor] = interleaved(values, count)
    return write_tensors(writer, path, tensors)


def _gguf_tensors(folder: Path, architecture: str, layers: int) -> dict[str, NDArray[np.float32]]:
    """Experts' matrices stacked, Gemma's norms whole."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    spelled = gguf.get_tensor_name_map(kind, layers)
    found: dict[str, NDArray[np.float32]] = {}
    stacks: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        before, experts, after = name.partition(".experts.")
        if experts:
            index, part = after.split(".", 1)
            stacks.setdefault(f"{before}.experts.{part}", {})[int(index)] = values
        else:
            offset = architecture in ("gemma2", "gemma3") and name.endswith("norm.weight")
            found[_spelled(spelled, name)] = values + 1 if offset else values
    for name, stack in stacks.items():
        found[_spelled(spelled, name)] = np.stack([stack[i] for i in range(len(stack))])
    return found


def _spelled(names: "gguf.TensorNameMap", name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found
