"""What comes in ahead: in order, little by little, only where there is room, kept for a while, and never in the way."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.radix.residency import Verdict
from sglang_lora_tree.scheduling.protocol import Plan
from sglang_lora_tree.scheduling.swapper import Swapper
from tests.radix.tree import Running, Tree

PLAN = Plan(1, 1, EvalParameters())


def make(tree: Tree, busy: tuple[str, ...] = (), **settings: float) -> Swapper:
    return Swapper(tree.residency, dataclasses.replace(Settings(), **settings), lambda: busy)


def step(tree: Tree, swapper: Swapper, now: float = 0.0, count: int = 1) -> None:
    """Loop steps on a machine whose disk and copies take no time."""
    for _ in range(count):
        tree.residency.poll()
        tree.cache.check_hicache_events()
        swapper.step(now)
        tree.finish_reads()
        tree.check()


def identities(tree: Tree, names: str) -> list[str]:
    return [demand.identity for name in names if (demand := tree.demand({name: 1.0}))]


def test_prefetch_from_disk_to_the_gpu_in_order(tree: Tree) -> None:
    swapper, wanted = make(tree), identities(tree, "cab")
    swapper.follow(dataclasses.replace(PLAN, prefetch=tuple(wanted)))
    order: list[str] = []
    for _ in range(40):
        swapper.follow(dataclasses.replace(PLAN, prefetch=tuple(name for name in wanted if not tree.core.is_resident(name))))
        step(tree, swapper)
        order += [name for name in wanted if tree.core.is_resident(name) and name not in order]
    tree.settle()
    assert order == wanted and all(tree.residency.tier_of(name) == "gpu" for name in wanted)
    assert swapper.counters.reads_ahead == 3 and swapper.counters.swap_ins_ahead == 3


def test_reads_do_not_wait_for_copies(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    swapper, wanted = make(tree), identities(tree, "abc")
    assert tree.residency.start_reading(wanted[0])
    tree.finish_reads()
    tree.residency.poll()
    monkeypatch.setattr(tree.cache, "is_load_path_idle", lambda: False)
    swapper.follow(dataclasses.replace(PLAN, prefetch=tuple(wanted)))
    step(tree, swapper, count=4)
    assert [tree.residency.tier_of(name) for name in wanted] == ["host"] * 3
    monkeypatch.undo()
    step(tree, swapper, count=6)
    tree.settle()
    assert [tree.residency.tier_of(name) for name in wanted] == ["gpu"] * 3


def test_prefetch_takes_little_from_history_and_nothing_from_running_requests(tree: Tree) -> None:
    running = Running(tree, "running", None, list(range(1, 150)))
    running.start()
    tree.add_kv(None, list(range(1000, 1049)))
    assert tree.cache.num_free_slots < 15
    swapper, wanted = make(tree), identities(tree, "abcdef")
    for _ in range(40):
        swapper.follow(dataclasses.replace(PLAN, prefetch=tuple(wanted)))
        step(tree, swapper)
    tree.settle()
    resident = [name for name in wanted if tree.core.is_resident(name)]
    assert len(resident) == 1, "a tenth of 200 slots is one adapter"
    # Decoding that is short of slots takes them back.
    taken = tree.cache.allocate_device(tree.cache.num_free_slots + tree.cache.evictable_size() + 15)
    assert taken is not None and not tree.core.is_resident(resident[0])
    tree.private["decoding"] = taken.tolist()
    step(tree, swapper)
    assert swapper.counters.thrash == 1


def test_what_came_in_is_kept_for_its_grace_time(tree: Tree) -> None:
    (name,) = identities(tree, "a")
    swapper = make(tree, grace_seconds=2.0)
    swapper.follow(dataclasses.replace(PLAN, prefetch=(name, name)))
    step(tree, swapper, count=4)
    assert tree.core.is_resident(name)
    tree.settle()
    tree.cache.evict_some(1000)
    assert tree.core.is_resident(name), "not before it is used"
    step(tree, swapper, now=2.1)
    tree.cache.evict_some(1000)
    assert not tree.core.is_resident(name) and swapper.counters.thrash == 0


def test_a_use_ends_the_grace_time(tree: Tree) -> None:
    (name,) = identities(tree, "a")
    swapper = make(tree)
    swapper.follow(dataclasses.replace(PLAN, prefetch=(name, name)))
    step(tree, swapper, count=4)
    tree.settle()
    demand = tree.demand({"a": 1.0})
    tree.residency.begin_pass(["x"])
    assert tree.residency.admit("x", demand, 100, False) is Verdict.READY
    tree.residency.note_admitted("x", demand)
    tree.add_kv(demand, [1, 2, 3])
    step(tree, swapper)
    assert (swapper.counters.used, swapper.counters.thrash) == (1, 0)
    tree.check_everything_can_go()


@pytest.mark.parametrize("below", [1.0, 0.7, 0.0])
def test_proactive_swap_in_keeps_below_the_threshold(tree: Tree, below: float) -> None:
    wanted = identities(tree, "abcdef")
    tree.bring(*wanted)
    tree.cache.evict_some(1000)
    swapper = make(tree, swap_in_below=below)
    nodes = tuple(tree.core.lora_nodes[name].node.id for name in wanted)
    swapper.follow(dataclasses.replace(PLAN, swap_in=nodes))
    step(tree, swapper, count=20)
    resident = [name for name in wanted if tree.core.is_resident(name)]
    assert resident == wanted[: {1.0: 6, 0.7: 6, 0.0: 0}[below]]
    used = tree.cache.num_pool_slots - tree.cache.num_free_slots
    assert used <= below * tree.cache.num_pool_slots


def swapped_out_history(tree: Tree) -> tuple[object, int]:
    """Adapter a on the GPU, 20 tokens of its KV in host memory; the demand and the KV's node."""
    demand = tree.demand({"a": 1.0})
    assert demand is not None
    tree.bring(demand.identity)
    tree.add_kv(demand, list(range(20)))
    tree.settle()
    release = tree.cache.hold(tree.core.lora_nodes[demand.identity])
    tree.cache.evict_some(1000)
    release()
    (node,) = tree.core.lora_nodes[demand.identity].node.children.values()
    assert node.evicted and tree.matched(demand, list(range(20))) == 20
    return demand, node.id


def test_history_comes_in_and_nobody_reads_it_on_its_way(tree: Tree) -> None:
    demand, node_id = swapped_out_history(tree)
    swapper = make(tree)
    swapper.follow(dataclasses.replace(PLAN, swap_in=(node_id,)))
    tree.residency.poll()
    swapper.step(0.0)
    assert tree.cache.is_in_flight(node_id)
    tree.residency.begin_pass(["x", "y"])
    assert tree.residency.admit("x", demand, 100, False) is Verdict.WAIT, "its history is on its way"
    assert tree.residency.admit("y", None, 100, False) is Verdict.READY, "the base model's is not"
    tree.residency.end_pass(False)
    tree.settle()
    tree.residency.begin_pass(["x"])
    assert tree.residency.admit("x", demand, 100, False) is Verdict.READY
    assert tree.match(tree.key(demand), list(range(20))).device_prefix_len == 20
    tree.check()


def test_history_of_an_adapter_in_use_stays_where_it_is(tree: Tree) -> None:
    demand, node_id = swapped_out_history(tree)
    swapper = make(tree, busy=(demand.identity,))
    swapper.follow(dataclasses.replace(PLAN, swap_in=(node_id,)))
    step(tree, swapper, count=3)
    assert tree.core.get_node(node_id).evicted


def test_a_flush_and_nonsense_in_plans(tree: Tree) -> None:
    (name,) = identities(tree, "a")
    swapper = make(tree)
    swapper.follow(dataclasses.replace(PLAN, prefetch=("adapter:unknown", name, name), swap_in=(0, 1, 10**9)))
    step(tree, swapper, count=12)
    assert tree.core.is_resident(name)
    tree.settle()
    tree.flush()
    step(tree, swapper, count=3)
    assert swapper.counters.thrash == 0
    swapper.stop()
    tree.check_everything_can_go()
