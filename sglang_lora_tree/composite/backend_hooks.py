"""The LoRA backend ``lora_tree``: base output plus every member's contribution, straight from the pool's slots.

Replaces, through ``sglang.srt.lora.backend.lora_registry.register_lora_backend``, SGLang's segment kernels (one adapter per
request, weights in buffers of their own) by ``kernels`` (pairs of token and adapter, weights in token slots).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import LORA_SUPPORTED_BACKENDS, register_lora_backend

from sglang_lora_tree.adapters.base_shape import MODULES
from sglang_lora_tree.kernels import dispatch
from sglang_lora_tree.kernels.lora import (
    Shrunk,
    add_and_activate,
    add_and_normalize,
    add_and_rotate,
    expand,
    expand_and_activate,
    expand_and_rotate,
    expand_delta,
    overlaps,
    shrink,
)
from sglang_lora_tree.kernels.pairs import Members, Pairs
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.rotation import Rotation
from sglang_lora_tree.kernels.table import AdapterTable

if TYPE_CHECKING:
    from sglang_lora_tree.composite.layer_wait_hooks import LayerWait

BACKEND_NAME = "lora_tree"
FUSED_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""SGLang's linear layers and the modules of a PEFT adapter that they hold."""

PREFILL_GRAPH_ITEMS = 2048
"""Most items (`Pairs`) of a batch that replays a prefill graph: its graphs share scratch space for so many, 70 MB for the
shape of an 8B model. A full batch of 8,192 tokens in mixes of three adapters of rank 16 has about 500."""


@dataclass(frozen=True)
class ModuleGroup:
    """Stands where SGLang's layers keep their LoRA weights: which layer and modules to look up.

    ``shape`` answers what ``sglang.srt.lora.layers`` asks of a weight tensor (``set_lora_info``): A is (1, slices, d_in), B
    is (1, outputs, 1), as if every rank were 1.
    """

    layer: int
    modules: tuple[int, ...]
    shape: tuple[int, int, int]
    device: torch.device
    finished_later: bool = False
    """The output goes to one operation and nowhere else (SiluAndMul, the rotary embedding, a norm): that adds the adapters'
    part (finish_hooks.py)."""

    @classmethod
    def of(
        cls, fused: str, layer: int, num_outputs: int, device: torch.device, finished_later: bool = False
    ) -> tuple[ModuleGroup, ModuleGroup]:
        modules = tuple(MODULES.index(name) for name in FUSED_MODULES[fused])
        return (
            cls(layer, modules, (1, len(modules), 1), device, finished_later),
            cls(layer, modules, (1, num_outputs, 1), device, finished_later),
        )


@dataclass(frozen=True)
class Unfinished:
    """A linear layer's output without its adapters' part, until the operation that adds it.

    y: the output. offsets: where the modules' columns start. delta: the part, if it was computed beside the product.
    """

    y: torch.Tensor
    shrunk: Shrunk
    offsets: tuple[int, ...]
    delta: torch.Tensor | None


Operands = tuple[Shrunk, torch.Tensor, AdapterTable, PoolView, Pairs]
"""What `expand` and its like take first."""


@dataclass
class Batch:
    """The batch that the layers are about to compute; they call the backend if it is active, or a graph is captured
    (seam: ``BaseLayerWithLoRA.lora_active``)."""

    pairs: Pairs
    has_active_lora: bool
    """Whether any request has an adapter."""


class LoraTreeBackend(BaseLoRABackend):
    """See the module's docstring. ``attach`` gives it the pool once SGLang has built it."""

    name = BACKEND_NAME
    skip_inactive_dense_lora = True
    """SGLang captures a second decode graph without our launches, and replays it for batches of base requests alone."""
    supports_prefill_cuda_graph = True
    """Breakable ones: `TreeLoRAManager.supports_prefill_cuda_graph`."""

    def __init__(self, max_loras_per_batch: int, device: torch.device, server_args: Any = None) -> None:
        super().__init__(max_loras_per_batch, device)
        global _current
        _current = self
        self.table: AdapterTable | None = None
        self.pool: PoolView | None = None
        self.max_members = 1
        self.layer_wait: LayerWait | None = None
        """What the forward pass under way waits for, if adapters come in with it."""
        self._unfinished: Unfinished | None = None
        self._side_stream: torch.cuda.Stream | None = None
        self._eager: dict[int, Pairs] = {}  # by lanes per tile
        self._decode_graph: Pairs | None = None
        self._decode_graph_size: tuple[int, int] | None = None
        self._prefill_graphs: dict[dispatch.Config, Pairs] = {}

    def attach(self, pool: PoolView, table: AdapterTable, max_members: int) -> None:
        """Give the backend the pool and the table that kernels read."""
        self.pool, self.table, self.max_members = pool, table, max_members
        self._eager, self._decode_graph, self._prefill_graphs = {}, None, {}

    # ---- Batches ----

    def prepare(
        self,
        seg_lens: Sequence[int],
        members: Sequence[Members],
        use_decode_graph: bool,
        use_prefill_graph: bool = False,
        layer_wait: LayerWait | None = None,
    ) -> None:
        """Describe the next forward pass.

        Args:
            seg_lens: tokens of each request.
            members: (adapter number, weight) pairs of each request; empty for the base model.
            use_decode_graph: update the tensors that captured decode graphs read, in place.
            use_prefill_graph: the same for prefill graphs; only if `fits_prefill_graph`.
            layer_wait: of the adapters that come in with the batch.
        """
        assert not (use_decode_graph and use_prefill_graph), "a forward pass replays one graph"
        assert self.table is not None, "a forward pass before the pool is attached"
        self.table.flush()
        if use_decode_graph:
            pairs = self._decode_graph_pairs()
        elif use_prefill_graph:
            pairs = self._prefill_graph_pairs(sum(seg_lens))
        else:
            pairs = self._eager_pairs(len(seg_lens), sum(seg_lens))
        pairs.update(seg_lens, members)
        self.batch_info = Batch(pairs, has_active_lora=any(len(mix) for mix in members))  # type: ignore[assignment]
        self.layer_wait = layer_wait
        if layer_wait is not None:
            layer_wait.wait(0)

    def init_decode_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        assert num_tokens_per_req == 1, "speculative decoding is refused at start"
        self._decode_graph_size = (max_bs_in_cuda_graph, max_bs_in_cuda_graph * num_tokens_per_req)

    def _decode_graph_pairs(self) -> Pairs:
        assert self._decode_graph_size is not None, "a decode graph without init_decode_cuda_graph_batch_info"
        if self._decode_graph is None:
            assert self.table is not None
            self._decode_graph = Pairs.allocate(self.table, *self._decode_graph_size, self.max_members, for_graphs=True)
        return self._decode_graph

    def init_prefill_cuda_graph_batch_info(self, max_num_tokens: int, max_num_requests: int | None = None) -> None:
        self.prefill_cuda_graph_max_tokens = max_num_tokens
        self.prefill_cuda_graph_max_bs = min(max_num_tokens, max_num_requests or max_num_tokens)

    def fits_prefill_graph(self, seg_lens: Sequence[int], members: Sequence[Members], graph_tokens: int) -> bool:
        """Whether a batch may replay the prefill graph that was captured for `graph_tokens` tokens.

        Not if the graph would compute it in another order than without a graph, nor if it has too many items.
        """
        num_tokens = sum(seg_lens)
        if dispatch.choose(num_tokens, self.device) != dispatch.choose(graph_tokens, self.device):
            return False
        return self._prefill_graph_pairs(num_tokens).fits(seg_lens, members)

    def _prefill_graph_pairs(self, num_tokens: int) -> Pairs:
        """What all graphs of one dispatch config read: they differ in how many of its tiles they look at."""
        assert self.prefill_cuda_graph_max_bs is not None and self.prefill_cuda_graph_max_tokens is not None, (
            "a prefill graph without init_prefill_cuda_graph_batch_info"
        )
        config = dispatch.choose(num_tokens, self.device)
        if config not in self._prefill_graphs:
            assert self.table is not None
            max_tokens = min(config.max_tokens, self.prefill_cuda_graph_max_tokens)
            self._prefill_graphs[config] = Pairs.allocate(
                self.table,
                min(self.prefill_cuda_graph_max_bs, max_tokens),
                max_tokens,
                self.max_members,
                config.block_t,
                for_graphs=True,
                max_items=PREFILL_GRAPH_ITEMS,
            )
        return self._prefill_graphs[config]

    def _eager_pairs(self, bs: int, num_tokens: int) -> Pairs:
        assert self.table is not None
        block_t = dispatch.choose(num_tokens, self.device).block_t
        pairs = self._eager.get(block_t)
        if pairs is None or pairs.max_bs < bs or pairs.max_tokens < num_tokens:
            old = (0, 0) if pairs is None else (pairs.max_bs, pairs.max_tokens)
            sizes = [max(have, 1 << max(need - 1, 0).bit_length()) for have, need in zip(old, (bs, num_tokens), strict=True)]
            pairs = self._eager[block_t] = Pairs.allocate(self.table, sizes[0], sizes[1], self.max_members, block_t)
        return pairs

    # ---- Layers (seam: BaseLoRABackend.forward_with_base, the one entry of every linear layer) ----

    def forward_with_base(
        self,
        layer: Any,
        x: torch.Tensor,
        base_fn: Callable[[], torch.Tensor],
        lora_a: ModuleGroup,
        lora_b: ModuleGroup,
        output_offset: torch.Tensor,
        offsets: Sequence[int],
        *,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        kind: str = "linear",
        pruned_batch_info: Any = None,
    ) -> torch.Tensor:
        """y = base(x) + delta(x); with ``all_reduce`` (row-parallel layers) x, y and z are this rank's part of a sum."""
        batch: Batch = self.batch_info  # type: ignore[assignment]
        assert self.table is not None and self.pool is not None
        left = self._unfinished
        assert left is None, (
            f"nothing has finished the output of {', '.join(MODULES[module] for module in left.shrunk.modules)} in layer "
            f"{left.shrunk.layer}, and answers would be wrong: start with join_operations false"
        )
        if not (batch.has_active_lora or batch.pairs.for_graphs):  # SGLang's warm-up while it captures
            y = base_fn()
            return y if all_reduce is None else all_reduce(y)
        operands = self.table, self.pool, batch.pairs
        widths = tuple(end - start for start, end in pairwise(offsets))
        starts = tuple(offsets[:-1])
        later = lora_a.finished_later and all_reduce is None
        delta: torch.Tensor | None = None
        if overlaps(x):
            # z and delta are freed on the side stream, which waits for this one before it reuses the memory.
            main = torch.cuda.current_stream()
            if self._side_stream is None or self._side_stream == main:  # torch hands out 32 streams in turns
                self._side_stream = torch.cuda.Stream()
            side = self._side_stream
            side.wait_stream(main)
            with torch.cuda.stream(side):
                shrunk = shrink(x, *operands, lora_a.layer, lora_a.modules, widths)
                if later:
                    delta = expand_delta(shrunk, *operands, len(x), starts)
            y = base_fn()
            main.wait_stream(side)
        else:
            shrunk = shrink(x, *operands, lora_a.layer, lora_a.modules, widths)
            if later and not x.is_cuda:
                delta = expand_delta(shrunk, *operands, len(x), starts)
            y = base_fn()
            # For many tokens expand does, without a delta, what is next to q, k, v and to gate, up.
            later = later and (delta is not None or len(lora_a.modules) > 1)
        if later:
            self._unfinished = Unfinished(y, shrunk, starts, delta)
            return y
        expand(shrunk, y, *operands, starts)
        return y if all_reduce is None else all_reduce(y)

    def _take_unfinished(self, y: torch.Tensor, num_modules: int) -> tuple[Unfinished, Operands] | None:
        """What ``forward_with_base`` has left of the output that y is or starts, and the operands of `expand`; once."""
        unfinished = self._unfinished
        if unfinished is None or unfinished.y.data_ptr() != y.data_ptr() or len(unfinished.offsets) != num_modules:
            return None
        self._unfinished = None
        batch: Batch = self.batch_info  # type: ignore[assignment]
        assert self.table is not None and self.pool is not None
        return unfinished, (unfinished.shrunk, unfinished.y, self.table, self.pool, batch.pairs)

    def activate(self, y: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up of an output that ``forward_with_base`` has left unfinished; None if y is not one."""
        taken = self._take_unfinished(y, 2)
        if taken is None:
            return None
        unfinished, operands = taken
        return expand_and_activate(*operands) if unfinished.delta is None else add_and_activate(y, unfinished.delta)

    def rotate(self, q: torch.Tensor, rotation: Rotation | None) -> bool:
        """Finish the output that ``forward_with_base`` has left unfinished and whose first columns are q.

        Args:
            q: (T, width), a view.
            rotation: of the output's q and k; None to leave that to the caller.

        Returns:
            Whether q and k are rotated now.
        """
        taken = self._take_unfinished(q, 3)
        if taken is None:
            return False
        unfinished, operands = taken
        if rotation is None:
            expand(*operands, unfinished.offsets)
        elif unfinished.delta is None:
            expand_and_rotate(*operands, unfinished.offsets, rotation)
        else:
            add_and_rotate(unfinished.y, unfinished.delta, rotation, unfinished.offsets[2])
        return rotation is not None

    def normalize(self, y: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> bool:
        """Finish the output that ``forward_with_base`` has left unfinished and that y is.

        Args:
            residual: what y is added to and normalised with, in place; None to leave that to the caller.

        Returns:
            Whether that is done now.
        """
        taken = self._take_unfinished(y, 1)
        if taken is None:
            return False
        unfinished, operands = taken
        if residual is None:
            expand(*operands, unfinished.offsets)
        else:
            add_and_normalize(unfinished.y, unfinished.delta, residual, weight, epsilon)
        return residual is not None


_current: LoraTreeBackend | None = None


def current() -> LoraTreeBackend | None:
    """This process's backend, once SGLang has built it."""
    return _current


def register() -> None:
    """Make the backend known to SGLang; safe to call again."""
    if BACKEND_NAME not in LORA_SUPPORTED_BACKENDS:
        register_lora_backend(BACKEND_NAME)(lambda: LoraTreeBackend)
