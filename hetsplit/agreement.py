"""How far two engines agree: what one decodes from the other's cache, against what it decodes from its own.

Owns the measurement of an ordered pair (a prefiller, a decoder) on a text that every Python has: the error of keys and
values by layer, and how next-token distributions differ. Decides nothing: tolerances are the reader's. Knows neither
wires nor files; engines are objects in this process, and all calls come from one thread.

Invariants: the pair hands over as a transfer does, through a `KvFill`, whose withheld positions decode computes itself;
the text decides each next token, so that one early difference does not change what is compared later; every store is
released, however a measurement ends.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetsplit.engines import Decoder, LocalPrefill, Prefiller, Row
from hetsplit.errors import ConfigError, RequestError
from hetsplit.kv import KvBlock, KvCache, KvFill, KvStore, visible, withheld_span
from hetsplit.tokenizer import Tokenizer
from hetsplit.worker.service import check_identity, identity_of

PROMPT_TOKENS = 128
SCORED_TOKENS = 128
LIMIT_S = 60.0
TOPIC, CHARACTERS = "compound", 8192


def english_tokens(tokenizer: Tokenizer) -> list[int]:
    """The first `CHARACTERS` of a page of Python's own documentation: the same text on every host of one Python."""
    from pydoc_data.topics import topics

    return tokenizer.encode(str(topics[TOPIC])[:CHARACTERS])


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `Reference.measure` found of a pair.

    `key_errors` and `value_errors`: by layer, the root mean square of the prefiller's keys (values) minus the decoder's
    own, over that of the decoder's own; a ratio. `top1_ratio`: the share of scored tokens after which both
    distributions have the same likeliest token. `kl_nats`: mean KL divergence of the distribution after the hand-off
    from the decoder's own, in nats per token. NaN where an engine gave no finite number.
    """

    prefiller: str
    decoder: str
    prompt_tokens: int
    scored_tokens: int
    key_errors: tuple[float, ...]
    value_errors: tuple[float, ...]
    top1_ratio: float
    kl_nats: float

    @property
    def worst_layer(self) -> int:
        """The layer with the largest error of keys or values."""
        return int(np.argmax(np.maximum(self.key_errors, self.value_errors)))

    @property
    def worst_kv_error(self) -> float:
        return float(np.max([self.key_errors, self.value_errors]))

    @property
    def mean_kv_error(self) -> float:
        """The mean over layers, keys and values."""
        return float(np.mean([self.key_errors, self.value_errors]))


class Reference:
    """A decoder by itself on `tokens`: what every prefiller is compared with.

    The first `prompt_tokens` of `tokens` (None: `english_tokens`) are prefilled, then one step for each of the next
    `scored_tokens`; fewer of both where the text or the context is shorter, and fewer steps where they take longer than
    `limit_s`. Raises `ConfigError` for an engine that cannot decode or prefill by itself, `RequestError` for a text or
    context of less than two tokens, and what the engine raises.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokens: Sequence[int] | None = None,
        *,
        prompt_tokens: int = PROMPT_TOKENS,
        scored_tokens: int = SCORED_TOKENS,
        limit_s: float = LIMIT_S,
    ) -> None:
        local = _checked(decoder)
        self.decoder = decoder
        self._tokens, prompt = _cut(decoder, tokens, prompt_tokens, scored_tokens)
        self._span = range(0, prompt)
        own = range(0, withheld_span(self._span).start)
        self._chunk = max(own.stop, 1)  # both sides compute the same chunk, so that one engine gives the same bits
        with ExitStack() as releasing:
            store = self._reserved(releasing)
            for _ in local.extend(store, self._tokens, own, chunk=self._chunk):
                pass
            while not store.settle():
                pass
            self._blocks = list(store.read(own))
            self._logits = list(self._steps(store.seal(own.stop), time.monotonic() + limit_s))

    def measure(self, prefiller: Prefiller, *, mixed_weights: bool = False) -> Agreement:
        """Hand `prefiller`'s cache over and compare.

        Raises `IncompatibleError` naming the field in which the two differ (weights only unless `mixed_weights`),
        `ConfigError` for an engine that does not prefill, and what the engines raise.
        """
        if not isinstance(prefiller, Prefiller):
            raise ConfigError(f"engine {getattr(prefiller, 'name', prefiller)} has no role prefill")
        mine, theirs = identity_of(self.decoder), identity_of(prefiller)
        check_identity(mine, theirs, f"engine {prefiller.name}", mixed_weights=mixed_weights)
        if prefiller.spec.context < self._span.stop:
            raise RequestError(
                f"a prompt of {self._span.stop} tokens, the context of {prefiller.name} is {prefiller.spec.context}"
            )
        with ExitStack() as releasing:
            fill = KvFill(self._reserved(releasing), self.decoder.layout, self._span)
            blocks = []
            for block in prefiller.prefill(self._tokens, self._span, chunk=self._chunk, stop=Event()):
                if (seen := visible(block, self.decoder.layout, withheld_span(self._span).start)).count:
                    fill.put(seen)
                blocks.append(block)
            while not fill.settle():
                pass
            key_errors, value_errors = _errors(blocks, self._blocks, len(self.decoder.layout.layers))
            top1_ratio, kl_nats = _distance(self._logits, self._steps(fill.finish()))
        counts = (self._span.stop, len(self._logits))
        names = (prefiller.name, self.decoder.name)
        return Agreement(*names, *counts, key_errors, value_errors, top1_ratio, kl_nats)

    def _reserved(self, releasing: ExitStack) -> KvStore:
        store = self.decoder.reserve(len(self._tokens))
        releasing.callback(store.release)
        return store

    def _steps(self, cache: KvCache, deadline: float = float("inf")) -> Iterator[NDArray[np.float32]]:
        """Logits `[V]` after each scored token; the first step takes the withheld ones along."""
        stops = range(self._span.stop + 1, len(self._tokens) + 1)
        for start, stop in pairwise((cache.length, *stops)):
            yield self.decoder.step([Row(cache, self._tokens[start:stop])]).logits[0].copy()
            if time.monotonic() > deadline:
                return


def measure(prefiller: Prefiller, decoder: Decoder, *, mixed_weights: bool = False, **options: Any) -> Agreement:
    """`Reference(decoder, **options).measure(prefiller)`, for one pair."""
    return Reference(decoder, **options).measure(prefiller, mixed_weights=mixed_weights)


def _checked(decoder: Decoder) -> LocalPrefill:
    name = getattr(decoder, "name", decoder)
    if not isinstance(decoder, Decoder):
        raise ConfigError(f"engine {name} has no role decode")
    if not isinstance(decoder, LocalPrefill):
        raise ConfigError(f"engine {name} has no local prefill that another engine's could be compared with")
    return decoder


def _cut(decoder: Decoder, tokens: Sequence[int] | None, prompt: int, scored: int) -> tuple[list[int], int]:
    """The tokens that are run, and how many of them are the prompt: half of them where there is no room for all."""
    if tokens is None:
        if decoder.tokenizer is None:
            raise RequestError(f"a text needs a tokenizer, the model of engine {decoder.name} has none; give tokens")
        tokens = english_tokens(decoder.tokenizer)
    if min(prompt, scored) < 1:
        raise RequestError(f"{prompt} prompt tokens and {scored} scored tokens, at least 1 of each allowed")
    found = list(tokens[: min(prompt + scored, decoder.spec.context)])
    if len(found) < 2:
        raise RequestError(f"a text of {len(found)} tokens, at least 2 needed")
    return found, min(prompt, (len(found) + 1) // 2) if len(found) < prompt + scored else prompt


def _errors(
    theirs: Sequence[KvBlock], own: Sequence[KvBlock], layers: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Relative errors of keys and of values by layer, over the positions that both have."""
    squares = np.zeros((2, 2, layers))  # of differences, of the decoder's own; keys, values
    with np.errstate(invalid="ignore", over="ignore"):
        for a in theirs:
            for b in (block for block in own if block.layer == a.layer):
                start, stop = max(a.start, b.start), min(a.stop, b.stop)
                if start < stop:
                    squares[..., a.layer] += _squares(a.part(start, stop), b.part(start, stop))
        keys, values = np.sqrt(squares[0] / np.maximum(squares[1], np.finfo(np.float64).tiny))
    return tuple(map(float, keys)), tuple(map(float, values))


def _squares(a: KvBlock, b: KvBlock) -> NDArray[np.float64]:
    """`[2, 2]`: sums of squares of a - b and of b; of keys and of values."""
    pairs = [(x.astype(np.float64), y.astype(np.float64)) for x, y in ((a.keys, b.keys), (a.values, b.values))]
    return np.array([[np.square(x - y).sum() for x, y in pairs], [np.square(y).sum() for _, y in pairs]])


def _distance(own: Sequence[NDArray[np.float32]], handed: Iterator[NDArray[np.float32]]) -> tuple[float, float]:
    """Share of equal likeliest tokens, and the mean KL divergence in nats."""
    same, divergence = [], []
    with np.errstate(invalid="ignore"):  # not finite is seen in the result
        for mine, theirs in zip(own, handed, strict=False):  # `own` may have ended early
            p, q = _log_softmax(mine), _log_softmax(theirs)
            same.append(p.argmax() == q.argmax())
            divergence.append(np.sum(np.exp(p) * (p - q)))
    return float(np.mean(same)), max(float(np.mean(divergence)), 0.0)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max()
    log_probabilities: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return log_probabilities
