"""Canonical tensor names and shapes, their spelling in each format, and the account of what a file holds.

Invariant: after `account`, every tensor of the model is there with its shape and a type that can be decoded, and
every other tensor of the file is one that may be ignored.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
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
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}
# Where what attention gives is normed, the MLP's own norm takes another name.
_HF_POST_NORMS: Final = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_HF_MIXTRAL: Final = {"gate": "w1", "up": "w3", "down": "w2"}
_GGUF_LAYER: Final = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}
HF_IGNORED: Final = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
GGUF_IGNORED: Final = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")

MLP: Final = ("gate", "up", "down")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names, in the order of the forward pass, with their shapes."""
    width, queries, keys = spec.width, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    routed = spec.experts
    inner = routed.intermediate if routed else spec.intermediate
    mlp = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    matrices: dict[str, tuple[int, ...]] = {"q": (queries, width), "k": (keys, width), "v": (keys, width)}
    matrices |= {"o": (width, queries)} | ({} if routed else mlp)
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (width,)} | matrices | {"mlp_norm": (width,)}
    layer |= {f"{part}_bias": matrices[part][:1] for part in spec.biases}
    if spec.qk_norm:
        layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.post_norms:
        layer |= {"attn_post_norm": (width,), "mlp_post_norm": (width,)}
    if routed:
        layer |= {"router": (routed.count, width)}
        layer |= {f"experts.{i}.{part}": shape for i in range(routed.count) for part, shape in mlp.items()}
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, width)}
    shapes |= {f"layers.{index}.{part}": shape for index in range(spec.n_layers) for part, shape in layer.items()}
    shapes |= {"norm": (width,)}
    return shapes if spec.tied_head else shapes | {"head": (spec.vocab_size, width)}


def hf_name(canonical: str, spec: ModelSpec) -> str:
    """How a Hugging Face folder spells a canonical name."""
    fixed = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    if canonical in fixed:
        return fixed[canonical]
    _, index, part = canonical.split(".", 2)
    layer = f"model.layers.{index}"
    mixtral = spec.architecture == "llama"  # the one routed family of this architecture
    if part.startswith("experts."):
        _, expert, matrix = part.split(".")
        if mixtral:
            return f"{layer}.block_sparse_moe.experts.{expert}.{_HF_MIXTRAL[matrix]}.weight"
        return f"{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
    if part == "router" and mixtral:
        return f"{layer}.block_sparse_moe.gate.weight"
    spelled = _HF_LAYER | (_HF_POST_NORMS if spec.post_norms else {})
    matrix = part.removesuffix("_bias")
    return f"{layer}.{spelled[matrix]}.{'weight' if matrix == part else 'bias'}"


def gguf_name(canonical: str) -> str:
    """How a GGUF file spells a canonical name."""
    fixed = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    if canonical in fixed:
        return fixed[canonical]
    _, index, part = canonical.split(".", 2)
    if part.startswith("experts."):
        _, expert, matrix = part.split(".")
        return f"blk.{index}.{_GGUF_LAYER[matrix]}.{expert}.weight"
    matrix = part.removesuffix("_bias")
    return f"blk.{index}.{_GGUF_LAYER[matrix]}.{'weight' if matrix == part else 'bias'}"


def hf_fused(spec: ModelSpec) -> Iterator[tuple[str, list[str]]]:
    """Names under which some folders store several matrices below each other, and what these are called apart."""
    for index in range(spec.n_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.self_attn.qkv_proj.weight", [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        yield f"{layer}.mlp.gate_up_proj.weight", [f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")]


def gguf_fused(spec: ModelSpec) -> Iterator[tuple[str, list[str]]]:
    """As `hf_fused`; experts lie one after the other, and Phi 3's `ffn_up` holds the gate as well."""
    experts = range(spec.experts.count if spec.experts else 0)
    for index in range(spec.n_layers):
        layer = f"blk.{index}"
        yield f"{layer}.attn_qkv.weight", [f"{layer}.attn_{part}.weight" for part in "qkv"]
        if spec.architecture == "phi3":
            yield f"{layer}.ffn_up.weight", [f"{layer}.ffn_{part}.weight" for part in ("gate", "up")]
        for part in MLP if experts else ():
            yield f"{layer}.ffn_{part}_exps.weight", [f"{layer}.ffn_{part}.{expert}.weight" for expert in experts]


def parts_of(
    tensor: StoredTensor, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[StoredTensor] | None:
    """A stored tensor cut into `names` with `shapes`, one below the other; None where it does not add up to them.

    Every type's rows are whole bytes, so a part is a range of the stored bytes.
    """
    columns = {shape[-1] for shape in shapes}
    rows = [math.prod(shape[:-1]) for shape in shapes]
    if {tensor.shape[-1]} != columns or math.prod(tensor.shape[:-1]) != sum(rows):
        return None
    size = tensor.size // sum(rows)
    offsets = accumulate(rows, initial=0)
    return [
        StoredTensor(name, tensor.type, shape, tensor.offset + before * size, count * size)
        for name, shape, before, count in zip(names, shapes, offsets, rows, strict=False)
    ]


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
