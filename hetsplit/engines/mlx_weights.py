"""Hugging Face folders, plain or quantised by MLX, as mlx-lm models.

Owns the proof of a quantised folder (which tensor is quantised how, as config.json says and as the file shows) and the
making of mlx-lm's module from `ModelSpec`. Knows nothing of caches. Invariants: everything is checked before weights
are read; no code of a model folder ever runs; the rotary frequencies are `ModelSpec`'s, those that peers compare, and
not mlx-lm's own reading of the config; nothing in a loaded model is lazy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from hetsplit.engines.checks import check_plain
from hetsplit.engines.mlx_store import MLX_DTYPE
from hetsplit.errors import ConfigError, brief
from hetsplit.spec import DType, ModelSpec, Rope
from hetsplit.spec_hf import spec_from_hf
from hetsplit.weights.checkpoint import Place, folder_places, open_folder
from hetsplit.weights.files import StoredTensor, read_json
from hetsplit.weights.fingerprint import fingerprint
from hetsplit.weights.names import HF_IGNORED, hf_name, tensor_shapes
from hetsplit.weights.quants import PLAIN_DTYPES


@contextmanager
def _limits_kept() -> Iterator[None]:
    """Importing mlx-lm lowers the process's limit of open files, for good; a worker needs what it was given."""
    import resource

    kept = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = kept


with _limits_kept():
    from mlx_lm.models import llama

FAMILIES: Final = {"llama": llama, "mistral": llama}
"""mlx-lm's module for a `model_type`: those that rotate in half-split order and keep plain keys and values."""

BITS: Final = (2, 3, 4, 5, 6, 8)
GROUP_SIZES: Final = (32, 64, 128)
_KNOWN_SETTINGS: Final = {"group_size", "bits", "mode"}
_NUMPY: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How one matrix is packed: `bits` per element, a scale and a bias for each `group_size` columns."""

    group_size: int
    bits: int


@dataclass(frozen=True)
class Folder:
    """A proven folder. `stored`: its tensors by the name that mlx-lm's model gives them; `quantised`: by module."""

    path: Path
    family: str
    spec: ModelSpec
    stored_dtype: DType
    stored: Mapping[str, Place]
    weights_hash: str
    quantised: Mapping[str, Quantisation] = field(default_factory=dict)


def open_mlx(path: Path) -> Folder:
    """Prove a folder. Raises `ConfigError` naming the file and the field or tensor that cannot be used."""
    if not path.is_dir():
        raise ConfigError(
            f"{path}: the mlx engine reads Hugging Face and MLX folders (config.json and safetensors), not "
            f"{'GGUF' if path.suffix.lower() == '.gguf' else 'single'} files; give the model's folder or repository, "
            "or take engine torch or llamacpp for a .gguf file"
        )
    config = read_json(path / "config.json")
    for key in ("model_file", "quantize_activations"):
        if config.get(key):
            raise ConfigError(f"{path}: config.json: {key} is {brief(config[key])}; not supported (no code is run)")
    family = config.get("model_type")
    if family not in tuple(FAMILIES):
        raise ConfigError(
            f"{path}: config.json: model_type is {brief(family)}; the mlx engine supports: {', '.join(FAMILIES)}"
        )
    if config.get("quantization") is not None:
        return _open_quantised(path, family, config)
    checkpoint = open_folder(path)
    check_plain(checkpoint.spec, path, "mlx")
    next(checkpoint.tensors())  # a tied model that ships another head is refused there
    stored = {hf_name(name, checkpoint.spec): place for name, place in checkpoint.stored.items()}
    return Folder(path, family, checkpoint.spec, checkpoint.stored_dtype, stored, checkpoint.fingerprint())


def _open_quantised(path: Path, family: str, config: dict[str, Any]) -> Folder:
    settings = config["quantization"]
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: config.json: quantization is {brief(settings)}; an object is allowed")
    plain = {key: value for key, value in config.items() if key != "quantization"}
    if plain.get("quantization_config") == settings:  # mlx-lm writes both
        del plain["quantization_config"]
    generation = path / "generation_config.json"
    try:
        spec = spec_from_hf(plain, read_json(generation) if generation.exists() else None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    check_plain(spec, path, "mlx")
    places = folder_places(path)
    quantised = _account(path, {name: tensor for name, (_, tensor) in places.items()}, spec, settings)
    stored = {name: place for name, place in places.items() if not HF_IGNORED.fullmatch(name)}
    types = Counter(stored[f"{module}.scales"][1].type for module in quantised)
    dtype = PLAIN_DTYPES[max(types, key=lambda kind: types[kind])]
    return Folder(path, family, spec, dtype, stored, fingerprint(stored), quantised)


def _account(
    path: Path, present: Mapping[str, StoredTensor], spec: ModelSpec, settings: Mapping[str, Any]
) -> dict[str, Quantisation]:
    """Prove that `present` is the model, and how each quantised matrix is packed, by module name."""
    found: dict[str, Quantisation] = {}
    wanted = set()
    for canonical, shape in tensor_shapes(spec).items():
        name = hf_name(canonical, spec)
        module = name.removesuffix(".weight")
        wanted.add(name)
        if name not in present:
            raise ConfigError(f"{path}: the tensor {name} is missing")
        if present[name].type == "U32":
            wanted |= {f"{module}.scales", f"{module}.biases"}
            found[module] = _packing(path, present[name], settings)
            _prove_packed(path, module, present, shape, found[module])
        else:
            _prove_plain(path, present[name], shape)
    if strangers := [name for name in present if name not in wanted and not HF_IGNORED.fullmatch(name)]:
        tensor = present[strangers[0]]
        raise ConfigError(f"{path}: unexpected tensor {tensor.name!r} of type {tensor.type}")
    if not found:
        raise ConfigError(f"{path}: config.json has a quantization, but no tensor of the folder is quantised")
    return found


def _packing(path: Path, tensor: StoredTensor, settings: Mapping[str, Any]) -> Quantisation:
    """What config.json says of a quantised tensor: its module's own entry, or the general one."""
    module = tensor.name.removesuffix(".weight")
    general = {key: value for key, value in settings.items() if key in _KNOWN_SETTINGS}
    own = settings.get(module, True)
    stated = general if own is True else own
    if (
        not isinstance(stated, dict)
        or not all(type(stated.get(key)) is int for key in ("bits", "group_size"))  # 4.0 is in BITS as well
        or stated["bits"] not in BITS
        or stated["group_size"] not in GROUP_SIZES
        or stated.get("mode", "affine") != "affine"
    ):
        raise ConfigError(
            f"{path}: tensor {tensor.name} of type {tensor.type} is quantised as {brief(stated)}, says config.json; "
            f"supported: mode affine, bits {', '.join(map(str, BITS))}, group_size {', '.join(map(str, GROUP_SIZES))}"
        )
    return Quantisation(stated["group_size"], stated["bits"])


def _prove_packed(
    path: Path, module: str, present: Mapping[str, StoredTensor], shape: tuple[int, ...], packing: Quantisation
) -> None:
    weight = present[f"{module}.weight"]
    rows, columns = shape if len(shape) == 2 else (0, 0)
    says = f"{packing.bits} bits in groups of {packing.group_size}, says config.json"
    if not rows or columns % packing.group_size or weight.shape != (rows, columns * packing.bits // 32):
        raise ConfigError(
            f"{path}: tensor {weight.name} of type {weight.type} has shape {weight.shape}; that is not {shape} "
            f"quantised to {says}"
        )
    for name in (f"{module}.scales", f"{module}.biases"):
        if name not in present:
            raise ConfigError(f"{path}: tensor {weight.name} is quantised ({weight.type}), but {name} is missing")
        part, expected = present[name], (rows, columns // packing.group_size)
        if part.type not in PLAIN_DTYPES or part.shape != expected:
            raise ConfigError(
                f"{path}: tensor {name} is {part.type} {part.shape}; {says}: {', '.join(PLAIN_DTYPES)} in shape "
                f"{expected} is needed"
            )


def _prove_plain(path: Path, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.type not in PLAIN_DTYPES:
        raise ConfigError(
            f"{path}: tensor {tensor.name} has type {tensor.type}, not supported; supported: "
            f"{', '.join(PLAIN_DTYPES)}, and U32 where it is quantised"
        )
    if tensor.shape != shape:
        raise ConfigError(f"{path}: tensor {tensor.name} has shape {tensor.shape}, the config says {shape}")


class Rotary:
    """Rotary embedding in half-split order as a spec says it."""

    def __init__(self, rope: Rope) -> None:
        self._dims = 2 * len(rope.inv_freq)
        self._freqs = 1 / mx.array(rope.inv_freq, mx.float32)
        self._scale = rope.scale
        mx.eval(self._freqs)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self._scale != 1:
            x = self._scale * x
        return mx.fast.rope(x, self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._freqs)


def build(folder: Folder, dtype: DType, progress: Callable[[int, int], None] | None = None) -> Module:
    """mlx-lm's model with the folder's weights, floats in `dtype`, all evaluated. `progress` hears (done, in all)."""
    module = FAMILIES[folder.family]
    model = module.Model(module.ModelArgs(**_arguments(folder)))
    rotary = {rope: Rotary(rope) for rope in folder.spec.rotary if rope is not None}
    for layer, rope in zip(model.layers, folder.spec.rotary, strict=True):
        if rope is not None:
            layer.self_attn.rope = rotary[rope]
    if folder.quantised:
        quantize(model, class_predicate=lambda path, _: _parameters(folder.quantised.get(path)))
    loaded: list[tuple[str, mx.array]] = []
    for done, (name, place) in enumerate(folder.stored.items(), 1):
        loaded.append((name, _value(place, dtype)))
        if progress is not None:
            progress(done, len(folder.stored))
    model.load_weights(loaded, strict=True)
    model.eval()
    mx.eval([value for part in model.modules() for value in part.values() if isinstance(value, mx.array)])
    built: Module = model
    return built


def _arguments(folder: Folder) -> dict[str, Any]:
    """mlx-lm's names for the facts of a spec."""
    spec = folder.spec
    return {
        "model_type": folder.family,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.n_layers,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied_head,
        "attention_bias": "q" in spec.biases,
        "mlp_bias": "up" in spec.biases,
    }


def _parameters(packing: Quantisation | None) -> dict[str, int] | bool:
    return packing is not None and {"group_size": packing.group_size, "bits": packing.bits}


def _value(place: Place, dtype: DType) -> mx.array:
    """A tensor's bytes, copied once; floats then cast to `dtype`."""
    file, tensor = place
    raw = np.frombuffer(file.data, _NUMPY[tensor.type], math.prod(tensor.shape), tensor.offset)
    value = mx.array(raw.reshape(tensor.shape))
    if tensor.type == "BF16":
        value = value.view(mx.bfloat16)
    if tensor.type != "U32":
        value = value.astype(MLX_DTYPE[dtype])
    mx.eval(value)
    file.let_go(tensor)
    return value
