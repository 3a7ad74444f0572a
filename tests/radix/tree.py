"""The real tree without a server or a model: allocator, KV pool, HiCache, store, table and residency of one rank.

Every token's KV is a number made of its namespace and of all tokens up to it, so that any slot of the pool, on the GPU
or in host memory, can be told right or wrong by looking at it: :meth:`Tree.check` does, with every invariant, at any
moment.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from benchmarks.standalone_cache import build_cache
from sglang_lora_tree.adapters.adapter import Adapter, load_adapter
from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, MODULES, BaseShape
from sglang_lora_tree.config import Settings
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.identity import canonical_members, mix_identity, namespace_key
from sglang_lora_tree.radix.layout import Outline, Packer
from sglang_lora_tree.radix.residency import Demand, Residency
from sglang_lora_tree.radix.store import AdapterStore, Registration

BASE = BaseShape.from_hf_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
)
"""W = 2 heads x 4 = 8 elements, 4 planes: an adapter of rank r on everything takes 15 r slots."""


def write_adapter(
    folder: Path,
    rank: int = 1,
    seed: int = 0,
    modules: Sequence[str] = MODULES,
    layers: Sequence[int] | None = None,
    base: BaseShape = BASE,
) -> Path:
    """Write a PEFT folder with random float32 tensors; different seeds are different adapters."""
    random = torch.Generator().manual_seed(seed)
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
    if layers is not None:
        config["layers_to_transform"] = list(layers)
    tensors = {}
    for layer in range(base.num_layers) if layers is None else layers:
        for module in modules:
            d_in, d_out = base.widths[module]
            name = f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, d_in, generator=random)
            tensors[f"{name}.lora_B.weight"] = torch.randn(d_out, rank, generator=random)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def kv_values(key: str | None, tokens: Sequence[int]) -> torch.Tensor:
    """What the KV of each token looks like: float32 (tokens,), never 0, exact."""
    state = zlib.crc32(repr(key).encode())
    values = []
    for token in tokens:
        state = zlib.crc32(token.to_bytes(8, "little", signed=True), state)
        values.append(1 + state % (1 << 20))
    return torch.tensor(values, dtype=torch.float32)


class LazyFuture(Future):
    """Work that is done when somebody waits for it, so that a test says when a read ends and repeats exactly."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)
        return super().exception(timeout)


class LazyExecutor:
    def submit(self, work: Callable[[], Any]) -> LazyFuture:
        return LazyFuture(work)

    def shutdown(self) -> None: ...


class Tree:
    """One rank. Close it, or use it as a context manager."""

    def __init__(
        self,
        pool_slots: int = 200,
        host_slots: int = 400,
        page_size: int = 1,
        settings: Settings | None = None,
        base: BaseShape = BASE,
        eviction_policy: str = "lru",
    ) -> None:
        self.base = base
        self.page_size = page_size
        self.settings = dataclasses.replace(settings or Settings(), disk_readers=0)
        self.cache = build_cache(
            pool_slots,
            host_slots,
            num_layers=base.num_layers,
            num_kv_heads=base.num_kv_heads,
            head_dim=base.head_dim,
            page_size=page_size,
            eviction_policy=eviction_policy,
        )
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.core = self.cache.tree_core
        self.store = AdapterStore()
        self.packer = Packer(base, self.cache.pool_shape)
        self.table = AdapterTable(
            capacity=min(self.settings.max_resident_adapters, pool_slots),
            slot_capacity=pool_slots,
            num_layers=base.num_layers,
            max_rank=self.settings.max_rank,
            device="cpu",
        )
        self.residency = Residency(self.cache, self.store, self.packer, self.table, self.settings)
        self.residency.reader._executor.shutdown()
        self.residency.reader._executor = LazyExecutor()
        host = self.cache.host_pool
        self.device_planes = _planes(self.cache.pool.k_buffer, self.cache.pool.v_buffer)
        self.host_planes = _planes(host.k_data_refs, host.v_data_refs)
        self.private: dict[str, list[int]] = {}
        """Slots that running requests own and the tree does not."""
        self.adapters: dict[str, Adapter] = {}
        """Every adapter ever loaded, by identity: what its rows must look like."""

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.residency.reader.drain()
        self.residency.reader._executor.shutdown()

    # ---- Names ----

    def load(self, name: str, path: Path, pinned: bool = False, lora_id: str | None = None) -> str:
        """Register an adapter, as the manager does; returns its identity."""
        adapter = load_adapter(path, self.base, name=name)
        outline = Outline.of(adapter, self.base.num_layers)
        self.residency.check_fits(outline, name)
        stored = self.store.add(Registration(lora_id or name, name, str(path), pinned), outline)
        self.residency.note_registered(stored)
        self.adapters[stored.identity] = adapter
        return stored.identity

    def unload(self, lora_id: str) -> None:
        stored = self.store.remove(lora_id)
        assert stored is not None
        self.residency.note_unregistered(stored)

    def demand(self, weights: Mapping[str, float] | None) -> Demand | None:
        """What a request with these weights, by lora id, needs; None for the base model."""
        if not weights:
            return None
        digests = []
        for lora_id, weight in weights.items():
            stored = self.store.by_id(lora_id)
            assert stored is not None, lora_id
            digests.append((stored.outline.digest, weight))
        pairs = canonical_members(digests)
        identity = mix_identity(pairs)
        return Demand(identity, tuple(f"adapter:{digest}" for digest, _ in pairs)) if pairs else None

    # ---- Requests ----

    def key(self, demand: Demand | None, extra_key: str | None = None) -> str | None:
        return namespace_key("" if demand is None else demand.identity, extra_key)

    def match(self, key: str | None, tokens: Sequence[int]) -> MatchResult:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), key)))

    def matched(self, demand: Demand | None, tokens: Sequence[int], extra_key: str | None = None) -> int:
        """How many tokens of KV a request would find, on the GPU or in host memory."""
        result = self.match(self.key(demand, extra_key), tokens)
        return result.device_prefix_len + result.host_hit_length

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write the KV of tokens, as a forward pass does."""
        for plane in self.device_planes:
            plane[slots] = values[:, None]

    def insert(self, key: str | None, tokens: Sequence[int], slots: torch.Tensor, protected: int = 0) -> int:
        """Put KV under the tree; returns the node at its end. ``protected``: tokens at the front that the tree has."""
        aligned = len(tokens) // self.page_size * self.page_size
        result = self.cache.insert(
            InsertParams(
                key=RadixKey(array("q", tokens[:aligned]), key),
                value=slots[:aligned].clone(),
                prev_prefix_len=protected,
                inserted_len=protected,
            )
        )
        return result.last_device_node

    def add_kv(self, demand: Demand | None, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A whole request at once: match, compute the rest, insert."""
        request = Running(self, "add_kv", demand, list(tokens), extra_key)
        request.start()
        request.finish()

    # ---- Time ----

    def settle(self) -> None:
        """Let every read and copy under way come to its end."""
        while self.residency.reader.num_pending or self.cache.delayed_loads or self.cache.cache_controller.load_queue:
            self.finish_reads()
            self.residency.poll()
            self.cache.submit_loads()
            self.cache.check_hicache_events()
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()  # the first call starts the backups, the second finishes them

    def finish_reads(self) -> None:
        """Have all files read; the next poll takes them in."""
        for job in self.residency.reader.jobs:
            job.future.exception()

    def bring(self, *identities: str) -> None:
        """Have adapters on the GPU, as requests for them would."""
        for identity in identities:
            if identity not in self.core.lora_nodes:
                assert self.residency.start_reading(identity)
                self.finish_reads()
                self.residency.reader.poll()
            lora_node = self.core.lora_nodes[identity]
            if not lora_node.is_resident:
                assert self.residency.ensure_indices(1)
                assert self.cache.start_swap_in(lora_node)
                self.settle()

    def bring_mix(self, demand: Demand) -> None:
        self.bring(*demand.members)
        if demand.is_mix:
            assert self.core.is_resident(demand.identity) or self.residency._make_mix(demand)

    def flush(self) -> None:
        """What SGLang does for /flush_cache."""
        self.cache.reset()
        self.allocator.clear()

    # ---- Checks ----

    def check(self) -> None:
        """Every invariant, and every byte that is said to be in place."""
        self.core.check_invariants()
        assert self.core.count_invalid_kv() == 0
        if not self.cache.ongoing_load_back and not self.cache.ongoing_write_through:
            self.cache.sanity_check()  # SGLang's own; it does not know copies under way
        for mix in self.core.lora_nodes.values():
            if mix.is_resident and mix.is_locked:
                unlocked = [member for member in mix.members if not self.core.lora_nodes[member].is_locked]
                assert not unlocked, f"{mix.identity} is in use, and {unlocked} count as evictable"
        self._check_slots()
        self._check_table()
        self._check_rows()

    def _check_slots(self) -> None:
        cache, page = self.cache, self.page_size
        private = [slot for slots in self.private.values() for slot in slots]
        total = cache.num_free_slots + cache.evictable_size() + cache.protected_size() + len(private)
        assert total == cache.num_pool_slots, f"{total} slots accounted for, of {cache.num_pool_slots}"
        in_tree = [int(slot) for node in self.nodes() for slot in _value(node, "value")]
        free = self.allocator.free_pages.tolist() if page == 1 else self.allocator.get_all_free_pages().tolist()
        if page == 1:
            free += self.allocator.release_pages.tolist()
        else:
            free = [page_id * page + offset for page_id in free for offset in range(page)]
        owners = sorted(in_tree + private + free)
        assert owners == list(range(page, cache.num_pool_slots + page)), "a slot has two owners, or none"
        host = cache.host_pool
        on_host = [int(slot) for node in self.nodes() for slot in _value(node, "host_value")]
        assert len(on_host) == len(set(on_host)), "a host slot has two owners"
        reading = sum(self._rows(name).shape[1] for name in self.residency._reading)
        used = host.size - host.available_size()
        assert used == len(on_host) + reading, f"{used} host slots used, {len(on_host)} in the tree, {reading} read"

    def _check_table(self) -> None:
        residency, table = self.residency, self.table
        resident = {
            identity: node for identity, node in self.core.lora_nodes.items() if node.is_resident and not node.is_mix
        }
        assert residency._indices.keys() == resident.keys(), "the table's adapters are not the residents"
        indices = list(residency._indices.values())
        assert sorted(indices + residency._free_indices) == list(range(table.capacity)), "an index is lost or shared"
        table.flush()
        for identity, index in residency._indices.items():
            first, count = int(table.first_slot[index]), int(table.slot_count[index])
            slots = table.slots[first : first + count]
            assert torch.equal(slots.long(), resident[identity].device_slots), f"{identity}: the table has other slots"
            outline = Outline.of(self.adapters[identity], self.base.num_layers)
            assert torch.equal(table.rank[index], torch.from_numpy(outline.rank))
            assert torch.equal(table.scaling[index], torch.from_numpy(outline.scaling))
            row_start = self.packer.plan(outline).row_start
            assert torch.equal(table.row_start[index], torch.from_numpy(row_start))
        for index in residency._free_indices:
            assert int(table.slot_count[index]) == 0, f"free index {index} still has slots"

    def _check_rows(self) -> None:
        loading = bool(self.cache.cache_controller.load_queue or self.cache.delayed_loads)
        for lora_node in self.core.lora_nodes.values():
            if lora_node.is_mix:
                continue
            expected = self._rows(lora_node.identity)
            if lora_node.host_slots is not None:
                self._compare(self.host_planes, lora_node.host_slots, expected, f"{lora_node.identity} in host memory")
            if lora_node.is_resident and not loading:
                self._compare(self.device_planes, lora_node.device_slots, expected, f"{lora_node.identity} on the GPU")
        for node in self.nodes():
            if self.core.find(node.id) is not None:
                continue
            tokens = list(node.key.raw_token_ids())
            above = node.parent
            while above.parent is not None and self.core.find(above.id) is None:
                tokens = list(above.key.raw_token_ids()) + tokens
                above = above.parent
            expected = kv_values(node.key.extra_key, tokens)[-len(node.key) :]
            if not loading:
                self._compare_kv(self.device_planes, _value(node, "value"), expected, f"KV node {node.id} on the GPU")
            if node.write_through_pending_id is None:
                where = f"KV node {node.id} in host memory"
                self._compare_kv(self.host_planes, _value(node, "host_value"), expected, where)

    def _rows(self, identity: str) -> torch.Tensor:
        """An adapter's planes (2L, n, W)."""
        known = self.__dict__.setdefault("_known_rows", {})
        if identity not in known:
            planes = self.packer.pack(self.adapters[identity], torch.float32)
            planes = planes.view(self.packer.pool.num_planes, -1, self.packer.pool.width)
            known[identity] = planes
        return known[identity]

    @staticmethod
    def _compare(planes: Sequence[torch.Tensor], slots: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        found = torch.stack([plane[slots] for plane in planes])
        assert torch.equal(found, expected), f"wrong rows: {where}"

    @staticmethod
    def _compare_kv(planes: Sequence[torch.Tensor], slots: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        if len(slots) == 0:
            return
        found = torch.stack([plane[slots] for plane in planes])
        assert bool((found == expected[None, :, None]).all()), f"wrong KV: {where}"

    def check_usable(self, demand: Demand | None) -> None:
        """What a request computes with must be in place the moment it runs, not on its way."""
        for identity in () if demand is None else demand.members:
            lora_node = self.core.lora_nodes[identity]
            assert lora_node.is_resident and identity in self.residency._indices, f"{identity} is not on the GPU"
            self._compare(self.device_planes, lora_node.device_slots, self._rows(identity), f"{identity} in use")

    def nodes(self) -> Iterable[Any]:
        return [node for node in self.core._node_arena.values() if node is not self.core.virtual_root]

    def describe(self) -> str:
        """What has slots, for messages."""
        parts = [f"{self.cache.num_free_slots} free", f"private {({k: len(v) for k, v in self.private.items()})}"]
        for node in self.nodes():
            data = node.component_data[ComponentType.FULL]
            lora_node = self.core.find(node.id)
            kind = "kv" if lora_node is None else "mix" if lora_node.is_mix else "adapter"
            slots = f"{len(_value(node, 'value'))}+{len(_value(node, 'host_value'))}"
            loading = " loading" if node.id in self.cache.ongoing_load_back else ""
            parts.append(f"{kind} {node.id} {slots} locks {data.lock_ref},{data.host_lock_ref}{loading}")
        return "; ".join(parts)

    def check_nothing_is_locked(self) -> None:
        for node in self.nodes():
            data = node.component_data[ComponentType.FULL]
            assert data.lock_ref == 0 and data.host_lock_ref == 0, f"node {node.id} is still locked"

    def check_everything_can_go(self) -> None:
        """Evict all, on the GPU and in host memory: nothing may be left that only a restart would free."""
        self.check_nothing_is_locked()
        self.cache.evict_some(self.cache.num_pool_slots)
        assert self.cache.num_free_slots == self.cache.num_pool_slots
        self.cache.evict_host(self.cache.host_pool.size)
        assert self.cache.host_pool.available_size() == self.cache.host_pool.size
        assert not self.core.lora_nodes and not list(self.nodes())


def _planes(keys: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A pool as 2L planes (slots, W): K and V of each layer in turn."""
    return [plane.view(plane.shape[0], -1) for pair in zip(keys, values, strict=True) for plane in pair]


def _value(node: Any, name: str) -> torch.Tensor:
    value = getattr(node.component_data[ComponentType.FULL], name)
    return torch.empty(0, dtype=torch.int64) if value is None else value


@dataclass(eq=False, repr=False)
class Running:
    """A request that has slots: what SGLang's scheduler does with one, call by call."""

    tree: Tree
    id: str
    demand: Demand | None
    tokens: list[int]
    extra_key: str | None = None
    num_new: int = 0
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Of the tokens, in order, with the rest of the last page."""
    protected: int = 0
    """Tokens at the front whose slots the tree owns."""
    prompt: int = 0

    @property
    def key(self) -> str | None:
        return self.tree.key(self.demand, self.extra_key)

    @property
    def remaining(self) -> int:
        return self.num_new - (len(self.tokens) - self.prompt)

    def lock(self, room: int | None = None) -> bool:
        """Match and lock; False (and nothing locked) if the rest and the output do not fit ``room`` slots."""
        tree = self.tree
        result = tree.match(self.key, self.tokens[:-1])
        self._lock(result.last_device_node)
        self.end = result.last_device_node
        page = tree.page_size
        if room is not None:
            room = tree.cache.num_free_slots + tree.cache.evictable_size() - room
            if len(self.tokens) - result.device_prefix_len + max(self.num_new, 0) + page >= room:
                self.unlock()
                return False
        if result.host_hit_length and tree.cache.load_back(result.best_match_node):
            self.unlock()
            self._lock(result.best_match_node)
            self.end = result.best_match_node
        self.slots = tree.cache.path_device_indices(self.end)
        self.protected = len(self.slots)
        return True

    def allocate(self) -> None:
        """Slots for all tokens that the tree does not have, and their KV."""
        tree = self.tree
        tree.check_usable(self.demand)
        missing = round_up(len(self.tokens), tree.page_size) - len(self.slots)
        new = tree.cache.allocate_device(missing)
        assert new is not None, "an admitted request finds no slots"
        tree.private[self.id] = new.tolist()
        self.slots = torch.cat([self.slots, new])
        values = kv_values(self.key, self.tokens)
        tree.fill(self.slots[self.protected : len(self.tokens)], values[self.protected :])

    def start(self) -> None:
        self.prompt = self.prompt or len(self.tokens)
        assert self.lock()
        self.allocate()
        self.tree.cache.submit_loads()

    def append(self, token: int) -> bool:
        """One decode step; False if there is no slot for it."""
        tree = self.tree
        if len(self.tokens) == len(self.slots):
            new = tree.cache.allocate_device(tree.page_size)
            if new is None:
                return False
            self.slots = torch.cat([self.slots, new])
            tree.private[self.id] += new.tolist()
        self.tokens.append(token)
        place = len(self.tokens) - 1
        tree.fill(self.slots[place : place + 1], kv_values(self.key, self.tokens)[place:])
        return True

    def checkpoint(self) -> None:
        """Give the KV so far to the tree and go on (a chunk of a prefill, or the end of one)."""
        tree = self.tree
        aligned = len(self.tokens) // tree.page_size * tree.page_size
        end = tree.insert(self.key, self.tokens, self.slots, self.protected)
        self.slots = torch.cat([tree.cache.path_device_indices(end), self.slots[aligned:]])
        self.unlock()
        self._lock(end)
        self.end = end
        self.protected = aligned
        tree.private[self.id] = self.slots[aligned:].tolist()

    def finish(self) -> None:
        """The tree takes the whole pages, and the request is gone."""
        self.checkpoint()
        self.abort()

    def abort(self) -> None:
        """Be retracted: leave without giving anything to the tree."""
        left = self.slots[self.protected :]
        if len(left):
            self.tree.allocator.free(left)
        self.tree.private.pop(self.id, None)
        self.unlock()

    def _lock(self, node: int) -> None:
        cache = self.tree.cache
        receipt = cache.inc_lock_ref(node).to_dec_params()
        self.unlock = lambda: (cache.dec_lock_ref(node, receipt), None)[1]


def round_up(count: int, page: int) -> int:
    return -(-count // page) * page
