"""The transformers engine: causal models of Hugging Face folders, run by transformers' own modules.

Owns the cache that transformers writes into, which is a `TorchStore`'s memory, and the order of work within a prefill
and a step. Knows nothing of requests, transfers or sampling. Invariants: no code of a model folder ever runs;
`prefill` and `extend` run the same code; the rotary frequencies of the loaded module are those that peers compare. An
error of the backend leaves as a `HetsplitError` with the original chained.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import logging

from hetsplit.engines import Row, StepResult
from hetsplit.engines.budget import KvBudget
from hetsplit.engines.checks import check_plain, check_prefill, check_reserve, check_room, check_rows, check_span, own
from hetsplit.engines.openmp import end_openmp_team
from hetsplit.engines.torch_device import checked_dtype, default_dtype, find_device
from hetsplit.engines.torch_store import TorchStore, backend_errors, default_kv_bytes, to_numpy
from hetsplit.errors import ConfigError, brief
from hetsplit.kv import KvBlock, KvStore
from hetsplit.model import TORCH_DTYPE, Segment
from hetsplit.spec import DType, ModelSpec, Rope
from hetsplit.tokenizer import Tokenizer, load_tokenizer
from hetsplit.weights import Checkpoint, locate, open_checkpoint
from hetsplit.weights.files import read_json
from hetsplit.weights.names import hf_name

MODEL_TYPES: Final = {"llama": LlamaForCausalLM, "mistral": MistralForCausalLM}
"""transformers' module for a `model_type`: those that rotate in half-split order and keep plain keys and values."""

_FREQUENCY_ERROR: Final = 1e-6
_ROPE_FIELDS: Final = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


class _Enough(Exception):
    """Ends a forward pass whose rest nobody needs."""


class _InPlace(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's cache as transformers asks for it: new keys and values go into their reserved place."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, start: int, placed: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.length, self._placed = keys[None], values[None], start, placed
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Its memory is there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[..., start : self.length, :] = key_states
        self.values[..., start : self.length, :] = value_states
        self._placed()
        return self.keys[..., : self.length, :], self.values[..., : self.length, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class TransformersEngine:
    """A `Prefiller`, `Decoder` and `LocalPrefill`. `model`: transformers' module, in eval mode, with floats in `dtype`.

    `kv_bytes` bounds what all stores hold together; None means half of the physical memory on a CPU and nine tenths
    of what is free on a GPU. `weights_hash` and `tokenizer` are what peers compare; `source` is for people. A whole
    chunk is computed at once, so a block comes when its chunk's last layer is reached.
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        dtype: DType,
        *,
        tokenizer: Tokenizer | None = None,
        weights_hash: str = "",
        source: str = "",
        kv_bytes: int | None = None,
    ) -> None:
        self.model, self.spec, self.dtype = model, spec, dtype
        self.device = str(model.device)
        self.layout = spec.layout(dtype)
        self.tokenizer: Tokenizer | None = tokenizer
        self.weights_hash, self.source = weights_hash, source
        self.budget = KvBudget(default_kv_bytes(model.device) if kv_bytes is None else kv_bytes)

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
        try:
            for part in self._compute(store, tokens, span, chunk, stop):
                for layer in range(self.spec.n_layers):
                    with backend_errors("copying blocks to the host"):
                        block = KvBlock(layer, part.start, *map(to_numpy, store.views(layer, part)))
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
        return (None for _ in self._compute(own(store, TorchStore), tokens, span, chunk, Event()))

    def _compute(
        self, store: TorchStore, tokens: Sequence[int], span: range, chunk: int, stop: Event
    ) -> Iterator[range]:
        """Fill `store`; yields a chunk's positions when they are in place. Ends early once `stop` is set."""
        for start in range(span.start, span.stop, chunk):
            part = range(start, min(start + chunk, span.stop))
            placed = 0

            def one_more() -> None:
                nonlocal placed
                placed += 1
                if placed == self.spec.n_layers or stop.is_set():  # nobody asks for more than keys and values
                    raise _Enough

            with backend_errors(f"computing positions [{start}, {part.stop})"), suppress(_Enough):
                segment = store.segment(start, len(part))
                self._run(self.model.base_model, segment, tokens[start : part.stop], one_more)
            if placed < self.spec.n_layers:
                return
            yield part

    @torch.inference_mode()
    def _run(
        self, module: Any, segment: Segment, tokens: Sequence[int], placed: Callable[[], None], **options: Any
    ) -> Any:
        memory = segment.memory[None]
        layers = zip(memory.keys, memory.values, strict=True)
        cache = Cache(layers=[_InPlace(keys, values, segment.start, placed) for keys, values in layers])
        return module(
            input_ids=torch.tensor([list(tokens)], device=self.model.device),
            position_ids=torch.arange(segment.start, segment.stop, device=self.model.device)[None],
            cache=cache,
            use_cache=True,
            **options,
        )

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Append each row's tokens to its cache, row by row; logits float32 `[B, V]` after each row's last token.

        Raises `CapacityError` for a row beyond its reservation, `EngineError` when the backend fails; no cache's
        length has changed then.
        """
        check_rows(self.spec, rows)
        segments = [own(row.cache.store, TorchStore).segment(row.cache.length, len(row.tokens)) for row in rows]
        logits = np.empty((len(rows), self.spec.vocab_size), np.float32)
        with backend_errors(f"a decode step of {len(rows)} rows"):
            for i, (row, segment) in enumerate(zip(rows, segments, strict=True)):
                found = self._run(self.model, segment, row.tokens, lambda: None, logits_to_keep=1).logits
                logits[i] = found[0, -1].float().cpu().numpy()
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
) -> TransformersEngine:
    """See `hetsplit.engines.load`. `dtype`: None means the checkpoint's own, where float16 is loaded as bfloat16."""
    place = find_device(device)
    wanted = None if dtype is None else checked_dtype(dtype, place)
    path = locate(model, progress=progress is not None)
    if not path.is_dir():
        raise ConfigError(f"{path}: the transformers engine reads Hugging Face folders, this is a file")
    config = read_json(path / "config.json")
    kind = config.get("model_type")
    if kind not in tuple(MODEL_TYPES):
        raise ConfigError(
            f"{path}: config.json: model_type is {brief(kind)}; the transformers engine knows the keys of: "
            f"{', '.join(MODEL_TYPES)}"
        )
    checkpoint = open_checkpoint(path)
    check_plain(checkpoint.spec, path, "transformers")
    held = wanted or default_dtype(checkpoint.stored_dtype, place)
    tokenizer = load_tokenizer(path)
    with backend_errors(f"the weights of {path.name} in {held} on {place}"):
        module = _module(MODEL_TYPES[kind], config, checkpoint, held).to(place)
    _check_frequencies(path, module, checkpoint.spec)
    end_openmp_team()
    if progress is not None:
        progress(1, 1)
    return TransformersEngine(
        module,
        checkpoint.spec,
        held,
        tokenizer=tokenizer,
        weights_hash=checkpoint.fingerprint(),
        source=path.name,
    )


def _module(kind: Any, config: dict[str, Any], checkpoint: Checkpoint, dtype: DType) -> Any:
    """transformers' module; what it cannot load becomes a `ConfigError`, the original chained.

    Facts are those of `checkpoint`'s spec and tensors are those that it proved and hashes: transformers would obey
    fields of config.json that nobody compares, and would look for files by rules of its own.
    """
    spec, held = checkpoint.spec, TORCH_DTYPE[dtype]
    tensors = {hf_name(name, spec): tensor.to(held, copy=True) for name, tensor in checkpoint.tensors()}
    try:
        with _quiet():
            module = kind.from_pretrained(
                None,
                config=kind.config_class(**_facts(spec, config)),
                state_dict=tensors,
                dtype=held,
                attn_implementation="sdpa",
                local_files_only=True,
            )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(f"{checkpoint.path}: transformers cannot load it: {error}") from error
    expected = module.state_dict().keys() - ({"lm_head.weight"} if spec.tied_head else set())
    if differing := sorted(expected ^ tensors.keys()):
        raise ConfigError(f"{checkpoint.path}: tensor {differing[0]}: {kind.__name__} and the spec differ about it")
    return module.eval()


def _facts(spec: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """transformers' names for the facts of a spec; its rope fields as the file spells them."""
    return {
        "hidden_size": spec.width,
        "num_hidden_layers": spec.n_layers,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": "q" in spec.biases,
        "mlp_bias": "up" in spec.biases,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied_head,
        "sliding_window": None,
    } | {name: config[name] for name in _ROPE_FIELDS if config.get(name) is not None}


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading shows bars and advice on standard error, which are not ours to show."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_frequencies(path: Path, module: Any, spec: ModelSpec) -> None:
    """Prove that transformers rotates as the spec says. Raises `ConfigError`."""
    rotary = getattr(module.base_model, "rotary_emb", None)
    if not all(_rotates(rotary, rope) for rope in set(spec.rotary) if rope is not None):
        raise ConfigError(f"{path}: transformers' rotary frequencies are not those of config.json as hetsplit reads it")


def _rotates(rotary: Any, rope: Rope) -> bool:
    found, expected = getattr(rotary, "inv_freq", None), torch.tensor(rope.inv_freq)
    return (
        found is not None
        and found.shape == expected.shape
        and bool((found.float().cpu() - expected).abs().max() <= _FREQUENCY_ERROR)
        and math.isclose(getattr(rotary, "attention_scaling", 1.0), rope.scale, rel_tol=_FREQUENCY_ERROR)
    )
