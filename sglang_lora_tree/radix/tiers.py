"""Where every adapter of one scheduler process is (disk, host memory, GPU), what it takes there, and the steps between.

Nothing here waits: files are read by ``disk_reader``, rows travel by HiCache. Who may have an adapter brought in, and when, is
decided by ``residency`` for requests and by ``pins`` for pinned adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sglang_lora_tree.config import Settings
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.adapter_files import AdapterFiles, LocalFiles, RemoteFiles
from sglang_lora_tree.radix.disk_reader import DiskReader
from sglang_lora_tree.radix.layout import AdapterLayout, Outline, Packer
from sglang_lora_tree.radix.store import AdapterStore, StoredAdapter

if TYPE_CHECKING:
    from sglang_lora_tree.radix.cache_hooks import LoraTreeCache
    from sglang_lora_tree.radix.lora_node_hooks import LoraNode


@dataclass(frozen=True)
class Demand:
    """What a request needs on the GPU: the node its KV hangs under, and the adapters that node depends on."""

    identity: str
    members: tuple[str, ...]

    @cached_property
    def is_mix(self) -> bool:
        return self.members != (self.identity,)


@dataclass
class Counters:
    """What happened since start; read by ``observability``."""

    adapter_hits: int = 0
    adapter_misses: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    failed_reads: int = 0
    swap_ins: int = 0
    swap_in_slots: int = 0
    swap_outs: int = 0
    swap_out_slots: int = 0
    cold_starts: int = 0
    cold_start_seconds: float = 0.0
    """From a request's first look at an absent adapter to the pass that finds it ready; for metrics only."""


class Tiers:
    """The three tiers.

    Args:
        cache: SGLang's prefix cache over the LoRA tree.
        store: registered adapters.
        packer: rows of this rank's pool.
        table: where kernels look adapters up; kept in step with what is on the GPU.
        settings: of ``--lora-tree``.
    """

    def __init__(
        self, cache: LoraTreeCache, store: AdapterStore, packer: Packer, table: AdapterTable, settings: Settings
    ) -> None:
        self.cache = cache
        self.core = cache.tree_core
        self.store = store
        self.packer = packer
        self.table = table
        self.settings = settings
        self.counters = Counters()
        self.reader = DiskReader(max(settings.disk_readers, 1), cache.agree)
        self.files: AdapterFiles = RemoteFiles(settings.disk_readers) if settings.disk_readers else LocalFiles()
        self.on_read_failed: Callable[[StoredAdapter, str], None] = lambda stored, error: None
        """Told why an adapter that is still registered could not be read."""
        self.version = 0
        """Another one whenever other adapters are on the GPU."""
        self._layouts: dict[str, AdapterLayout] = {}
        self._indices: dict[str, int] = {}
        self._free_indices = list(range(table.capacity - 1, -1, -1))
        self._reading: set[str] = set()
        cache.delay_loads = settings.delay_loads
        self.core.listener.on_resident = self._on_resident
        self.core.listener.on_evicted = self._on_evicted
        self.core.listener.on_removed = self._on_removed

    # ---- Registration ----

    def check_fits(self, outline: Outline, name: str) -> AdapterLayout:
        """Plan an adapter's rows; ValueError if it could never be served here."""
        layout = self.packer.plan(outline)
        rank = int(outline.rank.max())
        if rank > self.table.max_rank:
            raise ValueError(
                f"adapter {name}: rank {rank} is above the largest rank served, {self.table.max_rank}: start with "
                f'--lora-tree \'{{"max_rank": {rank}}}\''
            )
        for limit, where, cure in (
            (self.max_adapter_slots, "GPU pool", "raise --max-total-tokens or --mem-fraction-static"),
            (self.cache.host_pool.size, "host pool", "raise --hicache-size or --hicache-ratio"),
        ):
            if layout.num_slots > limit:
                raise ValueError(
                    f"adapter {name} takes {layout.num_slots} slots and could never fit the {where}, which has room for "
                    f"{limit}: {cure}, or compress the adapter"
                )
        return layout

    @property
    def max_adapter_slots(self) -> int:
        """Slots that adapters of one request may take: all but a page for its first token."""
        return self.cache.num_pool_slots - self.cache.page_size

    def note_registered(self, stored: StoredAdapter) -> None:
        """A name was added to the store: its history KV, if any is left, counts again."""
        self._layouts[stored.identity] = self.packer.plan(stored.outline)
        self._refresh_registered(stored.identity)

    def note_unregistered(self, stored: StoredAdapter) -> None:
        """A name was removed: an adapter without names, and KV of it, is the first to leave from now on."""
        self._refresh_registered(stored.identity)
        self._forget_unknown(stored.identity)

    def _forget_unknown(self, identity: str) -> None:
        """Drop the layout of an adapter that neither a name nor the tree knows any more."""
        if identity not in self.core.lora_nodes and self.store.get(identity) is None:
            self._layouts.pop(identity, None)

    def _refresh_registered(self, identity: str) -> None:
        self.core.set_registered(identity, self.store.get(identity) is not None)
        for mix in self.core.mixes_of(identity):
            self.core.set_registered(mix.identity, all(self.store.get(name) is not None for name in mix.members))

    # ---- What is where, and how large ----

    def slots_of(self, demand: Demand) -> int:
        """Slots that a request's adapters (and its mix node) take on the GPU, besides its tokens."""
        slots = sum(self._layouts[member].num_slots for member in demand.members)
        return slots + (self.cache.page_size if demand.is_mix else 0)

    def slots_of_adapter(self, identity: str) -> int:
        """Slots that one adapter takes."""
        return self._layouts[identity].num_slots

    def tier_of(self, identity: str) -> str:
        """Where an adapter is: "gpu", "loading", "host" or "disk"."""
        lora_node = self.core.lora_nodes.get(identity)
        if lora_node is None:
            return "disk"
        if not lora_node.is_resident:
            return "host"
        return "gpu" if self.cache.is_loaded(lora_node) else "loading"

    def is_whole(self, identity: str) -> bool:
        """Whether forward passes find every row of an adapter that is on the GPU: those before have waited for the last."""
        lora_node = self.core.lora_nodes[identity]
        return self.cache.is_loaded(lora_node) or self.cache.is_awaited(lora_node)

    @property
    def coming(self) -> list[AdapterLayout]:
        """Adapters that come in with the batch that SGLang has formed last."""
        return [self._layouts[lora_node.identity] for lora_node in self.cache.coming]

    @property
    def resident(self) -> Container[str]:
        """Identities of adapters on the GPU, or on their way there."""
        return self._indices

    @property
    def num_resident(self) -> int:
        """Adapters on the GPU."""
        return len(self._indices)

    @property
    def slots_being_read(self) -> int:
        """Host slots that reader threads are filling; no node owns them yet."""
        # An adapter that was unloaded while it is read has no layout any more.
        return sum(self._layouts[identity].num_slots for identity in self._reading if identity in self._layouts)

    def index_of(self, identity: str) -> int:
        """The kernels' number of an adapter on the GPU."""
        return self._indices[identity]

    def is_reading(self, identity: str) -> bool:
        """Whether an adapter's file is being read."""
        return identity in self._reading

    # ---- Steps towards the GPU ----

    def start_reading(self, identity: str) -> bool:
        """Start reading an adapter's file into host memory; False if that has no room."""
        stored = self.store.get(identity)
        assert stored is not None, f"{identity} is wanted and not registered"
        # The name may be gone, or another may have come, when the thread gets to it.
        layout, paths = self._layouts[identity], stored.paths
        slots = self.cache.allocate_host(layout.num_slots)
        if slots is None:
            return False
        self._reading.add(identity)
        self.reader.submit(
            lambda: self._read(stored, paths, layout, slots),
            on_done=lambda outcome: self._on_read(stored, slots, *outcome),
            on_failed=lambda error: self._on_read_failed(identity, paths, slots, error),
        )
        return True

    def _read(
        self, stored: StoredAdapter, paths: list[str], layout: AdapterLayout, slots: torch.Tensor
    ) -> tuple[int, float]:
        """In a thread: file -> rows in host memory. Returns bytes and seconds, for metrics."""
        start = time.monotonic()
        rows, num_bytes = self.files.rows(paths, stored.name, stored.outline.digest, self.packer, self.cache.pool.dtype)
        assert len(rows) == layout.num_slots * self.packer.pool.num_planes, "the rows are not those that were planned"
        self.packer.scatter(rows, *self.cache.host_rows(), slots)
        return num_bytes, time.monotonic() - start

    def _on_read(self, stored: StoredAdapter, slots: torch.Tensor, num_bytes: int, seconds: float) -> None:
        self._reading.discard(stored.identity)
        self.counters.reads += 1
        self.counters.read_bytes += num_bytes
        self.counters.read_seconds += seconds
        if self.store.get(stored.identity) is None:
            self.cache.free_host(slots)  # unloaded meanwhile
            return
        self.core.add_adapter(stored.identity, slots)

    def _on_read_failed(self, identity: str, paths: list[str], slots: torch.Tensor, error: str) -> None:
        self._reading.discard(identity)
        self.cache.free_host(slots)
        self.counters.failed_reads += 1
        stored = self.store.get(identity)
        if stored is not None and stored.paths == paths:  # else nobody wants it, or there is another file to try
            self.on_read_failed(stored, error)

    def start_swap_in(self, lora_node: LoraNode) -> bool:
        """Queue the copy of an adapter in host memory to the GPU; False if that has no room, even after eviction."""
        if not self.cache.start_swap_in(lora_node):
            return False
        self.counters.swap_ins += 1
        self.counters.swap_in_slots += self._layouts[lora_node.identity].num_slots
        return True

    # ---- The kernels' table follows ----

    @property
    def has_free_index(self) -> bool:
        """Whether the table has room for one more adapter."""
        return bool(self._free_indices)

    def ensure_indices(self, count: int) -> bool:
        """Make room in the table, which holds fewer adapters than a large pool could."""
        unlocked = sum(not self.core.lora_nodes[identity].is_locked for identity in self._indices)
        if len(self._free_indices) + unlocked < count:
            return False  # evicting would cost history KV and bring nobody in
        while len(self._free_indices) < count:
            victim = self.core.least_valuable(self._indices)
            assert victim is not None, "an adapter came into use by the eviction of another"
            self.cache.evict_adapter(victim)
        return True

    def _on_resident(self, lora_node: LoraNode) -> None:
        if lora_node.is_mix:
            return
        outline = self._outline(lora_node.identity)
        index = self._free_indices.pop()
        self._indices[lora_node.identity] = index
        self.version += 1
        assert lora_node.device_slots is not None
        self.table.write(
            index,
            lora_node.device_slots,
            torch.from_numpy(self._layouts[lora_node.identity].row_start),
            torch.from_numpy(outline.rank),
            torch.from_numpy(outline.scaling),
        )

    def _on_evicted(self, lora_node: LoraNode) -> None:
        if lora_node.is_mix:
            return
        index = self._indices.pop(lora_node.identity)
        self.version += 1
        self._free_indices.append(index)
        self.table.clear(index)
        self.counters.swap_outs += 1
        assert lora_node.device_slots is not None
        self.counters.swap_out_slots += len(lora_node.device_slots)
        self.cache.evicted_adapter_slots += len(lora_node.device_slots)

    def _on_removed(self, lora_node: LoraNode) -> None:
        if not lora_node.is_mix:
            self._forget_unknown(lora_node.identity)

    def _outline(self, identity: str) -> Outline:
        stored = self.store.get(identity)
        assert stored is not None, f"{identity} comes to the GPU without being registered"
        return stored.outline

    def forget_everything(self) -> None:
        """A flush: the tree and both pools are empty. Names stay; adapters come back from their files on next use."""
        self.reader.drain()
        self._reading.clear()
        for index in self._indices.values():
            self.table.clear(index)
            self._free_indices.append(index)
        self._indices.clear()
        self.version += 1
        for identity in list(self._layouts):
            self._forget_unknown(identity)
