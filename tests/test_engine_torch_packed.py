"""The torch engine with packed weights: what it keeps in which role, and what it computes from them."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from numpy.typing import NDArray

from hetsplit.engines import Row, load
from hetsplit.engines.torch import TorchEngine
from hetsplit.errors import ConfigError
from hetsplit.kv import KvCache
from hetsplit.matrix import Packed
from hetsplit.spec import DType
from tests.models import P40, build_llama, save_folder, save_gguf
from tests.test_engine_torch import SPAN, content, greedy, prefilled


def moved(prefiller: TorchEngine, decoder: TorchEngine) -> KvCache:
    """A cache of one engine that the other filled."""
    store = decoder.reserve(80)
    for block in prefiller.prefill(P40, SPAN, chunk=16, stop=Event()):
        store.write(block)
    return store.seal(39)


QUANTS = ("Q4_0", "Q4_1", "Q8_0")


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model whose widths are multiples of a block, as a GGUF file of a type."""

    @cache
    def path(quant: str) -> Path:
        model = build_llama(hidden_size=128, num_attention_heads=8, intermediate_size=96, initializer_range=0.1)
        return save_gguf(model, tmp_path_factory.mktemp(quant) / "model.gguf", quant=quant)

    return path


def step_logits(engine: TorchEngine, cache: KvCache) -> NDArray[np.float32]:
    return engine.step([Row(cache, P40[-1:])]).logits[0]


def near(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> bool:
    return bool(np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected))


@pytest.mark.parametrize("quant", QUANTS)
def test_stored_blocks_decode_packed(packable: Callable[[str], Path], quant: str) -> None:
    """Quants are used as they are: what is left is bfloat16's rounding, in one role or in both."""
    exact = load(packable(quant), device="cpu", dtype="float32")
    expected = step_logits(exact, prefilled(exact, P40))
    for role in ("decode", "both"):
        engine = load(packable(quant), device="cpu", role=role)
        assert engine.dtype is DType.BFLOAT16 and isinstance(engine.decoder.layers[0].o, Packed)
        assert near(step_logits(engine, prefilled(engine, P40)), expected, 0.03)


def test_each_role_keeps_the_weights_that_it_needs(
    packable: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hetsplit")
    decode, prefill = (load(packable("Q4_1"), device="cpu", role=role) for role in ("decode", "prefill"))
    assert decode.model is decode.decoder and prefill.model is prefill.decoder and not caplog.messages
    assert decode.model.nbytes < prefill.model.nbytes / 2
    both = load(packable("Q4_1"), device="cpu")
    assert (both.model.nbytes, both.decoder.nbytes) == (prefill.model.nbytes, decode.model.nbytes)
    (said,) = caplog.messages
    assert f"{both.model.nbytes:,} bytes in bfloat16" in said and f"{both.decoder.nbytes:,} bytes packed" in said


def test_the_prefill_of_both_roles_is_that_of_one(packable: Callable[[str], Path]) -> None:
    """So a split between two workers equals one process, bit for bit."""
    apart, decode = (load(packable("Q4_1"), device="cpu", role=role) for role in ("prefill", "decode"))
    both = load(packable("Q4_1"), device="cpu")
    caches = [prefilled(both, P40), prefilled(apart, P40)]
    np.testing.assert_array_equal(*(content(cache, SPAN) for cache in caches))
    assert greedy(decode, moved(apart, decode), P40[-1:], 8) == greedy(both, caches[0], P40[-1:], 8)


@pytest.mark.parametrize(("dtype", "tolerance"), [("int8", 0.03), ("int4", 0.4)])
def test_plain_weights_are_packed_on_demand(packable: Callable[[str], Path], dtype: str, tolerance: float) -> None:
    exact = load(packable("F32"), device="cpu", dtype="float32")
    expected = step_logits(exact, prefilled(exact, P40))
    engine = load(packable("F32"), device="cpu", dtype=dtype, role="decode")
    assert isinstance(engine.model.layers[0].o, Packed) and isinstance(engine.model.head, Packed)
    found = step_logits(engine, moved(exact, engine))
    assert near(found, expected, tolerance) and not np.array_equal(found, expected)


def test_a_packed_batch_computes_what_each_row_does_alone(packable: Callable[[str], Path]) -> None:
    engine = load(packable("Q4_1"), device="cpu", role="decode")
    prompts = [P40[:n] for n in (5, 40, 17, 2, 33)]
    alone = [engine.step([Row(prefilled(engine, p), p[-1:])]).logits[0] for p in prompts]
    together = engine.step([Row(prefilled(engine, p), p[-1:]) for p in prompts]).logits
    for one, other in zip(alone, together, strict=True):
        assert near(other, one, 0.02)


def test_packed_weights_of_another_width_are_refused(tmp_path: Path) -> None:
    path = save_folder(build_llama(hidden_size=40, head_dim=8), tmp_path)
    with pytest.raises(ConfigError, match="'layers.0.qkv' has 40 columns; packed weights need a multiple of 32"):
        load(path, device="cpu", dtype="int4", role="decode")


@pytest.mark.e2e
def test_the_real_model_says_paris_from_packed_weights(smollm2_path: Path) -> None:
    engine = load(smollm2_path, device="cpu", role="decode")
    tokens = [504, 3575, 282, 4649, 314]
    assert greedy(engine, prefilled(engine, tokens), tokens[-1:], 8) == [7042, 30, 198, 198, 504, 2988, 314, 42]


@pytest.mark.e2e
def test_packed_weights_take_little_more_than_the_file(smollm2_path: Path) -> None:
    """Anonymous memory of a process after `import torch`, a reserved cache of 1,024 positions included."""
    code = f"""
import re, torch
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
before = anonymous()
import hetsplit, numpy
from hetsplit.engines import Row
engine = hetsplit.load({str(smollm2_path)!r}, device="cpu", role="decode")
store = engine.reserve(1024)
some = numpy.ones((1023, 3, 64), numpy.float32)
for layer in range(30):
    store.write(hetsplit.KvBlock(layer, 0, some, some))
engine.step([Row(store.seal(1023), [1])])
print(anonymous() - before, engine.layout.span_bytes(1024))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    grown, cache = map(int, run.stdout.split())
    assert grown <= 1.3 * smollm2_path.stat().st_size + cache
