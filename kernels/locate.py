"""Between shrink and expand, in Triton: add z up over the segments of d_in, make it ready to multiply, find where B's rows lie.

Expand has many programs, and its time is what the model waits for. What all of them would have to look up (an item's adapter,
its rows, their planes and slots: a chain of dependent loads) is looked up here once, while the base model's product runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels.pairs import ITEM_HEADER, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.table import NUM_MODULES, RANK_TILE, AdapterTable

PROGRAMS = 128


@triton.jit(do_not_specialize=["layer", "num_tiles"])
def _locate_kernel(  # type: ignore[no-untyped-def]
    z, parts, b_rows, pointers, slots, first_slot, slot_count, row_start, rank, item_indptr, items,
    layer, num_tiles, split_stride, part_stride, record_stride,
    A_CHUNKS: tl.constexpr, W: tl.constexpr, ELEMENT_SIZE: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    MODULES: tl.constexpr, CHUNKS: tl.constexpr, MOST_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, TABLE_MODULES: tl.constexpr,
    ITEM_HEADER: tl.constexpr, RANK_TILE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: every PROGRAMS-th item x one module."""
    NUM: tl.constexpr = len(MODULES)
    m = tl.program_id(1)
    module = 0
    chunks = 0
    for i in tl.static_range(NUM):
        module = tl.where(m == i, MODULES[i], module)
        chunks = tl.where(m == i, CHUNKS[i], chunks)
    r = tl.arange(0, RANK_TILE)
    c = tl.arange(0, BLOCK_C)
    lanes = tl.arange(0, BLOCK_T)
    for item in range(tl.program_id(0), tl.load(item_indptr + num_tiles), tl.num_programs(0)):
        record = items + item * (ITEM_HEADER + BLOCK_T)
        adapter = tl.load(record).to(tl.int64)
        cell = item * NUM + m
        exists = r < 0
        number = r
        module_rank = 0
        start = 0
        slot = 0
        count = 1
        if adapter >= 0:
            entry = adapter * record_stride + layer * TABLE_MODULES + module
            number = tl.load(record + 1) + r
            module_rank = tl.load(rank + entry)
            start = tl.load(row_start + entry)
            slot = tl.load(first_slot + adapter * record_stride)
            count = tl.load(slot_count + adapter * record_stride)
            exists = number < module_rank
        rows = start + module_rank * A_CHUNKS + number[None, :] * chunks + c[:, None]
        mask = exists[None, :] & (c < chunks)[:, None]
        plane = tl.load(pointers + rows // count, mask=mask, other=0)
        place = tl.load(slots + slot + rows % count, mask=mask, other=0).to(tl.int64)
        addresses = tl.where(mask, plane + place * (W * ELEMENT_SIZE), 0)  # 0: there is no such row
        tl.store(b_rows + (cell * MOST_CHUNKS + c[:, None]) * RANK_TILE + r[None, :], addresses, mask=(c < MOST_CHUNKS)[:, None])
        cells = cell * (BLOCK_T * RANK_TILE) + lanes[:, None] * RANK_TILE + r[None, :]
        rest = tl.load(z + cells, mask=exists[None, :], other=0.0)
        for split in tl.static_range(1, SPLITS):
            rest += tl.load(z + split * split_stride + cells, mask=exists[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            value = rest.to(parts.dtype.element_ty)
            tl.store(parts + part * part_stride + cells, value)
            rest -= value.to(tl.float32)


def locate(
    z: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, layer: int, modules: tuple[int, ...],
    output_widths: tuple[int, ...], d_in: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Add z (S, items, M, lanes, RANK_TILE) up over S, and find the addresses of B's rows.

    Returns
    -------
    parts : Tensor
        (P, items, M, lanes, RANK_TILE), numbers that tensor cores multiply with B's, and whose sum over P is z's: for a
        bfloat16 pool three bfloat16 numbers, which hold the 24 bits of a float32; otherwise z itself. 0 where the adapter lacks
        the rank.
    b_rows : Tensor
        int64 (items, M, chunks of the widest output, RANK_TILE): where chunk c of an item's rank lies; 0 = no such row.
    """
    chunks = tuple(triton.cdiv(width, pool.width) for width in output_widths)
    num_parts, dtype = (3, torch.bfloat16) if pool.dtype == torch.bfloat16 else (1, torch.float32)
    parts = torch.empty((num_parts, *z.shape[1:]), dtype=dtype, device=z.device)
    b_rows = torch.empty((z.shape[1], len(modules), max(chunks), RANK_TILE), dtype=torch.int64, device=z.device)
    if pairs.launch_items == 0:
        return parts, b_rows
    _locate_kernel[(min(pairs.num_items, PROGRAMS), len(modules))](
        z, parts, b_rows, pool.pointers, table.slots, table.first_slot, table.slot_count, table.row_start, table.rank,
        pairs.item_indptr, pairs.items, layer, pairs.max_tiles, z.stride(0), parts.stride(0), table.record_stride,
        A_CHUNKS=triton.cdiv(d_in, pool.width), W=pool.width, ELEMENT_SIZE=pool.dtype.itemsize, SPLITS=z.shape[0],
        PARTS=num_parts, MODULES=modules, CHUNKS=chunks, MOST_CHUNKS=max(chunks),
        BLOCK_C=triton.next_power_of_2(max(chunks)), TABLE_MODULES=NUM_MODULES, ITEM_HEADER=ITEM_HEADER,
        RANK_TILE=RANK_TILE, BLOCK_T=pairs.block_t, num_warps=4,
    )  # fmt: skip
    return parts, b_rows
