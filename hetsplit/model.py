"""One decoder transformer for all supported families: parameters, their loading, and the forward pass.

Branches on facts of the architecture (`ModelSpec`), never on a family's name: what differs between families' files was
undone when the weights were read. Knows nothing of requests, transfers or who owns the memory of keys and values.

Invariants: query, key and value weights lie together (`qkv`); keys are stored after RoPE in half-split
order; a layer's keys and values are in place and shown to the caller before that layer's attention runs, so a caller
who stops there has paid for nothing else. Tensor letters are those of `ModelSpec`: `T` tokens, `H` query heads, `G`
key/value heads, `D` head width, `E` model width, `I` width of the MLP, `V` vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hetsplit.errors import ConfigError
from hetsplit.spec import DType, ModelSpec

PACKED_FOR_ROWS = 256  # the rows of a usual chunk; one row is as fast with it
TORCH_DTYPE = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one layer, matrices `[out, in]` as in `torch.nn.Linear`, norms in float32."""

    attn_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2 G) D, E]
    o: Tensor  # [E, H D]
    mlp_norm: Tensor  # [E]
    gate: Tensor  # [I, E]
    up: Tensor  # [I, E]
    down: Tensor  # [E, I]


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` consecutive tokens of one sequence, and the memory of its `keys` and `values`, each `[L, G, C, D]`.

    Of the `C` positions in memory those below `start` are filled; the forward pass fills `[start, start + count)`.
    """

    keys: Tensor
    values: Tensor
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class Model:
    """A decoder whose parameters are allocated and not yet filled; see `load`."""

    def __init__(self, spec: ModelSpec, device: str, dtype: DType) -> None:
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        s = spec
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.embed = self._parameter(s.vocab_size, s.width)
        self.head = self.embed if s.tied_head else self._parameter(s.vocab_size, s.width)
        self.norm = self._norm_parameter()
        self.layers = [
            Layer(
                attn_norm=self._norm_parameter(),
                qkv=self._parameter(q + 2 * kv, s.width),
                o=self._parameter(s.width, q),
                mlp_norm=self._norm_parameter(),
                gate=self._parameter(s.intermediate, s.width),
                up=self._parameter(s.intermediate, s.width),
                down=self._parameter(s.width, s.intermediate),
            )
            for _ in range(s.n_layers)
        ]
        self.inv_freq = torch.tensor(s.inv_freq, dtype=torch.float32, device=self.device)
        self.eps = torch.tensor(s.norm_eps, dtype=torch.float32, device=self.device)

    def _parameter(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=TORCH_DTYPE[self.dtype], device=self.device)

    def _norm_parameter(self) -> Tensor:
        return torch.empty(self.spec.width, dtype=torch.float32, device=self.device)

    def places(self) -> dict[str, Tensor]:
        """Where each canonical tensor belongs: its name to a parameter, or to its rows in a fused one."""
        s = self.spec
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        places = {"embed": self.embed, "norm": self.norm}
        if not s.tied_head:
            places["head"] = self.head
        for i, layer in enumerate(self.layers):
            parts = {name: getattr(layer, name) for name in ("attn_norm", "o", "mlp_norm", "gate", "up", "down")}
            parts["q"], parts["k"], parts["v"] = layer.qkv.split_with_sizes((q, kv, kv))
            places |= {f"layers.{i}.{name}": place for name, place in parts.items()}
        return places

    @torch.inference_mode()
    def load(
        self, tensors: Iterable[tuple[str, Tensor]], progress: Callable[[int, int], None] | None = None
    ) -> "Model":
        """Copy each tensor straight into its place; `progress` hears (tensors done, tensors in all).

        One tensor is held at a time. Raises `ConfigError` for a tensor that is unknown, given twice or of another
        shape, and when one is missing.
        """
        places = self.places()
        total = len(places)
        for name, tensor in tensors:
            place = places.pop(name, None)
            if place is None:
                raise ConfigError(f"tensor {name!r} is unknown or given twice; still expected: {_some(places)}")
            if place.shape != tensor.shape:
                raise ConfigError(f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(place.shape)}")
            place.copy_(tensor)
            del tensor  # before the next one is read
            if progress is not None:
                progress(total - len(places), total)
        if places:
            raise ConfigError(f"the checkpoint lacks {len(places)} of {total} tensors: {_some(places)}")
        self._pack()
        return self

    def _pack(self) -> None:
        """Put a layer's matrices into oneDNN's own order where that makes products faster: bfloat16 on a CPU."""
        on_cpu = self.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if not (on_cpu and self.dtype is DType.BFLOAT16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return
        for i, layer in enumerate(self.layers):
            matrices = {name: _packed(getattr(layer, name)) for name in ("qkv", "o", "gate", "up", "down")}
            self.layers[i] = replace(layer, **matrices)

    def forward(self, x: Tensor, segments: Sequence[Segment]) -> Iterator[int]:
        """Run the layers over `x` float32 `[T, E]`, the embedded tokens of all segments in a row, in place.

        Yields each layer's index when its keys and values are in the segments' memory and its attention has not run
        yet; after the last `next()`, `x` is what `logits` takes. Work follows the iteration: to stop at a yield costs
        no more.
        """
        cos, sin = self._rope(segments)
        windows = [_Window.of(segment) for segment in segments]
        for i, layer in enumerate(self.layers):
            q, k, v = (_parts(tensor, segments) for tensor in self._project(layer, x, cos, sin))
            for window, new_k, new_v in zip(windows, k, v, strict=True):
                window.new_keys[i].copy_(new_k)
                window.new_values[i].copy_(new_v)
            yield i
            heads = [window.attend(i, part) for window, part in zip(windows, q, strict=True)]
            x += _linear(heads[0] if len(heads) == 1 else torch.cat(heads), layer.o)
            normed = self._rms_norm(x, layer.mlp_norm)
            x += _linear(_linear(normed, layer.up).mul_(_linear_silu(normed, layer.gate)), layer.down)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Token ids to float32 `[T, E]`: what layers add up keeps its precision whatever they compute in."""
        return F.embedding(torch.tensor(tokens, device=self.device), self.embed).float()

    def logits(self, x: Tensor) -> Tensor:
        """`[T, E]` out of the last layer to `[T, V]`."""
        normed = self._rms_norm(x, self.norm)
        if len(x) == 1:  # on a CPU faster than the product with a matrix of one row
            return torch.mv(self.head, normed[0])[None]
        return F.linear(normed, self.head)

    def _rope(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, float32 `[T, D]`, so that rotating is `x * cos + roll(x, D / 2) * sin`."""
        positions = [torch.arange(s.start, s.stop, dtype=torch.float32, device=self.device) for s in segments]
        angles = torch.outer(torch.cat(positions), self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[1, H, T, D]`, rotated keys `[1, G, T, D]` and values `[1, G, T, D]`."""
        s = self.spec
        qkv = _linear(self._rms_norm(x, layer.attn_norm), layer.qkv)
        heads = qkv.view(1, len(x), -1, s.head_dim).transpose(1, 2)
        qk, v = heads.split_with_sizes((s.heads + s.kv_heads, s.kv_heads), dim=1)
        wide = qk.float()
        rotated = (wide * cos).addcmul_(wide.roll(s.head_dim // 2, dims=-1), sin).to(qkv.dtype)
        q, k = rotated.split_with_sizes((s.heads, s.kv_heads), dim=1)
        return q, k, v

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm of each row of float32 `x` (Zhang and Sennrich, 2019), in the model's dtype."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(self.embed.dtype)


@dataclass(frozen=True, slots=True)
class _Window:
    """A segment's memory, per layer: where new keys and values go, and what attention sees, `[1, G, positions, D]`."""

    new_keys: Sequence[Tensor]
    new_values: Sequence[Tensor]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None
    causal: bool
    expand: bool  # give attention a key/value head for each query head

    @classmethod
    def of(cls, segment: Segment) -> "_Window":
        """The kernel's own causal rule serves a chunk at position 0, and one token needs none."""
        start, stop = segment.start, segment.stop
        keys, values = segment.keys[:, None], segment.values[:, None]  # [L, 1, G, C, D]
        mask = None
        if start > 0 and segment.count > 1:
            mask = keys.new_full((segment.count, stop), float("-inf")).triu_(start + 1)
        return cls(
            new_keys=keys[..., start:stop, :].unbind(),
            new_values=values[..., start:stop, :].unbind(),
            keys=keys[..., :stop, :].unbind(),
            values=values[..., :stop, :].unbind(),
            mask=mask,
            causal=start == 0 and segment.count > 1,
            # CUDA's fused kernels take a mask or grouped heads, not both; MPS wants whole tensors.
            expand=keys.device.type not in ("cpu", "cuda") or (keys.device.type == "cuda" and mask is not None),
        )

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """`q` `[1, H, T, D]` over all positions up to its own; gives `[T, H D]`."""
        keys, values = self.keys[layer], self.values[layer]
        if self.expand:
            repeats = q.shape[1] // keys.shape[1]
            q, keys, values = q.contiguous(), *(t.repeat_interleave(repeats, dim=1) for t in (keys, values))
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=self.mask, is_causal=self.causal, enable_gqa=not self.expand
        )
        return out.transpose(1, 2).reshape(q.shape[2], -1)


def _parts(tensor: Tensor, segments: Sequence[Segment]) -> Sequence[Tensor]:
    """`[1, heads, T, D]` by segment."""
    return (tensor,) if len(segments) == 1 else tensor.split_with_sizes([s.count for s in segments], dim=2)


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
        return product
    return F.linear(x, weight)


def _linear_silu(x: Tensor, weight: Tensor) -> Tensor:
    """`silu(linear(x))`; oneDNN applies the activation to each tile while it is in cache."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "swish", [], "")
        return product
    return F.silu(F.linear(x, weight))


def _some(names: Iterable[str], shown: int = 4) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return (", ".join(listed[:shown]) or "none") + more
