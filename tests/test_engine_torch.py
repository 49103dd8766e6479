"""The torch engine: its stores, the order and equality of its work, its limits; and `load`."""

import copy
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hetsplit.engines.torch as torch_module
import hetsplit.engines.torch_device as torch_device
from hetsplit.engines import Decoder, LocalPrefill, Prefiller, Row, load
from hetsplit.engines.torch import TorchEngine
from hetsplit.errors import CapacityError, ConfigError, EngineError, RequestError
from hetsplit.kv import KvBlock, KvCache, KvFill, KvStore, prefill_span
from hetsplit.spec import DType
from tests.models import (
    LLAMA82_IDS,
    LLAMA_IDS,
    LLAMA_IDS_AFTER_5,
    P40,
    ROPE_IDS,
    TIED_IDS,
    hf_logits,
    save_folder,
)

SPAN = range(0, 39)
PathOf = Callable[[str], Path]
EngineOf = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def engine_of(folder_of: PathOf, device: str) -> EngineOf:
    made: dict[tuple[str, str], TorchEngine] = {}

    def engine(name: str = "llama82", dtype: str = "float32") -> TorchEngine:
        if (name, dtype) not in made:
            made[name, dtype] = load(folder_of(name), device=device, dtype=dtype)
        return made[name, dtype]

    return engine


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, engine_of: EngineOf) -> Iterator[TorchEngine]:
    """Both dtypes; whatever a test reserves it must release."""
    engine = engine_of("llama82", request.param)
    used = engine.budget.used
    yield engine
    assert engine.budget.used == used


def settle(store: KvStore) -> None:
    while not store.settle():
        pass


def prefilled(engine: TorchEngine, tokens: Sequence[int], chunk: int = 16, room: int = 40) -> KvCache:
    """All but the last token's keys and values, through blocks as in a transfer."""
    span = prefill_span(len(tokens))
    store = engine.reserve(len(tokens) + room)
    for block in engine.prefill(tokens, span, chunk=chunk, stop=Event()):
        store.write(block)
    settle(store)
    return store.seal(len(span))


def greedy(engine: TorchEngine, cache: KvCache, tokens: Sequence[int], n: int) -> list[int]:
    found: list[int] = []
    for _ in range(n):
        found.append(int(engine.step([Row(cache, tokens)]).logits[0].argmax()))
        tokens = found[-1:]
    return found


def content(store: KvStore | KvCache, span: range) -> NDArray[Any]:
    """`[L, 2, T, G, D]`."""
    return np.stack([np.stack([block.keys, block.values]) for block in store.read(span)])


def random_block(engine: TorchEngine, layer: int, start: int, count: int, dtype: Any) -> KvBlock:
    shape = (count, engine.spec.kv_heads, engine.spec.head_dim)
    rng = np.random.default_rng(start + layer)
    return KvBlock(layer, start, *(rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2)))


def test_it_has_all_three_protocols(engine: TorchEngine, device: str) -> None:
    assert isinstance(engine, Prefiller) and isinstance(engine, Decoder) and isinstance(engine, LocalPrefill)
    assert engine.name == "torch" and engine.device.startswith(device) and engine.dtype is engine.layout.dtype


# What it computes


@pytest.mark.parametrize(
    ("name", "ids"), [("llama", LLAMA_IDS), ("llama82", LLAMA82_IDS), ("tied", TIED_IDS), ("rope", ROPE_IDS)]
)
def test_prefill_then_decode_gives_the_ids_of_transformers(engine_of: EngineOf, name: str, ids: list[int]) -> None:
    engine = engine_of(name)
    cache = prefilled(engine, P40)
    assert cache.length == 39
    assert greedy(engine, cache, P40[-1:], len(ids)) == ids
    cache.release()


def test_a_prompt_of_one_token(engine_of: EngineOf) -> None:
    engine = engine_of("llama")
    assert list(engine.prefill([5], prefill_span(1), chunk=256, stop=Event())) == []
    cache = engine.reserve(7).seal(0)
    assert greedy(engine, cache, [5], 6) == LLAMA_IDS_AFTER_5
    cache.release()


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 38, 39, 40, 256])
def test_any_chunk_size_gives_the_same_cache(engine_of: EngineOf, chunk: int) -> None:
    engine = engine_of()
    whole, cache = prefilled(engine, P40, chunk=256), prefilled(engine, P40, chunk=chunk)
    np.testing.assert_allclose(content(cache, SPAN), content(whole, SPAN), atol=1e-3)
    assert greedy(engine, cache, P40[-1:], 8) == LLAMA82_IDS
    whole.release()
    cache.release()


@pytest.mark.parametrize("chunk", [1, 7, 16, 256])
def test_extend_fills_bit_for_bit_what_prefill_sends(engine: TorchEngine, chunk: int) -> None:
    sent, store = prefilled(engine, P40, chunk), engine.reserve(60)
    units = sum(1 for _ in engine.extend(store, P40, SPAN, chunk=chunk))
    assert units == engine.spec.n_layers * -(-39 // chunk)
    assert content(store, SPAN).tobytes() == content(sent, SPAN).tobytes()
    sent.release()
    store.release()


def test_extend_continues_what_was_written(engine_of: EngineOf) -> None:
    engine = engine_of()
    whole, store = prefilled(engine, P40), engine.reserve(60)
    for block in whole.read(range(0, 21)):
        store.write(block)
    settle(store)
    for _ in engine.extend(store, P40, range(21, 39), chunk=5):
        pass
    np.testing.assert_allclose(content(store, SPAN), content(whole, SPAN), atol=1e-3)
    assert greedy(engine, store.seal(39), P40[-1:], 8) == LLAMA82_IDS
    whole.release()
    store.release()


def test_a_fill_withholds_its_tail_and_the_first_step_computes_it(engine_of: EngineOf) -> None:
    engine = engine_of()
    fill = KvFill(engine.reserve(48), engine.layout, SPAN)
    for block in engine.prefill(P40, SPAN, chunk=16, stop=Event()):
        fill.put(block)
    while not fill.settle():
        pass
    cache = fill.finish()
    assert cache.length == 36
    assert greedy(engine, cache, P40[36:], 8) == LLAMA82_IDS
    own = content(cache, range(36, 39))
    for tail in fill.tail:
        at = slice(tail.start - 36, tail.stop - 36)
        np.testing.assert_allclose(tail.keys, own[tail.layer, 0, at], atol=1e-3)
        np.testing.assert_allclose(tail.values, own[tail.layer, 1, at], atol=1e-3)
    cache.release()


def test_four_tokens_in_one_step_equal_four_steps(engine_of: EngineOf) -> None:
    engine = engine_of()
    at_once, one_by_one = prefilled(engine, P40[:37]), prefilled(engine, P40[:37])
    together = engine.step([Row(at_once, P40[36:])]).logits
    for token in P40[36:]:
        alone = engine.step([Row(one_by_one, [token])]).logits
    np.testing.assert_allclose(together, alone, atol=1e-3)
    assert at_once.length == one_by_one.length == 40
    np.testing.assert_allclose(content(at_once, range(40)), content(one_by_one, range(40)), atol=1e-3)
    at_once.release()
    one_by_one.release()


def test_an_unequal_batch_gives_each_row_what_it_has_alone(engine_of: EngineOf, model_of: Callable[[str], Any]) -> None:
    engine = engine_of()
    prompts = [P40, P40[::-1][:9], [3], P40[:4]]
    tails = [1, 4, 1, 3]
    caches, alone = [prefilled(engine, p) for p in prompts], [prefilled(engine, p) for p in prompts]
    for cache, tail in zip(caches + alone, tails * 2, strict=True):
        cache.length -= tail - 1
    rows = [Row(cache, p[-tail:]) for cache, p, tail in zip(caches, prompts, tails, strict=True)]
    for _ in range(3):
        together = engine.step(rows).logits
        single = [engine.step([Row(cache, row.tokens)]).logits[0] for cache, row in zip(alone, rows, strict=True)]
        np.testing.assert_allclose(together, single, atol=1e-3)
        prompts = [[*p, int(logits.argmax())] for p, logits in zip(prompts, together, strict=True)]
        rows = [Row(cache, p[-1:]) for cache, p in zip(caches, prompts, strict=True)]
    for prompt, logits in zip(prompts, together, strict=True):
        np.testing.assert_allclose(hf_logits(model_of("llama82"), prompt[:-1])[-1], logits, atol=1e-3)
    for cache in caches + alone:
        cache.release()


def test_no_rows_give_no_logits(engine: TorchEngine) -> None:
    assert engine.step([]).logits.shape == (0, 97)


# What it yields, and when


def test_blocks_come_chunk_by_chunk_and_own_their_buffers(engine: TorchEngine) -> None:
    blocks = list(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    assert [(block.start, block.layer) for block in blocks] == [(s, i) for s in (0, 16, 32) for i in range(2)]
    arrays = [array for block in blocks for array in (block.keys, block.values)]
    for array in arrays:
        assert array.dtype == engine.dtype.numpy and array.shape[1:] == (2, 16) and array.flags.c_contiguous
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_a_yielded_buffer_is_not_used_again(engine: TorchEngine) -> None:
    kept: list[tuple[KvBlock, bytes, bytes]] = []
    for block in engine.prefill(P40, SPAN, chunk=4, stop=Event()):
        kept.append((block, block.keys.tobytes(), block.values.tobytes()))
    assert all(b.keys.tobytes() == keys and b.values.tobytes() == values for b, keys, values in kept)


def test_the_last_layer_computes_keys_and_values_only(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs once per chunk and layer but the last, and the head never."""
    engine, counted = engine_of(), []
    attention = torch.nn.functional.scaled_dot_product_attention

    def counting(*args: Any, **options: Any) -> Any:
        counted.append(1)
        return attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    monkeypatch.setattr(engine.model, "logits", lambda x: pytest.fail("the head was computed"))
    blocks = sum(1 for _ in engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    assert (blocks, len(counted)) == (6, 3)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stop_ends_a_prefill_between_layers(engine: TorchEngine, device: str, after: int) -> None:
    if device == "cuda":
        pytest.skip("blocks on their way to the host still arrive")
    stop, seen = Event(), 0
    if after == 0:
        stop.set()
    for _ in engine.prefill(P40, SPAN, chunk=16, stop=stop):
        seen += 1
        if seen == after:
            stop.set()
    assert seen == after


def test_closing_a_prefill_releases_its_memory(engine: TorchEngine) -> None:
    used = engine.budget.used
    blocks = engine.prefill(P40, SPAN, chunk=16, stop=Event())
    next(blocks)
    assert engine.budget.used == used + engine.layout.span_bytes(39)
    blocks.close()  # type: ignore[attr-defined]
    assert engine.budget.used == used


def test_an_unused_prefill_holds_no_memory(engine: TorchEngine) -> None:
    used = engine.budget.used
    blocks = engine.prefill(P40, SPAN, chunk=16, stop=Event())
    assert engine.budget.used == used
    del blocks


# Stores


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_store_converts_what_is_written(engine: TorchEngine, dtype: Any) -> None:
    store = engine.reserve(20)
    blocks = [random_block(engine, layer, start, 5, dtype) for layer in range(2) for start in (0, 5, 10)]
    for block in blocks:
        store.write(block)
    settle(store)
    read = content(store, range(0, 15))
    assert read.dtype == engine.dtype.numpy
    for block in blocks:
        at = slice(block.start, block.stop)
        assert (read[block.layer, 0, at] == block.keys.astype(engine.dtype.numpy)).all()
        assert (read[block.layer, 1, at] == block.values.astype(engine.dtype.numpy)).all()
    store.release()


def test_a_store_takes_views_of_a_received_message(engine: TorchEngine) -> None:
    """Read-only memory at an odd offset, as it comes off the wire; the store keeps no part of it."""
    block = random_block(engine, 0, 0, 8, engine.dtype.numpy)
    message = bytearray(b"head!" + block.keys.tobytes() + block.values.tobytes())
    raw = np.frombuffer(bytes(message), engine.dtype.numpy, offset=5).reshape(2, *block.keys.shape)
    store = engine.reserve(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.write(KvBlock(0, 0, *raw))
        settle(store)
    keys = next(store.read(range(0, 8))).keys
    assert keys.tobytes() == block.keys.tobytes()
    store.release()


def test_write_runs_no_torch_operation(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's torch operations would bring a team of OpenMP threads of its own."""
    store, block = engine.reserve(8), random_block(engine, 1, 0, 8, np.float32)
    done = Event()

    def write() -> None:
        with torch.profiler.profile() as profile:
            store.write(block)
        if not any(event.name.startswith("aten::") for event in profile.events()):
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert done.is_set()
    store.release()


def test_reading_gives_copies(engine: TorchEngine) -> None:
    cache = prefilled(engine, P40)
    before = [(block, block.keys.tobytes()) for block in cache.read(SPAN)]
    cache.length = 0
    greedy(engine, cache, P40[::-1], 1)
    assert all(block.keys.tobytes() == keys for block, keys in before)
    cache.release()


def test_a_block_that_does_not_fit_is_refused(engine: TorchEngine) -> None:
    store, good = engine.reserve(8), random_block(engine, 0, 0, 8, np.float32)
    with pytest.raises(EngineError, match="layer 2, the model has 2"):
        store.write(replace(good, layer=2))
    with pytest.raises(CapacityError, match=r"\[1, 9\), 8 positions"):
        store.write(replace(good, start=1))
    with pytest.raises(EngineError, match="expected"):
        store.write(replace(good, values=good.values[:, :1]))
    with pytest.raises(EngineError, match="float64, allowed: float32, bfloat16, float16"):
        store.write(replace(good, keys=good.keys.astype(np.float64)))
    with pytest.raises(EngineError, match="9 positions, 8 are reserved"):
        store.seal(9)
    with pytest.raises(EngineError, match=r"\[0, 9\), 8 positions"):
        next(store.read(range(0, 9)))
    store.release()


def test_a_sealed_store_takes_no_block(engine: TorchEngine) -> None:
    cache = prefilled(engine, P40)
    with pytest.raises(EngineError, match="sealed"):
        cache.store.write(random_block(engine, 0, 0, 4, np.float32))
    cache.release()


def test_release_is_idempotent_and_final(engine: TorchEngine) -> None:
    used, store = engine.budget.used, engine.reserve(40)
    assert engine.budget.used == used + engine.layout.span_bytes(40)
    cache = store.seal(0)
    for _ in range(2):
        store.release()
        assert engine.budget.used == used
    with pytest.raises(EngineError, match="released"):
        engine.step([Row(cache, [1])])
    with pytest.raises(EngineError, match="released"):
        store.write(random_block(engine, 0, 0, 4, np.float32))


def test_a_dropped_store_counts_as_released(engine: TorchEngine) -> None:
    used, store = engine.budget.used, engine.reserve(40)
    assert engine.budget.used > used
    del store
    assert engine.budget.used == used


# Limits and failures


def test_a_full_budget_names_asked_and_free_bytes(engine_of: EngineOf) -> None:
    model = engine_of().model
    per_position = engine_of().layout.span_bytes(1)
    engine = TorchEngine(model, kv_bytes=50 * per_position)
    store = engine.reserve(30)
    with pytest.raises(CapacityError, match=f"{21 * per_position:,} bytes, {20 * per_position:,} of"):
        engine.reserve(21)
    with pytest.raises(CapacityError, match="39 positions"):
        next(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    store.release()
    assert len(list(engine.prefill(P40, SPAN, chunk=16, stop=Event()))) == 6


def test_a_reservation_that_no_machine_has(engine_of: EngineOf) -> None:
    engine = TorchEngine(engine_of().model, kv_bytes=1 << 70)
    with pytest.raises(CapacityError, match="no memory for a cache"):
        engine.reserve(1 << 50)
    assert engine.budget.used == 0


def test_a_step_beyond_its_reservation_changes_nothing(engine: TorchEngine) -> None:
    short, fine = prefilled(engine, P40, room=0), prefilled(engine, P40)
    with pytest.raises(CapacityError, match="positions up to 41 asked, 40 are reserved"):
        engine.step([Row(fine, [1]), Row(short, [1, 2])])
    assert (fine.length, short.length) == (39, 39)
    short.release()
    fine.release()


@pytest.mark.parametrize("wrong", [-1, 97])
def test_a_token_beyond_the_vocabulary_is_named(engine: TorchEngine, wrong: int) -> None:
    cache = engine.reserve(8).seal(0)
    with pytest.raises(RequestError, match=f"token id {wrong}, allowed: 0 to 96"):
        engine.step([Row(cache, [1, wrong])])
    with pytest.raises(RequestError, match=f"token id {wrong}"):
        engine.prefill([1, wrong], range(0, 2), chunk=4, stop=Event())
    cache.release()


def test_arguments_are_checked_at_the_call(engine: TorchEngine) -> None:
    store = engine.reserve(8)
    with pytest.raises(RequestError, match="chunk of 0"):
        engine.prefill(P40, SPAN, chunk=0, stop=Event())
    with pytest.raises(RequestError, match="begins at position 0, not 3"):
        engine.prefill(P40, range(3, 9), chunk=4, stop=Event())
    with pytest.raises(RequestError, match="prompt of 40 tokens"):
        engine.prefill(P40, range(0, 41), chunk=4, stop=Event())
    with pytest.raises(CapacityError, match="up to 9 asked, 8 are reserved"):
        engine.extend(store, P40, range(0, 9), chunk=4)
    with pytest.raises(RequestError, match="0 positions"):
        engine.reserve(0)
    cache = store.seal(0)
    with pytest.raises(EngineError, match="0 tokens"):
        engine.step([Row(cache, [])])
    with pytest.raises(EngineError, match="twice"):
        engine.step([Row(cache, [1]), Row(cache, [1])])
    store.release()


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), CapacityError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), CapacityError),
        (RuntimeError("CUDA error: an illegal memory access"), EngineError),
    ],
    ids=["gpu memory", "cpu memory", "other"],
)
def test_a_backend_failure_leaves_as_our_error(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, fault: Exception, raised: type[Exception]
) -> None:
    cache = prefilled(engine, P40)

    def fail(*args: Any) -> Any:
        raise fault

    monkeypatch.setattr(engine.model, "embedded", fail)
    with pytest.raises(raised) as caught:
        engine.step([Row(cache, [1])])
    assert caught.value.__cause__ is fault and cache.length == 39
    with pytest.raises(raised):
        next(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
    cache.release()


# Memory of a GPU, where writes are staged: the same code on a CPU, told that it is not one


@pytest.fixture
def staging(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    def reserve(positions: int) -> Any:
        store = engine.reserve(positions)
        monkeypatch.setattr(store, "_raw", None)
        return store

    return reserve


def test_staged_blocks_move_one_by_one(engine: TorchEngine, staging: Callable[[int], Any]) -> None:
    sent = list(engine.prefill(P40, SPAN, chunk=20, stop=Event()))
    store = staging(40)
    for block in sent:
        store.write(block)
    with pytest.raises(EngineError, match="4 blocks are still staged"):
        store.seal(39)
    assert [store.settle() for _ in sent] == [False, False, False, True]
    read = content(store, SPAN)
    for block in sent:
        assert read[block.layer, 0, block.start : block.stop].tobytes() == block.keys.tobytes()
        assert read[block.layer, 1, block.start : block.stop].tobytes() == block.values.tobytes()
    store.release()


def test_a_staged_block_is_a_copy(engine: TorchEngine, staging: Callable[[int], Any]) -> None:
    store, block = staging(8), random_block(engine, 0, 0, 8, engine.dtype.numpy)
    expected = block.keys.tobytes()
    store.write(block)
    block.keys[:] = 0
    settle(store)
    assert next(store.read(range(0, 8))).keys.tobytes() == expected
    store.release()


# load


def test_load_takes_the_stored_dtype(folder_of: PathOf, gguf_of: PathOf) -> None:
    heard: list[tuple[int, int]] = []
    folder = load(folder_of("llama"), device="cpu", progress=lambda done, total: heard.append((done, total)))
    assert folder.dtype is DType.FLOAT32 and heard[-1] == (21, 21)
    assert load(gguf_of("llama"), device="cpu").weights_hash != "" != folder.weights_hash


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_load_takes_half_precision_as_bfloat16(
    model_of: Callable[[str], Any], tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_folder(copy.deepcopy(model_of("llama")).to(getattr(torch, stored)), tmp_path)
    assert load(path, device="cpu").dtype is DType.BFLOAT16
    assert load(path, device="cpu", dtype=DType.FLOAT32).dtype is DType.FLOAT32
    monkeypatch.setattr(torch_device, "has_bfloat16", lambda device: False)
    assert load(path, device="cpu").dtype is DType.FLOAT32
    with pytest.raises(ConfigError, match="has no bfloat16, allowed: float32"):
        load(path, device="cpu", dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tensorflow"}, "engine 'tensorflow' is unknown, allowed: llamacpp, mlx, torch, transformers"),
        ({"role": "draft"}, "role 'draft' is unknown, allowed: both, prefill, decode"),
        ({"dtype": "float16"}, "dtype 'float16' is not computed with, allowed: float32, bfloat16"),
        ({"dtype": DType.FLOAT16}, "dtype 'float16' is not computed with, allowed: float32, bfloat16"),
        ({"dtype": "int2"}, "dtype 'int2' is not computed with, allowed: float32, bfloat16, int8, int4"),
        ({"device": "tpu"}, "device 'tpu' is not here, allowed: auto, .*cpu"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not here, allowed: auto, .*cpu"),
    ],
)
def test_load_refuses_by_name(folder_of: PathOf, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder_of("llama"), **options)


def test_engines_load_no_torch_until_load() -> None:
    code = "import sys, hetsplit.engines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.e2e
def test_the_real_model_says_paris(smollm2_path: Path, device: str) -> None:
    engine = load(smollm2_path, device=device, dtype="float32")
    tokens = [504, 3575, 282, 4649, 314]
    cache = prefilled(engine, tokens)
    assert greedy(engine, cache, tokens[-1:], 12) == [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
    assert engine.tokenizer is not None and engine.tokenizer.decode([7042]) == " Paris"


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_for_the_weights(error: Exception, folder_of: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(torch_module.Model, "_parameter", full)
    with pytest.raises(CapacityError, match="no memory for the weights of .* in float32 on cpu"):
        load(folder_of("llama82"), device="cpu", dtype="float32")


def test_a_copy_that_fails_is_an_engine_error(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error 700")

    monkeypatch.setattr(torch_module, "to_numpy", broken)
    with pytest.raises(EngineError, match="CUDA error 700"):
        list(engine.prefill(P40, SPAN, chunk=16, stop=Event()))
