"""Sampling: validation, agreement with transformers step by step, statistics, determinism, edges."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetsplit.errors import EngineError, RequestError
from hetsplit.sampling import Sampled, Sampler, SamplingParams, distribution, log_softmax

# Tokens of seed 1234 for the logits 0, 1/8 .. 15/8; a change breaks everybody's reproducible runs.
GOLDEN = [12, 7, 8, 12, 14, 13, 7, 14, 2, 15, 10, 3]
P40 = [(37 * i + 5) % 97 for i in range(40)]


def random_logits(size: int, seed: int = 0, spread: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def draws(sampler: Sampler, logits: NDArray[np.float32], count: int) -> list[int]:
    return [sampler.sample(logits).id for _ in range(count)]


# Parameters


def test_defaults_are_greedy_with_every_filter_off() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (0, 1.0, 0.0, 1.0)
    assert (params.seed, params.stop, params.max_tokens, params.ignore_eos, params.logprobs) == (
        None,
        (),
        256,
        False,
        None,
    )


REFUSED = [
    ("temperature", [-1, -1e-9, math.nan, math.inf, 10**400, "0.7", True, None], "at least 0"),
    ("top_p", [0, 0.0, -0.1, 1.5, math.nan, "1", False, None], "above 0 and at most 1"),
    ("min_p", [-0.1, 1.01, math.nan, -math.inf, "0", True], "from 0 to 1"),
    ("repetition_penalty", [0, -2, 1e-300, 1e300, math.nan, "1", True], "from 0.01 to 100"),
    ("top_k", [-2, 2**31, 1.0, "5", True, None, math.nan], "from -1 to 2147483647"),
    ("max_tokens", [0, -1, 2**31, 1.5, "7", True, None], "from 1 to 2147483647"),
    ("seed", [-1, 2**64, 1.0, "1", True], "from 0 to 18446744073709551615, or None"),
    ("logprobs", [-1, 21, 98, 2.0, "1", True], "from 0 to 20, or None"),
    ("ignore_eos", [1, 0, "yes", None], "True or False"),
    ("stop", ["", ["a", ""], [1], 5, None, b"x", {"a"}], "none of them empty"),
]


@pytest.mark.parametrize(("name", "value", "rule"), [(n, v, rule) for n, values, rule in REFUSED for v in values])
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(name: str, value: object, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_options(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is ")
    assert rule in message
    assert len(message) < 200


@pytest.mark.parametrize("stop", ["\ud800", ["a", "b\udcff"]])
def test_a_stop_string_that_is_no_unicode_is_refused(stop: object) -> None:
    with pytest.raises(RequestError, match="allowed: strings of valid Unicode") as caught:
        SamplingParams.from_options(stop=stop)
    assert str(caught.value).isascii()


def test_the_message_shows_value_and_type() -> None:
    with pytest.raises(RequestError, match=r"^temperature is '0\.7' \(str\); allowed: a finite number"):
        SamplingParams.from_options(temperature="0.7")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, 1e-30, 1e-4, 1, 1e308, np.float32(0.5)]),
        ("top_p", [1e-9, 1, np.float64(0.5)]),
        ("min_p", [0, 1]),
        ("repetition_penalty", [0.01, 2, 100]),
        ("top_k", [0, -1, 1, 97, 98, 9999999, np.int64(3)]),
        ("max_tokens", [1, 10**6]),
        ("seed", [None, 0, 2**64 - 1]),
        ("logprobs", [None, 0, 20]),
        ("ignore_eos", [True, False]),
    ],
)
def test_an_allowed_value_is_kept_as_a_plain_number(name: str, values: list[Any]) -> None:
    for value in values:
        kept = getattr(SamplingParams.from_options(**{name: value}), name)
        assert kept == value
        assert type(kept) in (int, float, bool, type(None))


def test_stop_is_kept_as_a_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert len(SamplingParams(stop=[str(i) for i in range(16)]).stop) == 16
    with pytest.raises(RequestError, match=r"stop has 17 entries; allowed: .* up to 16"):
        SamplingParams(stop=[str(i) for i in range(17)])


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"unknown sampling option 'temprature': did you mean temperature\?"):
        SamplingParams.from_options(temprature=1)
    with pytest.raises(RequestError, match=r"'xyz': allowed: temperature, top_k"):
        SamplingParams.from_options(xyz=1)


def test_params_are_frozen_and_equal_by_value() -> None:
    params = SamplingParams(stop=["a"])
    assert hash(params) == hash(SamplingParams(stop="a"))
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


# Agreement with transformers


def reference(logits: NDArray[np.float32], prompt: list[int], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities `[V]` after transformers' own processors, in the order in which `generate` runs them."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    scores = steps(torch.tensor([prompt]), torch.from_numpy(logits).double()[None])
    return scores.softmax(-1)[0].numpy()


def ours(logits: NDArray[np.float32], prompt: list[int], params: SamplingParams) -> NDArray[np.float64]:
    sampler = Sampler(params, prompt)
    ids, probabilities = distribution(sampler._penalised(logits), params)
    dense = np.zeros(len(logits))
    dense[ids] = probabilities
    return dense


COMBINATIONS: list[dict[str, float]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 96},
    {"temperature": 1.0, "top_k": 9999999},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "repetition_penalty": 0.5, "top_k": 40},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.6, "min_p": 0.3},
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
@pytest.mark.parametrize("size", [97, 5000])
def test_kept_set_and_probabilities_are_those_of_transformers(size: int, options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for seed in range(5):
        logits = random_logits(size, seed)
        want, got = reference(logits, P40, params), ours(logits, P40, params)
        assert np.array_equal(got > 0, want > 0)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-15)


def test_tokens_that_tie_with_the_last_of_top_k_stay_as_in_transformers() -> None:
    logits = np.array([1, 3, 2, 2, 2, 0], np.float32)
    params = SamplingParams(temperature=1, top_k=2)
    assert np.flatnonzero(ours(logits, [], params)).tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(ours(logits, [], params), reference(logits, [0], params))


def test_masked_tokens_are_never_kept_with_a_probability() -> None:
    logits = np.array([-np.inf, 1, -np.inf, 0], np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}):
        ids, probabilities = distribution(logits, SamplingParams(temperature=1, **options))
        assert ids[probabilities > 0].tolist() == [1, 3]


def test_of_equal_tokens_top_p_keeps_the_lowest_ids() -> None:
    ids, probabilities = distribution(np.zeros(10, np.float32), SamplingParams(temperature=1, top_p=0.35))
    assert ids.tolist() == [0, 1, 2, 3]
    assert probabilities.tolist() == [0.25] * 4


def test_filters_agree_with_a_full_sort_at_a_large_vocabulary() -> None:
    logits = random_logits(131072, seed=3, spread=4)
    ids, probabilities = distribution(logits, SamplingParams(temperature=1, top_p=0.9))
    whole = np.exp(log_softmax(logits))
    ranked = np.sort(whole)[::-1]
    count = int(np.argmax(ranked.cumsum() >= 0.9)) + 1
    assert len(ids) == count
    assert set(ids.tolist()) == set(np.argsort(-whole)[:count].tolist())
    np.testing.assert_allclose(probabilities, whole[ids] / whole[ids].sum())


# The penalty


def test_penalty_covers_prompt_and_generated_tokens() -> None:
    logits = np.array([2.0, 1.9, 1.8, -1.0], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), [3, 3, 0])
    assert draws(sampler, logits, 3) == [1, 2, 0]  # 0 is in the prompt; then 1 and 2 were generated too
    assert logits.tolist() == np.array([2.0, 1.9, 1.8, -1.0], np.float32).tolist()


def test_penalty_lowers_negative_logits_too() -> None:
    logits = np.array([-1.0, -1.1], np.float32)
    assert Sampler(SamplingParams(repetition_penalty=1.5), [0]).sample(logits).id == 1
    assert Sampler(SamplingParams(repetition_penalty=0.5), [1]).sample(logits).id == 1


def test_penalty_counts_a_repeated_token_once() -> None:
    params = SamplingParams(temperature=1, repetition_penalty=1.7)
    logits = random_logits(50)
    assert np.array_equal(ours(logits, [7, 7, 7], params), ours(logits, [7], params))


def test_extreme_penalties_stay_finite() -> None:
    logits = np.array([3e38, -3e38, 0.0], np.float32)
    for penalty in (0.01, 100):
        sampled = Sampler(SamplingParams(temperature=1, repetition_penalty=penalty, seed=0), [0, 1]).sample(logits)
        assert sampled.id == 0


@pytest.mark.parametrize("prompt", [[-1], [0, 97]])
def test_a_prompt_id_outside_the_vocabulary_is_refused(prompt: list[int]) -> None:
    with pytest.raises(RequestError, match=f"prompt token id {prompt[-1]}; allowed"):
        Sampler(SamplingParams(repetition_penalty=2), prompt).sample(random_logits(97))


# Drawing


def chi_square(counts: Counter[int], probabilities: NDArray[np.float64], total: int) -> float:
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities) if p > 0)


def test_draws_follow_the_probabilities() -> None:
    logits = np.array([0.5, 2.0, -1.0, 0.0, 1.0, 1.5, -0.5, 0.7], np.float32)
    params = SamplingParams(temperature=1.5, seed=11)
    total = 20000
    counts = Counter(draws(Sampler(params, []), logits, total))
    probabilities = np.exp(log_softmax(logits / 1.5))
    once_in_a_thousand = 24.3  # for 7 degrees of freedom
    assert chi_square(counts, probabilities, total) < once_in_a_thousand
    # The test is sharp enough to tell this temperature from the next.
    assert chi_square(counts, np.exp(log_softmax(logits / 1.4)), total) > once_in_a_thousand


def test_draws_stay_inside_the_kept_set_and_reach_all_of_it() -> None:
    logits = random_logits(97)
    params = SamplingParams(temperature=2, top_k=10, top_p=0.9, min_p=0.05, seed=5)
    ids, _ = distribution(logits, params)
    assert 3 < len(ids) <= 10
    assert set(draws(Sampler(params, []), logits, 3000)) == set(ids.tolist())


class FixedRandom:
    """A generator whose raw output is given."""

    def __init__(self, raw: int) -> None:
        self.raw = raw

    def random_raw(self) -> int:
        return self.raw


@pytest.mark.parametrize(("raw", "want"), [(0, 1), (2**64 - 1, 4)])
def test_the_ends_of_the_random_range_give_a_token_with_positive_probability(raw: int, want: int) -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.1, 0.2, -np.inf], np.float32)
    sampler = Sampler(SamplingParams(temperature=1), [])
    sampler._random = FixedRandom(raw)  # type: ignore[assignment]
    assert sampler.sample(logits).id == want


def test_the_highest_random_number_stays_inside_whatever_the_sum_rounds_to() -> None:
    for seed in range(200):
        logits = random_logits(1000, seed, spread=0.01)
        sampler = Sampler(SamplingParams(temperature=1), [])
        sampler._random = FixedRandom(2**64 - 1)  # type: ignore[assignment]
        assert sampler.sample(logits).id == 999


def test_one_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    logits = random_logits(97)

    def run(seed: int | None) -> list[int]:
        return draws(Sampler(SamplingParams(temperature=1.5, seed=seed), P40), logits, 30)

    assert run(7) == run(7)
    assert run(2**64 - 1) == run(2**64 - 1)
    assert len({tuple(run(seed)) for seed in (0, 1, 2**63, None, None)}) == 5


def test_seeded_tokens_do_not_change_between_releases() -> None:
    logits = np.arange(16, dtype=np.float32) / 8
    sampler = Sampler(SamplingParams(temperature=1, seed=1234), [])
    assert draws(sampler, logits, 12) == GOLDEN


def test_each_drawn_token_costs_one_random_number_whatever_the_filters() -> None:
    logits = random_logits(97)
    one = Sampler(SamplingParams(temperature=1, seed=3), [])
    other = Sampler(SamplingParams(temperature=1, seed=3, top_k=4, logprobs=5), [])
    draws(one, logits, 6)
    draws(other, logits, 6)
    assert one._random is not None
    assert other._random is not None
    assert one._random.random_raw() == other._random.random_raw()


# Greedy, and the values of case O18


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = np.array([0, 5, 5, 1, 5], np.float32)
    for options in ({}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 1e-9}):
        assert draws(Sampler(SamplingParams(**options), []), logits, 5) == [1] * 5


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaForCausalLM]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    yield LlamaForCausalLM(config).eval()


@torch.no_grad()
def generate(model: LlamaForCausalLM, params: list[SamplingParams], count: int) -> list[list[int]]:
    """A batch of requests on P40, each with its own params."""
    samplers = [Sampler(each, P40) for each in params]
    texts = [list(P40) for _ in params]
    for _ in range(count):
        logits = model(torch.tensor(texts)).logits[:, -1].numpy()
        for text, sampler, row in zip(texts, samplers, logits, strict=True):
            text.append(sampler.sample(row).id)
    return [text[len(P40) :] for text in texts]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 0, "top_k": 9999999, "top_p": 0.5, "min_p": 0.5, "logprobs": 20},
    ],
    ids=str,
)
def test_values_at_the_edge_give_the_greedy_text_beside_an_unharmed_companion(
    llama: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    edge = SamplingParams.from_options(**options)
    assert generate(llama, [edge, SamplingParams()], 4) == [[20, 84, 39, 39]] * 2


@pytest.mark.parametrize("top_k", [-1, 97, 98, 9999999])
def test_top_k_that_is_off_changes_nothing(top_k: int) -> None:
    logits = random_logits(97)
    off = draws(Sampler(SamplingParams(temperature=1, seed=9), []), logits, 20)
    assert draws(Sampler(SamplingParams(temperature=1, seed=9, top_k=top_k), []), logits, 20) == off


def test_a_huge_temperature_is_uniform_and_finite() -> None:
    _, probabilities = distribution(random_logits(97), SamplingParams(temperature=1e308))
    np.testing.assert_allclose(probabilities, 1 / 97)


@pytest.mark.parametrize("options", [{}, {"temperature": 1}, {"temperature": 1, "top_p": 0.5}])
def test_a_vocabulary_of_one(options: dict[str, Any]) -> None:
    sampled = Sampler(SamplingParams(logprobs=20, **options), []).sample(np.array([3.5], np.float32))
    assert sampled == Sampled(0, 0.0, ((0, 0.0),))


# Logprobs


def test_logprobs_are_of_the_raw_logits_before_penalty_and_temperature() -> None:
    logits = random_logits(97)
    sampled = Sampler(SamplingParams(temperature=5, repetition_penalty=3, seed=1, logprobs=5), P40).sample(logits)
    want = torch.from_numpy(logits).double().log_softmax(-1)
    assert sampled.logprob == pytest.approx(want[sampled.id].item(), abs=1e-12)
    values, ids = want.topk(5)
    assert [i for i, _ in sampled.top] == ids.tolist()
    np.testing.assert_allclose([value for _, value in sampled.top], values.numpy())


def test_logprobs_none_and_zero() -> None:
    logits = random_logits(97)
    assert Sampler(SamplingParams(), []).sample(logits) == Sampled(int(logits.argmax()), None, ())
    sampled = Sampler(SamplingParams(logprobs=0), []).sample(logits)
    assert sampled.logprob is not None
    assert sampled.top == ()


def test_alternatives_are_at_most_the_vocabulary_and_equal_ones_come_by_id() -> None:
    top = Sampler(SamplingParams(logprobs=20), []).sample(np.array([0, 1, 0, 1], np.float32)).top
    assert [i for i, _ in top] == [1, 3, 0, 2]
    top = Sampler(SamplingParams(logprobs=3), []).sample(np.zeros(97, np.float32)).top
    assert [i for i, _ in top] == [0, 1, 2]


def test_logprobs_of_large_logits_are_finite() -> None:
    sampled = Sampler(SamplingParams(logprobs=1), []).sample(np.array([3e38, -3e38], np.float32))
    assert sampled.logprob == 0.0


# Faults of the engine


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 0}, {"temperature": 1, "top_k": 2, "top_p": 0.5}])
@pytest.mark.parametrize(
    ("bad", "shown"),
    [([0, math.nan, 1], "nan"), ([-math.inf] * 3, "-inf"), ([0, math.inf, 1], "inf")],
)
def test_logits_that_are_not_finite_are_an_engine_error(options: dict[str, Any], bad: list[float], shown: str) -> None:
    with pytest.raises(EngineError, match=f"highest value is {shown}; allowed: finite"):
        Sampler(SamplingParams(**options), []).sample(np.array(bad, np.float32))


@pytest.mark.parametrize("shape", [(0,), (1, 97), ()])
def test_logits_of_another_shape_are_an_engine_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match=r"logits of shape .*; allowed: one row \[V\]"):
        Sampler(SamplingParams(), []).sample(np.zeros(shape, np.float32))
