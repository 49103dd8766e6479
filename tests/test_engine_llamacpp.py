"""The llama.cpp engine: what it computes, its stores, its limits, failures and silence."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from hetsplit.engines import Decoder, LocalPrefill, Prefiller, Row, load
from hetsplit.errors import CapacityError, ConfigError, EngineError
from hetsplit.kv import KvCache
from hetsplit.spec import DType
from tests.engines import without_vocabulary
from tests.families import build, save_family_gguf
from tests.models import P40, hf_logits, save_folder, save_gguf
from tests.test_engine_torch import SPAN, content, greedy, prefilled, random_block, settle

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (pip install 'hetsplit[llamacpp]')")
adapter = pytest.importorskip("hetsplit.engines.llamacpp")
stores = pytest.importorskip("hetsplit.engines.llamacpp_store")

ModelOf = Callable[[str], Any]


@pytest.fixture(scope="module")
def path(llama82: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(llama82, tmp_path_factory.mktemp("llamacpp") / "tiny.gguf", fields=without_vocabulary)


@pytest.fixture(scope="module")
def loaded(path: Path) -> Any:
    return load(path, engine="llamacpp", device="cpu")


@pytest.fixture
def engine(loaded: Any) -> Any:
    """Whatever a test reserves it must release."""
    used = loaded.budget.used
    yield loaded
    assert loaded.budget.used == used


def made(like: Any, path: Path, cells: int) -> Any:
    return adapter.LlamaEngine(path, like.spec, cells=cells)


def logits(engine: Any, cache: KvCache, tokens: Sequence[int] = P40[-1:]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = engine.step([Row(cache, tokens)]).logits[0]
    return found


def near(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float = 0.03) -> bool:
    return bool(np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected))


def test_it_has_all_three_protocols(engine: Any) -> None:
    assert isinstance(engine, Prefiller) and isinstance(engine, Decoder) and isinstance(engine, LocalPrefill)
    assert (engine.name, engine.device, engine.dtype) == ("llamacpp", "cpu", DType.FLOAT16)


# What it computes


def test_an_unknown_blob_ends_the_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stores.Cells.dump_bytes
    monkeypatch.setattr(stores.Cells, "dump_bytes", lambda *args: honest(*args)[:-4])
    with pytest.raises(ConfigError, match="tiny.gguf: this version of llama.cpp cannot be used: .* expected"):
        load(path, engine="llamacpp", device="cpu")


def test_keys_are_interleaved_on_their_way_in_and_split_on_their_way_out() -> None:
    keys = np.arange(2 * 3 * 8, dtype=np.float16).reshape(2, 3, 8)
    found = stores._interleave(keys)
    assert found[0, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7] and found[1, 2].tolist() == [40, 44, 41, 45, 42, 46, 43, 47]
    assert stores._half_split(found).tobytes() == keys.tobytes()
    assert stores._half_split(keys)[0, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_logits_are_those_of_transformers(engine: Any, model_of: ModelOf) -> None:
    cache = prefilled(engine, P40)
    assert near(logits(engine, cache), hf_logits(model_of("llama82"), P40)[-1])
    cache.release()


def test_two_prompts_of_one_length_do_not_mix_while_a_third_decodes(engine: Any, model_of: ModelOf) -> None:
    prompts = [P40, P40[::-1]]
    sent = [list(engine.prefill(prompt, SPAN, chunk=8, stop=Event())) for prompt in prompts]
    busy, others = prefilled(engine, P40[:9]), [engine.reserve(48) for _ in prompts]
    seen = list(P40[:9])
    for one, other in zip(*sent, strict=True):
        others[0].write(one)
        others[1].write(other)
        for store in others:
            store.settle()
        seen += greedy(engine, busy, seen[-1:], 1)
    for prompt, store in zip(prompts, others, strict=True):
        settle(store)
        assert near(logits(engine, store.seal(39), prompt[-1:]), hf_logits(model_of("llama82"), prompt)[-1])
        store.release()
    assert near(logits(engine, busy, seen[-1:]), hf_logits(model_of("llama82"), seen)[-1])
    busy.release()


# Stores


@pytest.mark.parametrize("order", ["layer by layer", "last layer first", "last layer late"])
@pytest.mark.parametrize("count", [1, 3, 39])
def test_blocks_may_come_in_any_order_between_layers(engine: Any, order: str, count: int) -> None:
    orders = {
        "layer by layer": lambda block: (block.layer, block.start),
        "last layer first": lambda block: (-block.layer, block.start),
        "last layer late": lambda block: block.start + 7 * block.layer,
    }
    whole, store = prefilled(engine, P40), engine.reserve(40)
    parts = [block.part(at, min(at + count, 39)) for block in whole.read(SPAN) for at in range(0, 39, count)]
    parts.sort(key=orders[order])
    for part in parts:
        store.write(part)
    settle(store)
    assert content(store, SPAN).tobytes() == content(whole, SPAN).tobytes()
    assert logits(engine, store.seal(39)).tobytes() == logits(engine, whole).tobytes()
    whole.release()
    store.release()


def test_chunks_of_one_layer_may_end_elsewhere_than_those_of_another(engine: Any) -> None:
    blocks, store = [random_block(engine, layer, 0, 12, np.float16) for layer in range(2)], engine.reserve(12)
    for layer, cuts in enumerate([(0, 5, 12), (0, 2, 3, 11, 12)]):
        for start, stop in pairwise(cuts):
            store.write(blocks[layer].part(start, stop))
    found = [store.held for _ in iter(store.settle, True)]
    assert [*found, store.held] == [2, 3, 5, 11, 12]
    read = content(store, range(12))
    assert all(read[i, 0].tobytes() == blocks[i].keys.tobytes() for i in range(2))
    store.release()


def test_a_store_moves_one_chunk_at_a_time_and_is_sealed_after_the_last(engine: Any) -> None:
    store = engine.reserve(40)
    for start in (0, 4):
        store.write(random_block(engine, 0, start, 4, np.float32))
    assert store.settle() and store.held == 0  # layer 1 is missing
    for start in (0, 4):
        store.write(random_block(engine, 1, start, 4, np.float32))
    with pytest.raises(EngineError, match="sealed while 4 blocks are still staged"):
        store.seal(8)
    assert (store.settle(), store.held, store.settle(), store.held) == (False, 4, True, 8)
    with pytest.raises(EngineError, match="a cache of 9 positions, 8 of 40 are filled"):
        store.seal(9)
    store.seal(8)
    with pytest.raises(EngineError, match="written to a sealed store"):
        store.write(random_block(engine, 0, 8, 4, np.float32))
    store.release()


def test_a_block_that_skips_or_repeats_positions_is_refused(engine: Any) -> None:
    store = engine.reserve(8)
    store.write(random_block(engine, 0, 0, 4, np.float32))
    for start in (0, 3, 5):
        with pytest.raises(EngineError, match=f"layer 0: a block starts at position {start}, expected 4"):
            store.write(random_block(engine, 0, start, 1, np.float32))
    store.write(random_block(engine, 0, 4, 0, np.float32))  # of no positions
    assert store.settle() and store.held == 0
    store.release()


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_number_beyond_float16_is_named(engine: Any, side: str, dtype: Any) -> None:
    store, block = engine.reserve(8), random_block(engine, 1, 0, 4, dtype)
    getattr(block, side)[2, 1, 5] = -131072
    message = rf"{side} of layer 1, position 2: -131072 is beyond float16, 65504 at most"
    with pytest.raises(EngineError, match=message):
        store.write(block)
    getattr(block, side)[2, 1, 5] = -60000
    store.write(block)
    store.release()


def test_release_is_idempotent_final_and_for_any_thread(engine: Any) -> None:
    used, cache = engine.budget.used, prefilled(engine, P40)
    for _ in range(2):
        thread = threading.Thread(target=cache.release)
        thread.start()
        thread.join(10)
        assert engine.budget.used == used
    block = random_block(engine, 0, 0, 4, np.float32)
    for use in (
        lambda: engine.step([Row(cache, [1])]),
        lambda: cache.store.write(block),
        cache.store.settle,
        lambda: cache.store.seal(0),
        lambda: content(cache, range(3)),
        lambda: list(engine.extend(cache.store, P40, SPAN, chunk=8)),
    ):
        with pytest.raises(EngineError, match="a released store was used"):
            use()


# Limits


def test_sequences_run_out_and_come_back(engine: Any) -> None:
    held = [engine.reserve(1) for _ in range(stores.MOVING)]
    with pytest.raises(CapacityError, match="all 63 sequences of the llama.cpp context are in use"):
        engine.reserve(1)
    for _ in range(2):  # a prefill has a store of its own
        held.pop().release()
    cache = prefilled(engine, P40)
    assert np.isfinite(logits(engine, cache)).all()
    cache.release()
    for store in held:
        store.release()


def test_cells_run_out_and_come_back(loaded: Any, path: Path) -> None:
    engine, per_position = made(loaded, path, 256), loaded.layout.span_bytes(1)
    store = engine.reserve(200)
    with pytest.raises(
        CapacityError, match=f"57 positions needs {57 * per_position:,} bytes, {56 * per_position:,} of"
    ):
        engine.reserve(57)
    with pytest.raises(CapacityError, match="a cache of 57 positions"):
        next(engine.prefill(P40 * 2, range(57), chunk=16, stop=Event()))
    store.release()
    engine.reserve(256).release()


def test_a_full_and_fragmented_context_takes_what_was_reserved(loaded: Any, path: Path) -> None:
    """Every other of many small caches goes; what comes in their place has to be cut into what the holes take."""
    engine = made(loaded, path, 256)

    def moved(tokens: list[int]) -> KvCache:
        store = engine.reserve(len(tokens))
        for block in loaded.prefill(tokens, range(len(tokens) - 1), chunk=64, stop=Event()):
            store.write(block)
        settle(store)
        return store.seal(len(tokens) - 1)  # type: ignore[no-any-return]

    small = [P40[i : i + 8] for i in range(32)]
    caches = [moved(tokens) for tokens in small]
    for cache in caches[::2]:
        cache.release()
    held = list(zip([*small[1::2], P40, P40, P40], [*caches[1::2], *(moved(P40) for _ in range(3))], strict=True))
    assert engine.budget.total - engine.budget.used == 8 * loaded.layout.span_bytes(1)
    for tokens, cache in held:
        alone = prefilled(loaded, tokens)  # in a context with room
        assert near(logits(engine, cache, tokens[-1:]), logits(loaded, alone, tokens[-1:]), 1e-3)
        alone.release()


# Failures


@pytest.mark.parametrize(("code", "raised"), [(1, CapacityError), (-3, EngineError), (2, EngineError)])
def test_a_decode_that_fails_halfway_changes_no_length(
    engine: Any, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[Exception]
) -> None:
    caches, calls, honest = [prefilled(engine, P40, room=200) for _ in range(3)], [], llama_cpp.llama_decode

    def decode(*args: Any) -> int:
        calls.append(1)
        return code if len(calls) == 2 else int(honest(*args))  # the first 512 tokens are in

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", decode)
        with pytest.raises(raised, match="a decode step of 3 rows"):
            engine.step([Row(cache, [1] * 200) for cache in caches])
    assert len(calls) == 2 and [cache.length for cache in caches] == [39, 39, 39]
    for cache in caches:
        assert near(logits(engine, cache), hf_logits(model_of("llama82"), P40)[-1])
        cache.release()


def test_a_prefill_that_fails_gives_its_cells_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used = engine.budget.used
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_decode", lambda *_: -3)
        with pytest.raises(EngineError, match=r"llama.cpp failed in positions \[0, 16\): code -3"):
            next(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    assert engine.budget.used == used


def test_a_cache_outlives_the_engine_that_was_dropped(loaded: Any, path: Path) -> None:
    engine = made(loaded, path, 256)
    cache = prefilled(engine, P40)
    before = content(cache, SPAN).tobytes()
    del engine
    assert content(cache, SPAN).tobytes() == before


def test_a_closed_engine_is_refused(loaded: Any, path: Path) -> None:
    engine = made(loaded, path, 256)
    cache, store = prefilled(engine, P40), engine.reserve(8)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.step([Row(cache, [1])]),
        lambda: engine.reserve(4),
        lambda: next(engine.prefill(P40, SPAN, chunk=8, stop=Event())),
        lambda: list(engine.extend(store, P40, range(4), chunk=8)),
        lambda: content(cache, SPAN),
        store.settle,
    ):
        with pytest.raises(EngineError, match="used after it was closed"):
            use()
    cache.release()


# What it refuses, and its silence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype 'bfloat16': llama.cpp computes with the file's own, .* in float16"),
        ({"dtype": "int4"}, "dtype 'int4': llama.cpp computes"),
        ({"device": "tpu"}, "device 'tpu' is not here, allowed: auto, .*cpu"),
    ],
    ids=["bfloat16", "int4", "tpu"],
)
def test_other_dtypes_and_devices_are_refused(path: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path, engine="llamacpp", **({"device": "cpu"} | options))
    assert load(path, engine="llamacpp", device="cpu", dtype="float16").dtype is DType.FLOAT16


def test_a_folder_is_refused(llama82_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the llama.cpp engine reads GGUF files, this is a folder"):
        load(llama82_dir, engine="llamacpp", device="cpu")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gpt2", "general.architecture is 'gpt2'"),
        ("llama.attention.sliding_window", 8, "llama.attention.sliding_window is 8; llama files define no windows"),
    ],
)
def test_a_file_is_refused_by_name(llama82: Any, tmp_path: Path, key: str, value: Any, message: str) -> None:
    def fields(writer: Any) -> None:
        without_vocabulary(writer)
        if isinstance(value, str):
            writer.kv_data[0][key].value = value
        else:
            writer.add_uint32(key, value)

    with pytest.raises(ConfigError, match=message):
        load(save_gguf(llama82, tmp_path / "other.gguf", fields=fields), engine="llamacpp", device="cpu")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3-window", {}, "attention windows are not supported by the llama.cpp engine"),
        ("gemma2-of-gguf", {}, "gemma2 models are not supported by the llama.cpp engine"),
        ("gemma2-of-gguf", {"sliding_window": 256}, "gemma2 models are not"),  # a window of the whole context
        ("gemma3-of-gguf", {}, "gemma3 models are not"),
    ],
)
def test_windows_and_gemma_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_folder(build(name, **changes), tmp_path / "folder")
    path = save_family_gguf(name, folder, tmp_path / "model.gguf", without_vocabulary)
    with pytest.raises(ConfigError, match=message):
        load(path, engine="llamacpp", device="cpu")


def test_what_llama_cpp_says_is_in_our_error_and_nowhere_else(llama82: Any, tmp_path: Path) -> None:
    """Another process, so that whatever is said when the library comes up is heard too."""
    good = save_gguf(llama82, tmp_path / "good.gguf", fields=without_vocabulary)
    silent = save_gguf(llama82, tmp_path / "bad.gguf")  # llama.cpp wants to be told that there is no vocabulary
    code = f"""
import sys
from threading import Event
from hetsplit import HetsplitError, load
engine = load({str(good)!r}, engine="llamacpp")
assert len(list(engine.prefill(list(range(40)), range(39), chunk=16, stop=Event()))) == 6
try:
    load({str(silent)!r}, engine="llamacpp")
except HetsplitError as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("ConfigError") and "bad.gguf: llama.cpp cannot load it (" in run.stdout
    assert "tokenizer" in run.stdout
