"""Beside shrink, in Triton: find where B's rows lie.

Expand has many programs, and its time is what the model waits for. What all of them would have to look up (an item's adapter,
its rows, their planes and slots: a chain of dependent loads) is looked up once, by programs of shrink's launch, while the base
model's product runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_lora_tree.kernels.rows import row_addresses


@triton.jit
def adapter_and_rank(item, n, mask, RANK_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which adapter has rank n of an item's tile, which of the adapter's ranks that is, and whether it is the second adapter.

    item (R,): pointers to the items (pairs.py), n (R,): which of their RANK_TILE ranks.
    """
    second = tl.load(item + 2, mask=mask, other=-1)
    is_second = (second >= 0) & (n >= RANK_TILE // 2)
    adapter = tl.where(is_second, second, tl.load(item, mask=mask, other=0)).to(tl.int64)
    rank = tl.where(is_second, n - RANK_TILE // 2, tl.load(item + 1, mask=mask, other=0) + n)
    return adapter, rank, is_second


@triton.jit
def locate(  # type: ignore[no-untyped-def]
    b_rows, pointers, slots, first_slot, slot_count, row_start, rank, items, item_begin, first_unit, units, step,
    layer, record_stride,
    A_CHUNKS: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, MODULES: tl.constexpr, CHUNKS: tl.constexpr,
    MOST_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, TABLE_MODULES: tl.constexpr, ITEM_STRIDE: tl.constexpr,
    RANK_TILE: tl.constexpr,
):  # fmt: skip
    """b_rows[item, m, c, r] = address of chunk c of rank r of the item's B, 0 = none: for every step-th unit (item, m)."""
    NUM: tl.constexpr = len(MODULES)
    r = tl.arange(0, RANK_TILE)
    c = tl.arange(0, BLOCK_C)
    for unit in range(first_unit, units, step):
        item = item_begin + unit // NUM
        m = unit % NUM
        module = MODULES[0]
        chunks = CHUNKS[0]
        for i in tl.static_range(1, NUM):
            module = tl.where(m == i, MODULES[i], module)
            chunks = tl.where(m == i, CHUNKS[i], chunks)
        adapter, number, _ = adapter_and_rank(items + item * ITEM_STRIDE + r * 0, r, r >= 0, RANK_TILE)
        entry = adapter * record_stride + layer * TABLE_MODULES + module
        module_rank = tl.load(rank + entry)
        start = tl.load(row_start + entry)
        slot = tl.load(first_slot + adapter * record_stride)
        count = tl.load(slot_count + adapter * record_stride)
        rows = (start + module_rank * A_CHUNKS + number * chunks)[None, :] + c[:, None]
        mask = (number < module_rank)[None, :] & (c < chunks)[:, None]
        addresses = row_addresses(rows, mask, pointers, (slots + slot)[None, :], count[None, :], W, DTYPE, False).to(tl.int64)
        cells = ((item * NUM + m).to(tl.int64) * MOST_CHUNKS + c[:, None]) * RANK_TILE + r[None, :]
        tl.store(b_rows + cells, tl.where(mask, addresses, 0), mask=(c < MOST_CHUNKS)[:, None])
