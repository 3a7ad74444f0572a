"""Whether all tensor-parallel ranks hold the same numbers, by the one reduction there is: the smallest over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def find_same(values: Sequence[int], agree: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
    """For each value, whether every rank has the same; the answer is the same on every rank.

    Args:
        values: at most 63 bits each, as many on every rank.
        agree: takes an int64 tensor to its minimum over the ranks; called once, by every rank at the same step.
    """
    reduced = agree(torch.tensor([*values, *(-value for value in values)], dtype=torch.int64)).tolist()
    lowest, highest = reduced[: len(values)], [-negative for negative in reduced[len(values) :]]
    return [low == high for low, high in zip(lowest, highest, strict=True)]
