"""Adapter <-> pool: an adapter is a list of rows as wide as a KV row, packed densely into whole token slots.

A slot holds one K row and one V row of W elements in each of the pool's L layers: 2L *planes* of rows. An adapter's rows
are numbered layer by layer, module by module: ``rank`` rows of A, each cut into ceil(d_in / W) chunks of W (the last one
padded with zeros), then ``rank`` rows of B transposed, cut likewise. Row ``i`` of an adapter of ``n`` slots lies in plane
``i // n`` at the adapter's slot ``i % n``, so the rows of model layer ``l`` end up in planes up to about ``2l``: a load that
moves the pool layer by layer delivers an adapter layer by layer too. Nothing is padded to a largest rank or to the fullest
layer. (S-LoRA's unified paging and ELORA's unified caching pool, over SGLang's own slots.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sglang_lora_tree.adapters.adapter import Adapter, AdapterModule
from sglang_lora_tree.adapters.base_shape import MODULES, BaseShape

KV_MODULES = ("k_proj", "v_proj")
ROW_PARALLEL_MODULES = ("o_proj", "down_proj")


@dataclass(frozen=True)
class PoolShape:
    """The part of a KV pool that packing depends on; equal on every rank of a tensor-parallel group."""

    num_layers: int
    width: int
    """W: kv heads on this rank x head_dim."""
    page_size: int

    @property
    def num_planes(self) -> int:
        return 2 * self.num_layers

    def round_to_pages(self, slots: int) -> int:
        return -(-slots // self.page_size) * self.page_size


@dataclass(frozen=True)
class Shard:
    """One rank's share of the base model's linear layers (Megatron's split, as SGLang does it)."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 1
    """Of the whole model; fewer than ``size`` means that ranks share kv heads."""

    @property
    def kv_size(self) -> int:
        return min(self.size, self.num_kv_heads)

    @property
    def kv_rank(self) -> int:
        return self.rank // (self.size // self.kv_size)

    def widths(self, base: BaseShape) -> dict[str, tuple[int, int]]:
        """Module -> (d_in, d_out) on this rank."""
        local = {}
        for module, (d_in, d_out) in base.widths.items():
            if module in ROW_PARALLEL_MODULES:
                d_in //= self.size
            else:
                d_out //= self.kv_size if module in KV_MODULES else self.size
            local[module] = (d_in, d_out)
        return local

    def slice(self, name: str, module: AdapterModule) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of one module: A (rank, d_in), B (d_out, rank), as views."""
        if name in ROW_PARALLEL_MODULES:
            width = module.a.shape[1] // self.size
            return module.a[:, self.rank * width : (self.rank + 1) * width], module.b
        rank, size = (self.kv_rank, self.kv_size) if name in KV_MODULES else (self.rank, self.size)
        height = module.b.shape[0] // size
        return module.a, module.b[rank * height : (rank + 1) * height]


@dataclass(frozen=True, eq=False)
class Outline:
    """What is kept of an adapter while its tensors are elsewhere: enough to plan for it and to recognise it."""

    digest: str
    rank: np.ndarray
    """int32 (layers, modules): 0 where the adapter lacks the module."""
    scaling: np.ndarray
    """float32 (layers, modules)."""

    @classmethod
    def of(cls, adapter: Adapter, num_layers: int) -> Outline:
        rank = np.zeros((num_layers, len(MODULES)), np.int32)
        scaling = np.zeros((num_layers, len(MODULES)), np.float32)
        for (layer, name), module in adapter.modules.items():
            rank[layer, MODULES.index(name)] = module.rank
            scaling[layer, MODULES.index(name)] = module.scaling
        return cls(adapter.digest, rank, scaling)

    @property
    def fingerprint(self) -> int:
        """60 bits of the digest, for ranks to compare."""
        return int(self.digest[:15], 16)


@dataclass(frozen=True, eq=False)
class AdapterLayout:
    """Where an adapter's rows go in one pool."""

    num_rows: int
    num_slots: int
    """n, in whole pages."""
    row_start: np.ndarray
    """int32 (layers, modules): first row of A; -1 where the adapter lacks the module."""
    last_pool_layer: np.ndarray
    """int32 (layers,): highest pool layer that model layer l reads; -1 if it reads none. Non-decreasing."""


@dataclass(frozen=True)
class Packer:
    """Turns adapters into rows of one pool, on one rank."""

    base: BaseShape
    pool: PoolShape
    shard: Shard = dataclasses.field(default_factory=Shard)

    def plan(self, outline: Outline) -> AdapterLayout:
        """Lay out an adapter's rows; its tensors are not needed."""
        widths = self.shard.widths(self.base)
        rows_per_rank = np.array([sum(self._chunks(width) for width in widths[name]) for name in MODULES])
        rows = outline.rank.astype(np.int64) * rows_per_rank
        ends = np.cumsum(rows).reshape(rows.shape)
        num_rows = int(ends[-1, -1])
        num_slots = self.pool.round_to_pages(-(-num_rows // self.pool.num_planes))
        last_row = np.where(rows.any(axis=1), ends[:, -1] - 1, -1)
        return AdapterLayout(
            num_rows=num_rows,
            num_slots=num_slots,
            row_start=np.where(rows > 0, ends - rows, -1).astype(np.int32),
            last_pool_layer=np.where(last_row < 0, -1, last_row // max(num_slots, 1) // 2).astype(np.int32),
        )

    def pack(self, adapter: Adapter, dtype: torch.dtype) -> torch.Tensor:
        """An adapter's rows on this rank: (2L * n, W) in the pool's dtype, plane after plane, zeros at the end."""
        layout = self.plan(Outline.of(adapter, self.base.num_layers))
        width = self.pool.width
        rows = torch.zeros(self.pool.num_planes * layout.num_slots, width, dtype=dtype)
        filled = 0
        for part in self._parts(adapter):
            chunks = self._chunks(part.shape[1])
            target = rows[filled : filled + part.shape[0] * chunks].view(part.shape[0], chunks * width)
            target[:, : part.shape[1]] = part
            filled += part.shape[0] * chunks
        assert filled == layout.num_rows, f"{filled} rows written, {layout.num_rows} planned"
        return rows

    def scatter(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put packed rows into a pool, in two calls whatever the number of layers.

        Args:
            rows: (2L * n, W), from :meth:`pack`.
            keys, values: the pool's K and V, (L, pool slots, W), any strides.
            slots: int64 (n,), the adapter's slots, in any order.
        """
        planes = rows.view(self.pool.num_layers, 2, len(slots), self.pool.width)
        keys[:, slots] = planes[:, 0]
        values[:, slots] = planes[:, 1]

    def _parts(self, adapter: Adapter) -> Iterator[torch.Tensor]:
        for (_, name), module in adapter.modules.items():
            a, b = self.shard.slice(name, module)
            yield a
            yield b.t()

    def _chunks(self, width: int) -> int:
        return -(-width // self.pool.width)
