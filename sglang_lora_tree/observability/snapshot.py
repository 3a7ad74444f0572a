"""The tree as plain data: nodes, tiers, slots, visits, locks and counters (``GET /lora_tree``)."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_lora_tree.radix.residency import Residency

MAX_KV_NODES = 2000
"""KV nodes listed at most; the counts always cover all."""


def take_snapshot(residency: Residency, scheduler: Any = None) -> dict[str, Any]:
    """Describe the tree of one scheduler process.

    Returns:
        A JSON-able dict: ``pool`` (slots by kind and tier), ``nodes`` (a list, parents before children), ``counters``.
    """
    core, cache, store = residency.core, residency.cache, residency.store
    nodes: list[dict[str, Any]] = []
    slots = {
        tier: {"adapter": 0, "mix": 0, "history_kv": 0, "running_kv": 0} for tier in ("device", "host")
    }
    stack = [(core.virtual_root, None)]
    num_kv_nodes = 0
    while stack:
        node, parent = stack.pop()
        lora_node = core.lora_node_of(node)
        data = node.component_data[0]
        own = lora_node is not None and lora_node.node is node
        if node is core.virtual_root:
            kind = "virtual root"
        elif own:
            assert lora_node is not None
            kind = "mix" if lora_node.is_mix else "adapter"
        else:
            kind = "kv"
        device = 0 if node is core.virtual_root or data.value is None else len(data.value)
        host = 0 if node is core.virtual_root or data.host_value is None else len(data.host_value)
        if kind != "virtual root":
            name = kind if kind != "kv" else ("running_kv" if data.lock_ref else "history_kv")
            slots["device"][name] += device
            slots["host"][name] += host
        if kind == "kv":
            num_kv_nodes += 1
        if kind != "kv" or num_kv_nodes <= MAX_KV_NODES:
            entry: dict[str, Any] = {
                "id": node.id,
                "parent": parent,
                "kind": kind,
                "slots": device or host,
                "device": device > 0,
                "host": host > 0,
                "loading": node.id in cache.ongoing_load_back,
                "locks": data.lock_ref if node is not core.virtual_root else 0,
                "visits": lora_node.visits if own and lora_node is not None else node.hit_count,
            }
            if own and lora_node is not None:
                entry["identity"] = lora_node.identity
                entry["registered"] = lora_node.registered
                names = [
                    "(unregistered)" if (stored := store.get(identity)) is None else stored.name
                    for identity in (lora_node.members or (lora_node.identity,))
                ]
                if lora_node.is_mix:
                    entry["members"] = names
                else:
                    entry["name"] = names[0]
            nodes.append(entry)
        stack.extend((child, node.id) for child in node.children.values())
    free = cache.num_free_slots
    tree_slots = sum(slots["device"].values())
    slots["device"]["free"] = free
    # Tokens of running requests that are not in the tree yet.
    slots["device"]["running_kv"] += cache.num_pool_slots - free - tree_slots
    host_pool = cache.host_pool
    slots["host"]["free"] = int(host_pool.available_size())
    return {
        "pool": {
            "slots": slots,
            "device_size": cache.num_pool_slots,
            "host_size": int(host_pool.size),
            "page_size": cache.page_size,
            "slot_bytes": int(host_pool.size_per_token),
        },
        "registered": {
            registration.name: {
                "identity": stored.identity,
                "pinned": registration.pinned,
                "slots": residency.slots_of_adapter(stored.identity),
                "tier": residency.tier_of(stored.identity),
            }
            for stored in store
            for registration in stored.registrations.values()
        },
        "nodes": nodes,
        "num_kv_nodes": num_kv_nodes,
        "invalid_kv": core.count_invalid_kv(),
        "counters": dataclasses.asdict(residency.counters),
    }
