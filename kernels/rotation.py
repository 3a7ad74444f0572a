"""Rotary position embedding of q and k, as SGLang's: the two halves of a head are rotated together ("neox style")."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """Where the tokens of a batch stand.

    Attributes
    ----------
    positions : Tensor
        int (T,): every token's position.
    cos_sin : Tensor
        float32 (positions, head), contiguous rows: the cosines of a position's head / 2 angles, then their sines.
    head : int
        The width of an attention head; all of it is rotated.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    head: int

    def apply(self, y: torch.Tensor) -> torch.Tensor:
        """Rotate heads, plain torch: y (T, n * head) -> the same shape, computed in float32 and rounded once."""
        cos, sin = self.cos_sin[self.positions][:, None].chunk(2, dim=-1)
        first, second = y.float().unflatten(1, (-1, 2, self.head // 2)).unbind(2)
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2)
        return rotated.flatten(1).to(y.dtype)
