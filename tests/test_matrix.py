"""Matrix products in every form against float64, and the blocks that packed ones are made of."""

from collections.abc import Callable, Sequence

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hetsplit import matrix as module
from hetsplit.errors import ConfigError
from hetsplit.matrix import Biased, Dense, Matrix, OneDnn, Packed, check_packable, has_bfloat16_products, matrix
from hetsplit.weights.blocks import BLOCK, STORED_AS_BLOCKS, Blocks, from_gguf, quantised

Floats = NDArray[np.float32]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def stored(values: Floats, kind: str) -> Blocks:
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return from_gguf(raw, kind)


@pytest.mark.parametrize("kind", STORED_AS_BLOCKS)
def test_blocks_of_a_file_stand_for_what_gguf_says(kind: str) -> None:
    values = random(5, 3 * BLOCK)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(values.shape)
    blocks = stored(values, kind)
    assert blocks.shape == (5, 96) and blocks.bits == (8 if kind == "Q8_0" else 4)
    np.testing.assert_allclose(blocks.floats(), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(blocks.read(slice(1, 3)).floats(), blocks.floats()[1:3])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_numbers_are_within_half_a_step(bits: int) -> None:
    values = random(4, 4 * BLOCK)
    values[1, :BLOCK] = 3.25  # a block without spread
    blocks = quantised(values, bits)
    assert blocks.quants.max() == 2**bits - 1
    half_steps = np.repeat(blocks.scales, BLOCK, axis=1) / 2
    assert np.all(np.abs(blocks.floats() - values) <= half_steps + 1e-6)
    np.testing.assert_array_equal(blocks.floats()[1, :BLOCK], values[1, :BLOCK])


def parts_of(form: str) -> Sequence[Blocks]:
    """18 rows in two parts of unequal length, so that neither is a multiple of what the kernel takes."""
    upper, lower = random(5, 2 * BLOCK, seed=1), random(13, 2 * BLOCK, seed=2)
    if form == "mixed":
        return [stored(upper, "Q4_1"), stored(lower, "Q8_0")]
    if form in STORED_AS_BLOCKS:
        return [stored(upper, form), stored(lower, form)]
    return [quantised(upper, int(form)), quantised(lower, int(form))]


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("form", [*STORED_AS_BLOCKS, "4", "8", "mixed"])
def test_packed_products_are_those_of_the_blocks(form: str, rows: int) -> None:
    parts = parts_of(form)
    weight = np.concatenate([part.floats() for part in parts])
    x = torch.from_numpy(random(rows, 2 * BLOCK, seed=3)).bfloat16()
    found = Packed.of(parts)(x)
    expected = x.double().numpy() @ weight.T.astype(np.float64)
    assert found.shape == (rows, 18) and found.dtype is torch.bfloat16 and found.is_contiguous()
    assert np.abs(found.double().numpy() - expected).max() < 0.02 * np.abs(expected).max()


def test_a_wide_packed_matrix_is_packed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = quantised(random(200, BLOCK), 4)
    whole = Packed.of([blocks])
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 64)
    assert torch.equal(Packed.of([blocks]).planes[0], whole.planes[0])


def test_packed_memory_is_near_the_blocks() -> None:
    four, eight = Packed.of([quantised(random(64, 256), 4)]), Packed.of([quantised(random(64, 256), 8)])
    assert four.nbytes == 64 * 256 * 5 // 8
    assert eight.nbytes == 64 * 256 * 9 // 8


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_finishes_alike(dtype: torch.dtype, scaled: bool, rows: int, activation: str) -> None:
    weight = torch.from_numpy(random(24, 64) / 8).to(dtype)
    x = torch.from_numpy(random(rows, 64, seed=4)).to(dtype)
    factor = torch.from_numpy(random(rows, 24, seed=5)).to(dtype) if scaled else None
    expected = ACTIVATIONS[activation](x.double() @ weight.double().T) * (1 if factor is None else factor)
    bias = torch.zeros(24, dtype=dtype)
    forms: list[Matrix] = [Dense(weight), matrix(weight.clone()), Biased(Dense(weight), bias)]
    if dtype is torch.bfloat16 and has_bfloat16_products():
        forms.append(OneDnn.of(weight.clone()))
    for form in forms:
        found = form(x.clone(), activation, factor)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_many_rows_are_widened_only_where_the_cpu_lacks_bfloat16(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_bfloat16_products", lambda: has_instructions)
    seen: list[torch.dtype] = []
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return plain(x, weight)

    monkeypatch.setattr(module.F, "linear", linear)
    Dense(torch.ones(4, 8, dtype=torch.bfloat16))(torch.ones(16, 8, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16 if has_instructions else torch.float32]


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'layers.0.o' has 40 columns; packed weights need a multiple of 32"):
        check_packable("layers.0.o", 40, torch.device("cpu"))
    with pytest.raises(ConfigError, match="on cpu, not on cuda"):
        check_packable("head", 64, torch.device("cuda"))
