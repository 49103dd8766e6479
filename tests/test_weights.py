"""Checkpoints of both formats give transformers' tensors, in its row order; quants, fingerprints, locating."""

import importlib
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import hetsplit.weights.fingerprint as fingerprint_module
from hetsplit.engines import load
from hetsplit.errors import ConfigError
from hetsplit.weights import locate, open_checkpoint
from hetsplit.weights.checkpoint import half_split
from hetsplit.weights.names import tensor_shapes
from tests.models import (
    BUILDERS,
    LLAMA3_ROPE,
    LLAMA82_IDS,
    LLAMA_IDS,
    LLAMA_IDS_AFTER_5,
    P40,
    ROPE_IDS,
    TIED_IDS,
    build_llama,
    canonical_weights,
    gguf_tensors,
    hf_greedy,
    rope_factors,
    save_folder,
    save_gguf,
)

ModelOf = Callable[[str], LlamaForCausalLM]
PathOf = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "prompt", "wanted"),
    [
        ("llama", P40, LLAMA_IDS),
        ("llama", [5], LLAMA_IDS_AFTER_5),
        ("llama82", P40, LLAMA82_IDS),
        ("tied", P40, TIED_IDS),
        ("rope", P40, ROPE_IDS),
    ],
)
def test_the_fixtures_are_the_models_that_the_cases_mean(
    name: str, prompt: list[int], wanted: list[int], model_of: ModelOf
) -> None:
    assert hf_greedy(model_of(name), prompt, len(wanted)) == wanted


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_tensors_are_transformers_own(
    name: str, kind: str, model_of: ModelOf, folder_of: PathOf, gguf_of: PathOf
) -> None:
    checkpoint = open_checkpoint((folder_of if kind == "folder" else gguf_of)(name))
    wanted = canonical_weights(model_of(name))
    found = dict(checkpoint.tensors())
    assert list(found) == list(tensor_shapes(checkpoint.spec)) and set(found) == set(wanted)
    for tensor_name, tensor in wanted.items():
        assert torch.equal(found[tensor_name], tensor), tensor_name


@pytest.mark.parametrize("name", BUILDERS)
def test_both_containers_resolve_to_the_same_facts(
    name: str, model_of: ModelOf, folder_of: PathOf, gguf_of: PathOf
) -> None:
    one, other = open_checkpoint(folder_of(name)).spec, open_checkpoint(gguf_of(name)).spec
    reference = model_of(name).model.rotary_emb.inv_freq.numpy()
    for spec in (one, other):
        np.testing.assert_allclose(spec.rotary[0].inv_freq, reference, rtol=1e-6)
    facts = (
        "vocab_size",
        "width",
        "intermediate",
        "n_layers",
        "heads",
        "kv_heads",
        "head_dim",
        "norm_eps",
        "tied_head",
    )
    for fact in ("architecture", "context", "bos_id", "eos_ids", *facts):
        assert getattr(one, fact) == getattr(other, fact), fact


def test_the_fixture_shows_wrong_head_counts(llama82: LlamaForCausalLM) -> None:
    """With 8/2 heads every wrong un-permutation of k differs from the right one."""
    stored = torch.from_numpy(gguf_tensors(llama82)["blk.0.attn_k.weight"])
    wanted = llama82.state_dict()["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(half_split(stored, 2), wanted)
    for wrong in (stored, half_split(stored, 8), half_split(stored, 4)):
        assert not torch.equal(wrong, wanted)


def test_head_width_16_shapes(folder_of: PathOf, gguf_of: PathOf) -> None:
    for path in (folder_of("wide"), gguf_of("wide")):
        found = dict(open_checkpoint(path).tensors())
        assert [tuple(found[f"layers.0.{part}"].shape) for part in "qkvo"] == [(64, 32), (32, 32), (32, 32), (32, 64)]


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
def test_rope_spellings_on_disk(spelling: str, folder_of: PathOf, tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("rope"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    block = dict(LLAMA3_ROPE)
    if spelling == "rope_parameters":
        config["rope_parameters"] = block
    else:
        del config["rope_parameters"]
        config["rope_theta"] = block.pop("rope_theta")
        block[spelling] = block.pop("rope_type")
        config["rope_scaling"] = block
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).spec == open_checkpoint(folder_of("rope")).spec
    assert LlamaForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq.tolist() == pytest.approx(
        open_checkpoint(folder).spec.rotary[0].inv_freq, rel=1e-6
    )


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.2.ffn_up.weight", "rope_factors_long.weight"]
)
def test_gguf_tensors_are_accounted_for(name: str, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    extra = gguf_tensors(llama) | {name: np.ones(7, np.float32)}
    path = save_gguf(llama, tmp_path / "x.gguf", tensors=extra)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_missing_gguf_tensors_are_named(name: str, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    rest = {key: value for key, value in gguf_tensors(llama).items() if key != name}
    path = save_gguf(llama, tmp_path / "x.gguf", tensors=rest)
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        open_checkpoint(path)


def test_a_gguf_shape_that_contradicts_the_metadata(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = gguf_tensors(llama)
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"][:-1]
    path = save_gguf(llama, tmp_path / "x.gguf", tensors=tensors)
    with pytest.raises(ConfigError, match=r"blk.0.ffn_up.weight has shape \(63, 32\), the config says \(64, 32\)"):
        open_checkpoint(path)


def test_rope_factors_that_are_no_row_of_float32(tmp_path: Path, model_of: ModelOf) -> None:
    model = model_of("llama")
    for factors in (np.ones((1, 4), np.float32), np.ones(5000, np.float32)):
        path = save_gguf(model, tmp_path / "x.gguf", tensors=gguf_tensors(model) | {"rope_freqs.weight": factors})
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
            open_checkpoint(path)
    assert rope_factors(model_of("rope")).max() == pytest.approx(8.0, rel=1e-5)


# Quantised types.

QUANTS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
SUPERBLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_files_equal_the_gguf_packages_values(quant: str, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    path = save_gguf(llama, tmp_path / "x.gguf", quant=quant)
    checkpoint = open_checkpoint(path)
    kind = gguf.GGMLQuantizationType[quant]
    found = dict(checkpoint.tensors())
    for name, tensor in canonical_weights(llama).items():
        values = tensor.numpy()
        if values.ndim > 1:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert torch.equal(found[name].float(), torch.from_numpy(values)), name
    assert checkpoint.stored_dtype == ("float16" if quant == "F16" else "bfloat16")


@pytest.mark.parametrize("quant", [*QUANTS[2:], *SUPERBLOCKS])
def test_random_blocks_decode_as_in_the_gguf_package(quant: str, tmp_path: Path) -> None:
    """Random blocks with finite scales, in more than one slice."""
    from hetsplit.weights import quants
    from hetsplit.weights.gguf import read_gguf

    kind = gguf.GGMLQuantizationType[quant]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (64, 8 * size), dtype=np.uint8)
    blocks.reshape(-1, 2)[:, 1] &= 0xBB  # clears two exponent bits of any float16, so that none is infinite or NaN
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "x.gguf")
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.isfinite(wanted).all() and wanted.abs().max() > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quants, "_SLICE_ELEMENTS", 1024)
        assert torch.equal(quants.load(file, file.tensors["t"]), wanted)


def test_a_supported_header_with_an_unsupported_quant(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    model = build_llama(hidden_size=256, num_attention_heads=8)
    tensors = gguf_tensors(model)
    writer_quants = {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.TQ2_0}
    path = tmp_path / "x.gguf"
    original = gguf.GGUFWriter.add_tensor

    def add(self: gguf.GGUFWriter, name: str, values: np.ndarray, raw_dtype: gguf.GGMLQuantizationType) -> None:
        kind = writer_quants.get(name, raw_dtype)
        original(self, name, gguf.quants.quantize(tensors[name], kind), raw_dtype=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        save_gguf(model, path, tensors=tensors)
    with pytest.raises(ConfigError, match=r"blk.0.ffn_up.weight has type TQ2_0, not supported; supported: BF16"):
        open_checkpoint(path)


def test_smollm2_dequantises_as_the_gguf_package_does(smollm2_path: Path) -> None:
    reader_types = {"embed": "Q8_0", "layers.7.down": "Q4_1", "layers.3.v": "Q4_1", "norm": "F32"}
    checkpoint = open_checkpoint(smollm2_path)
    found = {name: tensor for name, tensor in checkpoint.tensors() if name in reader_types}
    names = {
        "embed": "token_embd",
        "layers.7.down": "blk.7.ffn_down",
        "layers.3.v": "blk.3.attn_v",
        "norm": "output_norm",
    }
    from hetsplit.weights.gguf import read_gguf

    file = read_gguf(smollm2_path)
    for name, kind in reader_types.items():
        stored = file.tensors[f"{names[name]}.weight"]
        assert stored.type == kind
        raw = np.frombuffer(file.data, np.uint8, stored.size, stored.offset)
        wanted = gguf.quants.dequantize(raw.reshape(*stored.shape[:-1], -1), gguf.GGMLQuantizationType[kind])
        assert torch.equal(found[name], torch.from_numpy(wanted.copy())), name


def test_a_tensor_lives_no_longer_than_its_reader_wants(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = open_checkpoint(save_gguf(llama, tmp_path / "x.gguf", quant="Q8_0")).tensors()
    _, tensor = next(tensors)
    seen = weakref.ref(tensor)
    del tensor
    assert seen() is None


# Fingerprints.


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hetsplit"


def test_fingerprints_do_not_depend_on_shards(llama: LlamaForCausalLM, llama_dir: Path, tmp_path: Path) -> None:
    shards = save_folder(llama, tmp_path / "shards", max_shard_size="20KB")
    assert not (shards / "model.safetensors").exists()
    assert open_checkpoint(shards).fingerprint() == open_checkpoint(llama_dir).fingerprint()


def test_fingerprints_tell_weights_apart(folder_of: PathOf, gguf_of: PathOf) -> None:
    paths = [*map(folder_of, BUILDERS), gguf_of("llama"), gguf_of("llama82")]
    found = [open_checkpoint(path).fingerprint() for path in paths]
    assert all(len(value) == 32 and int(value, 16) >= 0 for value in found)
    # RoPE scaling changes no weight.
    assert found[0] == found[list(BUILDERS).index("rope")]
    assert len(set(found)) == len(found) - 1


def test_one_changed_byte_or_name_changes_the_fingerprint(llama_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_dir, tmp_path / "model")
    before = open_checkpoint(folder).fingerprint()
    tensors = load_file(folder / "model.safetensors")
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    save_file(tensors, folder / "model.safetensors")
    swapped = open_checkpoint(folder).fingerprint()
    tensors[up][0, 0] = torch.nextafter(tensors[up][0, 0], torch.tensor(9.0))
    save_file(tensors, folder / "model.safetensors")
    assert len({before, swapped, open_checkpoint(folder).fingerprint()}) == 3


def test_fingerprints_are_cached(llama_dir: Path, tmp_path: Path, cache_folder: Path) -> None:
    folder = shutil.copytree(llama_dir, tmp_path / "model")
    wanted = open_checkpoint(folder).fingerprint()
    (entry,) = cache_folder.rglob("*.json")
    assert entry.stat().st_size < 1000

    def fail(stored: object) -> str:
        raise AssertionError("computed again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint_module, "_computed", fail)
        assert open_checkpoint(folder).fingerprint() == wanted
        (tmp_path / "link").symlink_to(folder)
        assert open_checkpoint(tmp_path / "link").fingerprint() == wanted
        (folder / "model.safetensors").touch()
        with pytest.raises(AssertionError, match="computed again"):
            open_checkpoint(folder).fingerprint()
    for content in ("", "{", "[]", "{}", '{"state": 1}'):
        entry.write_text(content)
        assert open_checkpoint(folder).fingerprint() == wanted


def test_a_cache_that_cannot_be_written_is_no_error(llama_dir: Path, tmp_path: Path, cache_folder: Path) -> None:
    cache_folder.parent.write_text("a file where the folder should be")
    assert open_checkpoint(llama_dir).fingerprint() == open_checkpoint(llama_dir).fingerprint()
    assert cache_folder.parent.is_file()


# Finding a model.


def test_paths_are_located(llama_dir: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(llama_dir) == locate(str(llama_dir)) == llama_dir
    assert locate(smollm2_path) == smollm2_path
    monkeypatch.setenv("HOME", str(llama_dir.parent))
    assert locate(f"~/{llama_dir.name}") == llama_dir


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "a/b/c", "../a", "./a/b", "org/", "org/na me", ""])
def test_what_is_neither_a_path_nor_a_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name:
        with pytest.raises(ConfigError, match="no such folder or file"):
            locate(name)
    with pytest.raises(ConfigError):
        locate(tmp_path / "org" / "name")


@pytest.mark.parametrize("find", [locate, load])
@pytest.mark.parametrize(
    ("model", "named"),
    [
        (None, r"model is None \(NoneType\); allowed: a folder"),
        (5, r"model is 5 \(int\); allowed: a folder"),
        (b"m", r"model is b'm' \(bytes\); allowed: a folder"),
        ("~no-such-user/x", "model '~no-such-user/x': no path"),
        ("x" * 400, r"model 'xxx.*\.\.\.: no path that can be used: File name too long"),
        (Path("x" * 400), "File name too long"),
        ("/tmp/\udcff", r"model '/tmp/\\udcff': no path that can be used: 'utf-8'"),
    ],
)
def test_what_no_path_can_be_is_refused(find: Callable[[Any], object], model: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        find(model)
    assert len(str(caught.value)) < 300


def test_offline_repositories_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"org/name.*offline"):
        locate("org/name")


@pytest.mark.parametrize("progress", [False, True])
def test_repositories_are_downloaded_without_pickles(
    progress: bool, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(llama_dir)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("org/name.v-1", progress=progress) == llama_dir
    assert asked["repository"] == "org/name.v-1"
    files = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    unwanted = ["pytorch_model.bin", "model.onnx", "original/consolidated.00.safetensors", "consolidated.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, *unwanted], allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files
    bars = asked["tqdm_class"]
    assert (bars is None) == progress
    if bars is not None:
        assert bars(total=3, disable=False).disable


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"neither a folder .* nor a .gguf file"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_the_package_is_light_until_a_checkpoint_is_opened() -> None:
    import subprocess
    import sys

    code = "import sys, hetsplit.weights.gguf; print('torch' in sys.modules)"
    root = Path(importlib.import_module("hetsplit").__file__ or "").parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
