"""A small engine in numpy for tests of transfers and workers: fast, exact, sensitive to every byte of its cache."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hetsplit.engines import Row, StepResult
from hetsplit.errors import CapacityError
from hetsplit.kv import KvBlock, KvCache
from hetsplit.sampling import Sampler, SamplingParams
from hetsplit.spec import DType, KvLayer, KvLayout, ModelSpec, Rope

VOCAB, LAYERS, KV_HEADS, HEAD_DIM = 97, 3, 2, 4


def eventually(predicate: Callable[[], object], seconds: float = 2.0) -> bool:
    """Whether `predicate` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


ROPE = Rope((1.0, 0.01))


def toy_spec(context: int = 512, **changes: object) -> ModelSpec:
    facts = dict(
        architecture="toy", vocab_size=VOCAB, width=16, intermediate=32, n_layers=LAYERS, heads=4, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, norm_eps=1e-5, context=context, tied_head=False, bos_id=None, eos_ids=(),
        rotary=(ROPE,) * LAYERS, windows=(None,) * LAYERS, attention_scale=0.5,
    )  # fmt: skip
    return ModelSpec(**{**facts, **changes})


class ToyStore:
    """Host memory that holds NaN until it is written; `written` is the highest position that a fill reached."""

    def __init__(self, engine: "ToyEngine", positions: int) -> None:
        self.engine = engine
        self.positions = positions
        self.data = np.full((LAYERS, 2, positions, KV_HEADS, HEAD_DIM), np.nan, np.float32)
        self.written = 0
        self.staged: deque[KvBlock] = deque()
        self.settled = 0  # blocks that waited for the engine thread
        self.sealed: int | None = None
        self.released = False

    def write(self, block: KvBlock) -> None:
        self.engine.write_gate.wait(10)
        assert not self.released, "a write after release"
        if self.engine.staging:
            self.staged.append(KvBlock(block.layer, block.start, block.keys.copy(), block.values.copy()))
        else:
            self._put(block)

    def _put(self, block: KvBlock) -> None:
        self.data[block.layer, 0, block.start : block.stop] = block.keys
        self.data[block.layer, 1, block.start : block.stop] = block.values
        self.written = max(self.written, block.stop)

    def settle(self) -> bool:
        if self.staged:
            self._put(self.staged.popleft())
            self.settled += 1
        return not self.staged

    def seal(self, length: int) -> KvCache:
        assert not np.isnan(self.data[:, :, :length]).any(), "sealed with positions never written"
        self.sealed = length
        return KvCache(self, length)

    def read(self, span: range) -> Iterator[KvBlock]:
        for layer in range(LAYERS):
            yield KvBlock(layer, span.start, *self.data[layer, :, span.start : span.stop])

    def release(self) -> None:
        with self.engine.lock:
            if not self.released:
                self.released = True
                self.engine.reserved -= self.positions


class ToyEngine:
    """An engine whose every step a test can hold, slow down or break.

    `gate`, when cleared, holds prefill before its next block; it clears itself before block number `gate_at`.
    `write_gate` holds the fill threads in their stores. `unit_s` makes each unit of prefill take up to that long.
    With `staging`, blocks wait in a store until the engine thread settles them, as on a GPU.
    Engines whose device is "cpu" share one compute thread; another device gives one of its own.
    """

    name = "toy"
    tokenizer = None
    source = "toy"

    def __init__(
        self,
        *,
        capacity: int = 100_000,
        unit_s: float = 0.0,
        weights_hash: str = "toy",
        device: str = "cpu",
        dtype: DType = DType.FLOAT32,
        staging: bool = False,
        **spec: object,
    ) -> None:
        self.spec = toy_spec(**spec)
        self.layout = self.spec.layout(dtype)
        self.weights_hash = weights_hash
        self.device = device
        self.staging = staging
        self.capacity = capacity
        self.reserved = 0
        self.lock = threading.Lock()
        self.stores: list[ToyStore] = []
        self.unit_s = unit_s
        self.delays = random.Random(0)
        self.gate = threading.Event()
        self.gate.set()
        self.gate_at = -1
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.prefilled_units = 0
        self.running_prefills = 0
        self.steps = 0
        self.batches: list[int] = []

    def block(self, layer: int, start: int, tokens: Sequence[int]) -> KvBlock:
        t = np.asarray(tokens, np.float32)[:, None, None]
        p = np.arange(start, start + len(tokens), dtype=np.float32)[:, None, None]
        g = np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32).reshape(1, KV_HEADS, HEAD_DIM)
        keys = np.sin(t * 0.37 + p * 0.11 + g + layer).astype(np.float32)
        values = np.cos(keys * 3 + layer)
        return KvBlock(layer, start, keys.astype(self.layout.dtype.numpy), values.astype(self.layout.dtype.numpy))

    def prefill(self, tokens, span, *, chunk, stop):
        self.running_prefills += 1
        try:
            for start in range(span.start, span.stop, chunk):
                part = tokens[start : min(start + chunk, span.stop)]
                for layer in range(LAYERS):
                    if self.prefilled_units == self.gate_at:
                        self.gate.clear()
                    while not self.gate.wait(0.01) and not stop.is_set():
                        pass
                    if stop.is_set():
                        return
                    if self.unit_s:
                        time.sleep(self.delays.uniform(0, self.unit_s))
                    self.prefilled_units += 1
                    yield self.block(layer, start, part)
        finally:
            self.running_prefills -= 1

    def reserve(self, positions: int) -> ToyStore:
        with self.lock:
            if self.reserved + positions > self.capacity:
                raise CapacityError(f"{positions} positions asked, {self.capacity - self.reserved} free")
            self.reserved += positions
        store = ToyStore(self, positions)
        self.stores.append(store)
        return store

    def extend(self, store, tokens, span, *, chunk):
        for block in self.prefill(tokens, span, chunk=chunk, stop=threading.Event()):
            store._put(block)
            yield

    def step(self, rows: Sequence[Row]) -> StepResult:
        self.steps += 1
        self.batches.append(len(rows))
        logits = []
        for row in rows:
            for token in row.tokens:
                for layer in range(LAYERS):
                    row.cache.store._put(self.block(layer, row.cache.length, [token]))
                row.cache.length += 1
            logits.append(toy_logits(row.cache.store.data[:, :, : row.cache.length]))
        return StepResult(np.asarray(logits, np.float32))


def toy_logits(seen: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logits `[V]` that depend on every byte of the keys and values `[L, 2, T, G, D]`."""
    digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(seen))
    return np.random.default_rng(digest).standard_normal(VOCAB).astype(np.float32)


def reference(prompt: Sequence[int], **sampling: Any) -> list[tuple[int, float | None]]:
    """Ids and logprobs that a ToyEngine must give for a prompt, without any hetsplit code but the sampler."""
    engine = ToyEngine()
    params = SamplingParams(**sampling)
    sampler, tokens, out = Sampler(params, prompt), list(prompt), []
    for _ in range(params.max_tokens):
        blocks = [engine.block(layer, 0, tokens) for layer in range(LAYERS)]
        sampled = sampler.sample(toy_logits(np.stack([np.stack([b.keys, b.values]) for b in blocks])))
        out.append((sampled.id, sampled.logprob))
        tokens.append(sampled.id)
    return out


def kv_layout(
    kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, layers: int = LAYERS, dtype: DType = DType.FLOAT32
) -> KvLayout:
    return KvLayout((KvLayer(kv_heads, head_dim),) * layers, dtype)


def random_block(layout: KvLayout, layer: int, start: int, count: int, seed: int = 0) -> KvBlock:
    """A block of random bits, NaN payloads included: a transfer must not care what the numbers are."""
    shape = (2, count, layout.layers[layer].kv_heads, layout.layers[layer].head_dim)
    raw = np.random.default_rng((seed, layer, start)).bytes(int(np.prod(shape)) * layout.dtype.size)
    keys, values = np.frombuffer(raw, layout.dtype.numpy).reshape(shape)
    return KvBlock(layer, start, keys, values)
