"""The pool as the kernels see it: planes of rows, and the planes' addresses on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PoolView:
    """A view (never a copy) of a KV pool as 2L planes of slot rows.

    Attributes
    ----------
    planes : list of Tensor
        2L tensors (S, W) in the order K0, V0, K1, V1, ...: the row that each of the S slots has in that plane.
        The planes are separate allocations; the view keeps them alive.
    pointers : Tensor
        int64 (2L,), on the planes' device: each plane's address.
    width : int
        W, elements per row: kv_heads_local * head_dim.
    dtype : torch.dtype
        float32, float16 or bfloat16.
    device : torch.device
    aligned : bool
        Every row starts at a multiple of 16 bytes, so the kernels may load 16 bytes at a time.
    """

    planes: list[torch.Tensor]
    pointers: torch.Tensor
    width: int
    dtype: torch.dtype
    device: torch.device
    aligned: bool

    @classmethod
    def from_planes(cls, planes: Sequence[torch.Tensor]) -> PoolView:
        """View planes (S, W), all alike, with contiguous rows.

        Raises
        ------
        ValueError
            If there are no planes, or they differ in shape, dtype or device, or rows are not contiguous, or the dtype
            is none of float32, float16, bfloat16.
        """
        if not planes or len(planes) % 2:
            raise ValueError(f"a pool has a K and a V plane per layer, got {len(planes)} planes")
        first = planes[0]
        if first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"pool dtype {first.dtype} is not supported: use float32, float16 or bfloat16")
        for number, plane in enumerate(planes):
            if plane.dim() != 2 or not plane.is_contiguous():
                raise ValueError(f"plane {number}: want contiguous (slots, width), got shape {tuple(plane.shape)}")
            if (plane.shape, plane.dtype, plane.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"plane {number} ({tuple(plane.shape)}, {plane.dtype}, {plane.device}) differs from plane 0 "
                    f"({tuple(first.shape)}, {first.dtype}, {first.device}): all planes of a pool must be alike"
                )
        addresses = [plane.data_ptr() for plane in planes]
        return cls(
            planes=list(planes),
            pointers=torch.tensor(addresses, dtype=torch.int64, device=first.device),
            width=first.shape[1],
            dtype=first.dtype,
            device=first.device,
            aligned=not any(address % 16 for address in addresses) and first.shape[1] * first.element_size() % 16 == 0,
        )

    @classmethod
    def from_kv(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> PoolView:
        """View a pool kept as one K and one V tensor per layer, each (S, kv_heads, head_dim) or (S, W).

        Raises
        ------
        ValueError
            As `from_planes`, and if a tensor's rows cannot be seen as (S, W) without a copy.
        """
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} K tensors but {len(values)} V tensors")
        tensors = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"a K or V tensor of shape {tuple(tensor.shape)} is not contiguous")
        return cls.from_planes([tensor.view(tensor.shape[0], -1) for tensor in tensors])

    @property
    def num_layers(self) -> int:
        """L: the pool's layers."""
        return len(self.planes) // 2
