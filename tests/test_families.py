"""Logits of every family and container agree with transformers: what only shows when a model is computed."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hetsplit import connect
from hetsplit.agreement import measure
from hetsplit.engines import Row, load
from hetsplit.errors import ConfigError
from hetsplit.kv import KvFill, visible
from hetsplit.model import Memory, Model, Segment
from hetsplit.spec import DType
from hetsplit.weights import open_checkpoint
from tests.families import FAMILIES, GGUF_ARCHITECTURES, build, save_family_gguf
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
    memory = {
        window: Memory(*(torch.zeros(shape, device=model.device) for _ in range(2))) for window in set(spec.windows)
    }
    x = model.embedded(tokens)
    for _ in model.forward(x, [Segment(memory, 0, len(tokens))]):
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


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """A random model and its folder, made once."""

    @cache
    def made(name: str) -> tuple[PreTrainedModel, Path]:
        model = build(name)
        return model, save_folder(model, tmp_path_factory.mktemp(name))

    return made


Family = Callable[[str], tuple[PreTrainedModel, Path]]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_family(name: str, device: str, family: Family) -> None:
    """A prompt longer than any window, in one go."""
    reference, folder = family(name)
    model = loaded(folder, device)
    np.testing.assert_allclose(logits(model, P40), hf_logits(reference, P40), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("at_once", [6, 512])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_across_the_split(
    name: str, at_once: int, device: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefilled in chunks on one engine, decoded on another, past windows, chunks and what memory holds at once."""
    monkeypatch.setattr("hetsplit.spec.AT_ONCE", at_once)
    reference, folder = family(name)
    prefill, decode = (load(folder, device=device, dtype="float32", role=role) for role in ("prefill", "decode"))
    store = decode.reserve(64)
    fill = KvFill(store, decode.layout, range(39))
    for block in prefill.prefill(P40, range(39), chunk=7, stop=Event()):
        if (seen := visible(block, decode.layout, 36)).count:
            fill.put(seen)
    while not fill.settle():
        pass
    local = decode.reserve(64)
    for _ in decode.extend(local, P40, range(36), chunk=11):
        pass
    caches, tokens = (fill.finish(), local.seal(36)), list(P40)
    for count in (1, 1, 5, 1, 1, 4, 1, 3, 1):
        expected = hf_logits(reference, tokens)[-1]
        for one in caches:
            found = decode.step([Row(one, tokens[one.length :])]).logits[0]
            np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-4)
        tokens += [int(found.argmax())] * count


WINDOWS = ("mistral-window", "qwen2-window", "phi3-window", "gemma2", "gemma3")


@pytest.mark.parametrize("at_once", [6, 512])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_the_wire(name: str, at_once: int, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text as one process; of a layer with a window W, W - 1 positions travel and the withheld ones."""
    monkeypatch.setattr("hetsplit.spec.AT_ONCE", at_once)
    engines = [load(family(name)[1], device="cpu", dtype="float32") for _ in range(2)]
    layers = engines[0].layout.layers
    with connect(*engines, mode="split", chunk=5) as split, connect(None, engines[1]) as alone:
        for prompt in (P40, P40[:4], P40[:9], P40[:13]):
            found, expected = (side.complete(prompt, max_tokens=24, ignore_eos=True) for side in (split, alone))
            assert found.ids == expected.ids and found.timing.mode == "split"
            last = len(prompt) - 1
            sent = {layer: min(last, (layer.window or last) - 1 + min(last, 3)) for layer in layers}
            assert found.timing.sent_bytes == sum(4 * layer.position_elements * sent[layer] for layer in layers)


@pytest.mark.parametrize("name", WINDOWS)
def test_engines_agree_about_windows(name: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsplit.spec.AT_ONCE", 6)
    engine: Any = load(family(name)[1], device="cpu", dtype="float32")
    found = measure(engine, engine, tokens=P40 * 2, prompt_tokens=40, scored_tokens=30)
    assert found.top1_ratio == 1 and max(found.key_errors + found.value_errors) < 1e-5


@pytest.mark.parametrize("name", GGUF_ARCHITECTURES)
def test_a_gguf_is_the_same_model(name: str, device: str, family: Family, tmp_path: Path) -> None:
    reference, folder = family(name)
    path = save_family_gguf(name, folder, tmp_path / "model.gguf")
    model = loaded(path, device)
    np.testing.assert_allclose(logits(model, P40), hf_logits(reference, P40), atol=1e-3, rtol=1e-4)
    assert replace(model.spec, context=0) == replace(open_checkpoint(folder).spec, context=0)


# Fields that some class reads and another does not, each with a value that would change what is computed.
SWITCHES: Mapping[str, Any] = {
    "attention_bias": True,
    "attn_logit_softcapping": 2.0,
    "decoder_sparse_step": 2,
    "final_logit_softcapping": 2.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "silu",
    "layer_types": ["sliding_attention", "full_attention"],
    "max_window_layers": 1,
    "mlp_bias": True,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 64,
    "no_rope_layer_interval": 2,
    "no_rope_layers": [0, 1],
    "norm_topk_prob": False,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "query_pre_attn_scalar": 1,
    "rope_local_base_freq": 3.0,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "use_sliding_window": True,
}
PLAIN = ("llama-bias", "mistral-window", "qwen2", "qwen2-window", "qwen3", "phi3", "smollm3", "gemma2", "gemma3")
PLAIN += ("mixtral", "qwen3-moe")


SWITCHED = [{name: value} for name, value in SWITCHES.items()]
SWITCHED += [
    {"sliding_window": 5, "use_sliding_window": True},
    {"sliding_window": 5, "use_sliding_window": True, "layer_types": SWITCHES["layer_types"]},
    {"sliding_window": 5, "use_sliding_window": False, "layer_types": SWITCHES["layer_types"]},
    {"sliding_window": 5, "use_sliding_window": True, "no_rope_layer_interval": 2},
    {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2},
]


@pytest.mark.parametrize("fields", SWITCHED, ids=lambda fields: "-".join(map(str, fields)))
@pytest.mark.parametrize("name", PLAIN)
def test_a_field_counts_where_its_class_reads_it(
    name: str, fields: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """A field that another family has is refused, or does what transformers' class does with it: mostly nothing."""
    reference = build(name, num_hidden_layers=2)
    folder = save_folder(reference, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    silent = {key: value for key, value in config.items() if key not in ("layer_types", "no_rope_layers")}
    (folder / "config.json").write_text(json.dumps(silent | fields))
    try:
        model = loaded(folder, device)
    except ConfigError:
        return
    theirs, found = type(reference).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    assert not found["missing_keys"]
    np.testing.assert_allclose(logits(model, P40), hf_logits(theirs, P40), atol=1e-3, rtol=1e-4)


def test_a_qwen3_with_a_head_width_of_its_own(device: str, tmp_path: Path) -> None:
    config = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config |= {"initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = loaded(save_folder(Qwen3ForCausalLM(Qwen3Config(**config)).eval(), tmp_path), device)
    assert greedy(model, P40, 8) == [79, 81, 87, 87, 87, 26, 91, 87]


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
