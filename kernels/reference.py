"""The kernels in plain torch: the oracle they are tested against, and the path that serves on a CPU.

Tokens are walked over by mix, so requests with the same mix share a matmul; an adapter's rows are gathered once per
call and module. Everything is added up in float32.
"""

from __future__ import annotations

import torch

from sglang_lora_tree.kernels.pairs import Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.table import AdapterTable


def gather_rows(
    table: AdapterTable, pool: PoolView, adapter: int, layer: int, module: int, skip: int, rank: int, size: int
) -> torch.Tensor:
    """Gather one matrix of an adapter out of the pool: rank rows, each lying there in ceil(size / W) chunks of W.

    Parameters
    ----------
    adapter, layer, module : int
        Which entry of the table.
    skip : int
        Pool rows between the module's first row and the matrix: 0 for A, A's pool rows for B.
    rank, size : int
        The matrix's shape.

    Returns
    -------
    Tensor
        (rank, size), the pool's dtype.
    """
    chunks = -(-size // pool.width)
    key = ("rows", adapter, layer, module, skip, chunks)
    places: list[tuple[int, torch.Tensor]] | None = table.lookups.get(key)  # (plane, slots) in the rows' order
    if places is None:
        first_slot, slot_count = int(table.first_slot[adapter]), int(table.slot_count[adapter])
        slots = table.slots[first_slot : first_slot + slot_count].long()
        start = int(table.row_start[adapter, layer, module]) + skip
        stop = start + rank * chunks
        planes = range(start // slot_count, -(-stop // slot_count))
        places = [(p, slots[max(start - p * slot_count, 0) : stop - p * slot_count]) for p in planes]
        table.lookups[key] = places
    parts = [pool.planes[plane][slots] for plane, slots in places]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.view(rank, chunks * pool.width)[:, :size]


def _rank_and_scaling(table: AdapterTable, adapter: int, layer: int, module: int) -> tuple[int, float]:
    key = ("rank", adapter, layer, module)
    found: tuple[int, float] | None = table.lookups.get(key)
    if found is None:
        found = int(table.rank[adapter, layer, module]), float(table.scaling[adapter, layer, module])
        table.lookups[key] = found
    return found


def shrink(
    x: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int, modules: tuple[int, ...]
) -> torch.Tensor:
    """z[t, j, m, r] = w_j s_jm x[t] . A[r], A of the j-th member of t's mix and modules[m]. See lora.Shrunk."""
    d_in = x.shape[1]
    z = torch.empty((len(x), pairs.max_members, len(modules), table.max_rank), dtype=torch.float32, device=x.device)
    rows: dict[tuple[int, int], torch.Tensor] = {}
    for mix, tokens in pairs.groups.items():
        tokens = tokens.to(x.device)
        x_tokens = x[tokens].float()
        for j, (adapter, weight) in enumerate(mix):
            for m, module in enumerate(modules):
                rank, scaling = _rank_and_scaling(table, adapter, layer, module)
                if rank == 0:
                    continue
                if (adapter, m) not in rows:
                    rows[adapter, m] = gather_rows(table, pool, adapter, layer, module, 0, rank, d_in).float()
                z[tokens, j, m, :rank] = (x_tokens @ rows[adapter, m].T) * (scaling * weight)
    return z


def expand(
    z: torch.Tensor, y: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int,
    modules: tuple[int, ...], output_offsets: tuple[int, ...], output_widths: tuple[int, ...], d_in: int,
) -> None:  # fmt: skip
    """Add z[t, j, m] B over a token's members j to y[t, output m], rounding once. See lora.expand."""
    rows: dict[tuple[int, int], torch.Tensor] = {}
    for mix, tokens in pairs.groups.items():
        tokens = tokens.to(y.device)
        for m, module in enumerate(modules):
            offset, width = output_offsets[m], output_widths[m]
            total: torch.Tensor | None = None
            for j, (adapter, _) in enumerate(mix):
                rank, _ = _rank_and_scaling(table, adapter, layer, module)
                if rank == 0:
                    continue
                if (adapter, m) not in rows:
                    skip = rank * -(-d_in // pool.width)
                    rows[adapter, m] = gather_rows(table, pool, adapter, layer, module, skip, rank, width).float()
                part = z[tokens, j, m, :rank] @ rows[adapter, m]
                total = part if total is None else total + part
            if total is not None:
                output = y[:, offset : offset + width]
                output[tokens] = (output[tokens].float() + total).to(y.dtype)


def add_and_round(y: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """y + delta (float32), rounded once to y's dtype; y keeps its bits where delta is 0."""
    return y if delta is None else torch.where(delta == 0, y, (y.float() + delta).to(y.dtype))


def normalize(y: torch.Tensor, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """residual += y + delta, and y = the RMS norm of that sum, in place. See lora.add_and_normalize."""
    total = add_and_round(y, delta).float() + residual.float()
    residual.copy_(total)
    y.copy_(total * (total.square().mean(1, keepdim=True) + epsilon).rsqrt() * weight.float())


def rotate_heads(y: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, rotated: int) -> None:
    """y += delta, then rotate the first `rotated` columns, in place. See lora.add_and_rotate."""
    finished = add_and_round(y, delta)
    y[:, rotated:] = finished[:, rotated:]
    y[:, :rotated] = rotation.apply(finished[:, :rotated])


def activate_halves(y: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of y + delta. See lora.add_and_activate."""
    gate, up = add_and_round(y, delta).float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(y.dtype)
