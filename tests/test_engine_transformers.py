"""The transformers engine: what it refuses, what of a folder it obeys, the order of its work, its failures."""

import copy
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import MistralConfig, MistralForCausalLM, logging

import hetsplit.engines.transformers as module
from hetsplit.engines import Decoder, LocalPrefill, Prefiller, Row, load
from hetsplit.engines.checks import check_plain
from hetsplit.engines.transformers import TransformersEngine
from hetsplit.errors import CapacityError, ConfigError, EngineError
from hetsplit.kv import KvBlock
from hetsplit.spec import DType, Experts, Rope
from tests.models import LLAMA3_ROPE, P40, build_llama, hf_logits, save_folder
from tests.test_engine_torch import SPAN, content, prefilled

PathOf = Callable[[str], Path]
ModelOf = Callable[[str], Any]
Changed = Callable[..., Path]


def loaded(path: Path, **options: Any) -> TransformersEngine:
    engine: Any = load(path, engine="transformers", **({"device": "cpu", "dtype": "float32"} | options))
    return engine


def last_logits(engine: Any) -> NDArray[np.float32]:
    """Those after P40, `[V]`."""
    cache = prefilled(engine, P40)
    found: NDArray[np.float32] = engine.step([Row(cache, P40[-1:])]).logits[0]
    cache.release()
    return found


@pytest.fixture(scope="module")
def engine(llama82_dir: Path) -> TransformersEngine:
    return loaded(llama82_dir)


@pytest.fixture
def changed(llama82_dir: Path, tmp_path: Path) -> Changed:
    """A folder like llama82's, some fields of its config.json changed."""

    def change(**fields: Any) -> Path:
        path = shutil.copytree(llama82_dir, tmp_path / "changed", dirs_exist_ok=True)
        config = json.loads((llama82_dir / "config.json").read_text()) | fields
        (path / "config.json").write_text(json.dumps(config))
        return path

    return change


def test_it_has_all_three_protocols(engine: TransformersEngine) -> None:
    assert isinstance(engine, Prefiller) and isinstance(engine, Decoder) and isinstance(engine, LocalPrefill)
    assert (engine.name, engine.device, engine.dtype) == ("transformers", "cpu", engine.layout.dtype)


# What it refuses


@pytest.mark.parametrize("kind", ["gpt_neox", "cohere", "glm4", "gemma3_text", None, ["llama"], 7], ids=str)
def test_a_family_whose_keys_are_not_known_is_refused(changed: Changed, kind: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(changed(model_type=kind))
    assert f"model_type is {kind!r}; the transformers engine knows the keys of: llama, mistral" in str(caught.value)


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize("name", ["transformers", "mlx"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (MISTRAL | {"sliding_window": 32}, r"windows is (32, 32); the {} engine supports (None, None)"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation is 'gelu_tanh'; the {} engine supports 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantized checkpoints"),
        ({"architectures": ["LlamaForTokens"]}, "architectures is ['LlamaForTokens']"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else "",
)
def test_facts_that_its_modules_do_not_compute_are_refused(
    changed: Changed, fields: Any, message: str, name: str
) -> None:
    if name == "mlx":
        pytest.importorskip("mlx_lm")
    with pytest.raises(ConfigError) as caught:
        load(changed(**fields), engine=name, device="cpu")
    assert message.format(name) in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"qk_norm": True}, "qk_norm is True; the x engine supports False"),
        ({"post_norms": True}, "post_norms is True; the x engine supports False"),
        ({"attention_scale": 0.5}, "attention_scale is 0.5; the x engine supports 0.25"),
        ({"logit_cap": 2.0}, "logit_cap is 2.0; the x engine supports None"),
        ({"attention_cap": 2.0}, "attention_cap is 2.0; the x engine supports None"),
        ({"embed_scale": 5.0}, "embed_scale is 5.0; the x engine supports 1.0"),
        ({"experts": Experts(4, 2, 64, True)}, "experts is Experts("),
        ({"rotary": (Rope((1.0,) * 8), None)}, "layer 1 has no rotary embedding; the x engine supports one for all"),
        ({"rotary": (Rope((1.0,) * 8), Rope((2.0,) * 8))}, "layer 1 has another rotary embedding than layer 0"),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else "",
)
def test_a_plain_llama_is_told_from_all_others(engine: Any, facts: Any, message: str) -> None:
    check_plain(replace(engine.spec, biases=("q", "k", "v", "o")), Path("m"), "x")
    with pytest.raises(ConfigError) as caught:
        check_plain(replace(engine.spec, **facts), Path("m"), "x")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not computed with, allowed: float32, bfloat16$"),
        ({"dtype": "int8"}, "dtype 'int8' is not computed with, allowed: float32, bfloat16$"),
        ({"device": "tpu"}, "device 'tpu' is not here, allowed: auto, .*cpu"),
    ],
    ids=["float16", "int8", "tpu"],
)
def test_other_dtypes_and_devices_are_refused(llama82_dir: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(llama82_dir, **options)


def test_a_gguf_file_is_refused(gguf_of: PathOf) -> None:
    with pytest.raises(ConfigError, match="llama82.gguf: the transformers engine reads Hugging Face folders, this is"):
        loaded(gguf_of("llama82"))


def test_a_tied_model_with_another_head_is_refused(changed: Changed) -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings is true, but tensor lm_head.weight differs"):
        loaded(changed(tie_word_embeddings=True))


def test_a_missing_library_names_the_extra(llama82_dir: Path) -> None:
    code = f"""
import sys, hetsplit
sys.modules["transformers"] = None
try:
    hetsplit.load({str(llama82_dir)!r}, engine="transformers")
except hetsplit.HetsplitError as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60).stderr
    assert said.startswith("ConfigError: engine 'transformers' is not installed")
    assert "pip install 'hetsplit[transformers]'" in said


@pytest.mark.parametrize("fault", ["other", "scale", "none"])
def test_other_rotary_frequencies_are_refused(engine: TransformersEngine, llama82_dir: Path, fault: str) -> None:
    spec, wrong = engine.spec, copy.deepcopy(engine.model)
    (rope,) = {rope for rope in spec.rotary if rope is not None}
    if fault == "none":
        del wrong.model.rotary_emb
    other = Rope((*rope.inv_freq[:-1], rope.inv_freq[-1] + (fault == "other") * 1e-5), 1.1 if fault == "scale" else 1.0)
    with pytest.raises(ConfigError, match="rotary frequencies are not those of config.json as hetsplit reads it"):
        module._check_frequencies(llama82_dir, wrong, replace(spec, rotary=(other, other)))


# What of a folder it obeys


def test_identity_is_the_torch_engines(engine: TransformersEngine, llama82_dir: Path) -> None:
    other = load(llama82_dir, device="cpu", dtype="float32")
    assert (engine.spec, engine.layout, engine.weights_hash) == (other.spec, other.layout, other.weights_hash)


@pytest.mark.parametrize("name", ["llama", "tied", "rope", "wide"])
def test_logits_are_transformers_own(folder_of: PathOf, model_of: ModelOf, name: str) -> None:
    np.testing.assert_allclose(last_logits(loaded(folder_of(name))), hf_logits(model_of(name), P40)[-1], atol=1e-3)


def test_biases_are_obeyed(tmp_path: Path) -> None:
    model = build_llama(hidden_size=128, num_attention_heads=8, attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    path = save_folder(model, tmp_path)
    np.testing.assert_allclose(last_logits(loaded(path)), hf_logits(model, P40)[-1], atol=1e-3)
    config = json.loads((path / "config.json").read_text())
    config |= MISTRAL | {"sliding_window": None}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="unexpected tensor 'model.layers.0.mlp.down_proj.bias'"):
        loaded(path)


@pytest.mark.parametrize("window", [None, 256, 4096])
def test_a_mistral_without_a_window_in_effect(tmp_path: Path, window: int | None) -> None:
    facts = build_llama(hidden_size=128, num_attention_heads=8).config.to_dict()
    del facts["model_type"], facts["architectures"]
    model = MistralForCausalLM(MistralConfig(**facts, sliding_window=window)).eval()
    found = last_logits(loaded(save_folder(model, tmp_path)))
    np.testing.assert_allclose(found, hf_logits(model, P40)[-1], atol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"is_causal": False},
        {"return_dict": False},
        {"output_attentions": True, "output_hidden_states": True},
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        {"pad_token_id": 97},
        {"attention_dropout": "high"},
        {"dtype": "nonsense"},
        {"rope_parameters": None, "rope_theta": 10000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_peers_do_not_compare_change_nothing(
    changed: Changed, engine: TransformersEngine, fields: Any
) -> None:
    path = changed(**fields)
    (path / "evil.py").write_text("raise SystemExit('code of a model folder ran')")
    assert last_logits(loaded(path)).tobytes() == last_logits(engine).tobytes()


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_scaled_frequencies_in_either_spelling(changed: Changed, where: str) -> None:
    block = dict(LLAMA3_ROPE)
    fields: dict[str, Any] = {"rope_parameters": None, "rope_theta": block.pop("rope_theta"), where: block}
    model = build_llama(hidden_size=128, num_attention_heads=8, rope_parameters=LLAMA3_ROPE)
    np.testing.assert_allclose(last_logits(loaded(changed(**fields))), hf_logits(model, P40)[-1], atol=1e-3)


@pytest.mark.parametrize("stray", ["model.safetensors", "other.safetensors"])
def test_the_weights_are_those_that_were_hashed(tmp_path: Path, model_of: ModelOf, stray: str) -> None:
    """transformers itself prefers model.safetensors to an index, and the file that `transformers_weights` names."""
    model, other = model_of("llama82"), build_llama(hidden_size=128, num_attention_heads=8, initializer_range=0.4)
    path = save_folder(model, tmp_path / "model", max_shard_size="100KB")
    shutil.copy(save_folder(other, tmp_path / "other") / "model.safetensors", path / stray)
    config = json.loads((path / "config.json").read_text()) | {"transformers_weights": stray}
    (path / "config.json").write_text(json.dumps(config))
    engine = loaded(path)
    assert engine.weights_hash == load(path, device="cpu").weights_hash
    np.testing.assert_allclose(last_logits(engine), hf_logits(model, P40)[-1], atol=1e-3)


def test_a_file_that_changes_after_loading_changes_nothing(changed: Changed) -> None:
    path = changed()
    engine = loaded(path)
    before = last_logits(engine)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-80_000, 2)
        file.write(bytes(80_000))
    assert last_logits(engine).tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("stored", "asked", "held"),
    [
        ("float32", None, DType.FLOAT32),
        ("float16", None, DType.BFLOAT16),
        ("bfloat16", "float32", DType.FLOAT32),
        ("float32", DType.BFLOAT16, DType.BFLOAT16),
    ],
)
def test_the_dtype_is_the_stored_one_or_the_asked_one(
    model_of: ModelOf, tmp_path: Path, stored: str, asked: Any, held: DType
) -> None:
    engine = loaded(save_folder(copy.deepcopy(model_of("llama82")).to(getattr(torch, stored)), tmp_path), dtype=asked)
    assert engine.dtype is engine.layout.dtype is held
    assert {part.dtype for part in engine.model.parameters()} == {module.TORCH_DTYPE[held]}
    assert engine.model.base_model.rotary_emb.inv_freq.dtype is torch.float32
    reference = copy.deepcopy(model_of("llama82"))
    reference.load_state_dict(engine.model.state_dict())
    expected = hf_logits(reference, P40)[-1]
    allowed = 1e-4 if held is DType.FLOAT32 else 0.25
    assert np.linalg.norm(last_logits(engine) - expected) < allowed * np.linalg.norm(expected)


def test_loading_says_nothing(changed: Changed, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even where transformers was told to talk; afterwards it may talk again."""
    level = logging.get_verbosity()
    logging.set_verbosity_debug()
    logging.enable_progress_bar()
    try:
        loaded(changed(rope_theta=10000, pad_token_id=97))
        assert tuple(capfd.readouterr()) == ("", "")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.DEBUG, True)
    finally:
        logging.set_verbosity(level)
        logging.disable_progress_bar()


# The order of its work


@pytest.fixture
def calls(engine: TransformersEngine) -> Iterator[Counter[str]]:
    """How often modules ran to their end, by name."""
    counted: Counter[str] = Counter()
    watched = {"head": engine.model.lm_head, "norm": engine.model.model.norm}
    for index, layer in enumerate(engine.model.model.layers):
        watched |= {f"{part} {index}": getattr(layer, part) for part in ("self_attn", "mlp")}
    handles = [
        part.register_forward_hook(lambda *_, name=name: counted.update([name])) for name, part in watched.items()
    ]
    yield counted
    for handle in handles:
        handle.remove()


def test_the_last_layer_computes_keys_and_values_only(engine: TransformersEngine, calls: Counter[str]) -> None:
    assert sum(1 for _ in engine.prefill(P40, SPAN, chunk=16, stop=Event())) == 6
    assert calls == {"self_attn 0": 3, "mlp 0": 3}


def test_stop_ends_a_chunk_between_layers(engine: TransformersEngine, calls: Counter[str]) -> None:
    stop = Event()
    handle = engine.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: stop.set())
    assert list(engine.prefill(P40, SPAN, chunk=16, stop=stop)) == [] and not calls
    handle.remove()
    assert len(list(engine.prefill(P40, SPAN, chunk=16, stop=Event()))) == 6


@pytest.mark.parametrize("after", [1, 3])
def test_stop_ends_a_prefill_after_a_block(engine: TransformersEngine, after: int) -> None:
    stop, seen, used = Event(), 0, engine.budget.used
    for _ in engine.prefill(P40, SPAN, chunk=16, stop=stop):
        seen += 1
        if seen == after:
            stop.set()
    assert (seen, engine.budget.used) == (after, used)


def test_rows_of_unequal_length_do_not_see_each_other(
    engine: TransformersEngine, model_of: ModelOf, calls: Counter[str]
) -> None:
    prompts, tails = [P40, P40[::-1][:9], [3], P40[:4]], [1, 4, 1, 3]
    caches = [prefilled(engine, prompt) for prompt in prompts]  # type: ignore[arg-type]
    for cache, tail in zip(caches, tails, strict=True):
        cache.length -= tail - 1
    calls.clear()
    rows = [Row(cache, prompt[-tail:]) for cache, prompt, tail in zip(caches, prompts, tails, strict=True)]
    found = engine.step(rows).logits
    assert calls["head"] == 4 and [cache.length for cache in caches] == [40, 9, 1, 4]
    for cache, prompt, logits in zip(caches, prompts, found, strict=True):
        np.testing.assert_allclose(logits, hf_logits(model_of("llama82"), prompt)[-1], atol=1e-3)
        cache.release()
    assert engine.step([]).logits.shape == (0, 97)


# Failures


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(RuntimeError("CUDA error 700"), EngineError), (torch.OutOfMemoryError("out of memory"), CapacityError)],
    ids=["other", "memory"],
)
@pytest.mark.parametrize("part", ["layers.1.mlp", "norm"])
def test_a_step_that_fails_changes_no_length(
    engine: TransformersEngine, fault: Exception, raised: type[Exception], part: str
) -> None:
    caches, seen = [prefilled(engine, P40) for _ in range(2)], []  # type: ignore[arg-type]

    def fail(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 2:  # the first row was computed
            raise fault

    handle = engine.model.get_submodule(f"model.{part}").register_forward_hook(fail)
    with pytest.raises(raised) as caught:
        engine.step([Row(cache, P40[-1:]) for cache in caches])
    handle.remove()
    assert caught.value.__cause__ is fault and [cache.length for cache in caches] == [39, 39]
    again = engine.step([Row(cache, P40[-1:]) for cache in caches]).logits
    assert again[0].tobytes() == again[1].tobytes() == last_logits(engine).tobytes()
    for cache in caches:
        cache.release()


def test_a_prefill_that_fails_gives_its_memory_back(engine: TransformersEngine) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error 700")

    used = engine.budget.used
    handle = engine.model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(EngineError, match=r"positions \[0, 16\): CUDA error 700"):
        next(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    handle.remove()
    assert engine.budget.used == used


def test_a_released_store_is_refused(engine: TransformersEngine) -> None:
    cache, some = prefilled(engine, P40), np.zeros((1, 2, 16), np.float32)  # type: ignore[arg-type]
    cache.release()
    for use in (
        lambda: engine.step([Row(cache, [1])]),
        lambda: cache.store.write(KvBlock(0, 0, some, some)),
        lambda: cache.store.seal(0),
        lambda: content(cache, range(3)),
        lambda: list(engine.extend(cache.store, P40, SPAN, chunk=8)),
    ):
        with pytest.raises(EngineError, match="released"):
            use()
