"""Checked reading of the plain dicts that describe a model, whatever format they come from.

Owns types, bounds and the wording of faults; `spec_hf` and `spec_gguf` know the fields' names.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetsplit.errors import ConfigError, brief
from hetsplit.spec import ModelSpec

COUNT_MAX = 2**24
LAYERS_MAX = 4096
HEADS_MAX = 4096
CONTEXT_MAX = 2**31 - 1
DEFAULT_THETA = 10000.0


class Fields:
    """Checked reading of one dict. A null counts as absent. `where` names the dict in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def fault(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {brief(self.get(name))}; {allowed}")

    def integer(self, name: str, high: int = COUNT_MAX, *, low: int = 1, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.missing(name)
        if not isinstance(value, int) or isinstance(value, bool) or not (low <= value <= high):
            raise self.fault(name, f"an integer from {low} to {high} is allowed")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.missing(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.fault(name, "a positive finite number is allowed")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; False when absent."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self.fault(name, "true or false is allowed")
        return bool(value)

    def missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self.where}: the required field {name} is missing")


def decimal(value: float) -> float:
    """The shortest decimal of `value` as float32, so that 1e-5 read from JSON and from a float32 field agree."""
    return float(str(np.float32(value)))


def token_ids(found: Sequence[tuple[str, Any]], name: str, vocab: int) -> tuple[int, ...]:
    """The sorted union of ids that files give as an integer, a list or null; those beyond the vocabulary dropped."""
    ids: set[int] = set()
    for where, value in found:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ConfigError(
                    f"{where}: {name} is {brief(value)}; an integer, a list of integers or null is allowed"
                )
            if 0 <= token < vocab:
                ids.add(token)
            else:
                warnings.warn(f"{where}: {name} {token} is dropped: the vocabulary is 0 to {vocab - 1}", stacklevel=5)
    return tuple(sorted(ids))


def proven(spec: ModelSpec, where: str) -> ModelSpec:
    """The spec, its fields checked against each other."""
    if spec.heads % spec.kv_heads:
        raise ConfigError(f"{where}: {spec.heads} heads are no multiple of {spec.kv_heads} key/value heads")
    if spec.head_dim % 2:
        raise ConfigError(f"{where}: the head width is {spec.head_dim}; rotary embedding needs an even number")
    return spec


def derived_head_dim(fields: Fields, width: int, heads: int) -> int:
    if width % heads:
        raise ConfigError(f"{fields.where}: no head width is given and width {width} is no multiple of {heads} heads")
    return width // heads
