"""SGLang's LoRA manager without LoRA buffers: adapters are registered here and live in the pool.

Replaces ``sglang.srt.lora.lora_manager.LoRAManager`` by :class:`TreeLoRAManager` (hook on
``sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager``). SGLang's layer wrappers stay; what they take for
weights is a :class:`~sglang_lora_tree.composite.backend_hooks.ModuleGroup`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel, get_serving

from sglang_lora_tree.adapters.base_shape import BaseShape
from sglang_lora_tree.composite.backend_hooks import FUSED_MODULES, LoraTreeBackend, ModuleGroup
from sglang_lora_tree.composite.demand import DemandResolver
from sglang_lora_tree.composite.finish_hooks import finishes_later
from sglang_lora_tree.composite.layer_wait_hooks import LayerWait, is_hooked
from sglang_lora_tree.config import Settings, current_settings
from sglang_lora_tree.kernels.pool import PoolView
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.adapter_files import LocalFiles, RemoteFiles
from sglang_lora_tree.radix.agreement import find_same
from sglang_lora_tree.radix.cache_hooks import LoraTreeCache, check_kv_pool
from sglang_lora_tree.radix.layout import Outline, Packer, Shard
from sglang_lora_tree.radix.leftovers import remove_all_leftovers
from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.radix.store import AdapterStore, Registration

logger = logging.getLogger(__name__)

Reply = Callable[[LoRAUpdateOutput], None]

FROM_TENSORS = "__tensor__"
"""The path that SGLang gives adapters that came as tensors, also when it asks for one again that it has evicted."""


MOST_MEMBERS = 4096
"""Mixes that are kept as the kernels take them; more than a batch has."""

MOST_CHARACTERS = 256
"""Of an adapter's name, which stands in messages and metrics."""


class TreeLoRAManager(LoRAManager):
    """Registers adapters, wraps layers, and turns batches into pairs. One per scheduler process."""

    lora_backend: LoraTreeBackend

    def init_state(
        self,
        max_lora_rank: int | None = None,
        target_modules: Iterable[str] | None = None,
        lora_paths: list[LoRARef] | None = None,
    ) -> None:
        """Wrap the model's layers and validate ``--lora-paths``; the pool comes later (:meth:`attach_cache`).

        Raises:
            RuntimeError: an adapter of ``--lora-paths`` is refused (the server does not start).
        """
        settings = current_settings()
        assert settings is not None, "TreeLoRAManager without --lora-tree"
        self.settings: Settings = settings
        self.base = BaseShape.from_hf_config(self.base_hf_config.to_dict())
        self.store = AdapterStore(settings.spool_dir)
        self.resolver = DemandResolver(self.store)
        self.residency: Residency | None = None
        self.model_runner: Any = None  # set by build_manager
        self.memory_pool = None  # what SGLang's metrics take for "no LoRA buffers"
        self.target_modules = set(FUSED_MODULES)
        self.max_lora_rank = settings.max_rank
        self._members_of: dict[str, np.ndarray] = {}  # by identity, while the table has this version
        self._members_version = -1
        self.init_lora_modules()
        self._set_module_groups()
        for ref in lora_paths or ():
            self._register_at_start(ref)

    def _set_module_groups(self) -> None:
        joined = 0
        for layers in self.lora_modules:
            for name, module in layers.items():
                fused = name.rpartition(".")[2]
                layer = get_layer_id(name)
                assert layer is not None and fused in FUSED_MODULES, f"unexpected LoRA layer {name}"
                base = module.base_layer
                outputs = sum(getattr(base, "output_partition_sizes", None) or (base.output_size,))
                later = finishes_later(self.base_model, name)
                joined += later
                module.set_lora_info(*ModuleGroup.of(fused, layer, outputs, self.device, later))
        if self.settings.join_operations:
            logger.info("join_operations: %d of %d linear layers", joined, sum(map(len, self.lora_modules)))

    def _register_at_start(self, ref: LoRARef) -> None:
        name, path = str(ref.lora_name), str(ref.lora_path)
        try:
            check_name(name, get_serving().served_model_name)
            folder = find_folder(path)
            outline = LocalFiles().outline(folder, name, self.base)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"--lora-paths {name}={path}: {error}") from error
        self._add(Registration(ref.lora_id, name, folder, bool(ref.pinned)), outline)

    def attach_pool(self) -> AdapterTable:
        """Give the backend the KV pool and the table. SGLang captures decode graphs before it builds the tree, so this comes
        with the first forward pass, and the tree finds it done."""
        if self.lora_backend.table is None:
            kv_pool = self.model_runner.token_to_kv_pool
            check_kv_pool(kv_pool)
            num_slots = self.model_runner.token_to_kv_pool_allocator.size
            table = AdapterTable(
                capacity=min(self.settings.max_resident_adapters, num_slots),
                slot_capacity=num_slots,
                num_layers=self.base.num_layers,
                max_rank=self.settings.max_rank,
                device=self.device,
            )
            pool = PoolView.from_kv(kv_pool.k_buffer, kv_pool.v_buffer)
            self.lora_backend.attach(pool, table, self.settings.max_members)
        assert self.lora_backend.table is not None
        return self.lora_backend.table

    def attach_cache(self, cache: LoraTreeCache) -> None:
        """SGLang has built the pools and the tree: plan every adapter.

        Raises:
            ValueError: an adapter of ``--lora-paths`` could never fit.
        """
        table = self.attach_pool()
        shard = Shard(get_parallel().attn_tp_rank, self.attn_tp_size, self.base.num_kv_heads)
        packer = Packer(self.base, cache.pool_shape, shard)
        self.residency = Residency(cache, self.store, packer, table, self.settings)
        cache.waits_by_layer = is_hooked(self.model_runner.attn_backend)
        remove_all_leftovers(self.settings.spool_dir)  # of servers that were killed: rows are memory, spools may be large
        if isinstance(self.residency.files, RemoteFiles):
            self.residency.files.start()
        everything = hashlib.sha256("".join(stored.outline.digest for stored in self.store).encode()).hexdigest()
        if not all(find_same([int(everything[:15], 16)], cache.agree)):
            raise ValueError("--lora-paths: the ranks read different adapter files: give every node the same ones")
        for stored in self.store:
            self.residency.check_fits(stored.outline, stored.name)
            self.residency.note_registered(stored)

    # ---- Registration while serving ----

    def begin_load(self, ref: LoRARef, reply: Reply) -> None:
        """Register an adapter from a folder; the files are read elsewhere and ``reply`` is called when that is done."""
        if ref.lora_path == FROM_TENSORS:
            self._begin(ref, reply, lambda: self.store.spooled(str(ref.lora_name)))
        else:
            self._begin(ref, reply, lambda: find_folder(str(ref.lora_path)))

    def begin_load_from_tensors(
        self, ref: LoRARef, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], reply: Reply
    ) -> None:
        """Register an adapter that came as tensors: a thread spools it to a folder, and the rest is as above."""
        self._begin(ref, reply, lambda: self.store.spool(ref.lora_id, tensors, config))

    def _begin(self, ref: LoRARef, reply: Reply, find: Callable[[], str]) -> None:
        residency = self._residency()
        name = str(ref.lora_name)
        try:
            check_name(name, get_serving().served_model_name)
        except ValueError as error:
            reply(self._result(str(error)))
            return
        known = next((r.name for s in self.store for r in s.registrations.values() if r.name == name), None)
        if known is not None:
            reply(self._result(f"adapter {name} is loaded already: unload it first, or choose another name"))
            return

        paths: list[str] = []  # where this rank found it: one, or none

        def work() -> tuple[str, Outline]:
            paths.append(find())
            outline = residency.files.outline(paths[0], name, self.base)
            residency.check_fits(outline, name)
            return paths[0], outline

        def on_done(outcome: tuple[str, Outline]) -> None:
            path, outline = outcome
            try:
                self._check_pin(name, outline, bool(ref.pinned))
            except ValueError as error:
                self.store.discard_spooled(path)
                reply(self._result(str(error)))
                return
            self._add(Registration(ref.lora_id, name, path, bool(ref.pinned)), outline)
            reply(self._result())

        def on_failed(error: str) -> None:
            for path in paths:
                self.store.discard_spooled(path)  # also where only another rank has failed
            reply(self._result(error))

        residency.reader.submit(work, on_done, on_failed, fingerprint=lambda outcome: outcome[1].fingerprint)

    def unload(self, ref: LoRARef, for_good: bool) -> LoRAUpdateOutput:
        """Forget a name. SGLang has waited for its requests; slots, host copy and KV are the first to be reclaimed.

        Args:
            ref: the adapter.
            for_good: a user unloads it, perhaps after its eviction; False: max_loaded_loras evicts it until its next use.
        """
        stored = self.store.remove(ref.lora_id)
        if for_good:
            self.store.forget_spooled(str(ref.lora_name))
            if stored is None:
                return self._result()
        if stored is None:
            return self._result(f"adapter {ref.lora_name} is not loaded")
        self.resolver.forget(ref.lora_id)
        self._residency().note_unregistered(stored)
        return self._result()

    def _add(self, registration: Registration, outline: Outline) -> None:
        stored = self.store.add(registration, outline)
        if self.residency is not None:
            self.residency.note_registered(stored)

    def _check_pin(self, name: str, outline: Outline, pinned: bool) -> None:
        residency = self._residency()
        if not pinned:
            return
        slots = residency.packer.plan(outline).num_slots
        free = residency.max_adapter_slots - residency.pinned_slots()
        if slots > free // 2:
            raise ValueError(
                f"adapter {name} cannot be pinned: it takes {slots} slots, and pinned adapters may take half of the "
                f"{free} slots that are not pinned yet; load it unpinned, or raise --max-total-tokens"
            )

    def _residency(self) -> Residency:
        assert self.residency is not None, "the tree is not attached yet"
        return self.residency

    def _result(self, error: str | None = None) -> LoRAUpdateOutput:
        names = {r.name: r.path for stored in self.store for r in stored.registrations.values()}
        return LoRAUpdateOutput(success=error is None, error_message=error or "", loaded_adapters=names)

    # ---- Batches ----

    def fetch_new_loras(self, new_loras: set[str | None], running_loras: set[str | None] = frozenset()) -> None:  # type: ignore[assignment]
        """Nothing to fetch: admission has brought every adapter to the pool before a batch is formed."""

    def prepare_lora_batch(self, forward_batch: ForwardBatch) -> None:
        """Turn a batch's ``lora_ids`` into pairs (seam: ``ForwardBatch.init_new``, and the graph runners)."""
        seg_lens, members = self._segments(forward_batch)
        use_decode_graph = self._use_cuda_graph_batch(forward_batch)
        use_prefill_graph = (
            not use_decode_graph
            and super().can_use_prefill_cuda_graph(forward_batch)
            and self._fits_prefill_graph(seg_lens, members)
        )
        self.lora_backend.prepare(seg_lens, members, use_decode_graph, use_prefill_graph, self._layer_wait(forward_batch))

    def _layer_wait(self, forward_batch: ForwardBatch) -> LayerWait | None:
        """What a prefill waits for while it is computed: the adapters that come in with it."""
        residency = self.residency
        if residency is None or not residency.cache.has_loads_in_flight or not forward_batch.forward_mode.is_extend():
            return None
        for weighted in map(self.resolver.resolve, forward_batch.lora_ids):
            for member in () if weighted is None else weighted.demand.members:
                assert residency.is_whole(member), f"{member} would be computed with while its rows come in unawaited"
        return LayerWait.of(residency.cache.cache_controller.layer_done_counter, residency.coming)

    @property
    def supports_prefill_cuda_graph(self) -> bool:
        """Breakable ones only: attention, outside them, waits for what comes in (``layer_wait_hooks``)."""
        return super().supports_prefill_cuda_graph and check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE)

    def can_use_prefill_cuda_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether a batch may replay a prefill graph; asked before the capture, by us, and by the runner, with one answer."""
        return super().can_use_prefill_cuda_graph(forward_batch) and self._fits_prefill_graph(*self._segments(forward_batch))

    def _fits_prefill_graph(self, seg_lens: list[int], members: list[np.ndarray]) -> bool:
        """Whether our part of a batch may replay the graph that its tokens fall to."""
        num_tokens = sum(seg_lens)
        runner = getattr(self.model_runner, "prefill_cuda_graph_runner", None)  # none while graphs are captured
        sizes = getattr(runner, "capture_num_tokens", None) or ()
        graph_tokens = min((size for size in sizes if size >= num_tokens), default=num_tokens)
        return self.lora_backend.fits_prefill_graph(seg_lens, members, graph_tokens)

    def _segments(self, forward_batch: ForwardBatch) -> tuple[list[int], list[np.ndarray]]:
        """Each request's tokens and mix."""
        if forward_batch.forward_mode.is_extend():
            seg_lens = list(forward_batch.extend_seq_lens_cpu or ())
        else:
            seg_lens = [1] * forward_batch.batch_size
        self.attach_pool()
        members = [self._members(lora_id) for lora_id in forward_batch.lora_ids[: len(seg_lens)]]
        members += [_NO_MEMBERS] * (len(seg_lens) - len(members))
        return seg_lens, members

    def _members(self, lora_id: str | None) -> np.ndarray:
        """A mix as the kernels take it; the same object while nothing has moved in the table."""
        weighted = self.resolver.resolve(lora_id)
        if weighted is None:
            return _NO_MEMBERS
        table, residency = self.attach_pool(), self._residency()
        if self._members_version != table.version or len(self._members_of) > MOST_MEMBERS:
            self._members_of, self._members_version = {}, table.version
        identity = weighted.demand.identity
        members = self._members_of.get(identity)
        if members is None:
            indices = [residency.index_of(member) for member in weighted.demand.members]
            members = self._members_of[identity] = np.column_stack((indices, weighted.weights)).astype(np.float64)
        return members


_NO_MEMBERS = np.empty((0, 2))


def check_name(name: str, base_name: str | None) -> None:
    """ValueError if requests could not name an adapter by this name, or would mean the base model."""
    if not name or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"adapter {name!r}: a name is printable text without spaces at its ends, for requests to write; choose another"
        )
    if len(name) > MOST_CHARACTERS:
        raise ValueError(
            f"adapter {name[:40]!r}...: its name has {len(name)} characters; choose one of {MOST_CHARACTERS} at most"
        )
    if name == base_name:
        raise ValueError(f"adapter {name!r}: this is the name of the base model; choose another")


def find_folder(path: str) -> str:
    """The folder of an adapter: itself, or the local copy of a Hugging Face repository of that name."""
    if Path(path).is_dir():
        return path
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(path, allow_patterns=["adapter_config.json", "adapter_model.*", "added_tokens.json"])
        except Exception as error:
            raise ValueError(f"{path} is neither a folder here nor an adapter on the hub: {error}") from error
    return path


def build_manager(original: Callable[..., None], model_runner: Any) -> None:
    """AROUND ``ModelRunner.init_lora_manager``: ours when ``--lora-tree`` is on."""
    if current_settings() is None:
        original(model_runner)
        return
    import sglang.srt.model_executor.model_runner as module

    stock = module.LoRAManager
    module.LoRAManager = TreeLoRAManager
    try:
        original(model_runner)
    finally:
        module.LoRAManager = stock
    model_runner.lora_manager.model_runner = model_runner


HOOKS: list[tuple[str, Any, HookType]] = [
    ("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", build_manager, HookType.AROUND),
]
