"""Logits of every family and container agree with transformers: what only shows when a model is computed."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hetsplit.model import Model, Segment
from hetsplit.spec import DType
from hetsplit.weights import open_checkpoint
from tests.models import BUILDERS, LLAMA82_IDS, LLAMA_IDS, P40, ROPE_IDS, TIED_IDS, hf_greedy, hf_logits, save_folder

IDS = {"llama": LLAMA_IDS, "llama82": LLAMA82_IDS, "tied": TIED_IDS, "rope": ROPE_IDS}


def loaded(path: Path, device: str) -> Model:
    checkpoint = open_checkpoint(path)
    return Model(checkpoint.spec, device, DType.FLOAT32).load(checkpoint.tensors())


@torch.inference_mode()
def logits(model: Model, tokens: Sequence[int]) -> NDArray[np.float32]:
    """`[T, V]` of a prompt computed in one go."""
    spec = model.spec
    shape = (spec.n_layers, spec.kv_heads, len(tokens), spec.head_dim)
    keys, values = torch.zeros(shape, device=model.device), torch.zeros(shape, device=model.device)
    x = model.embedded(tokens)
    for _ in model.forward(x, [Segment(keys, values, 0, len(tokens))]):
        pass
    found: NDArray[np.float32] = model.logits(x).cpu().numpy()
    return found


def greedy(model: Model, tokens: Sequence[int], n: int) -> list[int]:
    ids = list(tokens)
    for _ in range(n):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(tokens) :]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_llamas(
    name: str,
    kind: str,
    device: str,
    model_of: Callable[[str], LlamaForCausalLM],
    folder_of: Callable[[str], Path],
    gguf_of: Callable[[str], Path],
) -> None:
    model = loaded((folder_of if kind == "folder" else gguf_of)(name), device)
    np.testing.assert_allclose(logits(model, P40), hf_logits(model_of(name), P40), atol=1e-3, rtol=0)
    wanted = IDS[name][:8] if name in IDS else hf_greedy(model_of(name), P40, 8)
    assert greedy(model, P40, 8) == wanted


def test_a_mistral_without_a_window(device: str, tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.5,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    reference = MistralForCausalLM(config).eval()
    model = loaded(save_folder(reference, tmp_path), device)
    assert model.spec.architecture == "llama"
    np.testing.assert_allclose(logits(model, P40), hf_logits(reference, P40), atol=1e-3, rtol=0)


def test_indexed_shards_win_over_a_stray_file(
    device: str, llama: LlamaForCausalLM, llama82_dir: Path, tmp_path: Path
) -> None:
    folder = save_folder(llama, tmp_path / "model", max_shard_size="20KB")
    shutil.copy(llama82_dir / "model.safetensors", folder)
    assert greedy(loaded(folder, device), P40, 8) == LLAMA_IDS[:8]


def test_smollm2_continues_as_in_transformers(device: str, smollm2_path: Path) -> None:
    """'The capital of France is', in float32; the ids are transformers' for the dequantised file."""
    model = loaded(smollm2_path, device)
    wanted = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
    assert greedy(model, [504, 3575, 282, 4649, 314], 12) == wanted
