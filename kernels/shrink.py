"""Shrink in Triton: z = w s x A^T for every (item, module, lane), A's rows gathered through the slot table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels import dispatch
from sglang_lora_tree.kernels.locate import adapter_and_rank, locate
from sglang_lora_tree.kernels.pairs import ITEM_HEADER, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rows import block_width, ceil_divide, round_to_power, row_addresses, upcasts
from sglang_lora_tree.kernels.table import NUM_MODULES, RANK_TILE, AdapterTable

SEGMENT = 1024
"""Elements of d_in that are added up by themselves: a constant, because a token's bits depend on it."""


def num_segments(d_in: int, width: int) -> int:
    """How many segments an input of d_in elements has, whose rows lie in the pool in chunks of `width`."""
    pieces = ceil_divide(d_in, width) * ceil_divide(width, SEGMENT)
    return ceil_divide(pieces, max(1, SEGMENT // width))


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    z, parts, cells, part_stride, weights, scaling, unit_exists, exists, PARTS: tl.constexpr,
):  # fmt: skip
    """Weigh z (lanes, rows) and store it in parts whose sum it is.

    Exactly 0 for lanes without the adapter, whatever their x (a padded token's may be NaN), and for ranks that do not exist.
    """
    weight = tl.load(weights, mask=exists[None, :], other=0).to(tl.float32, bitcast=True)
    factor = weight * tl.load(scaling, mask=exists, other=0.0)[None, :]
    rest = tl.where(weight != 0.0, z * factor, 0.0)
    for part in tl.static_range(PARTS):
        value = rest.to(parts.dtype.element_ty)
        tl.store(parts + part * part_stride + cells, value, mask=unit_exists[None, :])
        rest -= value.to(tl.float32)


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x, sums, parts, b_rows, arrivals, pointers, slots, first_slot, slot_count, row_start, rank, scaling, order, item_indptr,
    items, layer, num_tokens, x_stride, sum_stride, part_stride, record_stride,
    D: tl.constexpr, W: tl.constexpr, MODULES: tl.constexpr, TABLE_MODULES: tl.constexpr,
    ITEM_HEADER: tl.constexpr, RANK_TILE: tl.constexpr, SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
    CHUNKS: tl.constexpr, MOST_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: a tile of tokens x every WORKERS-th block of its items' rows of A x some segments of d_in.

    A tile's rows of A are those of its items, of all modules that read this x: one dot has the rows of several
    adapters and modules, and x is read once for them. Of the programs that share a block's segments, the last to arrive
    adds them up, in their order. One more program per block finds B's rows (locate.py).
    """
    NUM: tl.constexpr = len(MODULES)
    A_CHUNKS: tl.constexpr = (D + W - 1) // W
    # A piece is a chunk of W, or a part of one if W is larger than a segment; a segment is one or more pieces.
    PARTS_OF_CHUNK: tl.constexpr = (W + SEGMENT - 1) // SEGMENT
    PIECE: tl.constexpr = W if W < SEGMENT else SEGMENT
    PIECES: tl.constexpr = A_CHUNKS * PARTS_OF_CHUNK
    PIECES_EACH: tl.constexpr = 1 if W > SEGMENT else SEGMENT // W
    SEGMENTS_EACH: tl.constexpr = SEGMENTS // SPLITS
    UNITS: tl.constexpr = BLOCK_N // RANK_TILE
    ITEM_STRIDE: tl.constexpr = ITEM_HEADER + 2 * BLOCK_T
    tile = tl.program_id(0)
    split = tl.program_id(2)

    item_begin = tl.load(item_indptr + tile)
    units = (tl.load(item_indptr + tile + 1) - item_begin) * NUM  # a unit is RANK_TILE rows: an item's, of one module
    if split == SPLITS:
        locate(
            b_rows, pointers, slots, first_slot, slot_count, row_start, rank, items, item_begin, tl.program_id(1), units,
            tl.num_programs(1), layer, record_stride, A_CHUNKS, W, x.dtype.element_ty, MODULES, CHUNKS, MOST_CHUNKS, BLOCK_C,
            TABLE_MODULES, ITEM_STRIDE, RANK_TILE,
        )  # fmt: skip
        return
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
        unit_exists = unit < units
        adapter, r, is_second = adapter_and_rank(items + item * ITEM_STRIDE, n % RANK_TILE, unit_exists, RANK_TILE)
        entry = adapter * record_stride + layer * TABLE_MODULES + module
        start = tl.load(row_start + entry, mask=unit_exists, other=0)
        slot = tl.load(first_slot + adapter * record_stride, mask=unit_exists, other=0)
        count = tl.load(slot_count + adapter * record_stride, mask=unit_exists, other=1)
        exists = r < tl.load(rank + entry, mask=unit_exists, other=0)
        cell = (item * NUM + m).to(tl.int64) * (BLOCK_T * RANK_TILE) + n % RANK_TILE
        cells = cell[None, :] + lanes[:, None] * RANK_TILE
        weights = items + (item * ITEM_STRIDE + tl.where(is_second, ITEM_HEADER + BLOCK_T, ITEM_HEADER))[None, :] + lanes[:, None]
        if tl.max(exists.to(tl.int32), axis=0) > 0:
            first_row = start + r * A_CHUNKS
            total = tl.full((BLOCK_T, BLOCK_N), 0.0, dtype=tl.float32)
            for segment in range(split * SEGMENTS_EACH, (split + 1) * SEGMENTS_EACH):
                segment_total = tl.full((BLOCK_T, BLOCK_N), 0.0, dtype=tl.float32)
                for piece in range(segment * PIECES_EACH, tl.minimum((segment + 1) * PIECES_EACH, PIECES)):
                    chunk = piece // PARTS_OF_CHUNK
                    part = piece % PARTS_OF_CHUNK * PIECE
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

            if SPLITS == 1:
                _finish(total, parts, cells, part_stride, weights, scaling + entry, unit_exists, exists, PARTS)
            else:
                tl.store(sums + split * sum_stride + cells, total, mask=exists[None, :])
                tl.debug_barrier()  # all threads have stored, before one says so
                arrival = arrivals + item_begin * NUM + first_unit
                if tl.atomic_add(arrival, 1, sem="acq_rel") == SPLITS - 1:
                    total = tl.load(sums + cells, mask=exists[None, :], other=0.0, cache_modifier=".cg")
                    for other in tl.static_range(1, SPLITS):
                        total += tl.load(sums + other * sum_stride + cells, mask=exists[None, :], other=0.0, cache_modifier=".cg")
                    _finish(total, parts, cells, part_stride, weights, scaling + entry, unit_exists, exists, PARTS)
                    tl.store(arrival, 0)  # for the next launch
        elif split == 0:  # the adapters lack these modules
            zeros = tl.full((BLOCK_T, BLOCK_N), 0.0, dtype=tl.float32)
            _finish(zeros, parts, cells, part_stride, weights, scaling + entry, unit_exists, exists, PARTS)


def shrink(
    x: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int, modules: tuple[int, ...],
    output_widths: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """z[i, m, lane, r] = w s_m x[lane] . A[r], and where B's rows lie. See lora.shrink.

    Returns
    -------
    parts : Tensor
        (P, items, M, lanes, RANK_TILE), numbers that tensor cores multiply with B's exactly, and whose sum over P is z's: for
        a half-precision pool three bfloat16 numbers, which hold the 24 bits of a float32; otherwise z itself, in float32.
        0 where the adapter lacks the rank.
    b_rows : Tensor
        int64 (items, M, chunks of the widest output, RANK_TILE): where chunk c of an item's rank lies; 0 = no such row.
    """
    config = dispatch.choose(x.shape[0], x.device)
    d_in = x.shape[1]
    segments = num_segments(d_in, pool.width)
    splits = segments if config.shrink_split else 1
    chunks = tuple(ceil_divide(width, pool.width) for width in output_widths)
    num_parts, dtype = (1, torch.float32) if pool.dtype == torch.float32 else (3, torch.bfloat16)
    shape = (pairs.num_items, len(modules), pairs.block_t, RANK_TILE)
    parts = torch.empty((num_parts, *shape), dtype=dtype, device=x.device)
    b_rows = torch.empty((pairs.num_items, len(modules), max(chunks), RANK_TILE), dtype=torch.int64, device=x.device)
    stages = config.shrink_stages if pool.dtype.itemsize == 2 else config.shrink_stages // 2  # in as much shared memory
    workers = min(config.shrink_workers, ceil_divide(pairs.launch_items * len(modules) * RANK_TILE, config.shrink_block_n))
    if workers == 0:
        return parts, b_rows
    sums = torch.empty((splits, *shape), dtype=torch.float32, device=x.device) if splits > 1 else parts
    grid = (ceil_divide(x.shape[0], pairs.block_t), workers, splits + 1)
    _shrink_kernel[grid](
        x, sums, parts, b_rows, pairs.arrivals, pool.pointers, table.slots, table.first_slot, table.slot_count, table.row_start,
        table.rank, table.scaling, pairs.order, pairs.item_indptr, pairs.items, layer, x.shape[0], x.stride(0), sums.stride(0),
        parts.stride(0), table.record_stride,
        D=d_in, W=pool.width, MODULES=modules, TABLE_MODULES=NUM_MODULES, ITEM_HEADER=ITEM_HEADER,
        RANK_TILE=RANK_TILE, SEGMENT=SEGMENT, SEGMENTS=segments, SPLITS=splits, PARTS=num_parts, BLOCK_T=pairs.block_t,
        BLOCK_N=config.shrink_block_n, BLOCK_K=block_width(min(pool.width, SEGMENT), config.shrink_block_k),
        ALIGNED=pool.aligned, UPCAST=upcasts(pool), CHUNKS=chunks, MOST_CHUNKS=max(chunks),
        BLOCK_C=round_to_power(max(chunks)), num_warps=config.shrink_warps, num_stages=stages,
    )  # fmt: skip
    return parts, b_rows
