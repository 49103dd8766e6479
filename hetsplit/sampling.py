"""From logits to a token id: `SamplingParams`, what a request may ask for, and `Sampler`, which answers it.

Owns the validation of every sampling value, the order of the sampling steps (that of transformers: repetition penalty,
temperature, top-k, top-p, min-p), the random numbers and the logprobs. Knows nothing of engines, text or batches:
stop strings, `max_tokens` and `ignore_eos` are only checked and carried here, the scheduler applies them.

Invariants: a `SamplingParams` that exists is valid. A drawn token has a positive probability. Each drawn token costs
one random number and a greedy one none, so one seed gives the same tokens wherever the logits were computed.
"""

import difflib
import math
import numbers
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetsplit.errors import EngineError, RequestError

GREEDY_TEMPERATURE = 1e-5
MAX_STOPS = 16
MAX_LOGPROBS = 20
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks of sampling; every value is checked here.

    temperature: at least 0; below 1e-5 the most likely token is taken.
    top_k: draw among the k most likely tokens (and those equal to the last of them); 1 is greedy; 0, -1 or at least
        the vocabulary is off.
    top_p: draw among the fewest tokens whose probabilities reach this sum; above 0, at most 1 (off).
    min_p: drop tokens less likely than this share of the most likely one; 0 (off) to 1.
    repetition_penalty: 0.01 to 100, 1 is off; divides positive and multiplies negative logits of tokens seen before,
        the prompt's included.
    seed: 0 to 2**64 - 1; None takes fresh entropy from the operating system.
    stop: one string or up to 16, kept as a tuple; generation ends before the first that appears.
    max_tokens: at least 1.
    ignore_eos: go on after an end-of-sequence token.
    logprobs: how many most likely alternatives to report with each token, 0 to 20; None reports no logprob at all.

    Raises `RequestError` naming the field, its value and the allowed range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    max_tokens: int = 256
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._number("temperature", lambda x: x >= 0, "a finite number of at least 0")
        self._number("top_p", lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        self._number("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1")
        self._number("repetition_penalty", lambda x: 0.01 <= x <= 100, "a number from 0.01 to 100")
        self._whole("top_k", -1, _INT32_MAX)
        self._whole("max_tokens", 1, _INT32_MAX)
        self._whole("seed", 0, 2**64 - 1, optional=True)
        self._whole("logprobs", 0, MAX_LOGPROBS, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "True or False")
        self._stops()

    @classmethod
    def from_options(cls, **options: Any) -> "SamplingParams":
        """Make params from keyword options of unknown origin. Raises `RequestError` for a name that does not exist."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise RequestError(f"unknown sampling option {reprlib.repr(name)}: {hint}allowed: {', '.join(known)}")
        return cls(**options)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a random number."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def _number(self, name: str, allowed: Callable[[float], bool], rule: str) -> None:
        """Keep a field as a float, or refuse it."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _refused(name, value, rule)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and allowed(number)):
            raise _refused(name, value, rule)
        object.__setattr__(self, name, number)

    def _whole(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        """Keep a field as an int from `low` to `high`, or refuse it."""
        value = getattr(self, name)
        if optional and value is None:
            return
        rule = f"a whole number from {low} to {high}" + (", or None" if optional else "")
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
            raise _refused(name, value, rule)
        object.__setattr__(self, name, int(value))

    def _stops(self) -> None:
        """Keep `stop` as a tuple of strings, or refuse it."""
        value = self.stop
        rule = f"a string or a list of up to {MAX_STOPS} strings, none of them empty"
        if not isinstance(value, str | list | tuple):
            raise _refused("stop", value, rule)
        stops = (value,) if isinstance(value, str) else tuple(value)
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop has {len(stops)} entries; allowed: {rule}")
        if not all(isinstance(text, str) and text for text in stops):
            raise _refused("stop", value, rule)
        if not all(_is_unicode(text) for text in stops):
            raise _refused("stop", value, "strings of valid Unicode, without half a surrogate pair")
        object.__setattr__(self, "stop", stops)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token, with log-softmax values of the raw logits (before penalty and temperature) when they were asked for.

    `logprob` is the token's own; `top` the most likely `(id, logprob)` pairs, best first, whether drawn or not.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of one request: its random numbers, and the tokens seen so far for the repetition penalty.

    `prompt_ids` are the prompt's token ids. Raises `RequestError` for a negative one.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._random = None if params.greedy else np.random.Philox(params.seed)
        self._seen = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        if self._seen.size and self._seen[0] < 0:
            raise RequestError(f"prompt token id {self._seen[0]}; allowed: ids of at least 0")

    def sample(self, logits: NDArray[np.float32]) -> Sampled:
        """Choose the next token from logits `[V]`, which are left as they are.

        Raises `EngineError` for logits that hold NaN or +inf or nothing but -inf, `RequestError` for a prompt id
        outside the vocabulary.
        """
        _check(logits)
        scores = self._penalised(logits)
        token = int(scores.argmax()) if self._random is None else self._draw(scores, self._random)
        if self.params.repetition_penalty != 1:
            self._seen = np.union1d(self._seen, [token])
        if self.params.logprobs is None:
            return Sampled(token)
        logprobs = log_softmax(logits)
        return Sampled(token, float(logprobs[token]), _most_likely(logprobs, self.params.logprobs))

    def _penalised(self, logits: NDArray[np.float32]) -> NDArray[np.floating]:
        """Logits with those of tokens seen before made less likely (Keskar et al. 2019, section 4.1)."""
        penalty = self.params.repetition_penalty
        if penalty == 1 or not self._seen.size:
            return logits
        if self._seen[-1] >= len(logits):
            raise RequestError(f"prompt token id {self._seen[-1]}; allowed: ids below {len(logits)}, the vocabulary")
        scores = logits.astype(np.float64)
        seen = scores[self._seen]
        scores[self._seen] = np.where(seen < 0, seen * penalty, seen / penalty)
        return scores

    def _draw(self, scores: NDArray[np.floating], random: np.random.Philox) -> int:
        """One token by the inverse of the cumulative distribution, taken in the order of ids."""
        ids, weights = distribution(scores, self.params)
        cumulative = weights.cumsum()
        # 53 bits of the generator's raw output, which numpy promises never to change, unlike that of its distributions.
        uniform = (int(random.random_raw()) >> 11) * 2.0**-53
        total = cumulative[-1]
        # Rounding may lift the target to the total itself, which would point past the last token.
        target = min(uniform * total, np.nextafter(total, 0))
        return int(ids[cumulative.searchsorted(target, side="right")])


def distribution(scores: NDArray[np.floating], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that may be drawn, ascending, and their probabilities, for penalised logits `[V]`.

    Temperature, top-k, top-p and min-p in this order; each step sees the probabilities that the step before left.
    """
    ids = _top_k(scores, params.top_k)
    weights = scores[ids].astype(np.float64)
    weights -= weights.max()
    weights /= params.temperature
    np.exp(weights, out=weights)
    if params.top_p < 1:
        nucleus = _nucleus(weights / weights.sum(), params.top_p)
        ids, weights = ids[nucleus], weights[nucleus]
    if params.min_p > 0:
        likely = weights >= params.min_p  # the most likely token weighs 1
        ids, weights = ids[likely], weights[likely]
    return ids, weights / weights.sum()


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Natural log of the probabilities of logits `[V]`."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _check(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 1 or not logits.size:
        raise EngineError(f"the engine gave logits of shape {list(logits.shape)}; allowed: one row [V]")
    highest = logits.max()  # NaN if any of them is
    if not np.isfinite(highest):
        raise EngineError(f"the engine gave logits whose highest value is {highest}; allowed: finite numbers")


def _top_k(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Ids, ascending, of the k highest scores and of any that equal the lowest of them; all ids when k is off."""
    size = len(scores)
    if not 0 < k < size:
        return np.arange(size)
    return np.flatnonzero(scores >= np.partition(scores, size - k)[size - k])


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Places, ascending, of the fewest probabilities that sum to `top_p`; the earlier of two equal ones goes first."""
    # Those below this bound together weigh less than 1 - top_p, so none of them is needed and none has to be sorted.
    ranked = np.sort(probabilities[probabilities >= (1 - top_p) / len(probabilities)])[::-1]
    needed = min(int(ranked.cumsum().searchsorted(top_p)) + 1, len(ranked))
    lowest = ranked[needed - 1]
    above = np.flatnonzero(probabilities > lowest)
    equal = np.flatnonzero(probabilities == lowest)[: needed - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _most_likely(logprobs: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` highest logprobs with their ids, best first, the lower id first among equals."""
    if not count:
        return ()
    ids = _top_k(logprobs, count)
    best = ids[np.argsort(-logprobs[ids], kind="stable")][:count]
    return tuple((int(i), float(logprobs[i])) for i in best)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(name: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{name} is {reprlib.repr(value)} ({type(value).__name__}); allowed: {rule}")
