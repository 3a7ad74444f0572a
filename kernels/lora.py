"""LoRA and mixes over pool slots: check the operands, then run Triton or plain torch."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch

from sglang_lora_tree.kernels import reference
from sglang_lora_tree.kernels.pairs import Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.table import NUM_MODULES, AdapterTable


def shrink(
    x: torch.Tensor,
    table: AdapterTable,
    pool: PoolView,
    pairs: Pairs,
    layer: int,
    modules: tuple[int, ...],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply every token with the A matrices of its mix's members.

    z[t, j, m, r] = sum_k x[t, k] A[r, k] with A of layer `layer`, module modules[m] and the j-th member of t's mix.
    Neither weight nor scaling is in z, so under tensor parallelism z of a row-parallel layer is summed over the ranks
    between `shrink` and `expand`.

    Parameters
    ----------
    x : Tensor
        (T, d_in), the pool's dtype, contiguous rows; T >= pairs.num_tokens.
    table, pool, pairs
        Flushed table, pool, and batch, on x's device.
    layer : int
    modules : tuple of int
        Which of the MODULES read this x, e.g. (0, 1, 2) for q, k and v.
    out : Tensor, optional
        Where to write z instead of into a new tensor.

    Returns
    -------
    Tensor
        z, float32 (T, J, len(modules), R): J = pairs.max_members, R = table.padded_rank. Written where there is
        something to write: tokens with members, j below their number, r below the module's rank. Elsewhere undefined.
    """
    _check_operand("x", x, pool, pairs)
    _check_modules(table, pool, layer, modules)
    shape = (x.shape[0], pairs.max_members, len(modules), table.padded_rank)
    z = torch.empty(shape, dtype=torch.float32, device=x.device) if out is None else out
    _check_z(z, shape)
    _backend("shrink", x).shrink(x, z, table, pool, pairs, layer, modules)
    return z


def expand(
    z: torch.Tensor,
    y: torch.Tensor,
    table: AdapterTable,
    pool: PoolView,
    pairs: Pairs,
    layer: int,
    modules: tuple[int, ...],
    output_offsets: tuple[int, ...],
    output_widths: tuple[int, ...],
    *,
    d_in: int,
) -> None:
    """Add the members' contributions to the base model's output, in place.

    y[t, o_m : o_m + width_m] += sum_j w_j s_jm sum_r z[t, j, m, r] B[r, :], added up in float32 over all members in
    their order, then rounded once. Outputs that no member reaches keep their bits.

    Parameters
    ----------
    z : Tensor
        As `shrink` returns it.
    y : Tensor
        (T, D), the pool's dtype, contiguous rows.
    table, pool, pairs, layer, modules
        As in `shrink`.
    output_offsets, output_widths : tuple of int
        (len(modules),): the columns of y that each module's output takes. The widths are the modules' d_out.
    d_in : int
        x.shape[1] of `shrink`: B's rows lie behind A's, whose number depends on it.
    """
    _check_operand("y", y, pool, pairs)
    _check_modules(table, pool, layer, modules)
    _check_z(z, (y.shape[0], pairs.max_members, len(modules), table.padded_rank))
    assert len(output_offsets) == len(output_widths) == len(modules), "one output offset and width per module"
    for offset, width in zip(output_offsets, output_widths, strict=True):
        assert 0 <= offset and width > 0 and offset + width <= y.shape[1], (
            f"output columns {offset}..{offset + width} are outside y of {y.shape[1]} columns"
        )
    _backend("expand", y).expand(
        z, y, table, pool, pairs, layer, modules, output_offsets, output_widths, d_in=d_in
    )


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
    z = shrink(x, table, pool, pairs, layer, modules)
    expand(z, y, table, pool, pairs, layer, modules, output_offsets, output_widths, d_in=x.shape[1])


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on `device` go to the Triton kernels: on a GPU, and under Triton's interpreter."""
    return device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def _backend(name: str, operand: torch.Tensor) -> ModuleType:
    # Imported on first use: a CPU build of torch may come without Triton.
    return import_module(f"sglang_lora_tree.kernels.{name}") if uses_triton(operand.device) else reference


def _check_operand(name: str, operand: torch.Tensor, pool: PoolView, pairs: Pairs) -> None:
    assert operand.dim() == 2 and operand.stride(1) == 1, f"{name} must be (T, d) with contiguous rows"
    assert operand.dtype == pool.dtype, f"{name} is {operand.dtype}, the adapters in the pool are {pool.dtype}"
    assert operand.shape[0] >= pairs.num_tokens, f"{name} has {operand.shape[0]} of the {pairs.num_tokens} tokens"


def _check_modules(table: AdapterTable, pool: PoolView, layer: int, modules: tuple[int, ...]) -> None:
    assert 0 <= layer < table.num_layers, f"layer {layer} is outside range({table.num_layers})"
    assert modules and all(0 <= module < NUM_MODULES for module in modules), f"no such modules: {modules}"
    assert pool.num_layers == table.num_layers, f"the pool has {pool.num_layers} layers, the table {table.num_layers}"


def _check_z(z: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert tuple(z.shape) == shape and z.dtype == torch.float32 and z.is_contiguous(), (
        f"z must be contiguous float32 {shape}, got {z.dtype} {tuple(z.shape)}"
    )
