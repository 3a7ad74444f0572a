"""The Muon optimizer for matrices (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").

torch.optim.Muon orthogonalizes in bfloat16, which CPUs without bfloat16 units emulate slowly; this one works in float32
and on all matrices of one shape at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """(count, rows, columns) -> the same with all singular values near 1, by the quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal per matrix; the step's size follows the matrix' shape."""

    def __init__(self, weights: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for (rows, columns), weights in by_shape.items():
                updates = []
                for weight in weights:
                    assert weight.grad is not None, "a weight given to the optimizer got no gradient"
                    state = self.state[weight]
                    if not state:
                        state["momentum"] = torch.zeros_like(weight)
                    state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(torch.lerp(weight.grad, state["momentum"], group["momentum"]))
                for weight, update in zip(weights, orthogonalize(torch.stack(updates)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
