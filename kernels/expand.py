"""Expand in Triton: add sum_j w_j s_j z_j B_j to the output, B's rows gathered through the slot table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.pairs import BLOCK_T, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rows import block_width, row_addresses
from sglang_lora_tree.kernels.table import NUM_MODULES, RANK_TILE, AdapterTable

LARGEST_BLOCK_D = 128
NUM_WARPS = 4
"""The best of a small sweep on an H200."""


@triton.jit(do_not_specialize=["layer"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    z, y, pointers, slots, first_slot, slot_count, row_start, rank, scaling,
    seg_indptr, pair_indptr, pair_adapter, pair_weight, tile_req, tile_start,
    layer, y_stride, record_stride,
    A_CHUNKS: tl.constexpr, W: tl.constexpr, J: tl.constexpr, R: tl.constexpr, MODULES: tl.constexpr,
    OUTPUT_OFFSETS: tl.constexpr, OUTPUT_WIDTHS: tl.constexpr, TABLE_MODULES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program: a tile of tokens of one request x one module x a block of outputs inside one chunk.

    All members are added up in registers, in CSR order; y is read once and written once.
    """
    NUM: tl.constexpr = len(MODULES)
    BLOCKS: tl.constexpr = (W + BLOCK_D - 1) // BLOCK_D
    tile = tl.program_id(0)
    chunk = tl.program_id(1) // BLOCKS
    begin = tl.program_id(1) % BLOCKS * BLOCK_D
    m = tl.program_id(2)

    module = 0
    output_offset = 0
    output_width = 0
    for i in tl.static_range(NUM):
        module = tl.where(m == i, MODULES[i], module)
        output_offset = tl.where(m == i, OUTPUT_OFFSETS[i], output_offset)
        output_width = tl.where(m == i, OUTPUT_WIDTHS[i], output_width)
    if chunk * W + begin >= output_width:
        return
    req = tl.load(tile_req + tile)
    if req < 0:
        return
    pair_begin = tl.load(pair_indptr + req)
    pair_end = tl.load(pair_indptr + req + 1)
    if pair_begin >= pair_end:
        return

    tokens = tl.load(tile_start + tile) + tl.arange(0, BLOCK_T)
    token_mask = tokens < tl.load(seg_indptr + req + 1)
    inside = begin + tl.arange(0, BLOCK_D)
    d = chunk * W + inside
    d_mask = (inside < W) & (d < output_width)
    chunks = (output_width + W - 1) // W
    z_rows = z + tokens.to(tl.int64) * (J * NUM * R) + m * R

    touched = 0
    total = tl.full((BLOCK_T, BLOCK_D), 0.0, dtype=tl.float32)
    for pair in range(pair_begin, pair_end):
        adapter = tl.load(pair_adapter + pair).to(tl.int64)
        entry = adapter * record_stride + layer * TABLE_MODULES + module
        module_rank = tl.load(rank + entry)
        touched += module_rank
        adapter_slots = slots + tl.load(first_slot + adapter * record_stride)
        n = tl.load(slot_count + adapter * record_stride)
        factor = tl.load(pair_weight + pair) * tl.load(scaling + entry)
        first_row = tl.load(row_start + entry) + module_rank * A_CHUNKS + chunk
        z_pair = z_rows + (pair - pair_begin) * (NUM * R)
        for rank_begin in range(0, module_rank, BLOCK_R):
            ranks = rank_begin + tl.arange(0, BLOCK_R)
            rank_mask = ranks < module_rank
            z_tile = tl.load(z_pair[:, None] + ranks[None, :], mask=token_mask[:, None] & rank_mask[None, :], other=0.0)
            b_rows = row_addresses(
                first_row + ranks * chunks, rank_mask, pointers, adapter_slots, n, W, y.dtype.element_ty, ALIGNED
            )
            b_tile = tl.load(b_rows[:, None] + inside[None, :], mask=rank_mask[:, None] & d_mask[None, :], other=0.0)
            total = tl.dot(z_tile * factor, b_tile.to(tl.float32), total, input_precision="ieee")

    if touched > 0:  # adding zero would turn -0 into 0: outputs that no adapter reaches keep their bits
        outputs = y + tokens.to(tl.int64)[:, None] * y_stride + output_offset + d[None, :]
        mask = token_mask[:, None] & d_mask[None, :]
        base = tl.load(outputs, mask=mask, other=0.0).to(tl.float32)
        tl.store(outputs, (base + total).to(y.dtype.element_ty), mask=mask)


def expand(
    z: torch.Tensor, y: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int,
    modules: tuple[int, ...], output_offsets: tuple[int, ...], output_widths: tuple[int, ...], *, d_in: int,
) -> None:  # fmt: skip
    """Add w_j s_j z[t, j, m] B over a token's members j to y[t, output m], rounding once. See lora.expand."""
    if pairs.num_tiles == 0:
        return
    block = block_width(pool.width, LARGEST_BLOCK_D)
    blocks = triton.cdiv(max(output_widths), pool.width) * triton.cdiv(pool.width, block)
    grid = (pairs.num_tiles, blocks, len(modules))
    _expand_kernel[grid](
        z, y, pool.pointers, table.slots, table.first_slot, table.slot_count, table.row_start, table.rank,
        table.scaling, pairs.seg_indptr, pairs.pair_indptr, pairs.pair_adapter, pairs.pair_weight, pairs.tile_req,
        pairs.tile_start, layer, y.stride(0), table.record_stride,
        A_CHUNKS=triton.cdiv(d_in, pool.width), W=pool.width, J=pairs.max_members, R=table.padded_rank,
        MODULES=modules, OUTPUT_OFFSETS=output_offsets, OUTPUT_WIDTHS=output_widths, TABLE_MODULES=NUM_MODULES,
        BLOCK_T=BLOCK_T, BLOCK_R=RANK_TILE, BLOCK_D=block, ALIGNED=pool.aligned,
        num_warps=NUM_WARPS,
    )  # fmt: skip
