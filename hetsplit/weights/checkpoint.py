"""Checkpoints: a Hugging Face folder or a GGUF file, proved, as canonical tensors.

Owns where each format keeps its parts and what is undone when tensors are read: GGUF's interleaved q and k rows,
several matrices in one tensor, norms less 1. Invariant: opening reads headers and configs only (and the few factors of
`rope_freqs.weight`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetsplit.errors import ConfigError
from hetsplit.spec import DType, ModelSpec
from hetsplit.spec_gguf import interleaved, spec_from_gguf
from hetsplit.spec_hf import spec_from_hf
from hetsplit.weights.blocks import STORED_AS_BLOCKS, Blocks, from_gguf
from hetsplit.weights.files import StoredTensor, TensorFile, read_json
from hetsplit.weights.fingerprint import fingerprint
from hetsplit.weights.gguf import read_gguf
from hetsplit.weights.names import (
    GGUF_IGNORED,
    HF_IGNORED,
    account,
    gguf_fused,
    gguf_name,
    hf_fused,
    hf_name,
    parts_of,
    tensor_shapes,
)
from hetsplit.weights.quants import GGUF_TYPES, PLAIN_DTYPES, PLAIN_TYPES, load
from hetsplit.weights.safetensors import read_safetensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FACTORS_MAX = 4096
_OFFSET_NORMS = ("gemma2", "gemma3")  # architectures whose folders hold norms less 1; GGUF files hold them whole

Place = tuple[TensorFile, StoredTensor]


@dataclass(frozen=True)
class StoredCheckpoint:
    """The `Checkpoint` of both formats.

    `interleaved`: q and k rows are in GGUF's rotary order. `norm_offset`: weights of norms are stored less 1.
    """

    path: Path
    spec: ModelSpec
    stored_dtype: DType
    stored: dict[str, Place]
    interleaved: bool = False
    spare_head: Place | None = None
    norm_offset: bool = False

    @property
    def stored_in_blocks(self) -> bool:
        return any(tensor.type in STORED_AS_BLOCKS for _, tensor in self.stored.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.weights():
            yield name, value.floats() if isinstance(value, StoredBlocks) else value
            del value

    def weights(self) -> "Iterator[tuple[str, torch.Tensor | StoredBlocks]]":
        self._check_spare_head()
        for name, place in self.stored.items():
            yield name, self._value(name, place)  # no local holds it, so a tensor lives as long as its reader wants
            file, tensor = place
            file.let_go(tensor)

    def _value(self, name: str, place: Place) -> "torch.Tensor | StoredBlocks":
        heads = {"q": self.spec.heads, "k": self.spec.kv_heads}.get(name.rpartition(".")[2], 0)
        interleaved = heads if self.interleaved else 0
        if place[1].type in STORED_AS_BLOCKS:
            return StoredBlocks(*place, interleaved)
        values = load(*place)
        if self.norm_offset and name.endswith("norm"):
            return values.float() + 1
        return half_split(values, interleaved) if interleaved else values

    def fingerprint(self) -> str:
        return fingerprint(self.stored)

    def _check_spare_head(self) -> None:
        """A tied model may ship its head a second time; another head contradicts the flag."""
        if self.spare_head and not torch.equal(load(*self.spare_head), load(*self.stored["embed"])):
            file, head = self.spare_head
            raise ConfigError(
                f"{file.path}: tie_word_embeddings is true, but tensor {head.name} differs from the embedding"
            )


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix `[out, in]` that a GGUF file stores in blocks. Nothing is read before it is asked for.

    `interleaved`: how many heads its rows have in GGUF's rotary order, which reading undoes; 0 where rows lie as they
    should.
    """

    file: TensorFile
    tensor: StoredTensor
    interleaved: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def bits(self) -> int:
        return STORED_AS_BLOCKS[self.tensor.type]

    def read(self, rows: slice | Sequence[int]) -> Blocks:
        """Blocks of the rows of a slice, or of those with these indices."""
        raw = np.frombuffer(self.file.data, np.uint8, self.tensor.size, self.tensor.offset).reshape(self.shape[0], -1)
        if self.interleaved:
            order = half_split(torch.arange(self.shape[0])[:, None], self.interleaved).flatten().numpy()
            return from_gguf(raw[order[rows]], self.tensor.type)
        return from_gguf(raw[rows if isinstance(rows, slice) else list(rows)], self.tensor.type)

    def floats(self) -> torch.Tensor:
        """All of it, decoded to float32."""
        values = load(self.file, self.tensor)
        return half_split(values, self.interleaved) if self.interleaved else values

    def let_go(self) -> None:
        """Give back the memory that reading took."""
        self.file.let_go(self.tensor)


def half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """`[heads * D, E]` with each head's rotary pairs as neighbours to the order first halves, then second halves."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def open_gguf(path: Path) -> StoredCheckpoint:
    """Prove a GGUF file. Raises `ConfigError` naming the field or tensor."""
    file = read_gguf(path)
    factors = file.tensors.get("rope_freqs.weight")
    if factors and (factors.type != "F32" or factors.shape > (_FACTORS_MAX,) or len(factors.shape) > 1):
        raise ConfigError(
            f"{path}: tensor rope_freqs.weight is {factors.type} {factors.shape}; F32, one dimension, at most "
            f"{_FACTORS_MAX} is allowed"
        )
    try:
        spec = spec_from_gguf(
            file.metadata,
            tied_head="output.weight" not in file.tensors,
            rope_factors=load(file, factors).tolist() if factors else None,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    shapes = tensor_shapes(spec)
    wanted = {name: gguf_name(name) for name in shapes}
    slim = replace(file, metadata={})  # who keeps a tensor's place keeps the file, and the vocabulary is large
    places = {name: (slim, tensor) for name, tensor in file.tensors.items()}
    places = _apart(path, places, gguf_fused(spec), {wanted[name]: shape for name, shape in shapes.items()})
    account(path, _tensors(places), wanted, shapes, GGUF_TYPES, GGUF_IGNORED)
    stored = {name: places[wanted[name]] for name in shapes}
    return StoredCheckpoint(path, spec, _main_dtype(stored), stored, interleaved=interleaved(spec.architecture))


def open_folder(path: Path) -> StoredCheckpoint:
    """Prove a Hugging Face folder. Raises `ConfigError` naming the file and the field or tensor."""
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    try:
        spec = spec_from_hf(config, read_json(generation) if generation.exists() else None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    places = folder_places(path)
    shapes = tensor_shapes(spec)
    wanted = {name: hf_name(name, spec) for name in shapes}
    spare = places.pop(hf_name("head", spec), None) if spec.tied_head else None
    places = _apart(path, places, hf_fused(spec), {wanted[name]: shape for name, shape in shapes.items()})
    account(path, _tensors(places), wanted, shapes, PLAIN_TYPES, HF_IGNORED)
    stored = {name: places[wanted[name]] for name in shapes}
    if spare:
        account(path, {spare[1].name: spare[1]}, {"embed": spare[1].name}, shapes, PLAIN_TYPES, HF_IGNORED)
    offset = spec.architecture in _OFFSET_NORMS
    return StoredCheckpoint(path, spec, _main_dtype(stored), stored, spare_head=spare, norm_offset=offset)


def _tensors(places: Mapping[str, Place]) -> dict[str, StoredTensor]:
    return {name: tensor for name, (_, tensor) in places.items()}


def _apart(
    path: Path,
    places: Mapping[str, Place],
    fused: Iterable[tuple[str, list[str]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Place]:
    """`places` with tensors that hold several matrices cut into these; `shapes` by stored name."""
    found = dict(places)
    for whole, names in fused:
        if whole not in found or any(name in found for name in names if name != whole):
            continue
        file, tensor = found.pop(whole)
        parts = parts_of(tensor, names, [shapes[name] for name in names])
        if parts is None:
            raise ConfigError(
                f"{path}: tensor {whole} has shape {tensor.shape}; the config says "
                f"{' below '.join(str(shapes[name]) for name in names)}"
            )
        found |= {name: (file, part) for name, part in zip(names, parts, strict=True)}
    return found


def _main_dtype(stored: dict[str, Place]) -> DType:
    sizes: Counter[DType] = Counter()
    for _, tensor in stored.values():
        sizes[PLAIN_DTYPES.get(tensor.type, DType.BFLOAT16)] += torch.Size(tensor.shape).numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def folder_places(path: Path) -> dict[str, Place]:
    """Every tensor of a folder's safetensors by its stored name. An index wins over files that it does not name."""
    if (path / _INDEX).exists():
        return _indexed_places(path, read_json(path / _INDEX).get("weight_map"))
    if (path / _SINGLE).exists():
        file = read_safetensors(path / _SINGLE)
        return {name: (file, tensor) for name, tensor in file.tensors.items()}
    pickles = ", ".join(sorted(found.name for found in path.glob("pytorch_model*.bin")))
    hint = f"; {pickles} is not read, only safetensors are (no pickle)" if pickles else ""
    raise ConfigError(f"{path}: neither {_SINGLE} nor {_INDEX} is there{hint}")


def _indexed_places(path: Path, weight_map: Any) -> dict[str, Place]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path / _INDEX}: weight_map must be an object of tensor names to file names")
    shards: dict[str, TensorFile] = {}
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or "\\" in shard
            or not shard.endswith(".safetensors")
        ):
            raise ConfigError(f"{path / _INDEX}: tensor {name} is in {shard!r}; a plain name *.safetensors is allowed")
        if shard not in shards:
            shards[shard] = _read_shard(path / shard, name)
        if name not in shards[shard].tensors:
            raise ConfigError(f"{path / shard}: tensor {name} is not in this file, though {_INDEX} says so")
    for shard, file in shards.items():
        for name in file.tensors:
            if weight_map.get(name) != shard:
                raise ConfigError(f"{path / shard}: tensor {name} is in this file, though {_INDEX} does not say so")
    return {name: (shards[shard], shards[shard].tensors[name]) for name, shard in weight_map.items()}


def _read_shard(path: Path, name: str) -> TensorFile:
    try:
        return read_safetensors(path)
    except ConfigError as error:
        raise ConfigError(f"{error} ({_INDEX} expects tensor {name} in it)") from error
