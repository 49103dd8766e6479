"""Canonical tensor names and shapes, their spelling in each format, and the account of what a file holds.

Invariant: after `account`, every tensor of the model is there with its shape and a type that can be decoded, and
every other tensor of the file is one that may be ignored.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hetsplit.errors import ConfigError
from hetsplit.spec import ModelSpec
from hetsplit.weights.files import StoredTensor

_HF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_LAYER: Final = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
HF_IGNORED: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
GGUF_IGNORED: Final = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names, in the order of the forward pass, with their shapes."""
    width, queries, keys = spec.width, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = {
        "attn_norm": (width,),
        "q": (queries, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, queries),
        "mlp_norm": (width,),
        "gate": (spec.intermediate, width),
        "up": (spec.intermediate, width),
        "down": (width, spec.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, width)}
    shapes |= {f"layers.{index}.{part}": shape for index in range(spec.n_layers) for part, shape in layer.items()}
    shapes |= {"norm": (width,)}
    return shapes if spec.tied_head else shapes | {"head": (spec.vocab_size, width)}


def hf_name(canonical: str) -> str:
    """How a Hugging Face Llama spells a canonical name."""
    fixed = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    if canonical in fixed:
        return fixed[canonical]
    _, index, part = canonical.split(".")
    return f"model.layers.{index}.{_HF_LAYER[part]}.weight"


def gguf_name(canonical: str) -> str:
    """How a GGUF file of architecture llama spells a canonical name."""
    fixed = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    if canonical in fixed:
        return fixed[canonical]
    _, index, part = canonical.split(".")
    return f"blk.{index}.{_GGUF_LAYER[part]}.weight"


def account(
    path: Path,
    present: Mapping[str, StoredTensor],
    wanted: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    types: frozenset[str],
    ignored: re.Pattern[str],
) -> None:
    """Prove that `present` (by stored name) holds every `wanted` tensor (canonical to stored name) and no stranger.

    Raises `ConfigError` naming the tensor that is missing, unexpected, of a wrong shape or of an unsupported type.
    """
    if missing := [name for name in wanted.values() if name not in present]:
        raise ConfigError(f"{path}: the tensor {missing[0]} is missing{_others(missing)}")
    known = set(wanted.values())
    if strangers := [name for name in present if name not in known and not ignored.fullmatch(name)]:
        raise ConfigError(
            f"{path}: unexpected tensor {strangers[0]!r}{_others(strangers)}; no part of this architecture"
        )
    for canonical, name in wanted.items():
        tensor = present[name]
        if tensor.shape != shapes[canonical]:
            raise ConfigError(f"{path}: tensor {name} has shape {tensor.shape}, the config says {shapes[canonical]}")
        if tensor.type not in types:
            raise ConfigError(
                f"{path}: tensor {name} has type {tensor.type}, not supported; supported: {', '.join(sorted(types))}"
            )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
