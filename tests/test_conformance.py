"""The conformance suite: every pair of engines keeps every law, and each law catches the engine that breaks it."""

import threading
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

from hetsplit.conformance import LAWS, Broken, Law, Pair, Tolerance, check
from hetsplit.engines import Row, StepResult, load
from hetsplit.engines.torch import TorchEngine
from hetsplit.engines.torch_store import TorchStore
from hetsplit.errors import ConfigError, EngineError
from hetsplit.kv import KvBlock, KvCache, KvStore
from hetsplit.spec import DType
from tests.engines import PAIRS, TinyEngines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    return TinyEngines(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_pair_keeps_every_law(names: tuple[str, str], law: Law, tiny: TinyEngines) -> None:
    prefiller, decoder = map(tiny, names)
    law(Pair(prefiller, decoder, mixed_weights=True))


def test_the_pair_in_bfloat16(tiny: TinyEngines) -> None:
    engine = load(tiny.folder, device="cpu", dtype="bfloat16")
    report = check(engine, engine)
    assert len(report.kept) == len(LAWS) and not report.skipped


class DecodeOnly:
    def __init__(self, inner: Any) -> None:
        self.name, self.spec, self.layout = "decode only", inner.spec, inner.layout
        self.tokenizer, self.weights_hash, self.reserve, self.step = None, "", inner.reserve, inner.step


def test_an_engine_for_one_role_is_legal(tiny: TinyEngines) -> None:
    """Laws that need what is not there are skipped by name."""
    torch = tiny("torch")
    report = check(torch, DecodeOnly(torch), mixed_weights=True)
    assert report.skipped == {
        name: "decode only has no local prefill"
        for name in ("split equals alone", "keys and values agree", "a local prefill goes on anywhere")
    }
    assert set(report.kept) | set(report.skipped) == {law.name for law in LAWS}


def test_a_law_that_does_not_apply_is_a_skipped_test(tiny: TinyEngines) -> None:
    """pytest and unittest both take the standard library's exception for one."""
    (law,) = (law for law in LAWS if law.name == "keys and values agree")
    with pytest.raises(SkipTest, match="decode only has no local prefill"):
        law(Pair(tiny("torch"), DecodeOnly(tiny("torch"))))


def test_what_an_engine_lacks_is_named(tiny: TinyEngines) -> None:
    decoder = DecodeOnly(tiny("torch"))
    with pytest.raises(ConfigError, match="DecodeOnly is no Prefiller, it lacks: prefill"):
        Pair(decoder, decoder)  # type: ignore[arg-type]
    del decoder.tokenizer, decoder.weights_hash
    with pytest.raises(ConfigError, match="DecodeOnly is no Decoder, it lacks: tokenizer, weights_hash"):
        Pair(tiny("torch"), decoder)


def test_tolerance_follows_the_dtypes() -> None:
    assert Tolerance.of(DType.FLOAT32) == Tolerance.of(DType.FLOAT32, DType.FLOAT32)
    assert Tolerance.of(DType.FLOAT32, DType.FLOAT16).kv > Tolerance.of(DType.FLOAT32).kv


# Engines that are wrong in one way each.


class Wrapped(TorchEngine):
    """A right engine to break; made from one that was loaded."""

    def __init__(self, inner: TorchEngine) -> None:
        super().__init__(inner.model, weights_hash=inner.weights_hash)


class InterleavedKeys(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        for block in super().prefill(tokens, span, chunk=chunk, stop=stop):
            t, g, d = block.keys.shape
            keys = block.keys.reshape(t, g, 2, d // 2).swapaxes(2, 3).reshape(t, g, d)
            yield KvBlock(block.layer, block.start, keys, block.values)


class SwappedSides(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        for block in super().prefill(tokens, span, chunk=chunk, stop=stop):
            yield KvBlock(block.layer, block.start, block.values, block.keys)


class LostLayer(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        blocks = super().prefill(tokens, span, chunk=chunk, stop=stop)
        return (block for block in blocks if block.layer < self.spec.n_layers - 1)


class ChunksForget(Wrapped):
    """Each chunk begins anew, as if nothing came before it."""

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        for start in range(0, span.stop, chunk):
            part = list(tokens[start : min(start + chunk, span.stop)])
            for block in super().prefill(part, range(len(part)), chunk=chunk, stop=stop):
                yield KvBlock(block.layer, block.start + start, block.keys, block.values)


class ReusedBuffer(Wrapped):
    """All blocks of a layer share one array."""

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        buffer: dict[Any, Any] = {}
        for block in super().prefill(tokens, span, chunk=chunk, stop=stop):
            keys = buffer.setdefault((block.layer, block.count), np.empty_like(block.keys))
            keys[:] = block.keys
            yield KvBlock(block.layer, block.start, keys, block.values)


class DeafToStop(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        return super().prefill(tokens, span, chunk=chunk, stop=Event())


class AnyToken(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        return super().prefill([token % self.spec.vocab_size for token in tokens], span, chunk=chunk, stop=stop)


class WholePromptEvenIfEmpty(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        return super().prefill(tokens, span or range(len(tokens)), chunk=chunk, stop=stop)


class Leaks(Wrapped):
    def reserve(self, positions: int) -> TorchStore:
        self.budget.take(self.budget.total // 100, "a leak")
        return super().reserve(positions)


class Overbooks(Wrapped):
    def reserve(self, positions: int) -> TorchStore:
        return super().reserve(min(positions, 1000))


class ZeroedBeginning(Wrapped):
    """A store whose first position is lost."""

    def reserve(self, positions: int) -> TorchStore:
        store = super().reserve(positions)
        write = store.write
        store.write = lambda block: write(  # type: ignore[method-assign]
            block
            if block.start
            else KvBlock(block.layer, 0, block.keys * (np.arange(block.count) > 0)[:, None, None], block.values)
        )
        return store


class OpenAfterSeal(Wrapped):
    def reserve(self, positions: int) -> TorchStore:
        store = super().reserve(positions)
        store.seal = lambda length: KvCache(store, length)  # type: ignore[method-assign]
        return store


class RowsSwapped(Wrapped):
    def step(self, rows: Sequence[Row]) -> StepResult:
        return StepResult(super().step(rows).logits[::-1])


class LengthsGrowAnyway(Wrapped):
    def step(self, rows: Sequence[Row]) -> StepResult:
        lengths = [row.cache.length + len(row.tokens) for row in rows]
        try:
            return super().step(rows)
        finally:
            for row, length in zip(rows, lengths, strict=True):
                row.cache.length = length


class LastTokenOnly(Wrapped):
    """Of several tokens it computes the last."""

    def step(self, rows: Sequence[Row]) -> StepResult:
        found = super().step([Row(row.cache, row.tokens[-1:]) for row in rows])
        for row in rows:
            row.cache.length += len(row.tokens) - 1
        return found


class StepOffByOne(Wrapped):
    """Tokens are computed one position too late."""

    def step(self, rows: Sequence[Row]) -> StepResult:
        for row in rows:
            row.cache.length += 1
        try:
            return super().step(rows)
        finally:
            for row in rows:
                row.cache.length -= 1


class ExtendFromZero(Wrapped):
    """A local prefill that begins at position 0 whatever is there."""

    def extend(self, store: KvStore, tokens: Sequence[int], span: range, *, chunk: int) -> Iterator[None]:
        return super().extend(store, list(tokens[span.start :]), range(len(span)), chunk=chunk)


class NeverSettles(Wrapped):
    def reserve(self, positions: int) -> TorchStore:
        store = super().reserve(positions)
        store.settle = lambda: False  # type: ignore[method-assign]
        return store


class WritesEverywhere(Wrapped):
    """A write into one store spoils those of others."""

    def __init__(self, inner: TorchEngine) -> None:
        super().__init__(inner)
        self.stores: list[TorchStore] = []

    def reserve(self, positions: int) -> TorchStore:
        store, write, others = super().reserve(positions), TorchStore.write, list(self.stores)
        self.stores.append(store)

        def spoil(block: KvBlock) -> None:
            write(store, block)
            for other in others:
                if other._memory is not None:
                    other._memory[1].zero_()

        store.write = spoil  # type: ignore[method-assign]
        return store


class BoundToItsThread(Wrapped):
    def __init__(self, inner: TorchEngine) -> None:
        super().__init__(inner)
        self.thread = threading.get_ident()

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        if threading.get_ident() != self.thread:
            raise EngineError("this engine works on the thread that made it")
        return super().prefill(tokens, span, chunk=chunk, stop=stop)


class Crashes(Wrapped):
    def step(self, rows: Sequence[Row]) -> StepResult:
        raise ZeroDivisionError("not an error of hetsplit")


class GivesNothing(Wrapped):
    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        return iter(())


class Asserts(Wrapped):
    def step(self, rows: Sequence[Row]) -> StepResult:
        raise AssertionError("a fact that is none")


BREAKS: list[tuple[type[Wrapped], str, set[str]]] = [
    (InterleavedKeys, "prefiller", {"split equals alone", "keys and values agree"}),
    (SwappedSides, "prefiller", {"split equals alone", "keys and values agree"}),
    (LostLayer, "prefiller", {"prefill covers the span"}),
    (ChunksForget, "prefiller", {"chunks do not matter", "keys and values agree"}),
    (ReusedBuffer, "prefiller", {"chunks do not matter"}),
    (DeafToStop, "prefiller", {"stop ends a prefill"}),
    (GivesNothing, "prefiller", {"prefill covers the span", "chunks do not matter", "stop ends a prefill"}),
    (AnyToken, "prefiller", {"a bad prefill is refused"}),
    (WholePromptEvenIfEmpty, "prefiller", {"an empty prefill yields nothing"}),
    (Leaks, "decoder", {"release gives room back"}),
    (Overbooks, "decoder", {"room is bounded"}),
    (ZeroedBeginning, "decoder", {"a store gives back what was written"}),
    (OpenAfterSeal, "decoder", {"a bad block is refused"}),
    (RowsSwapped, "decoder", {"a batch computes what each row does alone"}),
    (LengthsGrowAnyway, "decoder", {"a step that fails changes nothing"}),
    (LastTokenOnly, "decoder", {"several tokens equal one by one"}),
    (ExtendFromZero, "decoder", {"a local prefill goes on anywhere"}),
    (NeverSettles, "decoder", {"a store gives back what was written"}),
    (WritesEverywhere, "decoder", {"blocks arrive while rows decode"}),
    (BoundToItsThread, "prefiller", {"the wire changes nothing"}),
    (Crashes, "decoder", {"split equals alone", "a step that fails changes nothing"}),
    (Asserts, "decoder", {"split equals alone", "a step that fails changes nothing"}),
]


@pytest.mark.parametrize(("engine", "side", "laws"), BREAKS, ids=[engine.__name__ for engine, _, _ in BREAKS])
def test_a_broken_engine_is_caught_by_name(
    engine: type[Wrapped], side: str, laws: set[str], tiny: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsplit.conformance._SETTLES_MAX", 100)
    right = tiny("torch")
    assert isinstance(right, TorchEngine)
    wrong = engine(right)
    sides = {"prefiller": right, "decoder": right} | {side: wrong}
    for law in LAWS:
        if law.name in laws:
            with pytest.raises(Broken, match=rf"^{law.name} \(torch to torch\): "):
                law(Pair(**sides))


@pytest.mark.parametrize(
    ("engine", "guess"),
    [
        (InterleavedKeys, "it looks as if rotary pairs were neighbours; the canonical order is half-split"),
        (SwappedSides, "it looks as if keys and values were swapped"),
    ],
)
def test_usual_faults_are_guessed(engine: type[Wrapped], guess: str, tiny: TinyEngines) -> None:
    right = tiny("torch")
    assert isinstance(right, TorchEngine)
    (law,) = (law for law in LAWS if law.name == "keys and values agree")
    with pytest.raises(Broken, match=rf"keys of layer 0: relative error .*, allowed 0.0001; {guess}$"):
        law(Pair(engine(right), right))


def test_check_names_every_law_that_is_broken(tiny: TinyEngines) -> None:
    right = tiny("torch")
    assert isinstance(right, TorchEngine)
    with pytest.raises(Broken, match=r"^\d+ of \d+ laws are broken:\n(.*\n)*.*keys and values agree \("):
        check(InterleavedKeys(right), right)


def test_laws_have_names_of_their_own() -> None:
    assert len({str(law) for law in LAWS}) == len(LAWS)
    unbroken = {law.name for law in LAWS} - {name for _, _, laws in BREAKS for name in laws}
    assert unbroken == {"a short fill is no cache"}  # `KvFill` sees to that one, whatever the engine
