"""Copy small host arrays to the device without waiting for it."""

from __future__ import annotations

import torch


def upload(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` (on the CPU) into `target` in place, ordered on the current stream, without device synchronisation.

    On CUDA the bytes go through a fresh pinned block. PyTorch's pinned allocator gives a block out again only after
    the copies that read it are done, so the caller may change `source` at once, and so may the next call.

    Parameters
    ----------
    target : Tensor
        Contiguous, any device.
    source : Tensor
        Same shape and dtype, on the CPU.
    """
    if target.device.type != "cuda":
        target.copy_(source)
        return
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    pinned.copy_(source)
    target.copy_(pinned, non_blocking=True)
