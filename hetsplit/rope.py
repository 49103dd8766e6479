"""Inverse frequencies of rotary embeddings and the ways to stretch them over longer contexts.

Owns the formulas; `spec_hf` and `spec_gguf` know where their numbers stand. Everything is float64, radians per
position, one entry for each pair of a head's columns. Invariant: only `as_rope` rounds, to float32.
"""

import math

import numpy as np
from numpy.typing import NDArray

from hetsplit.spec import Rope

Frequencies = NDArray[np.float64]


def frequencies(theta: float, head_dim: int) -> Frequencies:
    """Without scaling (https://arxiv.org/abs/2104.09864); `head_dim` is even."""
    found: Frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return found


def llama3(inv_freq: Frequencies, factor: float, low: float, high: float, original: int) -> Frequencies:
    """Llama 3.1's: long wavelengths slowed by `factor`, short ones kept, those between interpolated.

    `low < high` count turns over the `original` context.
    """
    turns = original * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    found: Frequencies = (1 - kept) * inv_freq / factor + kept * inv_freq
    return found


def yarn(inv_freq: Frequencies, theta: float, factor: float, original: int, fast: float, slow: float) -> Frequencies:
    """YaRN's (https://arxiv.org/abs/2309.00071): pairs that turn more than `fast` times over `original` are kept."""
    pairs = len(inv_freq)

    def pair(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), 2 * pairs - 1)
    slowed = np.clip((np.arange(pairs) - low) / max(high - low, 1e-3), 0, 1)
    found: Frequencies = inv_freq / factor * slowed + inv_freq * (1 - slowed)
    return found


def yarn_scale(factor: float) -> float:
    """What YaRN multiplies cosines and sines by where the model does not say."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def as_rope(inv_freq: Frequencies, scale: float = 1.0) -> Rope:
    """As two readers of one model's files agree on it."""
    return Rope(tuple(float(value) for value in inv_freq.astype(np.float32)), float(np.float32(scale)))
