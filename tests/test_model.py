"""The forward pass against transformers, and the loading of parameters."""

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hetsplit.errors import ConfigError
from hetsplit.model import TORCH_DTYPE, Memory, Model, Segment, _Window
from hetsplit.spec import DType, ModelSpec
from hetsplit.spec_hf import spec_from_hf
from tests.models import BUILDERS, LLAMA_IDS, P40, canonical_weights, hf_greedy, hf_logits
from tests.toy import toy_spec

ModelOf = Callable[[str], torch.nn.Module]


@pytest.fixture(scope="module")
def ours(model_of: ModelOf, device: str) -> Callable[..., Model]:
    def build(name: str, dtype: DType = DType.FLOAT32) -> Model:
        reference = model_of(name)
        spec = spec_from_hf(reference.config.to_dict())
        return Model(spec, device, dtype).load(canonical_weights(reference).items())

    return build


def memory(model: Model, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[L, G, C, D]`, full of NaN, so that a read of what was never written shows."""
    s = model.spec
    shape = (2, s.n_layers, s.kv_heads, capacity, s.head_dim)
    keys, values = torch.full(shape, float("nan"), dtype=TORCH_DTYPE[model.dtype], device=model.device)
    return keys, values


@torch.inference_mode()
def run(model: Model, tokens: list[int], counts: list[int] | None = None) -> NDArray[np.float32]:
    """Logits `[T, V]` after each token, computed in pieces of `counts` tokens."""
    keys, values = memory(model, len(tokens))
    at, found = 0, []
    for count in counts or [len(tokens)]:
        x = model.embedded(tokens[at : at + count])
        for _ in model.forward(x, [Segment({None: Memory(keys, values)}, at, count)]):
            pass
        found.append(model.logits(x).float().cpu().numpy())
        at += count
    return np.concatenate(found)


@pytest.mark.parametrize("name", BUILDERS)
def test_logits_are_those_of_transformers(ours: Callable[..., Model], model_of: ModelOf, name: str) -> None:
    np.testing.assert_allclose(run(ours(name), P40), hf_logits(model_of(name), P40), atol=1e-3)


@pytest.mark.parametrize("counts", [[1] * 40, [7, 1, 30, 2], [39, 1], [16, 16, 8]], ids=str)
def test_pieces_give_the_logits_of_the_whole(ours: Callable[..., Model], counts: list[int]) -> None:
    model = ours("llama82")
    np.testing.assert_allclose(run(model, P40, counts), run(model, P40), atol=1e-3)


@pytest.mark.parametrize("name", BUILDERS)
def test_greedy_ids_are_those_of_transformers(ours: Callable[..., Model], model_of: ModelOf, name: str) -> None:
    model, tokens = ours(name), list(P40)
    for _ in range(8):
        tokens.append(int(run(model, tokens)[-1].argmax()))
    assert tokens[len(P40) :] == hf_greedy(model_of(name), P40, 8)


def test_greedy_ids_written_down(ours: Callable[..., Model]) -> None:
    model, tokens = ours("llama"), list(P40)
    for _ in range(16):
        tokens.append(int(run(model, tokens)[-1].argmax()))
    assert tokens[len(P40) :] == LLAMA_IDS


def test_positions_matter_beyond_a_thousand(ours: Callable[..., Model], model_of: ModelOf) -> None:
    """RoPE of a chunk at an offset, where a slip of one position changes every key."""
    model = ours("llama82")
    tokens = [(31 * i + 7) % 97 for i in range(1200)]
    np.testing.assert_allclose(
        run(model, tokens, [1100, 100])[-20:], hf_logits(model_of("llama82"), tokens)[-20:], atol=5e-3
    )


@pytest.mark.parametrize("counts", [[40], [1] * 40], ids=["many rows", "one row"])
def test_bfloat16_is_as_exact_as_in_transformers(
    ours: Callable[..., Model], model_of: ModelOf, counts: list[int]
) -> None:
    """With packed weights on a CPU, where one row takes another kernel than many."""
    exact = hf_logits(model_of("llama82"), P40)
    theirs = hf_logits(deepcopy(model_of("llama82")).to(torch.bfloat16), P40)
    rough = run(ours("llama82", DType.BFLOAT16), P40, counts)
    assert 0 < np.std(rough - exact) < 1.25 * np.std(theirs - exact)


@torch.inference_mode()
def test_a_yield_comes_before_its_layers_attention(ours: Callable[..., Model]) -> None:
    model = ours("llama")
    keys, values = memory(model, 40)
    x = model.embedded(P40)
    layers = model.forward(x, [Segment({None: Memory(keys, values)}, 0, 40)])
    assert next(layers) == 0
    assert torch.equal(x, model.embedded(P40))
    assert not keys[0].isnan().any() and not values[0].isnan().any()
    assert keys[1].isnan().all() and values[1].isnan().all()
    assert next(layers) == 1
    assert not torch.equal(x, model.embedded(P40))


@torch.inference_mode()
def test_segments_of_unequal_length_do_not_meet(ours: Callable[..., Model]) -> None:
    model = ours("llama82")
    prompts = [P40[:23], P40[5:6], P40[::-1][:11]]
    alone = [run(model, prompt)[-1] for prompt in prompts]
    memories = [memory(model, 40) for _ in prompts]
    x = model.embedded([token for prompt in prompts for token in prompt])
    segments = [Segment({None: Memory(*held)}, 0, len(prompt)) for held, prompt in zip(memories, prompts, strict=True)]
    for _ in model.forward(x, segments):
        pass
    together = model.logits(x).cpu().numpy()[[22, 23, 34]]
    np.testing.assert_allclose(together, alone, atol=2e-4)


def weights(model_of: ModelOf, name: str = "llama") -> dict[str, torch.Tensor]:
    return canonical_weights(model_of(name))


def spec_of(model_of: ModelOf, name: str = "llama") -> ModelSpec:
    return spec_from_hf(model_of(name).config.to_dict())


@pytest.mark.parametrize("name", ["embed", "layers.1.k", "layers.0.up", "norm", "head"])
def test_a_missing_tensor_is_refused_by_name(model_of: ModelOf, name: str) -> None:
    found = weights(model_of)
    del found[name]
    with pytest.raises(ConfigError, match=rf"lacks 1 of 21 tensors: {name}$"):
        Model(spec_of(model_of), "cpu", DType.FLOAT32).load(found.items())


def test_an_unknown_tensor_is_refused_by_name(model_of: ModelOf) -> None:
    found = {"layers.0.q_norm": torch.ones(8)} | weights(model_of)
    with pytest.raises(ConfigError, match=r"'layers\.0\.q_norm' is unknown or given twice"):
        Model(spec_of(model_of), "cpu", DType.FLOAT32).load(found.items())


def test_a_tensor_given_twice_is_refused(model_of: ModelOf) -> None:
    found = [*weights(model_of).items(), ("norm", torch.ones(32))]
    with pytest.raises(ConfigError, match=r"'norm' is unknown or given twice; still expected: none"):
        Model(spec_of(model_of), "cpu", DType.FLOAT32).load(found)


def test_a_head_for_a_tied_model_is_refused(model_of: ModelOf) -> None:
    found = weights(model_of, "tied") | {"head": torch.ones(97, 32)}
    with pytest.raises(ConfigError, match="'head'"):
        Model(spec_of(model_of, "tied"), "cpu", DType.FLOAT32).load(found.items())


@pytest.mark.parametrize("name", ["layers.0.q", "norm"])
def test_a_wrong_shape_is_refused_with_both_shapes(model_of: ModelOf, name: str) -> None:
    """Also one that would broadcast."""
    found = weights(model_of)
    wanted = list(found[name].shape)
    found[name] = found[name][:1]
    with pytest.raises(ConfigError) as caught:
        Model(spec_of(model_of), "cpu", DType.FLOAT32).load(found.items())
    assert name in str(caught.value) and str([1, *wanted[1:]]) in str(caught.value) and str(wanted) in str(caught.value)


def test_progress_hears_every_tensor(model_of: ModelOf) -> None:
    heard: list[tuple[int, int]] = []
    Model(spec_of(model_of), "cpu", DType.FLOAT32).load(
        weights(model_of).items(), lambda done, total: heard.append((done, total))
    )
    assert heard == [(i, 21) for i in range(1, 22)]


@pytest.mark.parametrize("packed_bits", [None, 8])
def test_loading_holds_the_tensors_of_one_parameter(model_of: ModelOf, packed_bits: int | None) -> None:
    alive: dict[str, weakref.ref[torch.Tensor]] = {}

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(model_of).items():
            held = {earlier[-2:] for earlier, reference in alive.items() if reference() is not None}
            assert held <= {".q", ".k"} | ({"ed"} if packed_bits else set())  # a packed model looks up its embedding
            alive[name] = weakref.ref(copy := tensor.clone())
            yield name, copy
            del copy

    Model(spec_of(model_of), "cpu", DType.BFLOAT16, packed_bits).load(one_by_one())
    assert len(alive) == 21


def test_inverse_frequencies_are_taken_from_the_spec(ours: Callable[..., Model], model_of: ModelOf) -> None:
    spec = replace(spec_of(model_of), rotary=spec_of(model_of, "rope").rotary)
    other = Model(spec, str(ours("llama").device), DType.FLOAT32).load(weights(model_of).items())
    assert np.abs(run(other, P40) - run(ours("llama"), P40)).max() > 0.1


@pytest.mark.parametrize(("start", "count"), [(0, 5), (0, 1), (7, 1), (7, 5)])
def test_expanded_heads_attend_like_grouped_ones(start: int, count: int) -> None:
    """What runs on a GPU whose kernels take a mask or grouped heads, but not both."""
    torch.manual_seed(0)
    segment = Segment({None: Memory(torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8))}, start, count)
    spec = toy_spec(head_dim=8, attention_scale=8**-0.5)
    window = _Window.of(segment, None)
    q = torch.randn(count, 8, 8).transpose(0, 1)[None]
    torch.testing.assert_close(replace(window, expand=True).attend(1, q, spec), window.attend(1, q, spec))
