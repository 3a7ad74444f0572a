"""Ways to add every token's mix of adapters to a linear layer's output: ours, and three others to compare with.

All are an `Operator` over the adapters of one `KernelWorld` (all of one rank, for the others). Ours and `Merged.copy` read the
pool's slots; `loop` and `padded_bmm` start from contiguous copies (`Dense`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernel_world import KernelWorld, Layer, Mixes
from sglang_lora_tree.kernels import add_lora

CHUNK = 16
"""Tokens per segment of csgmv: SGLang's max_lora_chunk_size, below 64 tokens its only choice."""

Operator = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""Add every token's mix: (layer of the model, which of its linear layers, x (T, d_in), y (T, D)), y in place."""

Place = tuple[int, int]
"""(Layer of the model, which of its linear layers)."""


def ours(world: KernelWorld, mixes: Mixes) -> Operator:
    pairs = world.pairs([1] * len(mixes), mixes)

    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        layer = world.shape[index]
        add_lora(y, x, world.table, world.pool, pairs, number, layer.modules, layer.offsets, layer.widths)

    return apply


@dataclass(frozen=True)
class Rows:
    """Where the rows of all adapters (of one rank R) lie for one linear layer of M modules.

    Attributes:
        a: int64 (2, adapters, M * R, chunks of d_in): planes, then slots, of the chunks of A's rows.
        b: int64 (2, adapters, R, chunks of all outputs): the same of B's, transposed; the modules side by side.
    """

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def find(cls, world: KernelWorld, number: int, layer: Layer, rank: int) -> Rows:
        table, width = world.table, world.width
        assert not any(d % width for d in (layer.d_in, *layer.widths)), f"widths must be multiples of {width}: {layer}"
        adapters = table.capacity - 1  # KernelWorld leaves the last one empty
        start = table.row_start[:adapters, number, list(layer.modules)].long()
        assert bool((table.rank[:adapters, number, list(layer.modules)] == rank).all()), f"all ranks must be {rank}"
        first = table.first_slot[:adapters].long()[:, None, None]
        count = table.slot_count[:adapters].long()[:, None, None]

        def places(first_row: torch.Tensor, chunks: int) -> torch.Tensor:
            rows = first_row[:, None] + torch.arange(rank * chunks, device=first_row.device)
            rows = rows.view(adapters, rank, chunks)
            return torch.stack([rows // count, table.slots[first + rows % count].long()])

        chunks_in = layer.d_in // width
        a = [places(start[:, m], chunks_in) for m in range(len(layer.modules))]
        b = [places(start[:, m] + rank * chunks_in, out // width) for m, out in enumerate(layer.widths)]
        return cls(torch.cat(a, dim=2), torch.cat(b, dim=3))


@dataclass(frozen=True)
class Dense:
    """All adapters of one linear layer, contiguous: a (adapters, M * R, d_in), b (adapters, R, all outputs)."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def copy(cls, world: KernelWorld, rows: Rows) -> Dense:
        return cls(*(_take(world, places).flatten(2) for places in (rows.a, rows.b)))


def _take(world: KernelWorld, places: torch.Tensor) -> torch.Tensor:
    """Pool rows, (..., W), at `places` (2, ...): planes, then slots."""
    taken = torch.empty(*places.shape[1:], world.width, dtype=world.dtype, device=world.device)
    for plane in places[0].unique().tolist():
        here = places[0] == plane
        taken[here] = world.pool.planes[plane][places[1][here]]
    return taken


def loop(world: KernelWorld, dense: Mapping[Place, Dense], mixes: Mixes) -> Operator:
    """An adapter at a time, for all tokens that use it."""
    uses: dict[int, list[tuple[int, float]]] = {}
    for token, mix in enumerate(mixes):
        for adapter, weight in mix:
            uses.setdefault(adapter, []).append((token, weight))
    batch = [
        (
            adapter,
            torch.tensor([token for token, _ in pairs], device=world.device),
            torch.tensor([[weight] for _, weight in pairs], dtype=world.dtype, device=world.device),
        )
        for adapter, pairs in uses.items()
    ]

    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        layer, weights = world.shape[index], dense[number, index]
        for adapter, tokens, weight in batch:
            z = (x.index_select(0, tokens) @ weights.a[adapter].T).mul_(weight).chunk(len(layer.modules), 1)
            for part, offset, width in zip(z, layer.offsets, layer.widths, strict=True):
                columns = slice(offset, offset + width)
                y[:, columns].index_add_(0, tokens, part @ weights.b[adapter][:, columns])

    return apply


def padded_bmm(world: KernelWorld, dense: Mapping[Place, Dense], mixes: Mixes) -> Operator:
    """Every request's adapters gathered side by side, then one batched product per matrix."""
    bs, members = len(mixes), len(mixes[0])
    adapters, weights = _flatten(world, mixes)
    weights = weights.to(world.dtype).view(bs, members, 1, 1)

    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        layer, stored = world.shape[index], dense[number, index]
        a = stored.a.index_select(0, adapters).view(bs, -1, layer.d_in)
        b = stored.b.index_select(0, adapters).view(bs, -1, stored.b.shape[2])
        z = torch.bmm(a, x.unsqueeze(2)).view(bs, members, len(layer.modules), -1).mul_(weights)
        for m, (offset, width) in enumerate(zip(layer.offsets, layer.widths, strict=True)):
            columns = slice(offset, offset + width)
            y[:, columns].unsqueeze(1).baddbmm_(z[:, :, m].reshape(bs, 1, -1), b[:, :, columns])

    return apply


def _flatten(world: KernelWorld, mixes: Mixes) -> tuple[torch.Tensor, torch.Tensor]:
    """Adapters (int64) and weights (float32) of all requests, (bs * members,)."""
    assert len({len(mix) for mix in mixes}) == 1, "all mixes must have the same number of members"
    pairs = [pair for mix in mixes for pair in mix]
    adapters = torch.tensor([adapter for adapter, _ in pairs], device=world.device)
    return adapters, torch.tensor([weight for _, weight in pairs], dtype=torch.float32, device=world.device)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    a, b, a_rows, b_rows, adapters, weights,
    MEMBERS: tl.constexpr, MODULES: tl.constexpr, RANK: tl.constexpr, A_CHUNKS: tl.constexpr, B_CHUNKS: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one member of one request, and BLOCK columns of all ranks of one module of A, or of B."""
    BLOCKS: tl.constexpr = W // BLOCK
    TOTAL: tl.constexpr = MEMBERS * RANK
    request = tl.program_id(0) // MEMBERS
    member = tl.program_id(0) % MEMBERS
    adapter = tl.load(adapters + tl.program_id(0))
    chunk = tl.program_id(1) // BLOCKS
    inside = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    DTYPE: tl.constexpr = a.dtype.element_ty
    if chunk < MODULES * A_CHUNKS:
        m = chunk // A_CHUNKS
        chunk = chunk % A_CHUNKS
        rows = tl.load(a_rows + ((adapter * MODULES + m) * RANK + r) * A_CHUNKS + chunk)
        tile = tl.load(tl.multiple_of(rows.to(tl.pointer_type(DTYPE)), 16)[:, None] + inside[None, :])
        row = (request * MODULES + m) * TOTAL + member * RANK + r
        tl.store(a + row[:, None] * (A_CHUNKS * W) + chunk * W + inside[None, :], tile)
    else:
        chunk -= MODULES * A_CHUNKS
        rows = tl.load(b_rows + (adapter * RANK + r) * B_CHUNKS + chunk)
        tile = tl.load(tl.multiple_of(rows.to(tl.pointer_type(DTYPE)), 16)[:, None] + inside[None, :])
        tile = (tile.to(tl.float32) * tl.load(weights + tl.program_id(0))).to(DTYPE)
        output = request * (B_CHUNKS * W) + chunk * W + inside
        tl.store(b + output[None, :] * TOTAL + member * RANK + r[:, None], tile)


class Merged:
    """One adapter per request, of rank R * members, in the layout of SGLang's csgmv backend; a layer at a time.

    The buffers are those of one layer of the model, since the next layer's copy may overwrite them.
    """

    def __init__(self, world: KernelWorld, rows: Mapping[Place, Rows], mixes: Mixes, rank: int) -> None:
        self.world, self.rank = world, rank
        self.bs, self.members = len(mixes), len(mixes[0])
        self.adapters, self.weights = _flatten(world, mixes)
        size = world.pool.planes[0].element_size() * world.width
        self.addresses = {
            key: tuple(world.pool.pointers[planes] + slots * size for planes, slots in (found.a, found.b))
            for key, found in rows.items()
        }
        total = rank * self.members
        options: dict[str, Any] = {"dtype": world.dtype, "device": world.device}
        self.a = [torch.empty(self.bs, len(layer.modules) * total, layer.d_in, **options) for layer in world.shape]
        self.b = [torch.empty(self.bs, sum(layer.widths), total, **options) for layer in world.shape]

    def copy(self, number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Gather, weigh and concatenate: one launch."""
        layer, width = self.world.shape[index], self.world.width
        a_rows, b_rows = self.addresses[number, index]
        a_chunks, b_chunks = layer.d_in // width, sum(layer.widths) // width
        block = min(width, 512)
        grid = (self.bs * self.members, (len(layer.modules) * a_chunks + b_chunks) * (width // block))
        _merge_kernel[grid](
            self.a[index], self.b[index], a_rows, b_rows, self.adapters, self.weights, MEMBERS=self.members,
            MODULES=len(layer.modules), RANK=self.rank, A_CHUNKS=a_chunks, B_CHUNKS=b_chunks, W=width, BLOCK=block,
        )  # fmt: skip

    def sgmv(self) -> Operator:
        """SGLang's kernels as ChunkedSgmvLoRABackend and its layers call them (0.5.23: srt/lora/backend/chunked_backend.py)."""
        from sglang.kernels.ops.lora.dense.chunked_sgmv_expand import chunked_sgmv_lora_expand_forward
        from sglang.kernels.ops.lora.dense.chunked_sgmv_shrink import chunked_sgmv_lora_shrink_forward
        from sglang.srt.lora.utils import LoRABatchInfo

        numbers = torch.arange(self.bs + 1, dtype=torch.int32, device=self.world.device)
        batch = LoRABatchInfo(
            use_cuda_graph=False,  # only says that there are more segments than used: here there are not
            bs=self.bs,
            num_segments=self.bs,
            seg_indptr=numbers,
            weight_indices=numbers[:-1],
            lora_ranks=torch.full_like(numbers[:-1], self.rank * self.members),
            scalings=torch.ones(self.bs, dtype=torch.float32, device=self.world.device),
            max_len=CHUNK,
            seg_lens=None,
            permutation=numbers[:-1],
        )
        offsets_cpu = [torch.tensor([*layer.offsets, sum(layer.widths)], dtype=torch.int32) for layer in self.world.shape]
        offsets = [offset.to(self.world.device) for offset in offsets_cpu]

        def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
            layer = self.world.shape[index]
            z = chunked_sgmv_lora_shrink_forward(
                x=x, weights=self.a[index], batch_info=batch, num_slices=len(layer.modules)
            )
            chunked_sgmv_lora_expand_forward(
                x=z,
                weights=self.b[index],
                batch_info=batch,
                slice_offsets=offsets[index],
                slice_offsets_cpu=offsets_cpu[index],
                max_slice_size=max(layer.widths),
                base_output=y,
            )

        return apply


def both(first: Operator, second: Operator) -> Operator:
    def apply(number: int, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        first(number, index, x, y)
        second(number, index, x, y)

    return apply
