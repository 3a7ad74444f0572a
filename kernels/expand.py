"""Expand in Triton: add z B of every item to the output, B's rows taken from where locate.py found them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lora_tree.kernels import dispatch
from sglang_lora_tree.kernels.pairs import Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.rows import activate, add_and_round, block_width, ceil_divide, rotate, upcasts
from sglang_lora_tree.kernels.table import RANK_TILE

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _dot(z, b, total, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + z b: z (T, R) is a part of z (shrink.py), b (R, D) in the pool's dtype. Every product is exact."""
    if UPCAST:
        total = tl.dot(z.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif b.dtype == tl.float16:
        total = tl.dot(z.to(tl.float32), b.to(tl.float32), total, input_precision="tf32")  # both are tf32 numbers
    else:
        total = tl.dot(z, b, total, input_precision="ieee")
    return total


@triton.jit
def _delta(  # type: ignore[no-untyped-def]
    parts, b_rows, item_begin, item_end, m, chunk, inside, d_mask, part_stride,
    DTYPE: tl.constexpr, PARTS: tl.constexpr, MOST_CHUNKS: tl.constexpr, NUM: tl.constexpr, RANK_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What the items of a tile add to a block of outputs of module m: (BLOCK_T, BLOCK_D) in float32.

    How the items of other tokens lie between a token's own changes none of its bits: a step takes one item with all parts of
    z, or each part has a sum of its own, which adds up item after item whatever the steps. (One sum needs fewer registers.)
    """
    lanes = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_R)
    total = tl.full((BLOCK_T, BLOCK_D), 0.0, dtype=tl.float32)
    middle = total
    small = total
    for first_item in range(item_begin, item_end, BLOCK_R // RANK_TILE):
        item = first_item + k // RANK_TILE
        here = item < item_end
        cell = (item * NUM + m).to(tl.int64)
        address = tl.load(b_rows + (cell * MOST_CHUNKS + chunk) * RANK_TILE + k % RANK_TILE, mask=here, other=0)
        rows = address.to(tl.pointer_type(DTYPE))
        if ALIGNED:
            rows = tl.multiple_of(rows, 16)
        b_tile = tl.load(rows[:, None] + inside[None, :], mask=(address != 0)[:, None] & d_mask[None, :], other=0.0)
        z_cells = parts + (cell * (BLOCK_T * RANK_TILE) + k % RANK_TILE)[None, :] + lanes[:, None] * RANK_TILE
        if BLOCK_R == RANK_TILE:
            for part in tl.static_range(PARTS):
                z = tl.load(z_cells + part * part_stride, mask=here[None, :], other=0.0)
                total = _dot(z, b_tile, total, UPCAST)
        else:
            total = _dot(tl.load(z_cells, mask=here[None, :], other=0.0), b_tile, total, UPCAST)
            if PARTS == 3:
                middle = _dot(tl.load(z_cells + part_stride, mask=here[None, :], other=0.0), b_tile, middle, UPCAST)
                small = _dot(tl.load(z_cells + 2 * part_stride, mask=here[None, :], other=0.0), b_tile, small, UPCAST)
    return total + (middle + small)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    parts, b_rows, y, delta, activated, positions, cos_sin, order, item_indptr, num_tokens, y_stride, part_stride, cos_sin_stride,
    DTYPE: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, MOST_CHUNKS: tl.constexpr, OUTPUT_OFFSETS: tl.constexpr,
    OUTPUT_WIDTHS: tl.constexpr, FIRST_BLOCKS: tl.constexpr, ACTIVATE: tl.constexpr, HEAD: tl.constexpr,
    RANK_TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a block of outputs of one module, inside one chunk of W, x a tile of tokens.

    All items of the tile are added up in registers, BLOCK_R ranks at a time; y is read once and written once. With
    ACTIVATE the block is one of the gate and the same one of up, and silu(gate) * up is written instead. With HEAD, the
    width of an attention head, the outputs are q, k and v, and q and k are rotated to their tokens' positions. With a delta
    the sum is written there, and y is not read: it may be computed meanwhile.
    """
    NUM: tl.constexpr = len(OUTPUT_WIDTHS)
    BLOCKS: tl.constexpr = (W + BLOCK_D - 1) // BLOCK_D  # per chunk
    tile = tl.program_id(1)
    item_begin = tl.load(item_indptr + tile)
    item_end = tl.load(item_indptr + tile + 1)
    if delta is None and not ACTIVATE and not HEAD:
        if item_begin >= item_end:
            return

    block = tl.program_id(0)
    m = 0
    first_block = 0
    output_offset = OUTPUT_OFFSETS[0]
    output_width = OUTPUT_WIDTHS[0]
    if not ACTIVATE:
        for i in tl.static_range(1, NUM):
            here = block >= FIRST_BLOCKS[i]
            m = tl.where(here, i, m)
            first_block = tl.where(here, FIRST_BLOCKS[i], first_block)
            output_offset = tl.where(here, OUTPUT_OFFSETS[i], output_offset)
            output_width = tl.where(here, OUTPUT_WIDTHS[i], output_width)
    block -= first_block
    chunk = block // BLOCKS
    block = block % BLOCKS
    columns = tl.arange(0, BLOCK_D)
    first_angle = 0
    if HEAD > BLOCK_D:  # a part of a head's first half, and the part of its second half that is rotated with it
        HALF: tl.constexpr = BLOCK_D // 2
        first_angle = block % (HEAD // BLOCK_D) * HALF
        inside = block // (HEAD // BLOCK_D) * HEAD + columns // HALF * (HEAD // 2) + first_angle + columns % HALF
    else:
        inside = block * BLOCK_D + columns
    d = chunk * W + inside
    d_mask = (inside < W) & (d < output_width)

    tokens = tl.load(order + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    cells = tokens.to(tl.int64)[:, None] * y_stride + output_offset + d[None, :]
    mask = (tokens < num_tokens)[:, None] & d_mask[None, :]
    if delta is None:
        base = tl.load(y + cells, mask=mask, other=0.0)
    if ACTIVATE:
        up_base = tl.load(y + cells + OUTPUT_OFFSETS[1], mask=mask, other=0.0)  # on its way while gate is computed
    total = _delta(
        parts, b_rows, item_begin, item_end, m, chunk, inside, d_mask, part_stride, DTYPE, PARTS, MOST_CHUNKS, NUM, RANK_TILE,
        BLOCK_T, BLOCK_R, BLOCK_D, ALIGNED, UPCAST,
    )  # fmt: skip
    if delta is not None:
        tl.store(delta + cells, total, mask=mask)
    elif ACTIVATE:
        gate = add_and_round(base, total)
        total = _delta(
            parts, b_rows, item_begin, item_end, m + 1, chunk, inside, d_mask, part_stride, DTYPE, PARTS, MOST_CHUNKS, NUM,
            RANK_TILE, BLOCK_T, BLOCK_R, BLOCK_D, ALIGNED, UPCAST,
        )  # fmt: skip
        halves = activated + tokens.to(tl.int64)[:, None] * OUTPUT_WIDTHS[0] + d[None, :]
        tl.store(halves, activate(gate, add_and_round(up_base, total)), mask=mask)
    else:
        finished = add_and_round(base, total)
        if HEAD:
            if m < 2:
                position = tl.load(positions + tokens, mask=tokens < num_tokens, other=0)
                angles = cos_sin + position.to(tl.int64)[:, None] * cos_sin_stride + first_angle
                finished = rotate(finished, angles, angles + HEAD // 2, HEAD if HEAD < BLOCK_D else BLOCK_D)
        tl.store(y + cells, finished, mask=mask)


def expand(
    parts: torch.Tensor, b_rows: torch.Tensor, y: torch.Tensor, pool: PoolView, pairs: Pairs,
    output_offsets: tuple[int, ...], output_widths: tuple[int, ...],
    activated: torch.Tensor | None = None, rotation: Rotation | None = None, is_delta: bool = False,
) -> None:  # fmt: skip
    """Add z B over a tile's items to y[t, output m], rounding once; then activate or rotate it. See lora.expand.

    is_delta: y is float32, and z B is written there, 0 where there is none. See lora.expand_delta.
    """
    if pairs.launch_items == 0 and activated is None and rotation is None:
        if is_delta:
            y.zero_()
        return
    config = dispatch.choose(y.shape[0], y.device)
    head = 0 if rotation is None else rotation.head
    block = block_width(pool.width, config.expand_block_d)
    blocks = [ceil_divide(width, pool.width) * ceil_divide(pool.width, block) for width in output_widths]
    first_blocks = tuple(sum(blocks[:i]) for i in range(len(blocks)))
    grid = (sum(blocks) if activated is None else blocks[0], ceil_divide(y.shape[0], pairs.block_t))
    _expand_kernel[grid](
        parts, b_rows, None if is_delta else y, y if is_delta else None, activated,
        None if rotation is None else rotation.positions, None if rotation is None else rotation.cos_sin, pairs.order,
        pairs.item_indptr, y.shape[0], y.stride(0), parts.stride(0), 0 if rotation is None else rotation.cos_sin.stride(0),
        DTYPE=TRITON_TYPES[pool.dtype], W=pool.width, PARTS=parts.shape[0], MOST_CHUNKS=b_rows.shape[2],
        OUTPUT_OFFSETS=output_offsets, OUTPUT_WIDTHS=output_widths, FIRST_BLOCKS=first_blocks,
        ACTIVATE=activated is not None, HEAD=head, RANK_TILE=RANK_TILE, BLOCK_T=pairs.block_t,
        BLOCK_R=config.expand_items * RANK_TILE,
        BLOCK_D=block, ALIGNED=pool.aligned, UPCAST=upcasts(pool),
        num_warps=config.expand_warps, num_stages=config.expand_stages,
    )  # fmt: skip
