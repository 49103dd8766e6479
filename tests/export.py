"""The model of a GGUF file as a Hugging Face folder, for engines that read no GGUF."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.decoders import ByteLevel

from hetsplit.spec import ModelSpec
from hetsplit.tokenizer_gguf import read_gguf_metadata
from hetsplit.weights import open_checkpoint
from hetsplit.weights.gguf import read_gguf
from hetsplit.weights.names import hf_name


def export_folder(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Weights rounded to `dtype`, config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(path)
    tensors = {hf_name(name, checkpoint.spec): tensor.to(dtype).clone() for name, tensor in checkpoint.tensors()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    metadata = read_gguf(path).metadata
    config = hf_config(checkpoint.spec, metadata["llama.rope.freq_base"]) | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = read_gguf_metadata(metadata)
    if vocabulary is not None:
        vocabulary.backend.decoder = ByteLevel()  # ours is built without one
        vocabulary.backend.save(str(folder / "tokenizer.json"))
        names = {"chat_template": vocabulary.template} | dict(vocabulary.names)
        (folder / "tokenizer_config.json").write_text(json.dumps(names | {"add_bos_token": bool(vocabulary.prefix)}))
    return folder


def hf_config(spec: ModelSpec, rope_theta: float) -> dict[str, Any]:
    """A Llama's config.json, with plain RoPE."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied_head,
        "rope_theta": rope_theta,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids),
        "hidden_act": "silu",
    }
