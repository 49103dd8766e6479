"""The MLP of a layer: gated, and routed to experts where the model has some.

Owns which expert a token goes through and what each one adds. Knows nothing of attention or files. Tensor letters as in
`model`: `T` tokens, `E` model width, `I` width of the MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetsplit.matrix import Matrix
from hetsplit.spec import Experts


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(up(x) * activation(gate(x)))`."""

    gate: Matrix  # [I, E]
    up: Matrix  # [I, E]
    down: Matrix  # [E, I]

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor, activation: str) -> Tensor:
        """`x` `[T, E]` to `[T, E]`."""
        return self.down(self.up(x, factor=self.gate(x, activation)))


@dataclass(frozen=True, slots=True)
class RoutedMlp:
    """Each token goes through the experts that the router favours (https://arxiv.org/abs/2401.04088)."""

    router: Matrix  # [experts, E]
    experts: Sequence[Mlp]
    facts: Experts

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)

    def __call__(self, x: Tensor, activation: str) -> Tensor:
        """`x` `[T, E]` to float32 `[T, E]`. An expert computes the tokens that chose it together."""
        weights, chosen = self.router(x).float().softmax(dim=-1).topk(self.facts.used, dim=-1)
        if self.facts.normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.experts[index](x[rows], activation).float() * weights[rows, rank, None])
        return out
