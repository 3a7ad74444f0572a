"""The snapshot against the real tree: what it says is what there is, and it stays small however large the tree is."""

import orjson
import pytest

from sglang_lora_tree.observability import snapshot
from sglang_lora_tree.observability.audit import InvalidKvAudit
from sglang_lora_tree.observability.snapshot import count_adapters, count_slots, list_nodes, take_summary
from sglang_lora_tree.observability.text import render_text
from sglang_lora_tree.radix.residency import Demand


def take(tree, weights_of=lambda identity: None):
    return {
        **take_summary(tree.residency, InvalidKvAudit(tree.core)),
        **list_nodes(tree.residency, weights_of),
    }


def check_slots(tree):
    """Each tier's slots add up to the pool, and to what a walk over every node finds."""
    slots = count_slots(tree.residency)
    found = {"gpu": 0, "host": 0}
    for node in tree.nodes():
        data = node.component_data[0]
        found["gpu"] += 0 if data.value is None else len(data.value)
        found["host"] += 0 if data.host_value is None else len(data.host_value)
    private = sum(map(len, tree.private.values()))
    reading = tree.residency.slots_being_read
    for tier, size, outside in (
        ("gpu", tree.cache.num_pool_slots, private),
        ("host", tree.cache.host_pool.size, reading),
    ):
        assert sum(slots[tier].values()) == size
        assert size - slots[tier]["free"] == found[tier] + outside
        assert min(slots[tier].values()) >= 0
    return slots


def test_slots_by_kind_and_tier(busy_tree, sizes):
    slots = check_slots(busy_tree)
    assert slots["gpu"]["adapter"] == sizes["math"] + sizes["json"]
    assert slots["host"]["adapter"] == sum(sizes.values())
    assert slots["gpu"]["mix"] == slots["host"]["mix"] == 1
    assert slots["gpu"]["history_kv"] == 27  # the mix's and the base model's
    assert slots["gpu"]["running_kv"] == 13  # ten in the tree, three not yet
    busy_tree.running.finish()
    busy_tree.settle()
    slots = check_slots(busy_tree)
    assert slots["gpu"]["running_kv"] == 0 and slots["gpu"]["history_kv"] == 40


def test_slots_add_up_when_everything_leaves_the_gpu_and_while_an_adapter_is_read(busy_tree, identity, sizes):
    busy_tree.running.finish()
    busy_tree.settle()
    busy_tree.cache.evict_some(200)
    assert check_slots(busy_tree)["gpu"] == {"adapter": 0, "mix": 0, "history_kv": 0, "running_kv": 0, "free": 200}
    busy_tree.cache.evict_host(400)
    assert count_adapters(busy_tree.residency) == {"gpu": 0, "loading": 0, "host": 0, "disk": 3}
    assert busy_tree.residency.start_reading(identity["json"])
    assert check_slots(busy_tree)["host"]["adapter"] == sizes["json"]
    busy_tree.unload("json")  # while it is read
    assert sum(count_slots(busy_tree.residency)["host"].values()) == busy_tree.cache.host_pool.size
    busy_tree.settle()
    assert check_slots(busy_tree)["host"]["free"] == busy_tree.cache.host_pool.size


def test_adapters_by_tier(busy_tree, sizes):
    assert count_adapters(busy_tree.residency) == {"gpu": 2, "loading": 0, "host": 1, "disk": 0}
    registered = take(busy_tree)["registered"]
    assert {name: adapter["tier"] for name, adapter in registered.items()} == {
        "math": "gpu",
        "json": "gpu",
        "sql": "host",
    }
    assert {name: adapter["slots"] for name, adapter in registered.items()} == sizes
    busy_tree.unload("sql")
    assert count_adapters(busy_tree.residency) == {"gpu": 2, "loading": 0, "host": 0, "disk": 0}


def test_nodes_with_names_weights_locks_and_parents(busy_tree, identity):
    weights = {busy_tree.mix.identity: (0.5, -2.0)}
    listed = list_nodes(busy_tree.residency, weights.get)
    nodes = {node["id"]: node for node in listed["nodes"]}
    assert listed["complete"] and len(nodes) == len(busy_tree.core._node_arena)
    seen = set()
    for node in listed["nodes"]:
        assert node["parent"] is None or node["parent"] in seen, "parents come first"
        seen.add(node["id"])
    by_name = {node["name"]: node for node in nodes.values() if node["kind"] == "adapter"}
    assert by_name["math"]["gpu"] and by_name["math"]["locks"] == 1 and by_name["math"]["kv"]["gpu"] == 10
    assert not by_name["sql"]["gpu"] and by_name["sql"]["host"]
    [mix] = [node for node in nodes.values() if node["kind"] == "mix"]
    assert [member["identity"] for member in mix["members"]] == list(busy_tree.mix.members)
    assert [member["weight"] for member in mix["members"]] == [0.5, -2.0]
    assert mix["kv"] == {"nodes": 1, "gpu": 20, "host": 20}
    assert listed["nodes"][0]["kv"] == {"nodes": 1, "gpu": 7, "host": 7}, "the base model's"


def test_it_is_json_and_text(busy_tree, sizes):
    taken = take(busy_tree)
    assert orjson.loads(orjson.dumps(taken)) == taken
    text = render_text(taken)
    assert f"adapter math  {sizes['math']} slots [GPU+host]  1 lock" in text
    assert f"adapter sql  {sizes['sql']} slots [host]" in text


def test_a_load_under_way_shows(adapter_folders):
    from sglang_lora_tree.config import Settings
    from tests.radix.tree import Tree

    with Tree(settings=Settings(delay_loads=5, disk_readers=0)) as tree:
        name = tree.load("math", adapter_folders["math"])
        assert tree.residency.start_reading(name)
        tree.finish_reads()
        tree.residency.reader.poll()
        assert tree.residency.ensure_indices(1) and tree.cache.start_swap_in(tree.core.lora_nodes[name])
        assert count_adapters(tree.residency)["loading"] == 1
        assert [node["loading"] for node in list_nodes(tree.residency)["nodes"]] == [False, True]
        tree.settle()
        assert count_adapters(tree.residency)["gpu"] == 1


@pytest.mark.parametrize("limit", [8, 40])
def test_of_a_large_tree_every_lora_node_shows_a_share(tree, identity, monkeypatch, limit):
    tree.bring(*identity.values())
    for name in identity.values():
        for first in range(20):
            tree.add_kv(Demand(name, (name,)), [first, 60])
    monkeypatch.setattr(snapshot, "MAX_KV_NODES", limit)
    listed = list_nodes(tree.residency)
    assert not listed["complete"]
    shares = [node["kv"]["nodes"] for node in listed["nodes"] if node["kind"] == "adapter"]
    assert shares == [limit // 4] * 3
    assert take(tree)["num_kv_nodes"] == 60


def test_names_are_limited_too(tree, identity, monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_NAMES", 2)
    tree.bring(*identity.values())
    taken = take(tree)
    assert len(taken["registered"]) == 2 and taken["num_registered"] == 3
    assert sum(node["kind"] == "adapter" for node in taken["nodes"]) == 2 and not taken["complete"]
