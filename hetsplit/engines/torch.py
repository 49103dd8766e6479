"""The torch engine: prefills, decodes and fills its own stores, on a CPU, an NVIDIA GPU or an Apple GPU.

Owns one `Model`, or two of the same weights where packed ones decode, the budget of its stores, the order of work
within a prefill, and the way of keys and values to the host. Knows nothing of requests, transfers or sampling.
Invariants: `prefill` and `extend` run the same code, so with the same span and chunk they compute the same bits; an
error of the backend leaves as a `HetsplitError` with the original chained.
"""

import ctypes
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Event

import numpy as np
import torch
from torch import Tensor

from hetsplit.engines import Row, StepResult
from hetsplit.engines.budget import KvBudget
from hetsplit.engines.checks import check_prefill, check_reserve, check_room, check_rows, check_span, own
from hetsplit.engines.openmp import end_openmp_team
from hetsplit.engines.torch_device import checked_dtype, default_dtype, find_device
from hetsplit.engines.torch_store import TorchStore, as_numpy, backend_errors, default_kv_bytes, to_numpy
from hetsplit.errors import ConfigError
from hetsplit.kv import KvBlock, KvStore
from hetsplit.model import Model
from hetsplit.spec import DType
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import Checkpoint, locate, open_checkpoint

log = logging.getLogger(__name__)

PACKED_BITS = {"int8": 8, "int4": 4}
"""dtypes of packed weights and the bits that a number is rounded to; keys and values are bfloat16 with them."""

_COPIES_AHEAD = 2  # blocks on their way to the host while a GPU computes on


class TorchEngine:
    """A `Prefiller`, `Decoder` and `LocalPrefill`.

    `decoder` runs the steps in the place of `model`: the same weights in another form, on the same device, with keys
    and values of the same dtype. `kv_bytes` bounds what all stores hold together; None means half of the physical
    memory on a CPU and nine tenths of what is free on a GPU. `weights_hash` and `tokenizer` are what peers compare;
    `source` is for people.
    """

    name = "torch"

    def __init__(
        self,
        model: Model,
        *,
        decoder: Model | None = None,
        tokenizer: Tokenizer | None = None,
        weights_hash: str = "",
        source: str = "",
        kv_bytes: int | None = None,
    ) -> None:
        self.model, self.decoder = model, decoder or model
        self.spec, self.dtype = model.spec, model.dtype
        self.device = str(model.device)
        self.layout = model.spec.layout(model.dtype)
        self.tokenizer: Tokenizer | None = tokenizer
        self.weights_hash = weights_hash
        self.source = source
        self.budget = KvBudget(default_kv_bytes(model.device) if kv_bytes is None else kv_bytes)
        on_cuda = model.device.type == "cuda"
        self._copies = torch.cuda.Stream(model.device) if on_cuda else None  # type: ignore[no-untyped-call]

    def reserve(self, positions: int) -> TorchStore:
        """Memory for `positions` token positions. Raises `CapacityError` naming the bytes asked for and free."""
        check_reserve(positions)
        return TorchStore(self.layout, positions, self.model.device, self.budget)

    def prefill(self, tokens: Sequence[int], span: range, *, chunk: int, stop: Event) -> Iterator[KvBlock]:
        """Yield the blocks of positions `span` of `tokens`, which begins at position 0 (`Prefiller.prefill`)."""
        check_prefill(self.spec, tokens, span, chunk)
        return self._prefill(tokens, span, chunk, stop)

    def _prefill(self, tokens: Sequence[int], span: range, chunk: int, stop: Event) -> Iterator[KvBlock]:
        if not span:
            return
        store = self.reserve(span.stop)
        pending: deque[Callable[[], KvBlock]] = deque()
        try:
            with backend_errors("copying blocks to the host"):
                for layer, part in self._compute(store, tokens, span, chunk, stop):
                    pending.append(self._to_host(layer, part.start, *store.views(layer, part)))
                    if len(pending) > (0 if self._copies is None else _COPIES_AHEAD):
                        yield pending.popleft()()
                while pending:
                    yield pending.popleft()()
        finally:
            store.release()

    def extend(self, store: KvStore, tokens: Sequence[int], span: range, *, chunk: int) -> Iterator[None]:
        """Compute positions `span` of `tokens` into `store`, one layer of a chunk per `next()`.

        Positions below `span` are those the store holds already.
        """
        check_span(self.spec, tokens, span, chunk)
        check_room(store, span.stop)
        return (None for _ in self._compute(own(store, TorchStore), tokens, span, chunk, Event()))

    @torch.inference_mode()
    def _compute(
        self, store: TorchStore, tokens: Sequence[int], span: range, chunk: int, stop: Event
    ) -> Iterator[tuple[int, range]]:
        """Fill `store`; yields a layer and a chunk's positions when they are in place, before the layer's attention."""
        with backend_errors(f"computing positions [{span.start}, {span.stop})"):
            chunk = min(chunk, store.at_once)
            for start in range(span.start, span.stop, chunk):
                if stop.is_set():
                    return
                part = range(start, min(start + chunk, span.stop))
                x = self.model.embedded(tokens[part.start : part.stop])
                for layer in self.model.forward(x, [store.segment(start, len(part))]):
                    yield layer, part
                    if stop.is_set():
                        return
                    if layer == self.spec.n_layers - 1:
                        break  # nobody asks for more than the last layer's keys and values

    def _to_host(self, layer: int, start: int, keys: Tensor, values: Tensor) -> Callable[[], KvBlock]:
        """Begin to copy a block to the host; the result waits for its end. Only on CUDA is there a wait."""
        if self._copies is None:
            block = KvBlock(layer, start, to_numpy(keys), to_numpy(values))
            return lambda: block
        self._copies.wait_stream(torch.cuda.current_stream(keys.device))
        with torch.cuda.stream(self._copies):
            hosts = []
            for source in (keys, values):
                source.record_stream(self._copies)
                host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                hosts.append(host.copy_(source.contiguous(), non_blocking=True))
            done = self._copies.record_event()

        def landed() -> KvBlock:
            done.synchronize()
            return KvBlock(layer, start, *map(as_numpy, hosts))

        return landed

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepResult:
        """Append each row's tokens to its cache; logits float32 `[B, V]` after each row's last token.

        Raises `CapacityError` for a row beyond its reservation, `EngineError` when the backend fails; no cache's
        length has changed then.
        """
        if not rows:
            return StepResult(np.empty((0, self.spec.vocab_size), np.float32))
        check_rows(self.spec, rows)
        segments = [own(row.cache.store, TorchStore).segment(row.cache.length, len(row.tokens)) for row in rows]
        tokens = [token for row in rows for token in row.tokens]
        with backend_errors(f"a decode step of {len(rows)} rows"):
            x = self.decoder.embedded(tokens)
            for _ in self.decoder.forward(x, segments):
                pass
            if len(tokens) > 1:
                x = x[[stop - 1 for stop in accumulate(segment.count for segment in segments)]]
            logits = self.decoder.logits(x).float().cpu().numpy()
        for row in rows:
            row.cache.length += len(row.tokens)
        return StepResult(logits)


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: DType | str | None = None,
    role: str = "both",
    progress: Callable[[int, int], None] | None = None,
) -> TorchEngine:
    """See `hetsplit.engines.load`."""
    place = find_device(device)
    path = locate(model, progress=progress is not None)
    checkpoint = open_checkpoint(path)
    wanted, packed_bits = _precision(dtype, place, checkpoint)
    tokenizer = load_tokenizer(path)
    forms = [None, packed_bits] if role == "both" and packed_bits is not None else [packed_bits]
    if role == "prefill":
        forms = [None]
    loaded = []
    with backend_errors(f"the weights of {path.name} in {wanted} on {place}"):
        for done, form in enumerate(forms):
            heard = _share(progress, done, len(forms))
            loaded.append(Model(checkpoint.spec, place, wanted, form).load(checkpoint.weights(), heard))
    if len(loaded) > 1:
        plain, packed = (part.nbytes for part in loaded)
        log.info(
            f"{path.name}: weights are kept twice, {plain:,} bytes in {wanted} to prefill and {packed:,} bytes packed "
            "to decode; an engine for one role keeps one of them"
        )
    end_openmp_team()
    _return_freed_memory()
    return TorchEngine(
        loaded[0],
        decoder=loaded[-1],
        tokenizer=tokenizer,
        weights_hash=checkpoint.fingerprint(),
        source=path.name,
    )


def _return_freed_memory() -> None:
    """Hand what loading took for a while back to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _share(progress: Callable[[int, int], None] | None, done: int, parts: int) -> Callable[[int, int], None]:
    """`progress` of part number `done` of several that are equally long; what a tensor took for a while goes back."""

    def heard(tensors: int, total: int) -> None:
        _return_freed_memory()
        if progress is not None:
            progress(done * total + tensors, parts * total)

    return heard


def _precision(dtype: DType | str | None, device: str, checkpoint: Checkpoint) -> tuple[DType, int | None]:
    """What to compute in, and `Model`'s `packed_bits`."""
    if dtype in PACKED_BITS:
        if device != "cpu":
            raise ConfigError(f"dtype {str(dtype)!r} is computed with on cpu, not on {device}")
        return DType.BFLOAT16, PACKED_BITS[str(dtype)]
    if dtype is not None:
        return checked_dtype(dtype, device, also=PACKED_BITS), None
    if device == "cpu" and checkpoint.stored_in_blocks:
        return DType.BFLOAT16, 0
    return default_dtype(checkpoint.stored_dtype, device), None
