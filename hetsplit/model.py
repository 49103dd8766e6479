"""One decoder transformer for all supported families: parameters, their loading, and the forward pass.

Branches on facts of the architecture (`ModelSpec`), never on a family's name: what differs between families' files was
undone when the weights were read. Knows nothing of requests, transfers or who owns the memory of keys and values.

Invariants: query, key and value weights lie together (`qkv`); keys are stored after RoPE in half-split
order; a layer's keys and values are in place and shown to the caller before that layer's attention runs, so a caller
who stops there has paid for nothing else. Tensor letters are those of `ModelSpec`: `T` tokens, `H` query heads, `G`
key/value heads, `D` head width, `E` model width, `I` width of the MLP, `V` vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsplit.errors import ConfigError
from hetsplit.matrix import Biased, Dense, Matrix, Packed, Rounded, check_packable, matrix
from hetsplit.mlp import Mlp, RoutedMlp
from hetsplit.spec import DType, ModelSpec, Rope
from hetsplit.weights.checkpoint import StoredBlocks
from hetsplit.weights.names import MLP, tensor_shapes

TORCH_DTYPE = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}

Weight = Tensor | StoredBlocks


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one layer, matrices `[out, in]` as in `torch.nn.Linear`, norms in float32."""

    attn_norm: Tensor  # [E]
    qkv: Matrix  # [(H + 2 G) D, E]
    o: Matrix  # [E, H D]
    mlp_norm: Tensor  # [E]
    mlp: Mlp | RoutedMlp
    qk_norm: Tensor | None = None  # [H + G, 1, D]
    attn_post_norm: Tensor | None = None  # [E]
    mlp_post_norm: Tensor | None = None  # [E]


# Parameters of a layer that several canonical tensors make up, below each other.
_FUSED = {"qkv": ("q", "k", "v"), "qk_norm": ("q_norm", "k_norm")}


@dataclass(frozen=True, slots=True)
class Memory:
    """Keys and values of the layers that share a window, each `[L, G, C, D]`, of positions `[first, first + C)`."""

    keys: Tensor
    values: Tensor
    first: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` consecutive tokens of one sequence, and its memory for each window of the model.

    Of the positions in memory those that are seen and lie below `start` are filled; the forward pass fills
    `[start, start + count)`.
    """

    memory: Mapping[int | None, Memory]
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class Model:
    """A decoder transformer on one device; it has no parameters before `load`.

    `dtype` is what it computes in. `packed_bits`: None keeps matrices in that dtype; 0 keeps those that the checkpoint
    stores in blocks as they are (`matrix.Packed`); 4 or 8 packs all others too, rounded to so many bits, the head to 8.
    """

    embed: Weight  # [V, E]
    head: Matrix  # [V, E]
    norm: Tensor  # [E]
    layers: Sequence[Layer]

    def __init__(self, spec: ModelSpec, device: str, dtype: DType, packed_bits: int | None = None) -> None:
        self.spec, self.device, self.dtype, self.packed_bits = spec, torch.device(device), dtype, packed_bits
        self.ropes = [rope for rope in dict.fromkeys(spec.rotary) if rope is not None]
        self.place_of = places_of(spec.windows)
        self.rope_of = [None if rope is None else self.ropes.index(rope) for rope in spec.rotary]
        self.inv_freq = [torch.tensor(rope.inv_freq, dtype=torch.float32, device=self.device) for rope in self.ropes]
        self.eps = torch.tensor(spec.norm_eps, dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def load(
        self, tensors: Iterable[tuple[str, Weight]], progress: Callable[[int, int], None] | None = None
    ) -> "Model":
        """Take canonical tensors in any order; `progress` hears (tensors done, tensors in all).

        A tensor is held until the parameter that it is a part of is whole. Raises `ConfigError` for a tensor that is
        unknown, given twice or of another shape, and when one is missing.
        """
        shapes = tensor_shapes(self.spec)
        total, every = len(shapes), frozenset(shapes)
        parameters: dict[str, Any] = {}
        waiting: dict[str, Weight] = {}
        for name, tensor in tensors:
            shape = shapes.pop(name, None)
            if shape is None:
                raise ConfigError(f"tensor {name!r} is unknown or given twice; still expected: {_some(shapes)}")
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
            waiting[name] = tensor
            del tensor  # before the next one is read
            whole, parts = _whole(name, every)
            if all(part in waiting for part in parts):
                found = [waiting.pop(part) for part in parts]
                parameters |= self._parameter(whole, found)
                for part in found:
                    if isinstance(part, StoredBlocks):
                        part.let_go()
                del found, part
            if progress is not None:
                progress(total - len(shapes), total)
        if shapes:
            raise ConfigError(f"the checkpoint lacks {len(shapes)} of {total} tensors: {_some(shapes)}")
        self._assemble(parameters)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters on the device; a packed model's embedding is none of them."""
        held: list[Any] = [self.norm, self.head]
        held += [
            part for layer in self.layers for name in layer.__slots__ if (part := getattr(layer, name)) is not None
        ]
        held += [self.embed] if isinstance(self.embed, Tensor) and not self.spec.tied_head else []
        return sum(parameter.nbytes for parameter in held)

    def _parameter(self, name: str, parts: Sequence[Weight]) -> dict[str, Any]:
        """A vector in float32, a matrix in its fastest form; the embedding is the head as well where they are tied."""
        if name != "embed":
            matrices = [part for part in parts if len(part.shape) > 1]
            vectors = [part for part in parts if len(part.shape) == 1]
            if not matrices:
                return {name: self._qk_norm(*vectors) if name.endswith("qk_norm") else self._vector(vectors)}
            found = self._matrix(name, matrices)
            return {name: Biased(found, self._vector(vectors).to(TORCH_DTYPE[self.dtype])) if vectors else found}
        if self.packed_bits is None:
            embed = self._plain(parts)
            return {"embed": embed} | ({"head": Dense(embed)} if self.spec.tied_head else {})
        # What is packed cannot be looked up: then rows are read where the checkpoint has them.
        return {"embed": parts[0]} | ({"head": self._matrix("head", parts)} if self.spec.tied_head else {})

    def _vector(self, parts: Sequence[Weight]) -> Tensor:
        return torch.cat([_floats(part).to(self.device, torch.float32) for part in parts])

    def _qk_norm(self, q_norm: Weight, k_norm: Weight) -> Tensor:
        """One row for each head of q and of k."""
        heads = ((q_norm, self.spec.heads), (k_norm, self.spec.kv_heads))
        return torch.cat([self._vector([norm]).expand(count, 1, -1) for norm, count in heads])

    def _matrix(self, name: str, parts: Sequence[Weight]) -> Matrix:
        kept = all(isinstance(part, StoredBlocks) for part in parts)
        router = name.endswith("router")  # small, and what it chooses is all or nothing
        if self.packed_bits is None or router or not (self.packed_bits or kept):
            weight = self._plain(parts)
            return Dense(weight) if name == "head" or router else matrix(weight)
        check_packable(name, parts[0].shape[1], self.device)
        bits = 8 if name == "head" else self.packed_bits
        return Packed.of([part if isinstance(part, StoredBlocks) else Rounded(part, bits) for part in parts])

    def _plain(self, parts: Sequence[Weight]) -> Tensor:
        """The parts below each other, in the dtype that is computed in."""
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        weight = torch.empty(shape, dtype=TORCH_DTYPE[self.dtype], device=self.device)
        for place, part in zip(weight.split_with_sizes(rows), parts, strict=True):
            place.copy_(_floats(part))
        return weight

    def _assemble(self, parameters: Mapping[str, Any]) -> None:
        self.embed, self.head, self.norm = (parameters[name] for name in ("embed", "head", "norm"))
        layers: list[dict[str, Any]] = [{} for _ in range(self.spec.n_layers)]
        for name, parameter in parameters.items():
            if name.startswith("layers."):
                _, index, part = name.split(".", 2)
                layers[int(index)][part] = parameter
        self.layers = [Layer(mlp=self._mlp(layer), **layer) for layer in layers]

    def _mlp(self, parts: dict[str, Any]) -> Mlp | RoutedMlp:
        """Takes its parameters out of those of a layer."""
        routed = self.spec.experts
        if routed is None:
            return Mlp(*(parts.pop(part) for part in MLP))
        experts = [Mlp(*(parts.pop(f"experts.{i}.{part}") for part in MLP)) for i in range(routed.count)]
        return RoutedMlp(parts.pop("router"), experts, routed)

    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Iterator[int]:
        """Run the layers over `x` float32 `[T, E]`, the embedded tokens of all segments in a row, in place.

        Yields each layer's index when its keys and values are in the segments' memory and its attention has not run
        yet; after the last `next()`, `x` is what `logits` takes. Work follows the iteration: to stop at a yield costs
        no more.
        """
        ropes = [self._rope(*rope, segments) for rope in zip(self.ropes, self.inv_freq, strict=True)]
        views = {window: [_Window.of(segment, window) for segment in segments] for window in set(self.spec.windows)}
        for i, (layer, at) in enumerate(zip(self.layers, self.place_of, strict=True)):
            windows, rope = views[self.spec.windows[i]], self.rope_of[i]
            projected = self._project(layer, x, None if rope is None else ropes[rope])
            q, k, v = (_parts(tensor, segments) for tensor in projected)
            for window, new_k, new_v in zip(windows, k, v, strict=True):
                window.new_keys[at].copy_(new_k)
                window.new_values[at].copy_(new_v)
            yield i
            heads = [window.attend(at, part, self.spec) for window, part in zip(windows, q, strict=True)]
            x += self._added(layer.o(heads[0] if len(heads) == 1 else torch.cat(heads)), layer.attn_post_norm)
            normed = self._rms_norm(x, layer.mlp_norm)
            x += self._added(layer.mlp(normed, self.spec.activation), layer.mlp_post_norm)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Token ids to float32 `[T, E]`: what layers add up keeps its precision whatever they compute in."""
        if isinstance(self.embed, StoredBlocks):
            found = torch.from_numpy(self.embed.read(tokens).floats())
        else:
            found = F.embedding(torch.tensor(tokens, device=self.embed.device), self.embed).float()
        return found if self.spec.embed_scale == 1 else found * self.spec.embed_scale

    def logits(self, x: Tensor) -> Tensor:
        """`[T, E]` out of the last layer to `[T, V]`."""
        found = self.head(self._rms_norm(x, self.norm))
        return found if self.spec.logit_cap is None else _capped(found.float(), self.spec.logit_cap)

    def _rope(self, rope: Rope, inv_freq: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, float32 `[T, D]`, so that rotating is `x * cos + roll(x, D / 2) * sin`."""
        positions = [torch.arange(s.start, s.stop, dtype=torch.float32, device=self.device) for s in segments]
        angles = torch.outer(torch.cat(positions), inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if rope.scale != 1:
            cos, sin = cos * rope.scale, sin * rope.scale
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _project(self, layer: Layer, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[1, H, T, D]`, rotated keys `[1, G, T, D]` and values `[1, G, T, D]`."""
        s = self.spec
        qkv = layer.qkv(self._rms_norm(x, layer.attn_norm))
        heads = qkv.view(1, len(x), -1, s.head_dim).transpose(1, 2)
        qk, v = heads.split_with_sizes((s.heads + s.kv_heads, s.kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk = self._rms_norm(qk.float(), layer.qk_norm)
        if rope is not None:
            (cos, sin), wide = rope, qk.float()
            qk = (wide * cos).addcmul_(wide.roll(s.head_dim // 2, dims=-1), sin).to(qkv.dtype)
        q, k = qk.split_with_sizes((s.heads, s.kv_heads), dim=1)
        return q, k, v

    def _added(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What attention or the MLP adds to the residual stream."""
        return x if norm is None else self._rms_norm(x.float(), norm)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm of each row of float32 `x` (Zhang and Sennrich, 2019), in the model's dtype."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(TORCH_DTYPE[self.dtype])


@dataclass(frozen=True, slots=True)
class _Window:
    """A segment's memory, per layer of one window: where new keys and values go, and what attention sees.

    All are `[1, G, positions, D]`.
    """

    new_keys: Sequence[Tensor]
    new_values: Sequence[Tensor]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None
    causal: bool
    expand: bool  # give attention a key/value head for each query head

    @classmethod
    def of(cls, segment: Segment, window: int | None) -> "_Window":
        """The kernel's own causal rule serves a chunk at position 0, and one token needs none."""
        start, stop, count = segment.start, segment.stop, segment.count
        first = 0 if window is None else max(0, start + 1 - window)  # what the first of the new tokens sees
        cut = window is not None and count > window - (start - first)
        memory = segment.memory[window]
        keys, values = memory.keys[:, None], memory.values[:, None]  # [L, 1, G, C, D]
        mask = None
        if count > 1 and (start > first or cut):
            mask = keys.new_full((count, stop - first), float("-inf")).triu_(start - first + 1)
            if window is not None:
                mask += torch.full_like(mask, float("-inf")).tril_(start - first - window)
        return cls(
            new_keys=keys[..., start - memory.first : stop - memory.first, :].unbind(),
            new_values=values[..., start - memory.first : stop - memory.first, :].unbind(),
            keys=keys[..., first - memory.first : stop - memory.first, :].unbind(),
            values=values[..., first - memory.first : stop - memory.first, :].unbind(),
            mask=mask,
            causal=mask is None and count > 1,
            # CUDA's fused kernels take a mask or grouped heads, not both; MPS wants whole tensors.
            expand=keys.device.type not in ("cpu", "cuda") or (keys.device.type == "cuda" and mask is not None),
        )

    def attend(self, layer: int, q: Tensor, spec: ModelSpec) -> Tensor:
        """`q` `[1, H, T, D]` over the positions that it sees, up to its own; gives `[T, H D]`."""
        keys, values = self.keys[layer], self.values[layer]
        if spec.attention_cap is not None:
            return self._capped_attention(q, keys, values, spec.attention_scale, spec.attention_cap)
        if q.shape[2] == 1:  # all heads of a group see the same keys, as several tokens of one head would: much faster
            grouped = q.view(1, keys.shape[1], -1, q.shape[3])
            out = F.scaled_dot_product_attention(grouped, keys, values, scale=spec.attention_scale)
            return out.reshape(1, -1)
        if self.expand:
            repeats = q.shape[1] // keys.shape[1]
            q, keys, values = q.contiguous(), *(t.repeat_interleave(repeats, dim=1) for t in (keys, values))
        out = F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.causal,
            scale=spec.attention_scale,
            enable_gqa=not self.expand,
        )
        return out.transpose(1, 2).reshape(q.shape[2], -1)

    def _capped_attention(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float) -> Tensor:
        """Step by step: no fused kernel caps scores."""
        grouped = q.view(keys.shape[1], -1, q.shape[2], q.shape[3])  # [G, H / G, T, D]
        scores = _capped((grouped @ keys[0, :, None].transpose(-1, -2)).float() * scale, cap)
        if self.mask is not None:
            scores += self.mask
        elif self.causal:
            scores += torch.full_like(scores[0, 0], float("-inf")).triu_(1)
        out = scores.softmax(dim=-1).to(values.dtype) @ values[0, :, None]
        return out.permute(2, 0, 1, 3).reshape(q.shape[2], -1)


def places_of(windows: Sequence[int | None]) -> tuple[int, ...]:
    """For each layer its place among those that have the same window."""
    return tuple(windows[:i].count(window) for i, window in enumerate(windows))


def _capped(x: Tensor, cap: float) -> Tensor:
    return x.div(cap).tanh_().mul_(cap)


def _parts(tensor: Tensor, segments: Sequence[Segment]) -> Sequence[Tensor]:
    """`[1, heads, T, D]` by segment."""
    return (tensor,) if len(segments) == 1 else tensor.split_with_sizes([s.count for s in segments], dim=2)


def _floats(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.floats()


def _whole(name: str, every: frozenset[str]) -> tuple[str, list[str]]:
    """The parameter that a canonical tensor belongs to, and all tensors of `every` that make it up."""
    layer, dot, part = name.rpartition(".")
    matrix = part.removesuffix("_bias")
    whole = next((whole for whole, parts in _FUSED.items() if dot and matrix in parts), matrix)
    parts = [f"{layer}{dot}{part}" for part in _FUSED.get(whole, (whole,))]
    biases = [bias for part in parts if (bias := f"{part}_bias") in every]
    return f"{layer}{dot}{whole}", parts + biases


def _some(names: Iterable[str], shown: int = 4) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return (", ".join(listed[:shown]) or "none") + more
