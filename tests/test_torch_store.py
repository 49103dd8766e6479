"""Memory of layers with a window: where it begins, how it moves on, and that no step sees what is not in it."""

import numpy as np
import pytest
import torch

from hetsplit.engines.budget import KvBudget
from hetsplit.engines.torch_store import TorchStore
from hetsplit.errors import CapacityError, EngineError
from hetsplit.kv import KvBlock
from hetsplit.spec import DType, KvLayer, KvLayout

WINDOW, AT_ONCE, POSITIONS = 8, 6, 64
LAYOUT = KvLayout((KvLayer(1, 2, WINDOW), KvLayer(1, 2), KvLayer(1, 2, WINDOW)), DType.FLOAT32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsplit.spec.AT_ONCE", AT_ONCE)


@pytest.fixture(params=["in place", "staged"])
def store(request: pytest.FixtureRequest) -> TorchStore:
    made = TorchStore(LAYOUT, POSITIONS, torch.device("cpu"), KvBudget(1 << 20))
    if request.param == "staged":
        made._raw = None
    return made


def block(layer: int, start: int, stop: int) -> KvBlock:
    """Numbers that say where they belong."""
    keys = np.arange(2 * start, 2 * stop, dtype=np.float32).reshape(-1, 1, 2) + 1000 * layer
    return KvBlock(layer, start, keys, -keys)


def filled(store: TorchStore, length: int, visible: int) -> None:
    for layer, kind in enumerate(LAYOUT.layers):
        store.write(block(layer, 0 if kind.window is None else visible, length))
    while not store.settle():
        pass


def content(store: TorchStore, stop: int) -> list[tuple[int, int]]:
    """Where each layer's blocks begin and end, their numbers checked."""
    found = []
    for one in store.read(range(stop)):
        wanted = block(one.layer, one.start, one.stop)
        assert np.array_equal(one.keys, wanted.keys) and np.array_equal(one.values, wanted.values)
        found.append((one.start, one.stop))
    return found


def computed(store: TorchStore, start: int, count: int) -> None:
    """A forward pass: new numbers in their places."""
    segment = store.segment(start, count)
    for layer, kind in enumerate(LAYOUT.layers):
        memory, place = segment.memory[kind.window], [0, 0, 1][layer]
        new, at = block(layer, start, start + count), start - memory.first
        for side, array in ((memory.keys, new.keys), (memory.values, new.values)):
            side[place, :, at : at + count] = torch.from_numpy(array).transpose(0, 1)


def test_memory_is_that_of_the_window(store: TorchStore) -> None:
    shapes = {window: tuple(memory.keys.shape) for window, memory in store._held().items()}
    assert shapes == {WINDOW: (2, 1, WINDOW - 1 + AT_ONCE, 2), None: (1, 1, POSITIONS, 2)}
    assert store.at_once == AT_ONCE


def test_it_begins_with_the_first_block_and_moves_on(store: TorchStore) -> None:
    filled(store, 30, visible=23)
    assert content(store, 30) == [(23, 30), (0, 30), (23, 30)]
    length = 30
    for count in (4, 2, 1, 6, 1, 1, 3, 6, 6, 4):
        computed(store, length, count)
        length += count
        for start, stop in content(store, length)[::2]:
            assert start <= length + 1 - WINDOW and stop == length
    assert length == POSITIONS


def test_it_moves_on_while_a_prompt_is_computed(store: TorchStore) -> None:
    for start in range(0, 60, AT_ONCE):
        computed(store, start, AT_ONCE)
        assert content(store, start + AT_ONCE)[1] == (0, start + AT_ONCE)
        assert content(store, start + AT_ONCE)[0][0] <= max(0, start + AT_ONCE + 1 - WINDOW)


def test_a_step_that_is_repeated_finds_what_it_saw(store: TorchStore) -> None:
    filled(store, 30, visible=23)
    for _ in range(3):
        computed(store, 30, 6)
        computed(store, 30, 1)
    assert content(store, 31) == [(23, 31), (0, 31), (23, 31)]


def test_what_is_not_in_memory_is_not_seen(store: TorchStore) -> None:
    filled(store, 30, visible=24)
    with pytest.raises(EngineError, match="position 30 sees positions from 23 on, kept are those from 24 on"):
        store.segment(30, 1)
    store.segment(31, 1)
    with pytest.raises(EngineError, match=r"positions \[20, 24\) of layer 2 were written, its window keeps \[24, 37\)"):
        store.write(block(2, 20, 24))
    with pytest.raises(EngineError, match=r"positions \[30, 40\) of layer 0 were written, its window keeps \[24, 37\)"):
        store.write(block(0, 30, 40))


def test_a_step_appends_what_there_is_room_for(store: TorchStore) -> None:
    filled(store, 30, visible=23)
    with pytest.raises(CapacityError, match="7 tokens at once, a layer with a window takes 6"):
        store.segment(30, 7)
    assert content(store, 30) == [(23, 30), (0, 30), (23, 30)]


def test_a_small_store_keeps_everything() -> None:
    store = TorchStore(LAYOUT, 13, torch.device("cpu"), KvBudget(1 << 20))
    assert store.at_once == 13
    filled(store, 10, visible=0)
    computed(store, 10, 3)
    assert content(store, 13) == [(0, 13)] * 3
