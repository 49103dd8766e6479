"""Laws of fills: coverage, the withheld tail, and that nothing short is ever sealed."""

import itertools
import random

import numpy as np
import pytest

from hetsplit.errors import LocalProtocolError
from hetsplit.kv import WITHHELD, Coverage, KvBlock, KvFill, prefill_span, visible, withheld_span
from hetsplit.spec import AT_ONCE, DType, KvLayer, KvLayout
from tests.toy import LAYERS, ToyEngine, ToyStore

LENGTHS = [*range(1, 10), 40]


def chunks(span: range, rng: random.Random) -> list[range]:
    """A span cut at random."""
    cuts = sorted(rng.sample(range(span.start + 1, span.stop), k=rng.randint(0, max(len(span) - 1, 0))))
    edges = [span.start, *cuts, span.stop]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def interleaved(span: range, rng: random.Random) -> list[tuple[int, range]]:
    """Each layer's chunks in order, the layers mixed at random."""
    queues = [[(layer, part) for part in chunks(span, rng)] for layer in range(LAYERS)]
    order = []
    while any(queues):
        order.append(rng.choice([q for q in queues if q]).pop(0))
    return order


def a_fill(engine: ToyEngine, prompt: int) -> tuple[KvFill, ToyStore]:
    store = engine.reserve(prompt + 1)
    return KvFill(store, engine.layout, prefill_span(prompt)), store


@pytest.mark.parametrize("n", LENGTHS)
def test_spans_of_a_prompt(n: int) -> None:
    span = prefill_span(n)
    tail = withheld_span(span)
    assert span == range(n - 1)
    assert len(tail) == min(WITHHELD, n - 1)
    assert tail.stop == span.stop


def test_an_empty_prompt_has_an_empty_span() -> None:
    assert list(prefill_span(0)) == []


def test_the_tail_of_a_later_span_stays_inside_it() -> None:
    assert withheld_span(range(10, 12)) == range(10, 12)
    assert withheld_span(range(10, 20)) == range(17, 20)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("seed", range(5))
def test_any_chunking_gives_the_same_cache_and_the_tail_is_withheld(n: int, seed: int) -> None:
    engine, rng = ToyEngine(), random.Random(seed)
    tokens = [rng.randrange(97) for _ in range(n)]
    fill, store = a_fill(engine, n)
    for layer, part in interleaved(fill.span, rng):
        fill.put(engine.block(layer, part.start, tokens[part.start : part.stop]))
    assert fill.settle()
    cache = fill.finish()
    kept = max(n - 1 - WITHHELD, 0)
    assert cache.length == store.sealed == store.written == kept
    assert np.isnan(store.data[:, :, kept:]).all()
    for block in cache.read(range(kept)):
        want = engine.block(block.layer, 0, tokens[:kept])
        assert (block.keys == want.keys).all()
        assert (block.values == want.values).all()
    for layer in range(LAYERS):
        tail = [block for block in fill.tail if block.layer == layer]
        assert [p for block in tail for p in range(block.start, block.stop)] == list(range(kept, n - 1))
        for block in tail:
            want = engine.block(layer, block.start, tokens[block.start : block.stop])
            assert (block.keys == want.keys).all()
            assert (block.values == want.values).all()


def test_the_tail_is_a_copy() -> None:
    engine = ToyEngine()
    fill, _ = a_fill(engine, 3)
    block = engine.block(0, 0, [1, 2])
    fill.put(block)
    block.keys[:] = 0
    assert (fill.tail[0].keys == engine.block(0, 0, [1, 2]).keys).all()


def test_a_part_of_a_block_is_a_view() -> None:
    block = ToyEngine().block(1, 10, [1, 2, 3, 4])
    part = block.part(11, 13)
    assert (part.layer, part.start, part.stop, part.count) == (1, 11, 13, 2)
    assert np.shares_memory(part.keys, block.keys)
    assert (part.values == block.values[1:3]).all()
    assert block.part(0, 100).count == 4


BAD_BLOCKS = [
    (LAYERS, 0, 1, f"layer {LAYERS} of {LAYERS}"),
    (-1, 0, 1, f"layer -1 of {LAYERS}"),
    (0, 0, 0, "a block of 0 positions, at least 1 allowed"),
    (0, 0, -1, "a block of -1 positions, at least 1 allowed"),
    (0, 1, 1, "starts at position 1, expected 0"),
    (0, -1, 1, "starts at position -1, expected 0"),
    (0, 0, 9, "ends at position 9, the span ends at 8"),
    (1, 3, 1, "starts at position 3, expected 4"),
    (1, 0, 4, "starts at position 0, expected 4"),
    (2, 8, 1, "ends at position 9, the span ends at 8"),
]


@pytest.mark.parametrize(("layer", "start", "count", "why"), BAD_BLOCKS)
def test_coverage_names_what_is_wrong(layer: int, start: int, count: int, why: str) -> None:
    coverage = Coverage([KvLayer(1, 2)] * LAYERS, range(8))
    coverage.advance(1, 4)
    coverage.advance(2, 8)
    assert why in (coverage.fault(layer, start, count) or "")


def test_coverage_starts_where_its_span_does() -> None:
    coverage = Coverage([KvLayer(1, 2)], range(5, 7))
    assert coverage.fault(0, 5, 2) is None
    assert "expected 5" in (coverage.fault(0, 0, 2) or "")
    assert coverage.missing() == "layer 0 ends at position 5, expected 7"
    coverage.advance(0, 2)
    assert coverage.missing() is None


@pytest.mark.parametrize(("span", "first"), [(range(40), 30), (range(10), 0), (range(35, 40), 35), (range(0), 0)])
def test_a_layer_with_a_window_begins_where_decode_sees_it(span: range, first: int) -> None:
    """Position 37 of 40 is the first that is computed again: it sees itself and 7 before it."""
    coverage = Coverage([KvLayer(1, 2), KvLayer(1, 2, window=8)], span)
    assert coverage.reached == [span.start, first]
    if first > span.start:
        assert coverage.fault(1, span.start, 4) == f"layer 1: block starts at position 0, expected {first}"
    coverage.advance(0, len(span))
    coverage.advance(1, span.stop - first)
    assert coverage.missing() is None


def test_what_a_window_does_not_see_is_cut_from_a_block() -> None:
    layout = KvLayout((KvLayer(1, 2), KvLayer(1, 2, window=8)), DType.FLOAT32)
    numbers = np.arange(24, dtype=np.float32).reshape(12, 1, 2)
    found = [visible(KvBlock(layer, 25, numbers, -numbers), layout, 37) for layer in range(2)]
    assert [(block.start, block.count) for block in found] == [(25, 12), (30, 7)]
    assert found[1].keys.tolist() == numbers[5:].tolist() and found[1].values.tolist() == (-numbers[5:]).tolist()
    assert visible(KvBlock(1, 18, numbers, numbers), layout, 37).count == 0


def test_memory_holds_a_window_and_what_is_new() -> None:
    layout = KvLayout((KvLayer(1, 2), KvLayer(1, 2, window=8)), DType.FLOAT32)
    assert [layer.capacity(4000) for layer in layout.layers] == [4000, 7 + AT_ONCE]
    assert layout.span_bytes(4000) == 16 * (4000 + 7 + AT_ONCE) and layout.span_bytes(100) == 16 * 200


def test_a_block_out_of_turn_changes_nothing() -> None:
    engine = ToyEngine()
    fill, store = a_fill(engine, 9)
    with pytest.raises(LocalProtocolError, match="starts at position 2, expected 0"):
        fill.put(engine.block(0, 2, [1, 2]))
    assert store.written == 0
    assert fill.tail == []
    assert fill.coverage.reached == [0] * LAYERS


@pytest.mark.parametrize("n", [2, 3, 5, 9, 40])
@pytest.mark.parametrize("short", range(LAYERS))
def test_a_fill_with_one_short_layer_is_not_sealed(n: int, short: int) -> None:
    engine = ToyEngine()
    fill, store = a_fill(engine, n)
    for layer in range(LAYERS):
        count = n - 1 - (layer == short)
        if count:
            fill.put(engine.block(layer, 0, [1] * count))
    with pytest.raises(LocalProtocolError, match=f"layer {short} ends at position {n - 2}, expected {n - 1}"):
        fill.finish()
    assert store.sealed is None


def test_a_fill_is_not_sealed_while_blocks_are_staged() -> None:
    class Staging(ToyStore):
        waiting = 2

        def settle(self) -> bool:
            self.waiting -= 1
            return self.waiting <= 0

    engine = ToyEngine()
    store = Staging(engine, 2)
    fill = KvFill(store, engine.layout, prefill_span(1))
    with pytest.raises(LocalProtocolError, match="still staged"):
        fill.finish()
    assert store.sealed is None
    assert fill.settle()
    assert fill.finish().length == 0


def test_release_goes_to_the_store_once() -> None:
    engine = ToyEngine()
    fill, store = a_fill(engine, 1)
    assert engine.reserved == 2
    cache = fill.finish()
    fill.release()
    cache.release()
    assert store.released
    assert engine.reserved == 0


def test_blocks_are_frozen() -> None:
    with pytest.raises(AttributeError):
        KvBlock(0, 0, np.zeros((1, 1, 1)), np.zeros((1, 1, 1))).layer = 1  # type: ignore[misc]
