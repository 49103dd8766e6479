"""What every engine refuses, in the same words: models, spans, rows, blocks and stores that it cannot serve.

Knows no backend. Errors are the caller's (`ConfigError`, `RequestError`) or, for what a worker never asks for,
`EngineError`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from hetsplit.engines import Row
from hetsplit.errors import CapacityError, ConfigError, EngineError, RequestError, brief
from hetsplit.kv import KvBlock, KvStore
from hetsplit.spec import DType, KvLayout, ModelSpec

Store = TypeVar("Store", bound=KvStore)

_READABLE = {dtype.value for dtype in DType}  # by name: bfloat16's own type takes a second to import


def check_plain(spec: ModelSpec, path: Path, engine: str) -> None:
    """For engines whose modules compute a plain Llama, biases aside. Raises `ConfigError` naming any other fact."""
    for layer, rope in enumerate(spec.rotary):
        if rope is None or rope != spec.rotary[0]:
            what = "no rotary embedding" if rope is None else "another rotary embedding than layer 0"
            raise ConfigError(f"{path}: layer {layer} has {what}; the {engine} engine supports one for all layers")
    plain = replace(
        spec,
        windows=(None,) * spec.n_layers,
        attention_scale=float(spec.head_dim) ** -0.5,
        activation="silu",
        qk_norm=False,
        post_norms=False,
        attention_cap=None,
        logit_cap=None,
        embed_scale=1.0,
        experts=None,
    )
    for fact in (field.name for field in fields(spec)):
        if (found := getattr(spec, fact)) != (allowed := getattr(plain, fact)):
            raise ConfigError(f"{path}: {fact} is {brief(found)}; the {engine} engine supports {brief(allowed)}")


def check_reserve(positions: int) -> None:
    """Raises `RequestError` for a cache of no positions."""
    if positions < 1:
        raise RequestError(f"a cache of {positions} positions, at least 1 allowed")


def check_prefill(spec: ModelSpec, tokens: Sequence[int], span: range, chunk: int) -> None:
    """What `Prefiller.prefill` is asked for. Raises `RequestError`."""
    if span.start != 0:
        raise RequestError(f"a prefill begins at position 0, not {span.start}; `extend` continues a store")
    check_span(spec, tokens, span, chunk)


def check_span(spec: ModelSpec, tokens: Sequence[int], span: range, chunk: int) -> None:
    """Positions `span` of `tokens`, computed in chunks. Raises `RequestError`."""
    if chunk < 1:
        raise RequestError(f"a chunk of {chunk} tokens, at least 1 allowed")
    if span.step != 1 or not 0 <= span.start <= max(span.start, span.stop) <= len(tokens):
        raise RequestError(f"{span} of a prompt of {len(tokens)} tokens, allowed: [0, {len(tokens)})")
    spec.check_ids(tokens[span.start : span.stop])


def check_room(store: KvStore, stop: int) -> None:
    """Raises `CapacityError` where positions below `stop` are not reserved."""
    if stop > store.positions:
        raise CapacityError(f"positions up to {stop} asked, {store.positions} are reserved")


def check_rows(spec: ModelSpec, rows: Sequence[Row]) -> None:
    """The rows of one step. Raises `EngineError`, and `RequestError` for ids outside the vocabulary."""
    if len({id(row.cache) for row in rows}) < len(rows):
        raise EngineError("a cache appears twice in one step")
    if any(not len(row.tokens) for row in rows):
        raise EngineError("a row of 0 tokens, at least 1 allowed")
    spec.check_ids([token for row in rows for token in row.tokens])


def check_block(layout: KvLayout, positions: int, block: KvBlock) -> None:
    """A block for a store of `positions` positions, in any float dtype: `astype` gives the store's own.

    Raises `EngineError` for another layer, shape or type, `CapacityError` for positions that are not reserved.
    """
    if not 0 <= block.layer < len(layout.layers):
        raise EngineError(f"a block of layer {block.layer}, the model has {len(layout.layers)}")
    layer = layout.layers[block.layer]
    shape = (block.count, layer.kv_heads, layer.head_dim)
    if block.keys.shape != shape or block.values.shape != shape:
        raise EngineError(f"keys {block.keys.shape} and values {block.values.shape}, expected {shape}")
    for array in (block.keys, block.values):
        if array.dtype.name not in _READABLE:
            raise EngineError(f"a block of {array.dtype}, allowed: {', '.join(DType)}")
    if not 0 <= block.start <= block.stop <= positions:
        raise CapacityError(f"a block of [{block.start}, {block.stop}), {positions} positions are reserved")


def own(store: KvStore, kind: type[Store]) -> Store:
    """The store as the engine's own type. Raises `EngineError` for another engine's."""
    if not isinstance(store, kind):
        raise EngineError(f"a store of type {type(store).__name__}, this engine takes its own only")
    return store
