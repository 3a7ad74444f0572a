"""Adapters packed into a pool, batches over them, and the dense float64 answer: what the kernel tests share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang_lora_tree.kernels import dispatch
from sglang_lora_tree.kernels.pairs import Members, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.table import NUM_MODULES, AdapterTable

Q, K, V, OUT, GATE, UP, DOWN = range(NUM_MODULES)
Widths = dict[int, tuple[int, int]]
"""Module -> (d_in, d_out)."""
Ranks = dict[tuple[int, int], int]
"""(layer, module) -> rank, for the modules that an adapter has."""

WIDTHS: Widths = {Q: (40, 48), K: (40, 20), V: (40, 20), OUT: (48, 40), GATE: (40, 56), UP: (40, 56), DOWN: (56, 40)}
"""A small model's."""
GROUPS = {
    "qkv": ((Q, K, V), (0, 48, 68)),
    "o": ((OUT,), (0,)),
    "gate_up": ((GATE, UP), (0, 56)),
    "down": ((DOWN,), (0,)),
}
"""The small model's linear layers: the modules that read one input, and their columns in the output."""


def all_modules(rank: int) -> Ranks:
    """An adapter of the small model, of two layers, with every module."""
    return {(layer, module): rank for layer in range(2) for module in WIDTHS}


@dataclass
class World:
    """A pool with adapters in it. What is not an adapter's data is NaN, the padding of last chunks too."""

    widths: Widths
    pool: PoolView
    table: AdapterTable
    max_members: int
    matrices: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)
    """(adapter, layer, module) -> A (rank, d_in), B (d_out, rank), scaling."""

    def batch(self, seg_lens: Sequence[int], members: Sequence[Members], for_graphs: bool = False) -> Pairs:
        tokens = sum(seg_lens)
        block_t = dispatch.choose(tokens, self.pool.device).block_t
        pairs = Pairs.allocate(self.table, len(seg_lens) + 3, tokens + 40, self.max_members, block_t, for_graphs)
        pairs.update(seg_lens, members)
        return pairs

    def random(self, tokens: int, width: int, seed: int) -> torch.Tensor:
        values = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
        return values.to(self.pool.dtype).to(self.pool.device)

    def dense(self, x: torch.Tensor, members: Members, layer: int, module: int) -> torch.Tensor:
        """sum_j w_j s_j B_j A_j x in float64, on the CPU: (T, d_out)."""
        x = x.double().cpu()
        total = torch.zeros(len(x), self.widths[module][1], dtype=torch.float64)
        for adapter, weight in members:
            if (adapter, layer, module) in self.matrices:
                a, b, scaling = self.matrices[adapter, layer, module]
                total += weight * scaling * (x @ a.double().T @ b.double().T)
        return total


def make_world(
    widths: Widths,
    adapters: Sequence[Ranks],
    *,
    num_layers: int = 2,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_rank: int = 48,
    max_members: int = 3,
    seed: int = 0,
) -> World:
    """Draw adapters and pack them into random slots of a pool twice as large as they need."""
    generator = torch.Generator().manual_seed(seed)
    packed = []
    matrices = {}
    for index, ranks in enumerate(adapters):
        rows: list[torch.Tensor] = []
        row_start, rank_table, scalings = (torch.zeros(num_layers, NUM_MODULES) for _ in range(3))
        row_start -= 1
        count = 0
        for (layer, module), rank in sorted(ranks.items()):
            d_in, d_out = widths[module]
            a = (torch.randn(rank, d_in, generator=generator) / d_in**0.5).to(dtype)
            b = (torch.randn(d_out, rank, generator=generator) / rank**0.5).to(dtype)
            scaling = float(torch.rand((), generator=generator)) + 0.5
            matrices[index, layer, module] = a, b, scaling
            row_start[layer, module], rank_table[layer, module], scalings[layer, module] = count, rank, scaling
            for matrix in (a, b.T):
                chunks = torch.full((rank, -(-matrix.shape[1] // width) * width), float("nan"), dtype=dtype)
                chunks[:, : matrix.shape[1]] = matrix
                rows.append(chunks.view(-1, width))
            count = sum(map(len, rows))
        packed.append((torch.cat(rows), row_start, rank_table.int(), scalings))

    slot_counts = [-(-len(rows) // (2 * num_layers)) for rows, *_ in packed]
    size = 2 * sum(slot_counts) + 1
    planes = [torch.full((size, width), float("nan"), dtype=dtype) for _ in range(2 * num_layers)]
    free = torch.randperm(size, generator=generator)
    table = AdapterTable(len(packed) + 2, size, num_layers, max_rank, device)
    for index, ((rows, row_start, rank_table, scalings), n) in enumerate(zip(packed, slot_counts, strict=True)):
        slots, free = free[:n], free[n:]
        for plane in range(2 * num_layers):
            part = rows[plane * n : (plane + 1) * n]
            planes[plane][slots[: len(part)]] = part
        table.write(index, slots.to(device), row_start.int(), rank_table, scalings)
    table.flush()
    pool = PoolView.from_planes([plane.to(device) for plane in planes])
    return World(widths, pool, table, max_members, matrices)


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> None:
    """`actual` is float64 `exact` up to one rounding to actual's dtype and float32 accumulation."""
    error = (actual.double().cpu() - exact).abs()
    truncates = actual.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"  # and does not round
    bound = exact.abs() * torch.finfo(actual.dtype).eps / (1 if truncates else 2) * 1.01 + 4e-6 * scale
    worst = (error - bound).max() if error.numel() else torch.tensor(0.0)
    assert not torch.isnan(error).any(), "NaN in the output: poisoned memory was read"
    assert worst <= 0, f"error exceeds one rounding by {float(worst):.3e}"
