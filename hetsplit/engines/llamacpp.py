"""The llama.cpp engine: a GGUF model prefills, decodes and fills its own stores through llama-cpp-python.

Owns the model and one context with a unified cache, where several sequences live, and the order of work within a
prefill and a step. Knows nothing of requests, transfers or sampling. Invariants: after a failed call every sequence
is cut back to the length that its cache has, at the latest when it is used again; keys and values are float16.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, Final

import llama_cpp
import numpy as np

from hetsplit.engines import Row, StepResult
from hetsplit.engines.budget import physical_bytes
from hetsplit.engines.checks import check_prefill, check_reserve, check_room, check_rows, check_span, own
from hetsplit.engines.llamacpp_blob import BlobLayout
from hetsplit.engines.llamacpp_store import MOVING, SEQUENCES, Cells, LlamaStore
from hetsplit.engines.openmp import end_openmp_team
from hetsplit.errors import CapacityError, ConfigError, EngineError
from hetsplit.kv import KvBlock, KvStore
from hetsplit.spec import DType, ModelSpec
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import locate, open_checkpoint

_BATCH: Final = 512
_PIECES: Final = {"cpu": 128, "gpu": 512}
"""Tokens computed between two looks at whether to stop: as few as keep the device busy."""

_CELLS_STEP: Final = 256
_CONTEXTS: Final = 4  # prompts of full length that the default cache has room for
_PROBE: Final = range(3)
_REFUSED: Final = ("gemma2", "gemma3")  # llama.cpp keeps two caches for them, even where no window is in use
_ERROR_LEVEL: Final = 4
_errors: deque[str] = deque(maxlen=4)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: Any) -> None:
    """llama.cpp writes pages to standard error; its last errors become part of ours."""
    if level == _ERROR_LEVEL:
        _errors.append(text.decode(errors="replace").strip())


llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))  # first of all: looking for devices talks as well


class LlamaEngine:
    """A `Prefiller`, `Decoder` and `LocalPrefill`. `path`: a GGUF file of the model that `spec` describes.

    `cells`: token positions of all caches together; memory for them is taken at once. `weights_hash` and `tokenizer`
    are what peers compare; `source` is for people. `close()` frees the model and the context, as dropping the engine
    and its stores does. Raises `ConfigError` for what llama.cpp or the blob's layout cannot serve, `CapacityError`
    where there is no memory for the cells.
    """

    name = "llamacpp"

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        *,
        cells: int | None = None,
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        weights_hash: str = "",
        source: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.dtype, self.device = spec, DType.FLOAT16, device
        self.layout = spec.layout(self.dtype)
        self.tokenizer: Tokenizer | None = tokenizer
        self.weights_hash, self.source = weights_hash, source
        with ExitStack() as made:
            model = _open_model(path, device, progress)
            made.callback(llama_cpp.llama_model_free, model)
            rope = _checked_rope(model, spec, path)
            context = _open_context(model, cells or _default_cells(spec, self.layout.span_bytes(1)), device)
            made.callback(llama_cpp.llama_free, context)
            self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
            made.callback(llama_cpp.llama_batch_free, self._batch)
            self._cells = Cells(
                context,
                self.layout,
                llama_cpp.llama_n_ctx(context),
                interleaved=rope == llama_cpp.LLAMA_ROPE_TYPE_NORM,
                free=made.pop_all().close,
            )
        self.close, self.budget = self._cells.close, self._cells.budget
        self._detect(path)

    def _detect(self, path: Path) -> None:
        """Learn the blob's layout from what the library writes, and prove that it takes what we write."""
        cells = self._cells
        sequence, other = cells.take(), cells.take()
        try:
            self._decode([(sequence, position, position, False) for position in _PROBE], "a probe of its cache")
            blobs = [(id, cells.dump_bytes(sequence, _PROBE, id).tobytes()) for id in (other, MOVING)]
            cells.blob = BlobLayout.detect(blobs, self.layout, _PROBE)
            written = cells.dump(sequence, _PROBE)
            cells.join(other, _PROBE, *written)
            for one, same in zip(chain(*written), chain(*cells.dump(other, _PROBE)), strict=True):
                if not np.array_equal(one, same):
                    raise EngineError("llama.cpp gives back other keys and values than it was given")
        except EngineError as error:
            raise ConfigError(f"{path}: this version of llama.cpp cannot be used: {error}") from error
        finally:
            for used in (sequence, other):
                cells.give(used)

    def reserve(self, positions: int) -> LlamaStore:
        """Cells for `positions` token positions. Raises `CapacityError` naming the bytes asked for and free."""
        check_reserve(positions)
        return LlamaStore(self._cells, positions)

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        """Yield the blocks of positions `span` of `tokens`; llama.cpp gives none before a chunk's end."""
        check_prefill(self.spec, tokens, span, chunk)
        return self._prefill(tokens, span, chunk, stop)

    def _prefill(self, tokens: Sequence[int], span: range, chunk: int, stop: Event) -> Iterator[KvBlock]:
        if not span:
            return
        store = self.reserve(span.stop)
        try:
            for part in self._compute(store, tokens, span, chunk, stop):
                for block in store.read(part):
                    yield block
                    if stop.is_set():
                        return
        finally:
            store.release()

    def extend(self, store: KvStore, tokens: Sequence[int], span: range, *, chunk: int) -> Iterator[None]:
        """Compute positions `span` of `tokens` into `store`, a chunk per `next()`.

        Positions below `span` are those the store holds already.
        """
        check_span(self.spec, tokens, span, chunk)
        check_room(store, span.stop)
        return (None for _ in self._compute(own(store, LlamaStore), tokens, span, chunk, Event()))

    def _compute(
        self, store: LlamaStore, tokens: Sequence[int], span: range, chunk: int, stop: Event
    ) -> Iterator[range]:
        """Fill `store`; yields a chunk's positions when they are in place."""
        self._ready(store, span.start)
        for start in range(span.start, span.stop, chunk):
            part = range(start, min(start + chunk, span.stop))
            for first in range(part.start, part.stop, _PIECES[self.device]):
                if stop.is_set():
                    return
                piece = range(first, min(first + _PIECES[self.device], part.stop))
                self._decode(
                    [(store.sequence, i, tokens[i], False) for i in piece], f"positions [{start}, {part.stop})"
                )
                store.grown(piece.stop)
            yield part

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Append each row's tokens to its cache; logits float32 `[B, V]` after each row's last token.

        Raises `CapacityError` for a row beyond its reservation, `EngineError` when llama.cpp fails; no cache's length
        has changed then.
        """
        check_rows(self.spec, rows)
        logits = np.empty((len(rows), self.spec.vocab_size), np.float32)
        stores = [own(row.cache.store, LlamaStore) for row in rows]
        entries: list[tuple[int, int, int, bool]] = []
        for row, store in zip(rows, stores, strict=True):
            check_room(store, row.cache.length + len(row.tokens))
            self._ready(store, row.cache.length)
            last = row.cache.length + len(row.tokens) - 1
            entries += [
                (store.sequence, position, token, position == last)
                for position, token in enumerate(row.tokens, row.cache.length)
            ]
        for store, row in zip(stores, rows, strict=True):
            store.grown(row.cache.length + len(row.tokens))  # what a failure leaves is cut off by the next `_ready`
        done = 0
        for start in range(0, len(entries), _BATCH):
            part = entries[start : start + _BATCH]
            self._decode(part, f"a decode step of {len(rows)} rows")
            for i in [i for i, entry in enumerate(part) if entry[3]]:
                found = llama_cpp.llama_get_logits_ith(self._cells.context, i)
                logits[done] = np.ctypeslib.as_array(found, (self.spec.vocab_size,))
                done += 1
        for row in rows:
            row.cache.length += len(row.tokens)
        return StepResult(logits)

    def _ready(self, store: LlamaStore, length: int) -> None:
        """Let a sequence end at `length`. Raises `EngineError` where it is shorter, or was released."""
        store.check_alive()
        self._cells.reap()
        store.trim(length)
        if store.held < length:
            raise EngineError(f"position {length} asked, the store is filled up to {store.held}")

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]], doing: str) -> None:
        """Run (sequence, position, token, whether logits are wanted), `_BATCH` at most."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (sequence, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        _errors.clear()
        code = llama_cpp.llama_decode(self._cells.context, batch)
        if code == 1:
            raise CapacityError(f"llama.cpp found no cells for {doing}")
        if code:
            raise EngineError(f"llama.cpp failed in {doing}: code {code}{_said()}")


def _said() -> str:
    return f" ({'; '.join(_errors)})" if _errors else ""


def _open_model(path: Path, device: str, progress: Callable[[int, int], None] | None) -> Any:
    llama_cpp.llama_backend_init()
    _errors.clear()
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0 if device == "cpu" else -1
    heard = llama_cpp.llama_progress_callback(
        lambda done, _: progress is None or progress(round(100 * done), 100) is None
    )
    settings.progress_callback = heard
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise ConfigError(f"{path}: llama.cpp cannot load it{_said()}")
    return model


def _open_context(model: Any, cells: int, device: str) -> Any:
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = -(-cells // _CELLS_STEP) * _CELLS_STEP
    settings.n_batch = settings.n_ubatch = _BATCH
    settings.n_seq_max = SEQUENCES
    settings.n_threads = settings.n_threads_batch = _threads()
    settings.kv_unified = True
    attention = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    if device == "cpu":  # where a step of one row then takes nearly twice as long
        attention = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.flash_attn_type = attention
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F16
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise CapacityError(f"llama.cpp made no context of {cells:,} cells{_said()}")
    return context


def _threads() -> int:
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdigit() and int(stated):
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_cells(spec: ModelSpec, position_bytes: int) -> int:
    """Some prompts of full length, in an eighth of the memory at most; at least one step of cells."""
    fits = physical_bytes() // 8 // position_bytes
    return max(min(_CONTEXTS * spec.context, fits) // _CELLS_STEP, 1) * _CELLS_STEP


def _checked_rope(model: Any, spec: ModelSpec, path: Path) -> int:
    """llama.cpp's rope type. Raises `ConfigError` for one whose key order is not known here, or another vocabulary."""
    rope: int = llama_cpp.llama_model_rope_type(model)
    if rope not in (llama_cpp.LLAMA_ROPE_TYPE_NORM, llama_cpp.LLAMA_ROPE_TYPE_NEOX):
        raise ConfigError(f"{path}: llama.cpp's rope type {rope} is not supported; allowed: 0 (norm), 2 (neox)")
    tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    if tokens != spec.vocab_size:
        raise ConfigError(f"{path}: llama.cpp counts {tokens} tokens, the model has {spec.vocab_size}")
    return rope


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: DType | str | None = None,
    role: str = "both",
    progress: Callable[[int, int], None] | None = None,
) -> LlamaEngine:
    """See `hetsplit.engines.load`. `device`: auto, gpu (where llama.cpp was built with one) or cpu. Weights stay as
    the GGUF file has them, keys and values are float16: `dtype` is None or float16.
    """
    place = _device(device)
    if dtype not in (None, DType.FLOAT16):
        raise ConfigError(
            f"dtype {str(dtype)!r}: llama.cpp computes with the file's own, and holds keys and values in float16"
        )
    path = locate(model, progress=progress is not None)
    if path.is_dir():
        raise ConfigError(f"{path}: the llama.cpp engine reads GGUF files, this is a folder")
    checkpoint = open_checkpoint(path)
    if checkpoint.spec.architecture in _REFUSED:
        raise ConfigError(f"{path}: {checkpoint.spec.architecture} models are not supported by the llama.cpp engine")
    if any(layer.window for layer in checkpoint.spec.layout(DType.FLOAT16).layers):
        raise ConfigError(f"{path}: attention windows are not supported by the llama.cpp engine")
    engine = LlamaEngine(
        path,
        checkpoint.spec,
        device=place,
        tokenizer=load_tokenizer(path),
        weights_hash=checkpoint.fingerprint(),
        source=path.name,
        progress=progress,
    )
    end_openmp_team()
    return engine


def _device(name: str) -> str:
    """A device that is there. Raises `ConfigError` naming those that are."""
    found = (["gpu"] if llama_cpp.llama_supports_gpu_offload() else []) + ["cpu"]
    if name == "auto":
        return found[0]
    if name not in found:
        raise ConfigError(f"device {name!r} is not here, allowed: auto, {', '.join(found)}")
    return name
