"""What `hetsplit engines` finds out: which engines are here, what each can do with a model, how each pair agrees.

Owns the order of the survey and what it records. Every engine that loads stays loaded until the end, since each is
paired with each: that is their memory, all together. Invariant: a fault of one engine, in its import, its load or a
measurement, becomes the reason in its own line and ends nothing else.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from typing import TextIO, TypeVar

from hetsplit import engines, terminal
from hetsplit.agreement import Agreement, Reference
from hetsplit.engines import Decoder, Engine, LocalPrefill, Prefiller
from hetsplit.errors import ConfigError, HetsplitError
from hetsplit.weights import locate

T = TypeVar("T")

_LIBRARIES = {
    "hetsplit.engines.torch": "torch",
    "hetsplit.engines.transformers": "transformers",
    "hetsplit.engines.llamacpp": "llama-cpp-python",
    "hetsplit.engines.mlx": "mlx",
}
_ROLES = {"prefill": Prefiller, "decode": Decoder, "local prefill": LocalPrefill}
# Engines are other people's code; these are what it can raise.
_FAULTS = (
    HetsplitError,
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine: its library with version, and what it does with a model; or `why_not`.

    `library` is "" where it is not here; `installed` says whether the engine can be imported. `roles` are those of
    "prefill", "decode" and "local prefill" that it has; `kv_dtype` is the element type of its keys and values.
    """

    name: str
    library: str
    installed: bool
    why_not: str = ""
    model: str = ""
    device: str = ""
    kv_dtype: str = ""
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairFacts:
    """An ordered pair: its agreement, or `why_not`. `mixed_weights`: the two hold different weights of one model."""

    prefiller: str
    decoder: str
    mixed_weights: bool
    agreement: Agreement | None = None
    why_not: str = ""


def run(
    models: Sequence[str], names: Sequence[str], *, device: str, dtype: str | None, measure: bool, record: str | None
) -> None:
    """Surveys and shows. `names` limits the engines; `record` is a file for JSON, - for standard output.

    Raises `ConfigError` for a model or an engine that does not exist, and a file that cannot be written.
    """
    points = _points(names)
    paths = [str(locate(model, progress=terminal.interactive())) for model in models]
    with ExitStack() as closing:
        out = _opened(record, closing)
        found = [_installed(point) for point in points]
        loaded: dict[str, Engine] = {}
        if paths:
            found = [_with_model(facts, paths, device, dtype, loaded) for facts in found]
        tables = sys.stderr if record == "-" else sys.stdout
        terminal.show_engines(found, with_model=bool(paths), file=tables)
        pairs = list(_pairs(loaded)) if measure else []
        terminal.show_pairs(pairs, file=tables)
        if out:
            facts = {"models": list(models), "engines": [asdict(each) for each in found]}
            json.dump(_plain(facts | {"pairs": [asdict(each) for each in pairs]}), out, indent=2, allow_nan=False)
            out.write("\n")


def _points(names: Sequence[str]) -> list[EntryPoint]:
    known = engines.installed()
    for name in names:
        if name not in known:
            engines.loader(name)  # says which are allowed
    return [point for name, point in known.items() if not names or name in names]


def _opened(record: str | None, closing: ExitStack) -> TextIO | None:
    if record is None or record == "-":
        return sys.stdout if record else None
    try:
        return closing.enter_context(open(record, "w"))
    except OSError as error:
        raise ConfigError(f"--json {record}: {error.strerror}") from error


def _installed(point: EntryPoint) -> EngineFacts:
    _, why_not = _tried(partial(engines.loader, point.name))
    return EngineFacts(point.name, _library(point), not why_not, why_not)


def _library(point: EntryPoint) -> str:
    """Name and version of what computes, or of the package that registers an engine of others; "" when not here."""
    name = _LIBRARIES.get(point.module) or (point.dist.name if point.dist else "")
    try:
        return f"{name} {version(name)}" if name else ""
    except PackageNotFoundError:
        return ""


def _with_model(
    facts: EngineFacts, models: Sequence[str], device: str, dtype: str | None, loaded: dict[str, Engine]
) -> EngineFacts:
    """The facts with the first of `models` that the engine can load; the engine goes into `loaded`."""
    if not facts.installed:
        return facts
    reasons = []
    for model in models:
        outcome, why_not = _tried(partial(_load, facts, model, device, dtype))
        if outcome:
            facts, loaded[facts.name] = outcome
            return facts
        reasons.append(why_not)
    return replace(facts, why_not="; ".join(reasons))


def _load(facts: EngineFacts, model: str, device: str, dtype: str | None) -> tuple[EngineFacts, Engine]:
    engine = terminal.load(model, engine=facts.name, device=device, dtype=dtype, role="both")
    if not isinstance(engine, Prefiller | Decoder):
        raise ConfigError(f"engine {facts.name} gives a {type(engine).__name__}, which neither prefills nor decodes")
    roles = tuple(role for role, protocol in _ROLES.items() if isinstance(engine, protocol))
    place = str(getattr(engine, "device", ""))
    return replace(facts, model=model, device=place, kv_dtype=engine.layout.dtype.value, roles=roles), engine


def _pairs(loaded: Mapping[str, Engine]) -> Iterator[PairFacts]:
    """Every ordered pair, decoder by decoder; each decoder is first measured by itself."""
    with terminal.counting(len(loaded) * (len(loaded) + 1)) as begin:
        for name, decoder in loaded.items():
            begin(f"{name} by itself")
            reference, why_not = _tried(partial(Reference, decoder))
            for other, prefiller in loaded.items():
                mixed = prefiller.weights_hash != decoder.weights_hash
                agreement = None
                begin(f"{other} to {name}")
                if reference:
                    agreement, why_not = _tried(partial(reference.measure, prefiller, mixed_weights=mixed))
                yield PairFacts(other, name, mixed, agreement, why_not)


def _tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """What `work` returns, or None and why not, in one line."""
    try:
        return work(), ""
    except _FAULTS as error:
        kind = "" if isinstance(error, HetsplitError) else f"{type(error).__name__}: "
        return None, kind + " ".join(str(error).split())


def _plain(value: object) -> object:
    """For JSON, which has no number that is not finite: those become null."""
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value
