"""Devices and dtypes that torch computes with here, for the engines that it runs.

Knows neither models nor stores.
"""

from collections.abc import Iterable

import torch

from hetsplit.errors import ConfigError
from hetsplit.model import TORCH_DTYPE
from hetsplit.spec import DType


def find_device(name: str) -> str:
    """A device that is there. Raises `ConfigError` naming those that are."""
    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    found += ["mps"] if torch.backends.mps.is_available() else []
    found.append("cpu")
    if name == "auto":
        return found[0]
    if name == "cuda" and torch.cuda.is_available():
        return "cuda:0"
    if name not in found:
        raise ConfigError(f"device {name!r} is not here, allowed: auto, {', '.join(found)}")
    return name


def default_dtype(stored: DType, device: str) -> DType:
    """What a checkpoint of such weights is loaded as: float16 becomes bfloat16, and float32 where there is none."""
    return DType.FLOAT32 if stored is DType.FLOAT32 or not has_bfloat16(device) else DType.BFLOAT16


def checked_dtype(name: DType | str, device: str, *, also: Iterable[str] = ()) -> DType:
    """A dtype that the device computes with. Raises `ConfigError` naming those that are, and those of `also`."""
    try:
        dtype = DType(name)
    except ValueError:
        dtype = None
    if dtype not in TORCH_DTYPE:
        allowed = ", ".join((*TORCH_DTYPE, *also))
        raise ConfigError(f"dtype {str(name)!r} is not computed with, allowed: {allowed}")
    if dtype is DType.BFLOAT16 and not has_bfloat16(device):
        raise ConfigError(f"device {device} has no bfloat16, allowed: float32")
    return dtype


def has_bfloat16(device: str) -> bool:
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "mps":
        try:
            torch.zeros(1, dtype=torch.bfloat16, device=device)
        except (RuntimeError, TypeError):
            return False
    return True
