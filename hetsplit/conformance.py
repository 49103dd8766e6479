"""The laws that every engine has to keep, for people who write one.

Owns what "any pair of engines works" means: each law is a function of a `Pair`, named, and raises `Broken` with what
it expected and what it found. `check` runs those that apply; to run them one by one in a test suite:

    @pytest.mark.parametrize("law", conformance.LAWS, ids=str)
    def test_my_engine(law: conformance.Law) -> None:
        law(conformance.Pair(mine, mine))

A law that does not apply raises `Skipped`, which test frameworks know: it is the standard library's `SkipTest`.
Knows no backend and no test framework. Invariants: a law leaves every store released; engines are called from one
thread at a time, `KvStore.write` excepted.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest import SkipTest

import numpy as np
from numpy.typing import NDArray

from hetsplit.engines import Decoder, LocalPrefill, Prefiller, Row
from hetsplit.errors import CapacityError, ConfigError, HetsplitError
from hetsplit.kv import KvBlock, KvCache, KvFill, KvStore, prefill_span, visible, withheld_span
from hetsplit.spec import DType
from hetsplit.split import connect

_ROOM: Final = 16  # positions that are reserved after the prompt
_STEPS: Final = 6  # tokens decoded where a law compares texts
_WAIT_S: Final = 60.0
_SETTLES_MAX: Final = 100_000
_PROMPT: Final = 24

# An engine is somebody's code: what it can raise.
_FAULTS: Final = (
    *(HetsplitError, ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError),
    *(MemoryError, OSError, AssertionError),
)

Floats = NDArray[np.float32]


class Broken(AssertionError):
    """An engine broke a law. The message says which, what was expected and what was found."""


class Skipped(SkipTest):
    """A law does not apply: the engine does not offer the part that it is about."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative root mean square errors that are allowed: `kv` for keys and values of a layer, `logits` of a position.

    `tokens`: greedy tokens have to be equal as well, where the best logit leads by more than the tolerance.
    """

    kv: float
    logits: float

    @classmethod
    def of(cls, *dtypes: DType) -> "Tolerance":
        """For engines that compute with the same weights in these dtypes."""
        if set(dtypes) == {DType.FLOAT32}:
            return cls(1e-4, 1e-3)
        return cls(0.05, 0.1)


@dataclass(frozen=True)
class Pair:
    """Two engines of one model, or one twice. `prompt` and `tolerance` have defaults that fit most models.

    `mixed_weights`: the engines hold different weights of that model. `chunk`: tokens of a prefill's usual step.
    Raises `ConfigError` naming what an engine lacks that its side of the pair needs.
    """

    prefiller: Prefiller
    decoder: Decoder
    prompt: Sequence[int] = ()
    tolerance: Tolerance | None = None
    chunk: int = 8
    mixed_weights: bool = False
    names: str = field(init=False)
    _prefilled: list[KvBlock] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        _complete(self.prefiller, Prefiller)
        _complete(self.decoder, Decoder)
        vocab = self.decoder.spec.vocab_size
        prompt = list(self.prompt) or [(37 * i + 5) % vocab for i in range(_PROMPT)]
        dtypes = (self.prefiller.layout.dtype, self.decoder.layout.dtype)
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "tolerance", self.tolerance or Tolerance.of(*dtypes))
        object.__setattr__(self, "names", f"{self.prefiller.name} to {self.decoder.name}")

    @property
    def allowed(self) -> Tolerance:
        assert self.tolerance is not None
        return self.tolerance

    @property
    def span(self) -> range:
        return prefill_span(len(self.prompt))

    def prefill(self, chunk: int) -> list[KvBlock]:
        """The prompt's prefill, computed."""
        return list(self.prefiller.prefill(self.prompt, self.span, chunk=chunk, stop=threading.Event()))

    def blocks(self) -> list[KvBlock]:
        """The same in chunks of `chunk`, computed once for all laws of this pair."""
        if not self._prefilled:
            self._prefilled.extend(self.prefill(self.chunk))
        return self._prefilled

    @contextmanager
    def store(self, positions: int | None = None) -> Iterator[KvStore]:
        """One of the decoder's stores; released at the end."""
        store = self.decoder.reserve(positions or len(self.prompt) + _ROOM)
        try:
            yield store
        finally:
            store.release()

    @contextmanager
    def moved(self, length: int | None = None) -> Iterator[KvCache]:
        """A cache of the decoder that the prefiller filled: the prompt's first `length` positions."""
        with self.store() as store:
            length = len(self.span) if length is None else length
            for block in self.blocks():
                if block.start < length:
                    store.write(visible(block.part(block.start, length), self.decoder.layout, length))
            settled(store)
            yield store.seal(length)

    @contextmanager
    def local(self, prompt: Sequence[int] | None = None) -> Iterator[KvCache]:
        """A cache that the decoder filled by itself. Raises `Skipped` where it cannot."""
        if not isinstance(self.decoder, LocalPrefill):
            raise Skipped(f"{self.decoder.name} has no local prefill")
        tokens = self.prompt if prompt is None else prompt
        span = prefill_span(len(tokens))
        with self.store() as store:
            for _ in self.decoder.extend(store, tokens, span, chunk=self.chunk):
                pass
            yield store.seal(len(span))

    def logits(self, cache: KvCache, tokens: Sequence[int]) -> Floats:
        """Those after the last of `tokens`, `[V]`."""
        found: Floats = self.decoder.step([Row(cache, tokens)]).logits[0]
        return found


@dataclass(frozen=True, slots=True)
class Law:
    """A name and a check; calling it raises `Broken`, or `Skipped` where it does not apply."""

    name: str
    check: Callable[[Pair], None]

    def __str__(self) -> str:
        return self.name

    def __call__(self, pair: Pair) -> None:
        try:
            self.check(pair)
        except Broken as error:
            raise Broken(f"{self.name} ({pair.names}): {error}") from error
        except _FAULTS as error:
            raise Broken(f"{self.name} ({pair.names}): {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found: laws kept, and those skipped with the reason."""

    kept: tuple[str, ...]
    skipped: dict[str, str]


def check(prefiller: Prefiller, decoder: Decoder, **options: Any) -> Report:
    """Run all laws over a pair; `options` are those of `Pair`. Raises `Broken` naming every law that was broken."""
    pair = Pair(prefiller, decoder, **options)
    kept: list[str] = []
    skipped: dict[str, str] = {}
    broken: list[str] = []
    for law in LAWS:
        try:
            law(pair)
            kept.append(law.name)
        except Skipped as reason:
            skipped[law.name] = str(reason)
        except Broken as error:
            broken.append(str(error))
    if broken:
        raise Broken(f"{len(broken)} of {len(LAWS)} laws are broken:\n" + "\n".join(broken))
    return Report(tuple(kept), skipped)


def settled(store: KvStore) -> None:
    """Move in what was written, as far as that is possible yet."""
    for _ in range(_SETTLES_MAX):
        if store.settle():
            return
    raise Broken(f"settle() was called {_SETTLES_MAX} times and asks for one call more")


def distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative root mean square error; inf where a number is not finite."""
    one, other = found.astype(np.float64), expected.astype(np.float64)
    scale = float(np.sqrt(np.mean(other**2))) or 1.0
    error = float(np.sqrt(np.mean((one - other) ** 2))) / scale
    return error if np.isfinite(error) else float("inf")


def _complete(engine: object, protocol: type[Prefiller] | type[Decoder]) -> None:
    parts = [*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))]
    if missing := [part for part in parts if not hasattr(engine, part)]:
        raise ConfigError(f"{type(engine).__name__} is no {protocol.__name__}, it lacks: {', '.join(missing)}")


def _near(what: str, found: NDArray[Any], expected: NDArray[Any], allowed: float) -> None:
    if found.shape != expected.shape:
        raise Broken(f"{what}: shape {found.shape}, expected {expected.shape}")
    if not (error := distance(found, expected)) <= allowed:
        raise Broken(f"{what}: relative error {error:.3g}, allowed {allowed:g}")


def _refused(what: str, call: Callable[[], Any], kind: type[HetsplitError] = HetsplitError) -> None:
    try:
        call()
    except kind:
        return
    except Broken:
        raise
    except _FAULTS as error:
        raise Broken(f"{what}: {type(error).__name__} ({error}), expected {kind.__name__}") from error
    raise Broken(f"{what}: accepted, expected {kind.__name__}")


def _joined(blocks: Sequence[KvBlock], layers: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Keys and values `[T, G, D]` of each layer; blocks of a layer are in order."""
    sides = []
    for layer in range(layers):
        own = [block for block in blocks if block.layer == layer]
        if not own:
            raise Broken(f"no block of layer {layer}, expected one of each of {layers} layers")
        sides.append((np.concatenate([b.keys for b in own]), np.concatenate([b.values for b in own])))
    return sides


def _agree(found: Sequence[KvBlock], expected: Sequence[KvBlock], layers: int, allowed: float) -> None:
    for layer, (one, other) in enumerate(zip(_joined(found, layers), _joined(expected, layers), strict=True)):
        for side, mine, theirs in zip(("keys", "values"), one, other, strict=True):
            try:
                _near(f"{side} of layer {layer}", mine, theirs, allowed)
            except Broken as error:
                raise Broken(f"{error}{_guess(side, mine, *other, allowed)}") from None


def _guess(side: str, found: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], allowed: float) -> str:
    """What the usual faults would have given, compared with what was found; "" where it is none of them."""
    tokens, heads, width = keys.shape
    if found.shape != keys.shape or width % 2:
        return ""
    neighbours = keys.reshape(tokens, heads, 2, width // 2).swapaxes(2, 3).reshape(keys.shape)
    others = {
        "as if keys and values were swapped": values if side == "keys" else keys,
        "as if rotary pairs were neighbours; the canonical order is half-split": neighbours,
    }
    return next((f"; it looks {what}" for what, other in others.items() if distance(found, other) <= allowed), "")


def _random_blocks(pair: Pair, positions: int) -> list[KvBlock]:
    rng = np.random.default_rng(0)
    layout = pair.decoder.layout
    return [
        KvBlock(i, 0, *(rng.standard_normal((positions, layer.kv_heads, layer.head_dim), np.float32) for _ in range(2)))
        for i, layer in enumerate(layout.layers)
    ]


def prefill_covers_the_span(pair: Pair) -> None:
    """Blocks come chunk by chunk, every layer once per chunk, in the layout's shape and dtype."""
    layout = pair.prefiller.layout
    expected = [
        (layer, start, min(start + pair.chunk, pair.span.stop))
        for start in range(0, pair.span.stop, pair.chunk)
        for layer in range(len(layout.layers))
    ]
    blocks = pair.prefill(pair.chunk)
    if (found := [(block.layer, block.start, block.stop) for block in blocks]) != expected:
        raise Broken(f"blocks (layer, start, stop) {found}, expected {expected}")
    for block in blocks:
        layer = layout.layers[block.layer]
        shape = (block.count, layer.kv_heads, layer.head_dim)
        for array in (block.keys, block.values):
            if array.shape != shape or array.dtype != layout.dtype.numpy:
                raise Broken(f"a block of {array.dtype} {array.shape}, expected {layout.dtype} {shape}")


def chunks_do_not_matter(pair: Pair) -> None:
    """Any chunk size gives the same keys and values; a block that was yielded stays as it is."""
    layers = len(pair.prefiller.layout.layers)
    whole = pair.prefill(4096)
    for chunk in (1, 3, pair.chunk):
        _agree(pair.prefill(chunk), whole, layers, pair.allowed.kv)


def stop_ends_a_prefill(pair: Pair) -> None:
    """Once `stop` is set, few blocks follow and no error; the engine goes on to serve."""
    stop = threading.Event()
    chunk = 1
    running = iter(pair.prefiller.prefill(pair.prompt, pair.span, chunk=chunk, stop=stop))
    if next(running, None) is None:
        raise Broken("no block at all before the stop")
    stop.set()
    rest = sum(1 for _ in running)
    per_chunk = len(pair.prefiller.layout.layers)
    if rest > 2 * per_chunk:
        raise Broken(f"{rest} blocks after the stop, at most two chunks' ({2 * per_chunk}) are allowed")
    if len(pair.prefill(pair.chunk)) < per_chunk:
        raise Broken("no whole prefill after one that was stopped")


def a_bad_prefill_is_refused(pair: Pair) -> None:
    """Spans beyond the prompt, chunks of nothing and ids outside the vocabulary, at the call or the first block."""
    stop = threading.Event()
    tokens, vocab = list(pair.prompt), pair.prefiller.spec.vocab_size

    def run(ids: Sequence[int], span: range, chunk: int) -> None:
        for _ in pair.prefiller.prefill(ids, span, chunk=chunk, stop=stop):
            pass

    _refused("a chunk of 0", lambda: run(tokens, pair.span, 0))
    _refused("a span beyond the prompt", lambda: run(tokens, range(0, len(tokens) + 1), pair.chunk))
    _refused(f"token id {vocab}", lambda: run([vocab, *tokens], range(0, 2), pair.chunk))
    _refused("token id -1", lambda: run([-1, *tokens], range(0, 2), pair.chunk))


def an_empty_prefill_yields_nothing(pair: Pair) -> None:
    """A prompt of one token prefills nothing, and decodes from an empty cache."""
    if found := list(pair.prefiller.prefill([1], range(0), chunk=pair.chunk, stop=threading.Event())):
        raise Broken(f"{len(found)} blocks of an empty span, expected none")
    with pair.store() as store:
        settled(store)
        logits = pair.logits(store.seal(0), [1])
        if logits.shape != (pair.decoder.spec.vocab_size,) or not np.isfinite(logits).all():
            raise Broken(f"logits {logits.shape} of one token, expected {pair.decoder.spec.vocab_size} finite ones")


def release_gives_room_back(pair: Pair) -> None:
    """Room comes back however often it is taken; a release may be repeated; what was released is not usable."""
    for _ in range(200):
        store = pair.decoder.reserve(len(pair.prompt) + _ROOM)
        store.release()
        store.release()
    _refused("a write to a released store", lambda: store.write(_random_blocks(pair, 1)[0]))
    _refused("sealing a released store", lambda: store.seal(0))


def room_is_bounded(pair: Pair) -> None:
    """What does not fit is refused before memory is spent, and hurts nobody."""
    _refused("a cache of 2**40 positions", lambda: pair.decoder.reserve(2**40), CapacityError)
    _refused("a cache of 0 positions", lambda: pair.decoder.reserve(0))
    with pair.store():
        pass


def a_store_gives_back_what_was_written(pair: Pair) -> None:
    """In canonical form, rounded to the dtype of the layout; in any order between layers."""
    positions = 12
    blocks = _random_blocks(pair, positions)
    parts = [block.part(start, start + 4) for block in reversed(blocks) for start in range(0, positions, 4)]
    with pair.store() as store:
        for part in parts:
            store.write(part)
            settled(store)  # to wait for other layers is no work: a worker would ask for more of it without end
        cache = store.seal(positions)
        layers = len(blocks)
        rounding = 1e-6 if pair.decoder.layout.dtype is DType.FLOAT32 else 0.005
        _agree(list(cache.read(range(0, positions))), blocks, layers, rounding)
        _agree(list(cache.read(range(3, 7))), [block.part(3, 7) for block in blocks], layers, rounding)


def a_bad_block_is_refused(pair: Pair) -> None:
    """Blocks of another shape, type or layer, beyond the reservation, or after the seal."""
    good = _random_blocks(pair, 4)
    with pair.store(8) as store:
        block = good[0]
        layers = len(good)
        _refused(f"layer {layers} of {layers}", lambda: store.write(replace(block, layer=layers)))
        _refused("layer -1", lambda: store.write(replace(block, layer=-1)))
        _refused("keys of half the width", lambda: store.write(replace(block, keys=block.keys[..., ::2])))
        _refused("keys that are integers", lambda: store.write(replace(block, keys=block.keys.astype(np.int32))))
        _refused("values of fewer positions", lambda: store.write(replace(block, values=block.values[:2])))
        _refused("positions beyond the reserved", lambda: store.write(replace(_random_blocks(pair, 9)[0])))
        for one in good:
            store.write(one)
        settled(store)
        store.seal(4)
        _refused("a write after the seal", lambda: store.write(replace(block, start=4)))


def a_short_fill_is_no_cache(pair: Pair) -> None:
    """A fill whose last layer is missing, or repeats, ends in a named error and never in a cache."""
    blocks = pair.blocks()
    last = len(pair.decoder.layout.layers) - 1
    with pair.store() as store:
        fill = KvFill(store, pair.decoder.layout, pair.span)
        for block in blocks:
            seen = visible(block, pair.decoder.layout, withheld_span(pair.span).start)
            if block.layer != last and seen.count:
                fill.put(seen)
        _refused("a fill without its last layer", fill.finish)
        _refused("a block that came already", lambda: fill.put(blocks[0]))


def split_equals_alone(pair: Pair) -> None:
    """A prefill on one and the decode on the other give the logits of the decoder alone, step after step."""
    with pair.moved() as cache, pair.local() as alone:
        tokens = list(pair.prompt[-1:])
        for step in range(_STEPS):
            found, expected = pair.logits(cache, tokens), pair.logits(alone, tokens)
            _near(f"logits of step {step}", found, expected, pair.allowed.logits)
            lead = np.sort(expected)[-1] - np.sort(expected)[-2]
            clear = lead > 2 * pair.allowed.logits * float(np.sqrt(np.mean(expected.astype(np.float64) ** 2)))
            tokens = [int(expected.argmax())]
            if clear and int(found.argmax()) != tokens[0]:
                raise Broken(f"token {int(found.argmax())} in step {step}, expected {tokens[0]}")


def keys_and_values_agree(pair: Pair) -> None:
    """What the prefiller computes is, layer by layer, what the decoder would have computed."""
    with pair.local() as alone:
        _agree(pair.blocks(), list(alone.read(pair.span)), len(pair.decoder.layout.layers), pair.allowed.kv)


def a_batch_computes_what_each_row_does_alone(pair: Pair) -> None:
    """Rows of unequal length, with one token or several, do not see each other."""
    lengths = [len(pair.span), 1, len(pair.span) // 2]
    rows = [(length, list(pair.prompt[length : length + 1 + index % 2])) for index, length in enumerate(lengths)]
    expected = []
    for length, tokens in rows:
        with pair.moved(length) as cache:
            expected.append(pair.logits(cache, tokens))
    with pair.moved(rows[0][0]) as one, pair.moved(rows[1][0]) as two, pair.moved(rows[2][0]) as three:
        batch = [Row(cache, tokens) for cache, (_, tokens) in zip((one, two, three), rows, strict=True)]
        found = pair.decoder.step(batch).logits
        for index, row in enumerate(batch):
            _near(f"logits of row {index}", found[index], expected[index], pair.allowed.logits)
            if row.cache.length != rows[index][0] + len(row.tokens):
                raise Broken(f"row {index}: length {row.cache.length}, expected {rows[index][0] + len(row.tokens)}")


def several_tokens_equal_one_by_one(pair: Pair) -> None:
    """A step of four tokens gives what four steps give; every prompt ends in one."""
    length = len(pair.span) - 3
    with pair.moved(length) as at_once, pair.moved(length) as one_by_one:
        tokens = list(pair.prompt[length : length + 4])
        found = pair.logits(at_once, tokens)
        for token in tokens:
            expected = pair.logits(one_by_one, [token])
        _near("logits after four tokens", found, expected, pair.allowed.logits)
        follow = [int(expected.argmax())]
        _near(
            "logits one step later", pair.logits(at_once, follow), pair.logits(one_by_one, follow), pair.allowed.logits
        )


def a_step_that_fails_changes_nothing(pair: Pair) -> None:
    """Rows beyond their reservation, ids outside the vocabulary, a cache twice: no length changes, nothing is lost."""
    token = pair.prompt[-1]
    with pair.moved() as cache, pair.moved() as same:
        length, vocab = cache.length, pair.decoder.spec.vocab_size
        beyond = cache.store.positions - length + 1
        step = pair.decoder.step
        _refused("a row beyond its reservation", lambda: step([Row(cache, [token] * beyond)]), CapacityError)
        _refused(f"token id {vocab}", lambda: step([Row(cache, [vocab])]))
        _refused("token id -1", lambda: step([Row(same, [token]), Row(cache, [-1])]))
        _refused("a cache twice in one step", lambda: step([Row(cache, [token]), Row(cache, [token])]))
        _refused("a row without tokens", lambda: step([Row(cache, [])]))
        if (cache.length, same.length) != (length, length):
            raise Broken(f"lengths {cache.length} and {same.length} after steps that failed, expected {length}")
        after = pair.logits(cache, [token])
    with pair.moved() as fresh:
        _near("logits after steps that failed", after, pair.logits(fresh, [token]), pair.allowed.logits)


def blocks_arrive_while_rows_decode(pair: Pair) -> None:
    """Another thread writes into one store while the engine's thread decodes from another, settling in between."""
    blocks = pair.blocks()
    token = pair.prompt[-1]
    with pair.moved() as quiet, pair.moved() as busy, pair.store() as store:
        expected = [pair.logits(quiet, [token]) for _ in range(_STEPS)]
        failures: list[BaseException] = []

        def fill() -> None:
            try:
                for block in blocks:
                    store.write(block)
            except HetsplitError as error:
                failures.append(error)

        thread = threading.Thread(target=fill)
        thread.start()
        for step in range(_STEPS):
            found = pair.logits(busy, [token])
            store.settle()
            _near(f"logits of step {step} while blocks arrive", found, expected[step], pair.allowed.logits)
        thread.join(_WAIT_S)
        if failures or thread.is_alive():
            raise Broken(f"writing from another thread: {failures or 'does not end'}")
        settled(store)
        cache = store.seal(len(pair.span))
        with pair.moved() as fresh:
            _near("logits afterwards", pair.logits(cache, [token]), pair.logits(fresh, [token]), pair.allowed.logits)


def a_local_prefill_goes_on_anywhere(pair: Pair) -> None:
    """A store that was filled halfway by blocks and then by `extend` is the one that was filled whole."""
    with pair.local() as alone, pair.store() as store:
        decoder = pair.decoder
        assert isinstance(decoder, LocalPrefill)
        half = len(pair.span) // 2
        for block in pair.blocks():
            if block.start < half:
                store.write(block.part(block.start, half))
        settled(store)
        for _ in decoder.extend(store, pair.prompt, range(half, pair.span.stop), chunk=5):
            pass
        cache = store.seal(len(pair.span))
        found, expected = (pair.logits(one, pair.prompt[-1:]) for one in (cache, alone))
        _near("logits", found, expected, pair.allowed.logits)


def the_wire_changes_nothing(pair: Pair) -> None:
    """Joined by `hetsplit.connect`, through gRPC, the pair gives the tokens that it gives by hand."""
    wanted = []
    with pair.moved(max(len(pair.span) - 3, 0)) as cache:
        tokens = list(pair.prompt[cache.length :])
        for _ in range(_STEPS):
            tokens = [int(pair.logits(cache, tokens).argmax())]
            wanted += tokens
    options = {"temperature": 0.0, "max_tokens": _STEPS, "ignore_eos": True}
    with connect(
        pair.prefiller, pair.decoder, mode="split", chunk=pair.chunk, mixed_weights=pair.mixed_weights
    ) as split:
        found = [token.id for token in split.complete(list(pair.prompt), **options).tokens]
    if found != wanted:
        raise Broken(f"tokens {found}, expected {wanted}")


LAWS: Final = tuple(
    Law(check.__name__.replace("_", " "), check)
    for check in (
        prefill_covers_the_span,
        chunks_do_not_matter,
        stop_ends_a_prefill,
        a_bad_prefill_is_refused,
        an_empty_prefill_yields_nothing,
        release_gives_room_back,
        room_is_bounded,
        a_store_gives_back_what_was_written,
        a_bad_block_is_refused,
        a_short_fill_is_no_cache,
        split_equals_alone,
        keys_and_values_agree,
        a_batch_computes_what_each_row_does_alone,
        several_tokens_equal_one_by_one,
        a_step_that_fails_changes_nothing,
        blocks_arrive_while_rows_decode,
        a_local_prefill_goes_on_anywhere,
        the_wire_changes_nothing,
    )
)
"""Every law, in an order that finds simple faults first."""
