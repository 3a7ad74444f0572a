"""The tree as plain data: a cheap summary (``/server_info``, metrics), and its nodes (``GET /lora_tree``).

Both are made in the scheduler loop, so both are bounded: the summary reads counters that SGLang and the other rooms
keep, and looks at adapters and the mixes on the GPU only; the list of nodes stops after a fixed number of visits, and says so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from sglang_lora_tree.observability.audit import InvalidKvAudit
from sglang_lora_tree.radix.lora_node_hooks import LoraNode
from sglang_lora_tree.radix.residency import Residency
from sglang_lora_tree.radix.tree_core_hooks import LoraTreeCore

MAX_KV_NODES = 2_000
"""KV nodes listed at most: of a larger tree every LoRA node shows an equal share, the shallowest first."""
MAX_NAMES = 1_000
"""Adapters listed by name, and LoRA nodes listed, at most."""

KINDS = ("adapter", "mix", "history_kv", "running_kv", "free")
"""What a slot is used for. Running KV is KV that a request holds, history KV the rest."""


def count_slots(residency: Residency) -> dict[str, dict[str, int]]:
    """Slots of both pools: tier ("gpu", "host") -> kind (``KINDS``) -> slots; a tier adds up to its pool's size."""
    core, cache = residency.core, residency.cache
    gpu, host = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    unlocked = 0
    for kind, lora_nodes in (("adapter", core.adapters), ("mix", core.resident_mixes)):
        for lora_node in lora_nodes.values():
            if (slots := lora_node.device_slots) is not None:
                gpu[kind] += len(slots)
                unlocked += 0 if lora_node.is_locked else len(slots)
    host["mix"] = (len(core.lora_nodes) - len(core.adapters)) * cache.page_size  # each has a page there
    host["adapter"] = sum(len(lora_node.host_slots) for lora_node in core.adapters.values() if lora_node.host_slots is not None)
    host["adapter"] += residency.slots_being_read
    gpu["free"], host["free"] = cache.num_free_slots, int(cache.host_pool.available_size())
    gpu["history_kv"] = cache.full_evictable_size() - unlocked
    # The rest of what is taken belongs to requests, in the tree (locked) or not yet.
    gpu["running_kv"] = cache.num_pool_slots - sum(gpu.values())
    host["history_kv"] = int(cache.host_pool.size) - sum(host.values())
    return {"gpu": gpu, "host": host}


def count_adapters(residency: Residency) -> dict[str, int]:
    """Registered adapters (different bytes) by tier: gpu, loading, host, disk."""
    tiers = dict.fromkeys(("gpu", "loading", "host"), 0)
    for lora_node in residency.core.adapters.values():
        if lora_node.registered:
            tiers[residency.tier_of(lora_node.identity)] += 1
    return {**tiers, "disk": len(residency.store) - sum(tiers.values())}


def list_adapters(residency: Residency) -> dict[str, dict[str, Any]]:
    """Registered names, ``MAX_NAMES`` at most -> identity, pinned, slots, tier, visits."""
    listed: dict[str, dict[str, Any]] = {}
    for stored in residency.store:
        lora_node = residency.core.lora_nodes.get(stored.identity)
        for registration in stored.registrations.values():
            if len(listed) >= MAX_NAMES:
                return listed
            listed[registration.name] = {
                "identity": stored.identity,
                "pinned": registration.pinned,
                "slots": residency.slots_of_adapter(stored.identity),
                "tier": residency.tier_of(stored.identity),
                "visits": 0 if lora_node is None else lora_node.visits,
            }
    return listed


def count_kv_nodes(residency: Residency) -> int:
    """All KV nodes, on the GPU or in host memory."""
    return len(residency.core._node_arena) - 1 - len(residency.core.lora_nodes)


def take_summary(residency: Residency, audit: InvalidKvAudit) -> dict[str, Any]:
    """Pools, adapters and counters of one scheduler process, as JSON values."""
    cache = residency.cache
    return {
        "pool": {
            "slots": count_slots(residency),
            "gpu_size": cache.num_pool_slots,
            "host_size": int(cache.host_pool.size),
            "page_size": cache.page_size,
            "slot_bytes": int(cache.host_pool.size_per_token),
        },
        "adapters": count_adapters(residency),
        "num_registered": sum(len(stored.registrations) for stored in residency.store),
        "registered": list_adapters(residency),
        "num_kv_nodes": count_kv_nodes(residency),
        "invalid_kv": audit.step(),
        "counters": {
            **dataclasses.asdict(residency.counters),
            "load_bytes": cache.load_bytes,
            "load_seconds": cache.moved_in.seconds,
            "last_resorts": cache.last_resorts,
            "came_with_batch": cache.num_came_with_batch,
        },
    }


def list_nodes(
    residency: Residency, weights_of: Callable[[str], tuple[float, ...] | None] = lambda identity: None
) -> dict[str, Any]:
    """The tree's nodes.

    Args:
        residency: of one scheduler process.
        weights_of: identity of a mix -> its weights, in its members' order, if they are known.

    Returns:
        ``nodes``: dicts, parents before children. Each has ``id``, ``parent`` (an id, or None), ``kind`` ("virtual
        root", "adapter", "mix", "kv"), ``slots``, ``gpu`` and ``host`` (whether it is there), ``loading``, ``locks``,
        ``visits``; a LoRA or mix node also ``identity``, ``registered``, ``name`` or ``members``; these and the virtual
        root (base-model KV) have ``kv``: the KV nodes listed below them and their slots per tier.
        ``complete``: whether the limits of this file left nothing out.
    """
    core = residency.core
    second_layer = list(core.lora_nodes.values())
    num_kv_nodes = count_kv_nodes(residency)
    share = MAX_KV_NODES if num_kv_nodes <= MAX_KV_NODES else max(MAX_KV_NODES // (len(second_layer) + 1), 1)
    nodes = []
    num_listed = 0
    for lora_node in (None, *second_layer[:MAX_NAMES]):
        top = core.virtual_root if lora_node is None else lora_node.node
        entry = _describe(residency, top)
        if lora_node is None:
            entry |= {"kind": "virtual root", "locks": 0}
        else:
            entry |= {
                "kind": "mix" if lora_node.is_mix else "adapter",
                "visits": lora_node.visits,
                "identity": lora_node.identity,
                "registered": lora_node.registered,
                **_name(residency, lora_node, weights_of),
            }
        below = [{**_describe(residency, node), "kind": "kv"} for node in itertools.islice(_kv_below(core, top), share)]
        entry["kv"] = {
            "nodes": len(below),
            "gpu": sum(kv["slots"] for kv in below if kv["gpu"]),
            "host": sum(kv["slots"] for kv in below if kv["host"]),
        }
        nodes += [entry, *below]
        num_listed += len(below)
    return {"nodes": nodes, "complete": num_listed == num_kv_nodes and len(second_layer) <= MAX_NAMES}


def _kv_below(core: LoraTreeCore, top: Any) -> Iterator[Any]:
    """KV nodes below a node of the second layer (the virtual root: of the base model), breadth first."""
    parents = deque([top])
    while parents:
        for node in parents.popleft().children.values():
            if core.find(node.id) is None:
                yield node
                if node.children:
                    parents.append(node)


def _describe(residency: Residency, node: Any) -> dict[str, Any]:
    data = node.component_data[0]
    gpu, host = data.value is not None, data.host_value is not None
    return {
        "id": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "slots": len(node.key),
        "gpu": gpu,
        "host": host,
        "loading": node.id in residency.cache.ongoing_load_back,
        "locks": data.lock_ref,
        "visits": node.hit_count,
    }


def _name(residency: Residency, lora_node: LoraNode, weights_of: Callable[[str], tuple[float, ...] | None]) -> dict[str, Any]:
    if not lora_node.is_mix:
        return {"name": _adapter_name(residency, lora_node.identity)}
    weights = weights_of(lora_node.identity) or (None,) * len(lora_node.members)
    return {
        "members": [
            {"identity": member, "name": _adapter_name(residency, member), "weight": weight}
            for member, weight in zip(lora_node.members, weights, strict=True)
        ]
    }


def _adapter_name(residency: Residency, identity: str) -> str:
    stored = residency.store.get(identity)
    return "(unregistered)" if stored is None else stored.name
