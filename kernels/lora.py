"""LoRA and mixes over pool slots: check the operands, then run Triton or plain torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from sglang_lora_tree.kernels import dispatch, reference
from sglang_lora_tree.kernels.pairs import Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.table import NUM_MODULES, AdapterTable


@dataclass(frozen=True)
class Shrunk:
    """What `shrink` leaves for `expand`: the small products, and where to go on.

    Attributes
    ----------
    z : Tensor
        By Triton (P, items, M, lanes, RANK_TILE), by item as `Pairs` lists them, in P parts (shrink.py); by plain torch float32
        (T, J, M, R) with J = pairs.max_members, R = table.max_rank, undefined where an adapter lacks the module or the rank.
    b_rows : Tensor or None
        int64 (items, M, chunks, RANK_TILE): addresses of B's rows, 0 = none (locate.py). None by plain torch.
    layer, modules, d_in, output_widths
        Of the `shrink`.
    """

    z: torch.Tensor
    b_rows: torch.Tensor | None
    layer: int
    modules: tuple[int, ...]
    d_in: int
    output_widths: tuple[int, ...]


def shrink(
    x: torch.Tensor,
    table: AdapterTable,
    pool: PoolView,
    pairs: Pairs,
    layer: int,
    modules: tuple[int, ...],
    output_widths: tuple[int, ...],
) -> Shrunk:
    """Multiply every token with the A matrices of its mix's members, their weights and scalings: z = w s x A^T.

    Needs nothing of the base model's output, so it can run beside its product on a stream of its own. Under tensor
    parallelism x and A of a row-parallel layer are this rank's part, and so is z: `expand` it into this rank's part of y,
    before y is summed over the ranks.

    Parameters
    ----------
    x : Tensor
        (T, d_in), the pool's dtype, contiguous rows; T >= pairs.num_tokens.
    table, pool, pairs
        Flushed table, pool, and batch, on x's device.
    layer : int
    modules : tuple of int
        Which of the MODULES read this x, e.g. (0, 1, 2) for q, k and v.
    output_widths : tuple of int
        (len(modules),): the modules' d_out.
    """
    _check_operand("x", x, pool, pairs)
    assert 0 <= layer < table.num_layers, f"layer {layer} is outside range({table.num_layers})"
    assert modules and all(0 <= module < NUM_MODULES for module in modules), f"no such modules: {modules}"
    assert len(output_widths) == len(modules), f"{len(modules)} modules, but widths {output_widths}"
    assert pool.num_layers == table.num_layers, f"the pool has {pool.num_layers} layers, the table {table.num_layers}"
    b_rows: torch.Tensor | None = None
    if uses_triton(x.device):
        # Imported on first use: a CPU build of torch may come without Triton.
        from sglang_lora_tree.kernels.shrink import shrink as shrink_triton

        z, b_rows = shrink_triton(x, table, pool, pairs, layer, modules, output_widths)
    else:
        z = reference.shrink(x, table, pool, pairs, layer, modules)
    return Shrunk(z, b_rows, layer, modules, x.shape[1], output_widths)


def expand(
    shrunk: Shrunk, y: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs, output_offsets: tuple[int, ...]
) -> None:
    """Add the members' contributions to the base model's output, in place.

    y[t, o_m : o_m + width_m] += z B summed over t's members, added up in float32, then rounded once. Outputs that no
    member reaches keep their bits.

    Parameters
    ----------
    shrunk : Shrunk
        Of the layer's input.
    y : Tensor
        (T, D), the pool's dtype, contiguous rows.
    table, pool, pairs
        As in `shrink`.
    output_offsets : tuple of int
        (len(modules),): where each module's columns of y start.
    """
    _check_operand("y", y, pool, pairs)
    assert len(output_offsets) == len(shrunk.modules), f"{len(shrunk.modules)} modules, but offsets {output_offsets}"
    for offset, width in zip(output_offsets, shrunk.output_widths, strict=True):
        assert 0 <= offset and width > 0 and offset + width <= y.shape[1], (
            f"output columns {offset}..{offset + width} are outside y of {y.shape[1]} columns"
        )
    if shrunk.b_rows is None:
        reference.expand(
            shrunk.z, y, table, pool, pairs, shrunk.layer, shrunk.modules, output_offsets, shrunk.output_widths, shrunk.d_in
        )
        return
    from sglang_lora_tree.kernels.expand import expand as expand_triton

    expand_triton(shrunk.z, shrunk.b_rows, y, pool, pairs, output_offsets, shrunk.output_widths)


def expand_delta(
    shrunk: Shrunk, table: AdapterTable, pool: PoolView, pairs: Pairs, num_tokens: int, output_offsets: tuple[int, ...]
) -> torch.Tensor:
    """The members' contributions by themselves, which `add_and_normalize` and its like add to the base model's output.

    Needs nothing of that output, so it can run beside its product, as `shrink`.

    Parameters
    ----------
    shrunk, table, pool, pairs, output_offsets
        As in `expand`; the modules' columns fill a row.
    num_tokens : int
        T, rows of the output.

    Returns
    -------
    Tensor
        float32 (T, columns); 0 where nothing is added.
    """
    columns = output_offsets[-1] + shrunk.output_widths[-1]
    if shrunk.b_rows is None:
        delta = torch.zeros(num_tokens, columns, dtype=torch.float32, device=shrunk.z.device)
        reference.expand(
            shrunk.z, delta, table, pool, pairs, shrunk.layer, shrunk.modules, output_offsets, shrunk.output_widths, shrunk.d_in
        )
        return delta
    from sglang_lora_tree.kernels.expand import expand as expand_triton

    delta = torch.empty(num_tokens, columns, dtype=torch.float32, device=shrunk.z.device)
    expand_triton(shrunk.z, shrunk.b_rows, delta, pool, pairs, output_offsets, shrunk.output_widths, is_delta=True)
    return delta


def add_and_normalize(
    y: torch.Tensor, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Add a delta to the output of o_proj or down_proj where the model adds it to the residual and normalises, in place.

    As SGLang's fused_add_rmsnorm: residual becomes y + delta + residual, y the RMS norm of that sum before it is rounded.

    Parameters
    ----------
    y, residual : Tensor
        (T, D), the model's dtype, contiguous rows.
    delta : Tensor or None
        float32 (T, D), of `expand_delta`. y + delta is rounded to y's dtype, as `expand` leaves it.
    weight : Tensor
        (D,), of the norm.
    epsilon : float
    """
    _check_delta(y, delta)
    assert residual.shape == y.shape and weight.shape == (y.shape[1],), f"residual {residual.shape}, weight {weight.shape}"
    _finisher(y).normalize(y, delta, residual, weight, epsilon)


def add_and_rotate(y: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, rotated: int) -> None:
    """Add a delta to q, k and v where the model rotates q and k, in place. y (T, D): its first `rotated` columns are rotated."""
    _check_delta(y, delta)
    assert rotated % rotation.head == 0 and fits_rotation(rotation.head, rotated), f"no heads of {rotation.head} in {rotated}"
    _finisher(y).rotate_heads(y, delta, rotation, rotated)


def add_and_activate(y: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of y + delta (T, 2 d), gate then up: (T, d), y's dtype. gate and up are rounded in between."""
    _check_delta(y, delta)
    activated: torch.Tensor = _finisher(y).activate_halves(y, delta)
    return activated


def expand_and_activate(
    shrunk: Shrunk, y: torch.Tensor, table: AdapterTable, pool: PoolView, pairs: Pairs
) -> torch.Tensor:
    """silu(gate) * up of the output with the members' contributions, in one pass over it.

    The same as `expand`, then SGLang's SiluAndMul, but y (T, 2 d), gate then up, is read once and not written: for many
    tokens that saves most of the bytes that LoRA moves. gate and up are rounded to y's dtype in between.

    Parameters
    ----------
    shrunk, y, table, pool, pairs
        As in `expand`; two modules whose outputs are y's halves.

    Returns
    -------
    Tensor
        (T, d), y's dtype.
    """
    _check_operand("y", y, pool, pairs)
    width = y.shape[1] // 2
    assert shrunk.output_widths == (width, width), f"gate and up are y's halves, not {shrunk.output_widths}"
    if shrunk.b_rows is None:
        y = y.clone()
        expand(shrunk, y, table, pool, pairs, (0, width))
        gate, up = y[:, :width].float(), y[:, width:].float()
        return (torch.nn.functional.silu(gate) * up).to(y.dtype)
    from sglang_lora_tree.kernels.expand import expand as expand_triton

    activated = torch.empty(y.shape[0], width, dtype=y.dtype, device=y.device)
    expand_triton(shrunk.z, shrunk.b_rows, y, pool, pairs, (0, width), (width, width), activated=activated)
    return activated


def expand_and_rotate(
    shrunk: Shrunk,
    y: torch.Tensor,
    table: AdapterTable,
    pool: PoolView,
    pairs: Pairs,
    output_offsets: tuple[int, ...],
    rotation: Rotation,
) -> None:
    """Add the members' contributions to q, k and v, then rotate q and k to their tokens' positions, in place.

    The same as `expand`, then SGLang's rotary embedding, in one pass over y. q and k are rounded to y's dtype in between.

    Parameters
    ----------
    shrunk, y, table, pool, pairs, output_offsets
        As in `expand`; three modules, q, k and v.
    rotation : Rotation
        Positions of y's T tokens; heads of a power of two that divides the pool's width.
    """
    _check_operand("y", y, pool, pairs)
    head = rotation.head
    assert len(shrunk.modules) == len(output_offsets) == 3, f"modules {shrunk.modules} are not q, k and v"
    assert fits_rotation(head, pool.width), f"heads of {head} do not fit rows of {pool.width}"
    assert rotation.positions.shape == (y.shape[0],), f"{tuple(rotation.positions.shape)} positions of {y.shape[0]} tokens"
    assert rotation.cos_sin.dtype == torch.float32 and rotation.cos_sin.shape[1] == head and rotation.cos_sin.stride(1) == 1
    if shrunk.b_rows is None:
        expand(shrunk, y, table, pool, pairs, output_offsets)
        for offset, width in zip(output_offsets[:2], shrunk.output_widths[:2], strict=True):
            y[:, offset : offset + width] = rotation.apply(y[:, offset : offset + width])
        return
    from sglang_lora_tree.kernels.expand import expand as expand_triton

    expand_triton(shrunk.z, shrunk.b_rows, y, pool, pairs, output_offsets, shrunk.output_widths, rotation=rotation)


def fits_rotation(head: int, width: int) -> bool:
    """Whether `expand_and_rotate` takes heads of this width: whole ones lie in a block of columns."""
    return head >= 2 and head & (head - 1) == 0 and width > 0 and width % head == 0


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    table: AdapterTable,
    pool: PoolView,
    pairs: Pairs,
    layer: int,
    modules: tuple[int, ...],
    output_offsets: tuple[int, ...],
    output_widths: tuple[int, ...],
) -> None:
    """Add every token's mix to the base model's output: y (T, D) += delta(x (T, d_in)), in place.

    `shrink`, then `expand`; see there.
    """
    expand(shrink(x, table, pool, pairs, layer, modules, output_widths), y, table, pool, pairs, output_offsets)


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on `device` go to the Triton kernels: on a GPU, and under Triton's interpreter."""
    return device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def overlaps(x: torch.Tensor) -> bool:
    """Whether `shrink` of this x should run on a stream of its own, beside the base model's product."""
    return x.is_cuda and dispatch.choose(x.shape[0], x.device).overlap


def _finisher(y: torch.Tensor) -> Any:
    """finish.py or its reference: modules of the same functions."""
    if not uses_triton(y.device):
        return reference
    from sglang_lora_tree.kernels import finish

    return finish


def _check_delta(y: torch.Tensor, delta: torch.Tensor | None) -> None:
    assert y.dim() == 2 and y.stride(1) == 1, "y must be (T, d) with contiguous rows"
    assert delta is None or (delta.shape == y.shape and delta.dtype == torch.float32), f"a delta {delta.shape} for {y.shape}"


def _check_operand(name: str, operand: torch.Tensor, pool: PoolView, pairs: Pairs) -> None:
    assert operand.dim() == 2 and operand.stride(1) == 1, f"{name} must be (T, d) with contiguous rows"
    assert operand.dtype == pool.dtype, f"{name} is {operand.dtype}, the adapters in the pool are {pool.dtype}"
    assert pairs.num_tokens <= operand.shape[0] <= pairs.max_tokens, (
        f"{name} has {operand.shape[0]} tokens, the batch {pairs.num_tokens}, allocated are {pairs.max_tokens}"
    )
