"""How far two engines agree: zero for the same bits, small for two precisions, large for a fault."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from hetsplit.agreement import CHARACTERS, Agreement, Reference, english_tokens, measure
from hetsplit.engines import Row, StepResult, torch
from hetsplit.errors import ConfigError, EngineError, IncompatibleError, LocalProtocolError, RequestError
from hetsplit.kv import KvBlock
from tests.toy import ToyEngine

TOKENS = [(37 * i + 5) % 97 for i in range(64)]
SIZES = {"prompt_tokens": 40, "scored_tokens": 24}
EngineOf = Callable[[str], torch.TorchEngine]


@pytest.fixture(scope="module")
def engine_of(llama82_dir: Path) -> EngineOf:
    """The torch engine in a dtype; nothing may be left reserved in it."""
    return lambda dtype: torch.load(llama82_dir, device="cpu", dtype=dtype)


class Warped:
    """A prefiller whose blocks another function changes."""

    def __init__(self, engine: torch.TorchEngine, change: Callable[[KvBlock], Sequence[KvBlock]]) -> None:
        self.name, self.spec, self.layout = "warped", engine.spec, engine.layout
        self.tokenizer, self.weights_hash = engine.tokenizer, engine.weights_hash
        self._engine, self._change = engine, change

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        for block in self._engine.prefill(tokens, span, chunk=chunk, stop=stop):
            yield from self._change(block)


def test_an_engine_agrees_with_itself_to_the_bit(engine_of: EngineOf) -> None:
    engine = engine_of("float32")
    found = measure(engine, engine, tokens=TOKENS, **SIZES)
    zeros = (0.0,) * engine.spec.n_layers
    assert found == Agreement("torch", "torch", 40, 24, zeros, zeros, 1.0, 0.0)
    assert engine.budget.used == 0


def test_two_precisions_agree_nearly(engine_of: EngineOf) -> None:
    low, high = engine_of("bfloat16"), engine_of("float32")
    for pair in ((low, high), (high, low)):
        found = measure(*pair, tokens=TOKENS, **SIZES)
        assert 1e-4 < found.mean_kv_error < found.worst_kv_error < 0.1
        assert 1e-6 < found.kl_nats < 0.2
        assert found.top1_ratio > 0.8


def test_what_is_measured_is_what_it_says(engine_of: EngineOf) -> None:
    """Errors and divergence against plain arithmetic, with one prefiller's blocks all scaled by known factors."""
    engine = engine_of("float32")

    def scaled(block: KvBlock) -> list[KvBlock]:
        return [replace(block, keys=block.keys * np.float32(1.25), values=block.values * np.float32(0.5))]

    found = measure(Warped(engine, scaled), engine, tokens=TOKENS, **SIZES)
    assert found.key_errors == pytest.approx((0.25, 0.25), rel=1e-6)
    assert found.value_errors == pytest.approx((0.5, 0.5), rel=1e-6)
    assert (found.worst_kv_error, found.mean_kv_error) == pytest.approx((0.5, 0.375))
    own, handed = alone(engine, 1.0, 1.0), alone(engine, 1.25, 0.5)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (own, handed))
    assert found.kl_nats == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()), rel=1e-5)
    assert found.top1_ratio == np.mean(own.argmax(-1) == handed.argmax(-1))


def alone(engine: torch.TorchEngine, keys: float, values: float) -> np.ndarray:
    """Logits float64 `[24, V]` after each scored token, from a cache of 37 positions scaled by two factors."""
    store = engine.reserve(64)
    for block in engine.prefill(TOKENS, range(37), chunk=37, stop=Event()):
        store.write(replace(block, keys=block.keys * np.float32(keys), values=block.values * np.float32(values)))
    cache = store.seal(37)
    engine.step([Row(cache, TOKENS[37:40])])
    found = np.concatenate([engine.step([Row(cache, [token])]).logits for token in TOKENS[40:]])
    store.release()
    return found.astype(np.float64)


def test_a_fault_of_one_layer_is_seen_in_that_layer(engine_of: EngineOf) -> None:
    engine = engine_of("float32")

    def shifted(block: KvBlock) -> list[KvBlock]:
        return [replace(block, keys=np.roll(block.keys, 1, axis=0)) if block.layer == 1 else block]

    found = measure(Warped(engine, shifted), engine, tokens=TOKENS, **SIZES)
    assert found.worst_layer == 1
    assert found.key_errors[0] == 0
    assert found.key_errors[1] > 0.5
    assert found.value_errors == (0, 0)
    assert found.kl_nats > 0.05
    assert found.top1_ratio < 1


def test_numbers_that_are_not_finite_show(engine_of: EngineOf) -> None:
    engine = engine_of("float32")

    def spoilt(block: KvBlock) -> list[KvBlock]:
        return [replace(block, keys=block.keys * np.float32("inf"))]

    found = measure(Warped(engine, spoilt), engine, tokens=TOKENS, **SIZES)
    assert not np.isfinite(found.worst_kv_error)
    assert np.isnan(found.kl_nats)


def test_one_reference_serves_several_prefillers(engine_of: EngineOf) -> None:
    high, low = engine_of("float32"), engine_of("bfloat16")
    reference = Reference(high, TOKENS, **SIZES)
    assert reference.measure(low) == measure(low, high, tokens=TOKENS, **SIZES)
    assert reference.measure(high).kl_nats == 0


def test_the_text_is_english_and_as_long_as_the_context_allows(tiny: Path) -> None:
    engine = torch.load(tiny, device="cpu", dtype="float32")
    tokens = english_tokens(engine.tokenizer)
    text = engine.tokenizer.decode(tokens)
    assert len(text) == CHARACTERS
    assert " statement" in text
    found = measure(engine, engine, prompt_tokens=300, scored_tokens=300)
    assert (found.prompt_tokens, found.scored_tokens) == (128, 128)  # of a context of 256


@pytest.mark.parametrize(("length", "counts"), [(2, (1, 1)), (5, (3, 2)), (50, (25, 25)), (63, (32, 31))])
def test_a_short_text_is_halved(length: int, counts: tuple[int, int]) -> None:
    engine = ToyEngine()
    found = measure(engine, engine, tokens=TOKENS[:length], **SIZES)
    assert (found.prompt_tokens, found.scored_tokens) == counts
    assert found.kl_nats == found.worst_kv_error == 0
    assert engine.reserved == 0


def test_a_slow_decoder_is_measured_over_fewer_tokens() -> None:
    engine = ToyEngine()
    reference = Reference(engine, TOKENS, limit_s=0.0, **SIZES)
    assert engine.steps == 1
    assert reference.measure(engine).scored_tokens == 1
    assert engine.steps == 2


def test_an_engine_that_stages_is_settled() -> None:
    engine = ToyEngine(staging=True)
    assert measure(engine, engine, tokens=TOKENS, **SIZES).kl_nats == 0


# What is refused; nothing stays reserved.


def test_other_weights_only_if_meant() -> None:
    reference = Reference(ToyEngine(), TOKENS, **SIZES)
    other = ToyEngine(weights_hash="other")
    with pytest.raises(IncompatibleError, match="weights: 'toy' here, 'other' there"):
        reference.measure(other)
    assert reference.measure(other, mixed_weights=True).top1_ratio == 1


def test_another_model_is_refused_by_field() -> None:
    with pytest.raises(IncompatibleError, match="engine toy holds another model: width: 16 here, 32 there"):
        measure(ToyEngine(width=32), ToyEngine(), mixed_weights=True, tokens=TOKENS)


class NoLocal(ToyEngine):
    extend = None


class NoStep(ToyEngine):
    step = None


class NoPrefill(ToyEngine):
    prefill = None


@pytest.mark.parametrize(
    ("prefiller", "decoder", "why"),
    [
        (ToyEngine, NoLocal, "no local prefill"),
        (ToyEngine, NoStep, "no role decode"),
        (NoPrefill, ToyEngine, "no role prefill"),
    ],
)
def test_an_engine_without_the_role(prefiller: type, decoder: type, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        measure(prefiller(), decoder(), tokens=TOKENS)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tokens": [1]}, "a text of 1 tokens, at least 2"),
        ({"tokens": TOKENS, "scored_tokens": 0}, "at least 1 of each"),
        ({}, "a text needs a tokenizer"),
    ],
)
def test_a_text_that_cannot_be_run(options: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        measure(ToyEngine(), ToyEngine(), **options)


def test_a_prompt_over_the_prefillers_context() -> None:
    with pytest.raises(RequestError, match="a prompt of 40 tokens, the context of toy is 39"):
        measure(ToyEngine(context=39), ToyEngine(), tokens=TOKENS, **SIZES)


def test_a_prefiller_that_loses_a_block(engine_of: EngineOf) -> None:
    engine = engine_of("float32")
    warped = Warped(engine, lambda block: [block] if (block.layer, block.start) != (1, 0) else [])
    reference = Reference(engine, TOKENS, prompt_tokens=60, scored_tokens=4)
    with pytest.raises(LocalProtocolError, match="layer 1"):
        reference.measure(warped)
    assert engine.budget.used == 0


def test_a_decoder_that_fails_gives_its_memory_back() -> None:
    class Failing(ToyEngine):
        def step(self, rows: Sequence[Row]) -> StepResult:
            raise EngineError("out of luck")

    engine = Failing()
    with pytest.raises(EngineError, match="out of luck"):
        Reference(engine, TOKENS)
    assert engine.reserved == 0
