"""The real tree without a server or a model: allocator, KV pool, HiCache, store, table and residency of one rank.

Every token's KV is a number made of its namespace and of all tokens up to it, so that any slot of the pool, on the GPU
or in host memory, can be told right or wrong by looking at it: :meth:`Tree.check` does, with every invariant, at any
moment (``tree_checks``).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
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

from benchmarks.standalone_cache import build_cache
from sglang_lora_tree.adapters.adapter import Adapter, load_adapter
from sglang_lora_tree.adapters.base_shape import MODULE_PATHS, MODULES, BaseShape
from sglang_lora_tree.config import Settings
from sglang_lora_tree.kernels.table import AdapterTable
from sglang_lora_tree.radix.identity import canonical_members, mix_identity, namespace_key
from sglang_lora_tree.radix.layout import Outline, Packer
from sglang_lora_tree.radix.residency import Demand, Residency
from sglang_lora_tree.radix.store import AdapterStore, Registration

from . import tree_checks
from .tree_checks import kv_values

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
        waits_by_layer: bool = True,
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
        self.cache.waits_by_layer = waits_by_layer
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
        self.rows: dict[str, torch.Tensor] = {}
        """Their planes (2L, n, W), as far as they have been checked."""

    check = tree_checks.check
    check_usable = tree_checks.check_usable
    check_nothing_is_locked = tree_checks.check_nothing_is_locked
    check_everything_can_go = tree_checks.check_everything_can_go
    describe = tree_checks.describe
    nodes = tree_checks.nodes

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

def _planes(keys: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A pool as 2L planes (slots, W): K and V of each layer in turn."""
    return [plane.view(plane.shape[0], -1) for pair in zip(keys, values, strict=True) for plane in pair]


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
