"""Shrink in Triton: z = x A^T for every (token, member, module), A's rows gathered through the slot table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.pairs import BLOCK_T, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rows import block_width, row_addresses, upcasts
from sglang_lora_tree.kernels.table import NUM_MODULES, RANK_TILE, AdapterTable

LARGEST_BLOCK_K = 128
NUM_WARPS = 4
"""The best of a small sweep on an H200. Constants, because a token's bits depend on them."""


@triton.jit(do_not_specialize=["layer"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x, z, pointers, slots, first_slot, slot_count, row_start, rank,
    seg_indptr, pair_indptr, pair_adapter, tile_req, tile_start,
    layer, x_stride, record_stride,
    D: tl.constexpr, W: tl.constexpr, J: tl.constexpr, R: tl.constexpr, MODULES: tl.constexpr,
    TABLE_MODULES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a tile of tokens of one request x one of its members x one module x one tile of ranks."""
    NUM: tl.constexpr = len(MODULES)
    CHUNKS: tl.constexpr = (D + W - 1) // W
    tile = tl.program_id(0)
    j = tl.program_id(1) // NUM
    m = tl.program_id(1) % NUM
    rank_begin = tl.program_id(2) * BLOCK_R

    req = tl.load(tile_req + tile)
    if req < 0:
        return
    pair = tl.load(pair_indptr + req) + j
    if pair >= tl.load(pair_indptr + req + 1):
        return
    module = 0
    for i in tl.static_range(NUM):
        module = tl.where(m == i, MODULES[i], module)
    adapter = tl.load(pair_adapter + pair).to(tl.int64)
    entry = adapter * record_stride + layer * TABLE_MODULES + module
    module_rank = tl.load(rank + entry)
    if rank_begin >= module_rank:
        return

    tokens = tl.load(tile_start + tile) + tl.arange(0, BLOCK_T)
    token_mask = tokens < tl.load(seg_indptr + req + 1)
    ranks = rank_begin + tl.arange(0, BLOCK_R)
    rank_mask = ranks < module_rank
    offsets = tl.arange(0, BLOCK_K)
    x_rows = x + tokens.to(tl.int64) * x_stride
    adapter_slots = slots + tl.load(first_slot + adapter * record_stride)
    n = tl.load(slot_count + adapter * record_stride)
    first_row = tl.load(row_start + entry)

    total = tl.full((BLOCK_T, BLOCK_R), 0.0, dtype=tl.float32)
    for chunk in range(0, CHUNKS):
        a_rows = row_addresses(
            first_row + ranks * CHUNKS + chunk, rank_mask, pointers, adapter_slots, n, W, x.dtype.element_ty, ALIGNED
        )
        part = tl.full((BLOCK_T, BLOCK_R), 0.0, dtype=tl.float32)  # tensor cores truncate as they add: keep sums short
        for begin in range(0, W, BLOCK_K):
            inside = begin + offsets
            k = chunk * W + inside
            k_mask = (inside < W) & (k < D)
            x_tile = tl.load(x_rows[:, None] + k[None, :], mask=token_mask[:, None] & k_mask[None, :], other=0.0)
            a_tile = tl.load(
                a_rows[:, None] + inside[None, :], mask=rank_mask[:, None] & k_mask[None, :], other=0.0
            )
            if UPCAST:
                x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
            part = tl.dot(x_tile, tl.trans(a_tile), part, input_precision="ieee")
        total += part

    z_rows = z + tokens.to(tl.int64) * (J * NUM * R) + (j * NUM + m) * R
    tl.store(z_rows[:, None] + ranks[None, :], total, mask=token_mask[:, None] & rank_mask[None, :])


def shrink(
    x: torch.Tensor, z: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int,
    modules: tuple[int, ...],
) -> None:  # fmt: skip
    """Write z[t, j, m, r] = x[t] . A[r], A of the j-th member of t's mix and modules[m]. See lora.shrink."""
    if pairs.num_tiles == 0:
        return
    grid = (pairs.num_tiles, pairs.max_members * len(modules), table.padded_rank // RANK_TILE)
    _shrink_kernel[grid](
        x, z, pool.pointers, table.slots, table.first_slot, table.slot_count, table.row_start, table.rank,
        pairs.seg_indptr, pairs.pair_indptr, pairs.pair_adapter, pairs.tile_req, pairs.tile_start,
        layer, x.stride(0), table.record_stride,
        D=x.shape[1], W=pool.width, J=pairs.max_members, R=table.padded_rank, MODULES=modules,
        TABLE_MODULES=NUM_MODULES, BLOCK_T=BLOCK_T, BLOCK_R=RANK_TILE, BLOCK_K=block_width(pool.width, LARGEST_BLOCK_K),
        ALIGNED=pool.aligned, UPCAST=upcasts(pool), num_warps=NUM_WARPS,
    )  # fmt: skip
