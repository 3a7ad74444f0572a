"""Shrink in Triton: z = w s x A^T for every (item, module, lane), A's rows gathered through the slot table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels import dispatch
from sglang_lora_tree.kernels.pairs import ITEM_HEADER, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rows import block_width, row_addresses, upcasts
from sglang_lora_tree.kernels.table import NUM_MODULES, RANK_TILE, AdapterTable

SEGMENT = 1024
"""Elements of d_in that are added up by themselves: a constant, because a token's bits depend on it."""


def num_segments(d_in: int, width: int) -> int:
    """How many segments an input of d_in elements has, whose rows lie in the pool in chunks of `width`."""
    pieces = triton.cdiv(d_in, width) * triton.cdiv(width, SEGMENT)
    return int(triton.cdiv(pieces, max(1, SEGMENT // width)))


@triton.jit(do_not_specialize=["layer", "num_tokens", "num_items"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x, z, pointers, slots, first_slot, slot_count, row_start, rank, scaling, order, item_indptr, items,
    layer, num_tokens, x_stride, num_items, record_stride,
    D: tl.constexpr, W: tl.constexpr, MODULES: tl.constexpr, TABLE_MODULES: tl.constexpr,
    ITEM_HEADER: tl.constexpr, RANK_TILE: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS_EACH: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a tile of tokens x every WORKERS-th block of its items' rows of A x some segments of d_in.

    A tile's rows of A are those of its items, of all modules that read this x: one dot has the rows of several
    adapters and modules, and x is read once for them.
    """
    NUM: tl.constexpr = len(MODULES)
    CHUNKS: tl.constexpr = (D + W - 1) // W
    # A piece is a chunk of W, or a part of one if W is larger than a segment; a segment is one or more pieces.
    PARTS: tl.constexpr = (W + SEGMENT - 1) // SEGMENT
    PIECE: tl.constexpr = W if W < SEGMENT else SEGMENT
    PIECES: tl.constexpr = CHUNKS * PARTS
    PIECES_EACH: tl.constexpr = 1 if W > SEGMENT else SEGMENT // W
    UNITS: tl.constexpr = BLOCK_N // RANK_TILE
    ITEM_STRIDE: tl.constexpr = ITEM_HEADER + BLOCK_T
    tile = tl.program_id(0)
    split = tl.program_id(2)

    item_begin = tl.load(item_indptr + tile)
    units = (tl.load(item_indptr + tile + 1) - item_begin) * NUM  # a unit is RANK_TILE rows: an item's, of one module
    lanes = tl.arange(0, BLOCK_T)
    tokens = tl.load(order + tile * BLOCK_T + lanes)
    token_mask = tokens < num_tokens
    x_rows = x + tokens.to(tl.int64) * x_stride
    n = tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, BLOCK_K)

    for first_unit in range(tl.program_id(1) * UNITS, units, tl.num_programs(1) * UNITS):
        unit = first_unit + n // RANK_TILE
        item = item_begin + unit // NUM
        m = unit % NUM
        module = tl.full((BLOCK_N,), MODULES[0], tl.int32)
        for i in tl.static_range(1, NUM):
            module = tl.where(m == i, MODULES[i], module)
        adapter = tl.load(items + item * ITEM_STRIDE, mask=unit < units, other=-1).to(tl.int64)
        exists = adapter >= 0
        r = tl.load(items + item * ITEM_STRIDE + 1, mask=exists, other=0) + n % RANK_TILE
        entry = adapter * record_stride + layer * TABLE_MODULES + module
        start = tl.load(row_start + entry, mask=exists, other=0)
        slot = tl.load(first_slot + adapter * record_stride, mask=exists, other=0)
        count = tl.load(slot_count + adapter * record_stride, mask=exists, other=1)
        exists = exists & (r < tl.load(rank + entry, mask=exists, other=0))
        if tl.max(exists.to(tl.int32), axis=0) > 0:
            first_row = start + r * CHUNKS
            total = tl.full((BLOCK_T, BLOCK_N), 0.0, dtype=tl.float32)
            for segment in range(split * SEGMENTS_EACH, (split + 1) * SEGMENTS_EACH):
                segment_total = tl.full((BLOCK_T, BLOCK_N), 0.0, dtype=tl.float32)
                for piece in range(segment * PIECES_EACH, tl.minimum((segment + 1) * PIECES_EACH, PIECES)):
                    chunk = piece // PARTS
                    part = piece % PARTS * PIECE
                    a_rows = row_addresses(
                        first_row + chunk, exists, pointers, slots + slot, count, W, x.dtype.element_ty, ALIGNED
                    )
                    for begin in range(0, PIECE, BLOCK_K):
                        inside = part + begin + offsets
                        k = chunk * W + inside
                        k_mask = (inside < W) & (begin + offsets < PIECE) & (k < D)
                        x_tile = tl.load(x_rows[:, None] + k[None, :], mask=token_mask[:, None] & k_mask[None, :], other=0.0)
                        a_tile = tl.load(a_rows[:, None] + inside[None, :], mask=exists[:, None] & k_mask[None, :], other=0.0)
                        if UPCAST:
                            x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
                        # Tensor cores truncate as they add: keep sums short.
                        segment_total += tl.dot(x_tile, tl.trans(a_tile), input_precision="ieee")
                total += segment_total

            weights = items + item[None, :] * ITEM_STRIDE + ITEM_HEADER + lanes[:, None]
            weight = tl.load(weights, mask=exists[None, :], other=0).to(tl.float32, bitcast=True)
            factor = weight * tl.load(scaling + entry, mask=exists, other=0.0)[None, :]
            # Exactly 0 for lanes without the adapter, whatever their x (a padded token's may be NaN).
            total = tl.where(weight != 0.0, total * factor, 0.0)
            cells = ((split * num_items + item) * NUM + m).to(tl.int64) * (BLOCK_T * RANK_TILE) + n % RANK_TILE
            tl.store(z + cells[None, :] + lanes[:, None] * RANK_TILE, total, mask=exists[None, :])


def shrink(
    x: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int, modules: tuple[int, ...]
) -> torch.Tensor:
    """z[s, i, m, lane, r] = w s_m x[lane] . A[r] over segment s of d_in, or over all of it (S = 1). See lora.shrink.

    Returns
    -------
    Tensor
        float32 (S, items, len(modules), lanes, RANK_TILE).
    """
    config = dispatch.choose(x.shape[0], x.device)
    d_in = x.shape[1]
    segments = num_segments(d_in, pool.width)
    splits = segments if config.shrink_split else 1
    shape = (splits, pairs.num_items, len(modules), pairs.block_t, RANK_TILE)
    z = torch.empty(shape, dtype=torch.float32, device=x.device)
    workers = min(config.shrink_workers, triton.cdiv(pairs.launch_items * len(modules) * RANK_TILE, config.shrink_block_n))
    if workers == 0:
        return z
    grid = (triton.cdiv(x.shape[0], pairs.block_t), workers, splits)
    _shrink_kernel[grid](
        x, z, pool.pointers, table.slots, table.first_slot, table.slot_count, table.row_start, table.rank, table.scaling,
        pairs.order, pairs.item_indptr, pairs.items, layer, x.shape[0], x.stride(0), pairs.num_items, table.record_stride,
        D=d_in, W=pool.width, MODULES=modules, TABLE_MODULES=NUM_MODULES, ITEM_HEADER=ITEM_HEADER,
        RANK_TILE=RANK_TILE, SEGMENT=SEGMENT, SEGMENTS_EACH=segments // splits, BLOCK_T=pairs.block_t,
        BLOCK_N=config.shrink_block_n, BLOCK_K=block_width(min(pool.width, SEGMENT), config.shrink_block_k),
        ALIGNED=pool.aligned, UPCAST=upcasts(pool), num_warps=config.shrink_warps, num_stages=config.shrink_stages,
    )  # fmt: skip
    return z
