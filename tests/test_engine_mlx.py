"""The MLX engine: what it refuses, quantised folders, dtypes, threads, memory, failures."""

import copy
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hetsplit.engines import Decoder, LocalPrefill, Prefiller, Row, load
from hetsplit.errors import CapacityError, ConfigError, EngineError
from hetsplit.kv import KvBlock
from hetsplit.spec import DType
from tests.models import P40, build_llama, hf_logits, save_folder
from tests.test_engine_torch import SPAN, content, prefilled

mx = pytest.importorskip("mlx.core", reason="needs mlx (pip install 'hetsplit[mlx]')")
llama = pytest.importorskip("mlx_lm.models.llama", reason="needs mlx-lm (pip install 'hetsplit[mlx]')")
engines = pytest.importorskip("hetsplit.engines.mlx")
MlxEngine = engines.MlxEngine

PathOf = Callable[[str], Path]
ModelOf = Callable[[str], Any]
Q_PROJ = "model.layers.1.self_attn.q_proj"


def loaded(path: Path, **options: Any) -> Any:
    return load(path, engine="mlx", **({"device": "cpu", "dtype": "float32"} | options))


def last_logits(engine: Any) -> NDArray[np.float32]:
    """Those after P40, `[V]`."""
    cache = prefilled(engine, P40)
    found: NDArray[np.float32] = engine.step([Row(cache, P40[-1:])]).logits[0]
    cache.release()
    return found


def near(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> bool:
    return bool(np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected))


def quantised(model: Any, path: Path, bits: int = 4, group_size: int = 32, own: Mapping[str, int] = {}) -> Any:
    """Writes a folder as mlx-lm does, `own` the bits of single modules; gives the model of the rounded weights."""
    save_folder(model, path)
    rounded, tensors = copy.deepcopy(model), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, values = name.removesuffix(".weight"), mx.array(tensor.numpy())
        if tensor.ndim == 1:
            tensors[name] = values
            continue
        size = {"group_size": group_size, "bits": own.get(module, bits)}
        tensors[name], scales, biases = packed = mx.quantize(values, **size)
        tensors |= {f"{module}.scales": scales, f"{module}.biases": biases}
        rounded.get_submodule(module).weight.data = torch.from_numpy(np.array(mx.dequantize(*packed, **size)))
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    general = {"group_size": group_size, "bits": bits}
    requantise(path, general | {module: general | {"bits": other} for module, other in own.items()})
    return rounded


def requantise(path: Path, says: Any) -> None:
    """Change what config.json says of the quantisation."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization": says, "quantization_config": says}))


@pytest.fixture(scope="module")
def engine(llama82_dir: Path) -> Any:
    return loaded(llama82_dir)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, llama82: Any) -> Path:
    """llama82 in 4 bits."""
    path = tmp_path_factory.mktemp("packed")
    quantised(llama82, path)
    return path


def test_it_has_all_three_protocols(engine: Any) -> None:
    assert isinstance(engine, Prefiller) and isinstance(engine, Decoder) and isinstance(engine, LocalPrefill)
    assert (engine.name, engine.device, engine.dtype) == ("mlx", "cpu", engine.layout.dtype)


# What it refuses


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'; the mlx engine supports: llama, mistral"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; the mlx engine supports: llama, mistral"),
        ({"model_type": None}, "model_type is None; the mlx engine supports"),
        ({"model_file": "evil.py"}, r"model_file is 'evil.py'; not supported \(no code is run\)"),
        ({"quantization": {"bits": 4, "group_size": 32}}, "has a quantization, but no tensor of the folder is"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_a_folder_is_refused_by_name(llama82_dir: Path, tmp_path: Path, fields: Any, message: str) -> None:
    path = shutil.copytree(llama82_dir, tmp_path / "changed")
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        loaded(path)


def test_a_gguf_file_is_refused(gguf_of: PathOf) -> None:
    with pytest.raises(ConfigError, match="not GGUF files; give the model's folder .* torch or llamacpp for a .gguf"):
        loaded(gguf_of("llama82"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4' is not computed with, allowed: float32, bfloat16, float16"),
        ({"device": "cuda"}, "device 'cuda' is not here, allowed: auto, .*cpu"),
    ],
    ids=["int4", "cuda"],
)
def test_other_dtypes_and_devices_are_refused(llama82_dir: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(llama82_dir, **options)


# What it computes


@pytest.mark.parametrize("name", ["llama", "llama82", "tied", "rope", "wide"])
def test_logits_are_those_of_transformers(folder_of: PathOf, model_of: ModelOf, name: str) -> None:
    assert near(last_logits(loaded(folder_of(name))), hf_logits(model_of(name), P40)[-1], 1e-4)


def test_biases_are_obeyed(tmp_path: Path) -> None:
    model = build_llama(hidden_size=128, num_attention_heads=8, attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    assert near(last_logits(loaded(save_folder(model, tmp_path))), hf_logits(model, P40)[-1], 1e-4)


def test_identity_is_the_torch_engines(engine: Any, llama82_dir: Path) -> None:
    other = load(llama82_dir, device="cpu", dtype="float32")
    assert (engine.spec, engine.layout, engine.weights_hash) == (other.spec, other.layout, other.weights_hash)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_stored_one(llama82: Any, tmp_path: Path, stored: str) -> None:
    path = save_folder(copy.deepcopy(llama82).to(getattr(torch, stored)), tmp_path)
    engine = loaded(path, dtype=None)
    assert engine.dtype is engine.layout.dtype is DType(stored)
    assert next(iter(engine.prefill(P40, SPAN, chunk=40, stop=Event()))).keys.dtype == DType(stored).numpy
    expected = last_logits(loaded(path))
    assert near(last_logits(engine), expected, {"float32": 1e-6, "bfloat16": 0.25, "float16": 0.05}[stored])


# Quantised folders


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 32), (4, 128), (5, 32), (6, 64), (8, 64)])
def test_quantised_weights_compute_what_they_stand_for(tmp_path: Path, bits: int, group_size: int, tied: bool) -> None:
    model = build_llama(hidden_size=128, num_attention_heads=8, intermediate_size=128, tie_word_embeddings=tied)
    rounded = quantised(model, tmp_path, bits, group_size)
    engine = loaded(tmp_path)
    assert near(last_logits(engine), hf_logits(rounded, P40)[-1], 1e-4)
    assert engine.model.model.layers[0].self_attn.q_proj.weight.dtype == mx.uint32


def test_modules_may_have_bits_of_their_own(llama82: Any, tmp_path: Path) -> None:
    rounded = quantised(llama82, tmp_path, own={Q_PROJ: 8, "lm_head": 6})
    assert near(last_logits(loaded(tmp_path)), hf_logits(rounded, P40)[-1], 1e-4)


def test_quantised_weights_have_another_hash(packed: Path, engine: Any) -> None:
    found = loaded(packed, dtype=None)
    assert found.weights_hash != engine.weights_hash and found.spec == engine.spec and found.dtype is DType.FLOAT32


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"bits": 8}, r"embed_tokens.weight of type U32 has shape \(97, 16\); that is not \(97, 128\) .* 8 bits"),
        ({"group_size": 64}, r"embed_tokens.scales is F32 \(97, 4\); 4 bits in groups of 64, .* \(97, 2\) is needed"),
        ({"bits": 7}, "embed_tokens.weight of type U32 is quantised as .*'bits': 7.*supported: .* bits 2, 3, 4"),
        ({"bits": 4.0}, "embed_tokens.weight of type U32 is quantised as .*'bits': 4.0"),
        ({"bits": None}, "embed_tokens.weight of type U32 is quantised as .*'bits': None"),
        ({"group_size": 32.0}, "embed_tokens.weight of type U32 is quantised as .*'group_size': 32.0"),
        ({"group_size": 16}, "embed_tokens.weight of type U32 is quantised as .*'group_size': 16.*group_size 32, 64"),
        ({"mode": "mxfp4"}, "embed_tokens.weight of type U32 is quantised as .*'mode': 'mxfp4'.*mode affine"),
        ({Q_PROJ: False}, f"{Q_PROJ}.weight of type U32 is quantised as False"),
        ({Q_PROJ: {"bits": 8, "group_size": 32}}, rf"{Q_PROJ}.weight of type U32 has shape \(128, 16\)"),
    ],
    ids=lambda value: str(value)[:36] if isinstance(value, dict) else "",
)
def test_a_mislabelled_quantisation_is_refused(packed: Path, tmp_path: Path, says: Any, message: str) -> None:
    path = shutil.copytree(packed, tmp_path / "changed")
    requantise(path, {"bits": 4, "group_size": 32} | says)
    with pytest.raises(ConfigError, match=message):
        loaded(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found.pop(f"{Q_PROJ}.biases"),
            rf"{Q_PROJ}.weight is quantised \(U32\), but .*biases is missing",
        ),
        (lambda found: found.pop(f"{Q_PROJ}.weight"), f"the tensor {Q_PROJ}.weight is missing"),
        (lambda found: found.update({"extra": mx.zeros((3,))}), "unexpected tensor 'extra' of type F32"),
        (lambda found: found.update({f"{Q_PROJ}.weight": mx.zeros((128, 16), mx.int32)}), "type I32, not supported"),
        (lambda found: found.update({f"{Q_PROJ}.scales": mx.zeros((128, 4), mx.int32)}), "scales is I32"),
    ],
    ids=["no biases", "no weight", "stranger", "signed", "integer scales"],
)
def test_a_quantised_folder_with_other_tensors_is_refused(
    packed: Path, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path, tensors = shutil.copytree(packed, tmp_path / "changed"), dict(mx.load(str(packed / "model.safetensors")))
    change(tensors)
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    with pytest.raises(ConfigError, match=message):
        loaded(path)


# Threads


def test_an_engine_runs_on_another_thread_than_it_was_loaded_on(packed: Path, engine: Any) -> None:
    found: dict[str, Any] = {}

    def on_thread(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)

    on_thread(lambda: found.update(engine=loaded(packed)))
    on_thread(lambda: found.update(cache=prefilled(found["engine"], P40)))
    on_thread(lambda: found.update(logits=found["engine"].step([Row(found["cache"], P40[-1:])]).logits[0]))
    assert found["logits"].tobytes() == last_logits(found["engine"]).tobytes()
    on_thread(found["cache"].release)
    assert found["engine"].budget.used == 0


def test_blocks_are_staged_once_the_store_is_computed_with(engine: Any) -> None:
    sent = list(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    store = engine.reserve(60)
    for _ in engine.extend(store, P40, range(16), chunk=16):
        pass
    for block in sent[2:]:
        store.write(block)
    with pytest.raises(EngineError, match="sealed while 4 blocks are still staged"):
        store.seal(39)
    assert [store.settle() for _ in range(5)] == [False, False, False, True, True]
    found = content(store, SPAN)
    for block in sent:
        assert np.allclose(found[block.layer, 0, block.start : block.stop], block.keys, atol=1e-4)
    store.release()


def test_a_release_while_a_block_is_settled_is_an_error_of_ours(engine: Any) -> None:
    class Interrupted(deque[Any]):
        def __bool__(self) -> bool:  # another thread comes between the question and the answer
            store.release()
            return True

    block = next(iter(engine.prefill(P40, SPAN, chunk=40, stop=Event())))
    store = engine.reserve(60)
    store._staged = Interrupted([block])
    with pytest.raises(EngineError, match="a released store was used"):
        store.settle()


# Numbers that a dtype cannot hold


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_float16_takes_no_number_that_it_cannot_hold(packed: Path, dtype: Any) -> None:
    store, block = loaded(packed, dtype="float16").reserve(4), np.zeros((4, 2, 16), dtype)
    block[2, 1, 3] = -131072
    with pytest.raises(EngineError, match="a block holds 131072, float16 holds at most 65504; load .* dtype bfloat16"):
        store.write(KvBlock(1, 0, block, block))
    store.write(KvBlock(1, 0, block.clip(-60000), block.clip(-60000)))


# Memory


def test_a_full_budget_counts_in_whole_steps(engine: Any) -> None:
    step = engine.layout.span_bytes(256)
    small = MlxEngine(engine.model, engine.spec, engine.dtype, kv_bytes=3 * step - 1)
    stores = [small.reserve(1), small.reserve(256)]
    for positions in (1, 257):
        with pytest.raises(CapacityError, match=f"a cache of {positions} positions needs .* {step - 1:,} of"):
            small.reserve(positions)
    with pytest.raises(CapacityError, match="a cache of 39 positions"):
        next(small.prefill(P40, SPAN, chunk=16, stop=Event()))
    stores[0].release()
    assert len(list(small.prefill(P40, SPAN, chunk=16, stop=Event()))) == 6


def test_a_prefill_keeps_no_memory_of_the_shapes_it_met(engine: Any) -> None:
    for chunk in range(1, 30):
        for _ in engine.prefill(P40, SPAN, chunk=chunk, stop=Event()):
            pass
    mine = engine.layout.span_bytes(256) * 3
    assert mx.get_cache_memory() <= mine


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stop_ends_a_prefill_between_layers(engine: Any, after: int) -> None:
    stop, seen, used = Event(), 0, engine.budget.used
    if not after:
        stop.set()
    for _ in engine.prefill(P40, SPAN, chunk=16, stop=stop):
        seen += 1
        if seen == after:
            stop.set()
    assert (seen, engine.budget.used) == (after, used)


# Failures


@pytest.mark.parametrize(
    ("said", "raised"),
    [("[METAL] Command buffer execution failed: Insufficient Memory", CapacityError), ("a bad kernel", EngineError)],
    ids=["memory", "other"],
)
@pytest.mark.parametrize("where", ["graph", "evaluation"])
def test_a_step_that_fails_changes_nothing(
    engine: Any, monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception], where: str
) -> None:
    fault, caches, expected = RuntimeError(said), [prefilled(engine, P40) for _ in range(2)], last_logits(engine)

    def fail(*_: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(*((llama.MLP, "__call__") if where == "graph" else (engines.mx, "eval")), fail)
        with pytest.raises(raised) as caught:
            engine.step([Row(cache, [1, 2, 3]) for cache in caches])
        assert caught.value.__cause__ is fault
        used = engine.budget.used
        with pytest.raises(raised):
            list(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
        assert engine.budget.used == used
    assert [cache.length for cache in caches] == [39, 39]
    assert all(near(found, expected, 1e-5) for found in engine.step([Row(c, P40[-1:]) for c in caches]).logits)
    for cache in caches:
        cache.release()
