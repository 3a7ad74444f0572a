import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lora_tree.observability.view import build, collapse, label_of
from tests.observability.snapshots import random_snapshot, small_snapshot


def totals(root):
    nodes = list(root.below())
    return {
        name: sum(getattr(node, name) for node in nodes)
        for name in ("num_nodes", "slots", "gpu_slots", "host_slots", "locked_slots", "visits", "locks")
    }


def test_the_tree_has_every_node_of_the_snapshot_once():
    snapshot = random_snapshot(5, 3, 60)
    root = build(snapshot)
    assert totals(root)["num_nodes"] == len(snapshot["nodes"]) - 1
    kinds = {kind: sum(node.kind == kind for node in root.below()) for kind in ("adapter", "mix", "kv")}
    assert kinds == {"adapter": 5, "mix": 3, "kv": 60}


def test_adapters_come_first_then_mixes_then_base_model_kv_each_by_visits():
    children = build(small_snapshot()).children
    assert [child.label for child in children] == ["math", "json", "sql", "math:0.7, json:-0.25", "KV"]


def test_tiers():
    math, json, sql, mix, base = build(small_snapshot()).children
    assert [node.tier for node in (math, json, sql, mix, base)] == ["GPU+host", "host", "loading", "host", "GPU+host"]
    assert [node.tier for node in math.children[0].children] == ["GPU"]


def test_a_mix_whose_weights_the_server_has_forgotten_is_still_named():
    members = [{"identity": "a", "name": "math", "weight": None}, {"identity": "b", "name": "json", "weight": 0.5}]
    assert label_of({"kind": "mix", "members": members}) == "math, json:0.5"


@given(
    seed=st.integers(0, 5),
    lora_nodes=st.integers(0, 12),
    children=st.integers(1, 9),
    depth=st.integers(1, 7),
)
def test_collapsing_sums_up_and_drops_nothing(seed, lora_nodes, children, depth):
    root = build(random_snapshot(6, 3, 80, seed))
    short = collapse(root, lora_nodes, children, depth)
    assert totals(short) == totals(root)
    for node in (short, *short.below()):
        assert sum(child.kind == "kv" for child in node.children) <= children
    assert sum(child.kind in ("adapter", "mix") for child in short.children) <= lora_nodes

    def kv_depth(node):
        return max((kv_depth(child) for child in node.children), default=0) + (node.kind == "kv")

    assert kv_depth(short) <= depth


def test_the_most_visited_adapters_are_kept():
    root = build(random_snapshot(20, 0, 0))
    kept = [child.visits for child in collapse(root, 5, 8, 6).children if child.kind == "adapter"]
    assert kept == sorted((child.visits for child in root.children), reverse=True)[:5]


@pytest.mark.parametrize("answer", [{}, {"nodes": 3, "pool": {}}, {"nodes": [], "pool": {}}])
def test_what_is_no_tree_is_refused(answer):
    with pytest.raises(ValueError, match=r"no (tree|virtual root) in it"):
        build(answer)
