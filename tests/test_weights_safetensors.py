"""Folders: damaged, stale and hostile ones are refused by file and tensor before anything is computed."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hetsplit.errors import ConfigError
from hetsplit.weights import open_checkpoint
from hetsplit.weights.safetensors import read_safetensors
from tests.models import build_llama, canonical_weights, save_folder

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def sharded(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLAMA in exactly three shards."""
    folder = save_folder(llama, tmp_path_factory.mktemp("sharded"), max_shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {
        name: f"model-0000{index * 3 // len(names) + 1}-of-00003.safetensors" for index, name in enumerate(names)
    }
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sharded, tmp_path / "model")


SHARD = "model-00002-of-00003.safetensors"


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def remap(folder: Path, **changes: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map(folder) | changes}))


def a_tensor(folder: Path, shard: str = SHARD) -> str:
    return next(name for name, where in weight_map(folder).items() if where == shard)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def assert_same_tensors(path: Path, model: LlamaForCausalLM) -> None:
    found = dict(open_checkpoint(path).tensors())
    wanted = canonical_weights(model)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_shards_give_the_models_tensors(sharded: Path, llama: LlamaForCausalLM) -> None:
    assert_same_tensors(sharded, llama)


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(folder: Path) -> None:
    (folder / SHARD).unlink()
    message = refusal(folder)
    assert SHARD in message and a_tensor(folder) in message and "no such file" in message


@pytest.mark.parametrize("keep", ["all but one byte", "half", "four bytes", "nothing", "header"])
def test_a_cut_shard_is_named_with_a_tensor(folder: Path, keep: str) -> None:
    whole = (folder / SHARD).read_bytes()
    header = 8 + struct.unpack_from("<Q", whole)[0]
    sizes = {
        "all but one byte": len(whole) - 1,
        "half": len(whole) // 2,
        "four bytes": 4,
        "nothing": 0,
        "header": header,
    }
    (folder / SHARD).write_bytes(whole[: sizes[keep]])
    message = refusal(folder)
    assert SHARD in message
    assert any(name in message for name, shard in weight_map(folder).items() if shard == SHARD)


def test_a_shard_with_bytes_to_spare_is_refused(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(b"\0")
    assert SHARD in refusal(folder)


def test_an_index_that_maps_a_tensor_to_the_wrong_shard(folder: Path) -> None:
    name = a_tensor(folder)
    remap(folder, **{name: "model-00001-of-00003.safetensors"})
    message = refusal(folder)
    assert "model-00001-of-00003.safetensors" in message and name in message


def test_a_tensor_that_the_index_does_not_know(folder: Path) -> None:
    name = a_tensor(folder)
    known = weight_map(folder)
    del known[name]
    (folder / INDEX).write_text(json.dumps({"weight_map": known}))
    message = refusal(folder)
    assert SHARD in message and name in message


def test_indexed_shards_win_over_a_stray_file(folder: Path, llama: LlamaForCausalLM) -> None:
    stray = {name: torch.full_like(tensor, 7.0) for name, tensor in llama.state_dict().items()}
    save_file(stray, folder / "model.safetensors")
    assert_same_tensors(folder, llama)


@pytest.mark.parametrize(
    "target",
    ["../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "..\\x.safetensors", "model.bin", 3, None],
)
def test_index_entries_that_leave_the_folder(folder: Path, target: object) -> None:
    shutil.copy(folder / SHARD, folder.parent / "model.safetensors")
    name = a_tensor(folder)
    remap(folder, **{name: target})
    message = refusal(folder)
    assert INDEX in message and name in message and repr(target) in message


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 2**40, 200_000])
def test_a_huge_header_length(folder: Path, length: int) -> None:
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(struct.pack("<Q", length) + whole[8:])
    message = refusal(folder)
    assert SHARD in message and str(length) in message and a_tensor(folder) in message


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    message = refusal(folder)
    assert SHARD in message and "Git LFS" in message and a_tensor(folder) in message


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"weight_map": []}', '{"weight_map": {}}', "{}", "[" * 100_000])
def test_an_index_that_is_no_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "\udcff", '{"vocab_size": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "config.json" in refusal(folder)


def test_a_folder_without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json: there is no such file" in refusal(folder)


def test_pickles_are_not_read(llama_dir: Path, tmp_path: Path) -> None:
    shutil.copy(llama_dir / "config.json", tmp_path)
    assert "neither model.safetensors nor" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message and "safetensors" in message and "pickle" in message


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def single(llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama_dir, tmp_path / "model")


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q0), f"the tensor {Q0} is missing"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "q_proj.bias"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 32)}), "model.layers.2.mlp.up_proj"),
        (lambda t: t.update({Q0: t[Q0].T.contiguous()[:31]}), f"{Q0} has shape (31, 32), the config says (32, 32)"),
        (lambda t: t.update({Q0: t[Q0].double()}), f"{Q0} has type F64"),
        (lambda t: t.update({Q0: t[Q0].to(torch.int8)}), f"{Q0} has type I8"),
        (lambda t: t.update({Q0: t[Q0].to(torch.float8_e4m3fn)}), f"{Q0} has type F8_E4M3"),
    ],
)
def test_every_tensor_is_accounted_for(
    single: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    change_tensors(single, change)
    assert words in refusal(single)


def test_rotary_buffers_of_old_checkpoints_are_ignored(single: Path, llama: LlamaForCausalLM) -> None:
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    change_tensors(single, lambda tensors: tensors.update(buffers))
    assert_same_tensors(single, llama)


def test_an_unaligned_header_is_read(single: Path, llama: LlamaForCausalLM) -> None:
    whole = (single / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    header = whole[8 : 8 + length].rstrip()
    header += b" " * ((-len(header)) % 8 + 3)
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + whole[8 + length :])
    assert_same_tensors(single, llama)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_llama().to(dtype)
    folder = save_folder(model, tmp_path)
    assert open_checkpoint(folder).stored_dtype == str(dtype).removeprefix("torch.")
    assert_same_tensors(folder, model)


# Tied and untied heads.


def test_tied_without_a_head(folder_of: Callable[[str], Path], model_of: Callable[[str], LlamaForCausalLM]) -> None:
    assert "lm_head.weight" not in load_file(folder_of("tied") / "model.safetensors")
    assert open_checkpoint(folder_of("tied")).spec.tied_head
    assert_same_tensors(folder_of("tied"), model_of("tied"))


@pytest.fixture
def tied_with_head(folder_of: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = shutil.copytree(folder_of("tied"), tmp_path / "tied")
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    return folder


def test_tied_with_an_equal_head(
    tied_with_head: Path, folder_of: Callable[[str], Path], model_of: Callable[[str], LlamaForCausalLM]
) -> None:
    assert_same_tensors(tied_with_head, model_of("tied"))
    assert open_checkpoint(tied_with_head).fingerprint() == open_checkpoint(folder_of("tied")).fingerprint()


def test_tied_with_another_head_contradicts_itself(tied_with_head: Path) -> None:
    change_tensors(tied_with_head, lambda t: t["lm_head.weight"][5].add_(1.0))
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from the embedding"):
        next(open_checkpoint(tied_with_head).tensors())


def test_untied_without_a_head_names_the_missing_tensor(single: Path) -> None:
    change_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
    assert "the tensor lm_head.weight is missing" in refusal(single)


def test_untied_with_a_head(llama_dir: Path, llama: LlamaForCausalLM) -> None:
    assert not open_checkpoint(llama_dir).spec.tied_head
    assert_same_tensors(llama_dir, llama)


# The header alone.


def write(path: Path, header: object, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry("F4")}, "dtype 'F4'"),
        ({"a": entry(["F32"])}, "dtype ['F32']"),
        ({"a": entry(shape=[-2])}, "shape"),
        ({"a": entry(shape=[True, 2])}, "shape"),
        ({"a": entry(shape=[2**40, 2**40])}, "its shape needs"),
        ({"a": entry(shape="2")}, "shape"),
        ({"a": entry(shape=[1] * 9)}, "shape"),
        ({"a": entry(offsets=[0, 4])}, "data_offsets span 4"),
        ({"a": entry(offsets=[8, 0])}, "data_offsets span -8"),
        ({"a": entry(offsets=[0])}, "data_offsets"),
        ({"a": entry(offsets=[0, 8.0])}, "data_offsets"),
        ({"a": entry(offsets=[8, 16])}, "starts at byte"),
        ({"a": entry(), "b": entry()}, "'b' starts at byte"),
        ({"a": entry(shape=[1], offsets=[0, 4])}, "its tensors end at"),
        ({"a": entry(shape=[3], offsets=[0, 12])}, "'a' ends at byte"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "dtype, shape and data_offsets"),
        ({"a": 3}, "its entry"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        ([1], "a JSON list"),
    ],
)
def test_faulty_headers_are_refused(tmp_path: Path, header: object, words: str) -> None:
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(ConfigError) as caught:
        read_safetensors(path)
    assert words in str(caught.value) and "x.safetensors" in str(caught.value)


def test_random_damage_raises_nothing_but_config_errors(llama_dir: Path, tmp_path: Path) -> None:
    whole = (llama_dir / "model.safetensors").read_bytes()
    header = 8 + struct.unpack_from("<Q", whole)[0]
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path = tmp_path / "x.safetensors"
        path.write_bytes(damaged)
        try:
            read_safetensors(path)
        except ConfigError:
            refused += 1
    assert refused > 100
