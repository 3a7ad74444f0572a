"""What must hold of a :class:`tree.Tree` at any moment: every invariant, and every row in both pools."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_lora_tree.radix.layout import Outline
from sglang_lora_tree.radix.residency import Demand

if TYPE_CHECKING:
    from .tree import Tree


def kv_values(key: str | None, tokens: Sequence[int]) -> torch.Tensor:
    """What the KV of each token looks like: float32 (tokens,), never 0, exact."""
    state = zlib.crc32(repr(key).encode())
    values = []
    for token in tokens:
        state = zlib.crc32(token.to_bytes(8, "little", signed=True), state)
        values.append(1 + state % (1 << 20))
    return torch.tensor(values, dtype=torch.float32)


def check(tree: Tree) -> None:
    """Every invariant, and every byte that is said to be in place."""
    tree.core.check_invariants()
    assert tree.core.count_invalid_kv() == 0
    if not tree.cache.ongoing_load_back and not tree.cache.ongoing_write_through:
        tree.cache.sanity_check()  # SGLang's own; it does not know copies under way
    for mix in tree.core.lora_nodes.values():
        if mix.is_resident and mix.is_locked:
            unlocked = [member for member in mix.members if not tree.core.lora_nodes[member].is_locked]
            assert not unlocked, f"{mix.identity} is in use, and {unlocked} count as evictable"
    _check_slots(tree)
    _check_moves(tree)
    _check_table(tree)
    _check_rows(tree)


def _check_slots(tree: Tree) -> None:
    cache, page = tree.cache, tree.page_size
    private = [slot for slots in tree.private.values() for slot in slots]
    total = cache.num_free_slots + cache.evictable_size() + cache.protected_size() + len(private)
    assert total == cache.num_pool_slots, f"{total} slots accounted for, of {cache.num_pool_slots}"
    in_tree = [int(slot) for node in nodes(tree) for slot in _value(node, "value")]
    free = tree.allocator.free_pages.tolist() if page == 1 else tree.allocator.get_all_free_pages().tolist()
    if page == 1:
        free += tree.allocator.release_pages.tolist()
    else:
        free = [page_id * page + offset for page_id in free for offset in range(page)]
    owners = sorted(in_tree + private + free)
    assert owners == list(range(page, cache.num_pool_slots + page)), "a slot has two owners, or none"
    host = cache.host_pool
    on_host = [int(slot) for node in nodes(tree) for slot in _value(node, "host_value")]
    assert len(on_host) == len(set(on_host)), "a host slot has two owners"
    reading = sum(_rows(tree, name).shape[1] for name in tree.residency._reading)
    used = host.size - host.available_size()
    assert used == len(on_host) + reading, f"{used} host slots used, {len(on_host)} in the tree, {reading} read"


def _check_moves(tree: Tree) -> None:
    """No adapter leaves but in an eviction that counts it at once, else the next one's KV would seem to be less."""
    moved, counters = tree.cache.moved_out, tree.residency.counters
    assert moved.adapter_slots == counters.swap_out_slots, f"{counters.swap_out_slots} slots of adapters left, {moved} is counted"


def _check_table(tree: Tree) -> None:
    residency, table = tree.residency, tree.table
    resident = {name: node for name, node in tree.core.lora_nodes.items() if node.is_resident and not node.is_mix}
    assert residency._indices.keys() == resident.keys(), "the table's adapters are not the residents"
    indices = list(residency._indices.values())
    assert sorted(indices + residency._free_indices) == list(range(table.capacity)), "an index is lost or shared"
    table.flush()
    for identity, index in residency._indices.items():
        first, count = int(table.first_slot[index]), int(table.slot_count[index])
        slots = table.slots[first : first + count]
        assert torch.equal(slots.long(), resident[identity].device_slots), f"{identity}: the table has other slots"
        outline = Outline.of(tree.adapters[identity], tree.base.num_layers)
        assert torch.equal(table.rank[index], torch.from_numpy(outline.rank))
        assert torch.equal(table.scaling[index], torch.from_numpy(outline.scaling))
        row_start = tree.packer.plan(outline).row_start
        assert torch.equal(table.row_start[index], torch.from_numpy(row_start))
    for index in residency._free_indices:
        assert int(table.slot_count[index]) == 0, f"free index {index} still has slots"


def _check_rows(tree: Tree) -> None:
    loading = bool(tree.cache.cache_controller.load_queue or tree.cache.delayed_loads)
    for lora_node in tree.core.lora_nodes.values():
        if lora_node.is_mix:
            continue
        expected = _rows(tree, lora_node.identity)
        if lora_node.host_slots is not None:
            _compare(tree.host_planes, lora_node.host_slots, expected, f"{lora_node.identity} in host memory")
        if lora_node.is_resident and not loading:
            _compare(tree.device_planes, lora_node.device_slots, expected, f"{lora_node.identity} on the GPU")
    for node in nodes(tree):
        if tree.core.find(node.id) is not None:
            continue
        tokens = list(node.key.raw_token_ids())
        above = node.parent
        while above.parent is not None and tree.core.find(above.id) is None:
            tokens = list(above.key.raw_token_ids()) + tokens
            above = above.parent
        expected = kv_values(node.key.extra_key, tokens)[-len(node.key) :]
        if not loading:
            _compare_kv(tree.device_planes, _value(node, "value"), expected, f"KV node {node.id} on the GPU")
        if node.write_through_pending_id is None:
            where = f"KV node {node.id} in host memory"
            _compare_kv(tree.host_planes, _value(node, "host_value"), expected, where)


def _rows(tree: Tree, identity: str) -> torch.Tensor:
    """An adapter's planes (2L, n, W)."""
    if identity not in tree.rows:
        planes = tree.packer.pack(tree.adapters[identity], torch.float32)
        tree.rows[identity] = planes.view(tree.packer.pool.num_planes, -1, tree.packer.pool.width)
    return tree.rows[identity]


def _compare(planes: Sequence[torch.Tensor], slots: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    found = torch.stack([plane[slots] for plane in planes])
    assert torch.equal(found, expected), f"wrong rows: {where}"


def _compare_kv(planes: Sequence[torch.Tensor], slots: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if len(slots) == 0:
        return
    found = torch.stack([plane[slots] for plane in planes])
    assert bool((found == expected[None, :, None]).all()), f"wrong KV: {where}"


def check_usable(tree: Tree, demand: Demand | None) -> None:
    """What a request computes with must be in place the moment it runs, not on its way."""
    for identity in () if demand is None else demand.members:
        lora_node = tree.core.lora_nodes[identity]
        assert lora_node.is_resident and identity in tree.residency._indices, f"{identity} is not on the GPU"
        _compare(tree.device_planes, lora_node.device_slots, _rows(tree, identity), f"{identity} in use")


def nodes(tree: Tree) -> Iterable[Any]:
    return [node for node in tree.core._node_arena.values() if node is not tree.core.virtual_root]


def describe(tree: Tree) -> str:
    """What has slots, for messages."""
    parts = [f"{tree.cache.num_free_slots} free", f"private {({k: len(v) for k, v in tree.private.items()})}"]
    for node in nodes(tree):
        data = node.component_data[ComponentType.FULL]
        lora_node = tree.core.find(node.id)
        kind = "kv" if lora_node is None else "mix" if lora_node.is_mix else "adapter"
        slots = f"{len(_value(node, 'value'))}+{len(_value(node, 'host_value'))}"
        loading = " loading" if node.id in tree.cache.ongoing_load_back else ""
        parts.append(f"{kind} {node.id} {slots} locks {data.lock_ref},{data.host_lock_ref}{loading}")
    return "; ".join(parts)


def check_nothing_is_locked(tree: Tree) -> None:
    for node in nodes(tree):
        data = node.component_data[ComponentType.FULL]
        assert data.lock_ref == 0 and data.host_lock_ref == 0, f"node {node.id} is still locked"


def check_everything_can_go(tree: Tree) -> None:
    """Evict all, on the GPU and in host memory: nothing may be left that only a restart would free."""
    check_nothing_is_locked(tree)
    tree.cache.evict_some(tree.cache.num_pool_slots)
    assert tree.cache.num_free_slots == tree.cache.num_pool_slots
    tree.cache.evict_host(tree.cache.host_pool.size)
    assert tree.cache.host_pool.available_size() == tree.cache.host_pool.size
    assert not tree.core.lora_nodes and not list(nodes(tree))


def _value(node: Any, name: str) -> torch.Tensor:
    value = getattr(node.component_data[ComponentType.FULL], name)
    return torch.empty(0, dtype=torch.int64) if value is None else value
