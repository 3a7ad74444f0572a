"""Policies give the order that they promise, and the indices give leaves out in it."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_lora_tree.config import RETENTION_POLICIES, Settings
from sglang_lora_tree.radix.cache_hooks import install_policy
from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.radix.leaf_index import CandidateIndex, ClassIndex, LeafIndex
from sglang_lora_tree.radix.policies import DEFAULT_POLICY, POLICIES, RetentionState, Usage
from sglang_lora_tree.radix.policies.classic import Branch, Gdsf, Rrip
from sglang_lora_tree.radix.policies.eval_policy import Eval
from sglang_lora_tree.radix.policies.learned import Halp, Hawkeye
from sglang_lora_tree.radix.policies.reuse_policy import Reuse
from sglang_lora_tree.radix.reuse import ReuseTable, bucket_of, gittins
from tests.radix.tree import Tree, write_adapter

_ids = itertools.count()


@dataclass(eq=False)
class Node:
    slots: int = 1
    backuped: bool = True
    evicted: bool = False
    last_access_time: float = 0.0
    parent: Any = None
    lora_node: Any = None
    id: int = field(default_factory=lambda: next(_ids))
    usage: Usage = field(default_factory=lambda: Usage(0.0, 0))

    @property
    def key(self) -> range:
        return range(self.slots)


def make_index(policy: Any) -> Any:
    def make_order() -> LeafIndex:
        if policy.candidates:
            return CandidateIndex(policy.static_key, policy.refine, policy.candidates, policy.moment)
        return LeafIndex(policy.static_key)

    return ClassIndex(make_order, policy.class_of, policy.value, policy.moment) if policy.classes else make_order()


def use(policy: Any, node: Node, tick: int) -> None:
    """What the tree does when a request uses a node."""
    state = policy.state
    state.requests += 1
    node.usage.touch(state.seconds, state.window)
    node.usage.visits += 1
    node.usage.uses += 1
    policy.on_use(node)
    node.usage.last_request = node.usage.last_look = state.requests
    node.last_access_time = float(tick)


def random_nodes(policy: Any, count: int, seed: int, spread: float = 600.0, tau: float = 60.0) -> list[Node]:
    """Nodes used at random times, up to 30 s before now."""
    rng = random.Random(seed)
    nodes = [Node(slots=rng.randint(1, 300)) for _ in range(count)]
    for node in nodes:
        node.usage.is_adapter = rng.random() < 0.1
    times = sorted(rng.uniform(0, spread) for _ in range(3 * count))
    for tick, (moment, node) in enumerate(zip(times, nodes + rng.choices(nodes, k=2 * count), strict=True)):
        policy.state.set_parameters(EvalParameters(now=moment, tau=tau, low_lora=20.0))
        use(policy, node, tick)
    policy.state.set_parameters(EvalParameters(now=spread, tau=tau, low_lora=20.0))
    policy.state.resident_adapters = 12
    policy.on_parameters(policy.state.parameters)
    return nodes


# ---- Indices ----


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-5, 5)), min_size=1, max_size=60), st.integers(1, 70))
def test_candidates_among_the_lowest_leave_by_exact_value(values: list[tuple[int, int]], count: int):
    """With as many candidates as leaves the order is the exact one, whatever the keys say."""
    leaves = [Node(slots=key + 1, last_access_time=key + change) for key, change in values]
    index = CandidateIndex(lambda leaf: leaf.slots, lambda leaf, key: leaf.last_access_time, count, lambda: None)
    for leaf in leaves:
        index.add(leaf)
    left = []
    while (leaf := index.pop_lowest()) is not None:
        index.discard(leaf)
        left.append(leaf.last_access_time)
    assert sorted(left) == sorted(leaf.last_access_time for leaf in leaves)
    if count >= len(leaves):
        assert left == sorted(left)


def test_exact_values_are_worked_out_again_when_the_moment_is_another():
    sign = 1
    index = CandidateIndex(lambda leaf: leaf.slots, lambda leaf, key: sign * key, 4, lambda: sign)
    leaves = [Node(slots=number) for number in range(1, 7)]
    for leaf in leaves:
        index.add(leaf)
    assert index.pop_lowest() is leaves[0]
    sign = -1
    assert index.pop_lowest() is leaves[4], "the least valuable of the four lowest"


def test_candidates_that_were_declined_are_offered_again():
    index = CandidateIndex(lambda leaf: leaf.slots, lambda leaf, key: -key, 4, lambda: None)
    leaves = [Node(slots=number) for number in range(1, 7)]
    for leaf in leaves:
        index.add(leaf)
    declined = index.pop_lowest()
    assert declined.slots == 4, "the least valuable of the four lowest"
    assert index.pop_lowest().slots == 5
    index.refresh(declined)
    assert index.pop_lowest() is declined
    index.discard(declined)
    index.refresh(leaves[4])
    rest = []
    while (leaf := index.pop_lowest()) is not None:
        index.discard(leaf)
        rest.append(leaf.slots)
    assert sorted(rest) == [1, 2, 3, 5, 6]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=60), st.data())
def test_classes_give_the_lowest_of_all(members: list[tuple[int, int]], data: Any):
    """Values fall along each class's order; then the index's order is that of values, also after leaves change class."""
    weights = [1.0, 5.0, 0.5, 2.0]
    leaves = [Node(slots=number + 1, last_access_time=float(when)) for number, when in members]
    index = ClassIndex(
        lambda: LeafIndex(lambda leaf: leaf.last_access_time),
        lambda leaf: leaf.slots,
        lambda known, leaf: weights[known - 1] * (1 + leaf.last_access_time),
        lambda: None,
    )
    for leaf in leaves:
        index.add(leaf)
    for leaf in data.draw(st.lists(st.sampled_from(leaves), max_size=10)):
        leaf.slots = leaf.slots % 4 + 1
        if data.draw(st.booleans()):
            index.refresh(leaf)
    assert len(index) == len(leaves) and set(index) == set(leaves)
    # A leaf that changed class without a word is found out when it comes up: only then is its class known.
    for leaf in leaves:
        index.refresh(leaf)
    values = []
    while (leaf := index.pop_lowest()) is not None:
        assert leaf in index
        index.discard(leaf)
        values.append(weights[leaf.slots - 1] * (1 + leaf.last_access_time))
    assert values == sorted(values) and len(values) == len(leaves)


# ---- Eval ----


def test_eval_before_the_first_plan_is_least_recently_used():
    policy = Eval(RetentionState())
    nodes = [Node(slots=1000 - number, last_access_time=float(number)) for number in range(20)]
    index = make_index(policy)
    for node in random.Random(0).sample(nodes, 20):
        index.add(node)
    assert [index.pop_lowest() for _ in range(20)] == nodes


def test_plans_change_the_order_and_their_end_changes_it_back():
    policy = Eval(RetentionState())
    small, large = Node(slots=1, last_access_time=2.0), Node(slots=1000, last_access_time=1.0)
    for node in (small, large):
        node.usage.visits = 1.0
    assert policy.static_key(large) < policy.static_key(small)
    policy.state.set_parameters(EvalParameters(now=1.0))
    assert policy.on_parameters(policy.state.parameters), "keys change"
    assert policy.static_key(small) < policy.static_key(large), "the large one costs more"
    assert not policy.on_parameters(EvalParameters(now=2.0)), "time alone changes no key"
    policy.state.parameters = None
    assert policy.on_parameters(None)
    assert policy.static_key(large) < policy.static_key(small)


@pytest.mark.parametrize("seed", range(5))
def test_the_index_finds_evals_victims(seed: int):
    """How often the index's victim is the exact minimum; docs/eval.md reports the share."""
    policy = Eval(RetentionState())
    nodes = random_nodes(policy, 2_000, seed)
    index = make_index(policy)
    for node in nodes:
        index.add(node)
    exact = sorted(nodes, key=policy.exact)
    by_key = sorted(nodes, key=policy.static_key)
    victims = [index.pop_lowest() for _ in range(200)]
    places = {node: place for place, node in enumerate(exact)}
    agreed = np.mean([places[node] < 200 for node in victims])
    agreed_by_key = np.mean([places[node] < 200 for node in by_key[:200]])
    assert agreed >= 0.99, f"{agreed:.3f} of the lowest tenth (keys alone: {agreed_by_key:.3f})"


# ---- Others ----


@given(st.lists(st.integers(0, 7), min_size=1, max_size=200))
def test_rrip_is_rrip(uses: list[int]):
    """Against the paper's own description: 2-bit counters, aged until one is 3. Four places, eight names."""
    policy = Rrip(RetentionState())
    index = make_index(policy)
    nodes: dict[int, Node] = {}
    counters: dict[int, int] = {}
    touched: dict[int, int] = {}
    for tick, name in enumerate(uses):
        if name not in nodes:
            if len(nodes) == 4:
                while 3 not in counters.values():
                    counters = {other: count + 1 for other, count in counters.items()}
                wanted = min((other for other in counters if counters[other] == 3), key=touched.__getitem__)
                victim = index.pop_lowest()
                policy.on_evict(victim)
                index.discard(victim)
                assert victim is nodes[wanted]
                del nodes[wanted], counters[wanted]
            nodes[name], counters[name] = Node(), 2
            use(policy, nodes[name], tick)
            index.add(nodes[name])
        else:
            counters[name] = 0
            use(policy, nodes[name], tick)
            index.refresh(nodes[name])
        touched[name] = tick


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=200))
def test_gdsf_is_greedy_dual(steps: list[tuple[int, bool]]):
    """Against Cherkasova's description: H = L + uses x cost / size at every use; the lowest H leaves, and becomes L."""
    policy = Gdsf(RetentionState(bytes_per_slot=1_000_000))
    index = make_index(policy)
    defaults = EvalParameters()
    nodes = [Node(slots=1 + 37 * name % 50, backuped=name % 3 == 0) for name in range(10)]
    for name, node in enumerate(nodes):
        node.usage.is_adapter = name % 2 == 0
    heights: dict[int, float] = {}
    touched: dict[int, int] = {}
    inflation = 0.0
    for tick, (name, is_use) in enumerate(steps):
        if is_use:
            node = nodes[name]
            copy = len(node.key) * 1_000_000 / defaults.host_to_device_bytes_per_s
            cost = copy
            if not node.backuped:
                is_adapter = node.usage.is_adapter
                disk = len(node.key) * 1_000_000 / defaults.disk_bytes_per_s
                cost = copy + disk if is_adapter else len(node.key) / defaults.prefill_tokens_per_s
            use(policy, node, tick)
            heights[name], touched[name] = inflation + node.usage.uses * cost / len(node.key), tick
            index.discard(node)
            index.add(node)
        elif heights:
            wanted = min(heights, key=lambda other: (heights[other], touched[other]))
            victim = index.pop_lowest()
            policy.on_evict(victim)
            index.discard(victim)
            assert victim is nodes[wanted]
            inflation = heights.pop(wanted)


def test_branch_takes_the_least_recently_used_branch_whole():
    policy = Branch(RetentionState())
    index = make_index(policy)
    tops = [SimpleNamespace(node=Node(last_access_time=when)) for when in (30.0, 10.0, 20.0)]
    leaves = [
        Node(last_access_time=when, lora_node=None if branch is None else tops[branch])
        for branch, when in ((0, 1.0), (1, 9.0), (2, 3.0), (1, 8.0), (2, 15.0), (0, 29.0), (None, 12.0), (None, 25.0))
    ]
    for leaf in leaves:
        index.add(leaf)
    order = [leaves.index(index.pop_lowest()) for _ in leaves]
    assert order == [3, 1, 6, 2, 4, 7, 0, 5], "branches by their own last use, leaves within by theirs; base KV by its own"


def test_hawkeye_keeps_the_kind_that_beladys_rule_would_hit():
    """Small nodes come back within what the cache holds, large ones in turn, ten times what it holds."""
    policy = Hawkeye(RetentionState(pool_slots=100))
    small, large = [Node(slots=8) for _ in range(4)], [Node(slots=60) for _ in range(20)]
    index = make_index(policy)
    order = []
    for tick in range(4_000):
        node = small[tick // 2 % 4] if tick % 2 else large[tick // 2 % 20]
        use(policy, node, tick)
        order.append(node)
    for node in [*large, *small]:
        index.add(node)
    last = {node: place for place, node in enumerate(order)}
    victims = [index.pop_lowest() for _ in range(24)]
    assert victims == [*sorted(large, key=last.__getitem__), *sorted(small, key=last.__getitem__)]
    assert last[victims[19]] > last[victims[20]], "not simply the least recently used"


def test_hawkeye_believes_less_in_a_kind_that_had_to_go():
    policy = Hawkeye(RetentionState(pool_slots=100))
    node = Node()
    assert policy.static_key(node)[0], "nothing is known against it"
    policy.on_evict(node)
    assert not policy.static_key(node)[0]


def test_halp_learns_which_of_the_oldest_is_wanted_back():
    """Before it knows anything, the oldest leaves; what has many uses comes back here, and then stays, among the oldest four."""

    def candidates(policy: Halp) -> tuple[Any, list[Node]]:
        index, state = make_index(policy), policy.state
        nodes = [Node(slots=10, last_access_time=float(place)) for place in range(6)]
        for place, node in enumerate(nodes):
            node.usage.uses, node.usage.last_request = (9, 1, 9, 9, 1, 1)[place], state.requests - 50 + place
            index.add(node)
        return index, nodes

    policy = Halp(RetentionState())
    policy.state.requests = 100
    index, nodes = candidates(policy)
    assert [index.pop_lowest() for _ in range(6)] == nodes
    for _ in range(400):
        policy.state.requests += 10
        once, often = Node(slots=10), Node(slots=10)
        for node, uses in ((once, 1), (often, 9)):
            node.usage.uses, node.usage.last_request = uses, policy.state.requests - 20
            policy.on_evict(node)
        policy.on_use(often)
    index, nodes = candidates(policy)
    assert index.pop_lowest() is nodes[1], "the only one of the oldest four that was used once"
    assert index.pop_lowest() is nodes[4], "now the fourth of the oldest"


def test_gittins_of_a_steady_rate_is_the_rate():
    assert list(gittins([0.25] * 5, [1.0, 2.0, 4.0, 8.0, 16.0])) == pytest.approx([0.25] * 5)


def test_gittins_waits_for_what_is_to_come():
    """A node that is never used at once, and surely after a while, is worth keeping meanwhile; afterwards it is not."""
    after, late, early = gittins([1e-9, 1.0, 1e-9], [10.0, 10.0, 1e6])
    assert late == pytest.approx(1.0, rel=0.01)
    assert early == pytest.approx(1.0, rel=0.01), "never lower than what is to come"
    assert after < 1e-6


@given(st.lists(st.floats(1e-6, 3.0), min_size=1, max_size=40))
def test_gittins_is_the_best_of_all_horizons(rates: list[float]):
    widths = [1.4**power for power in range(len(rates))]

    def quotient(start: int, stop: int) -> float:
        alive, used, time = 1.0, 0.0, 0.0
        for rate, width in zip(rates[start:stop], widths[start:stop], strict=True):
            stay = np.exp(-rate * width)
            used, time, alive = used + alive * (1 - stay), time + alive * (1 - stay) / rate, alive * stay
        return used / time

    best = [max(quotient(start, stop) for stop in range(start + 1, len(rates) + 1)) for start in range(len(rates))]
    expected = np.maximum.accumulate(best[::-1])
    assert list(gittins(rates, widths)) == pytest.approx(list(expected))


def test_a_table_learns_who_comes_back():
    table = ReuseTable((2,), refresh=50)
    for _ in range(500):
        table.note(0, 20, used=True)
        table.note(1, 200, used=False)
    assert table.value(0, 5) > 10 * table.value(1, 5)
    assert table.value(1, 400) <= table.value(1, 100) <= table.value(1, 1)


def test_a_kind_that_is_hardly_known_goes_by_its_group():
    table = ReuseTable((2, 2), refresh=100)
    for _ in range(500):
        table.note(0, 20, used=True)
        table.note(2, 200, used=False)
    assert table.value(1, 5) > 10 * table.value(3, 5)


@given(st.floats(0, 1e9))
def test_buckets_hold_every_age(age: float):
    assert 0 <= bucket_of(age) < 40
    assert bucket_of(age) <= bucket_of(2 * age)


def test_reuse_keeps_adapters_over_kv_that_is_never_used_again():
    policy = Reuse(RetentionState())
    rng = random.Random(0)
    adapters = [Node(slots=640) for _ in range(5)]
    for node in adapters:
        node.usage.is_adapter = True
    for tick in range(3_000):
        use(policy, rng.choice(adapters), tick)
        once = Node(slots=640)
        use(policy, once, tick)
        policy.state.requests += 1
        if tick > 50:
            once.usage.last_request -= 50
            policy.on_remove(once)
    index = make_index(policy)
    fresh = Node(slots=640)
    use(policy, fresh, 3_000)
    for node in [*adapters, fresh]:
        index.add(node)
    assert index.pop_lowest() is fresh, "the newest, and yet the first to leave"


# ---- In the tree ----


def test_every_policy_can_be_named():
    assert set(POLICIES) == set(RETENTION_POLICIES) - {"auto", "stock"}
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize("name", ["reuse", "eval", "branch", "gdsf", "halp", "hawkeye", "rrip", "stock"])
def test_the_tree_holds_under_every_policy(name: str, tmp_path: Any):
    """Random requests over a pool far too small, plans coming and going: every invariant and every byte on the way."""
    rng = random.Random(7)
    with Tree(pool_slots=150, host_slots=260) as tree:
        install_policy(tree.cache, Settings(retention_policy=name), "lru")
        identities = [tree.load(str(seed), write_adapter(tmp_path / str(seed), rank=1, seed=seed)) for seed in range(6)]
        demands = [tree.demand({str(seed): 1.0}) for seed in range(6)]
        demands.append(tree.demand({"0": 0.5, "1": 0.25}))
        for step in range(24):
            if step % 4 == 3:
                tree.core.set_eval_parameters(EvalParameters(version=step, now=step / 10, low_lora=4.0, tau=0.5))
            if step == 16:
                tree.core.set_eval_parameters(None)
            demand = rng.choice(demands)
            if demand.is_mix:
                tree.bring_mix(demand)
            else:
                tree.bring(*demand.members)
            tokens = [rng.randrange(2) for _ in range(rng.randint(2, 30))]
            tree.add_kv(demand, tokens)
            tree.core.note_visit(tree.core.lora_nodes[demand.identity])
            tree.settle()
            if step % 3 == 0:
                tree.check()
            if step == 18:
                tree.unload("5")
                del demands[5]
        gone = identities[5]
        assert tree.core.retention.resident_adapters == sum(
            node.is_resident and not node.is_mix for node in tree.core.lora_nodes.values()
        )
        if gone in tree.core.lora_nodes:
            assert not tree.core.lora_nodes[gone].registered


@pytest.mark.parametrize("name", ["reuse", "eval", "rrip", "stock"])
def test_what_no_name_refers_to_leaves_first(name: str, tmp_path: Any):
    with Tree(pool_slots=200, host_slots=400) as tree:
        install_policy(tree.cache, Settings(retention_policy=name), "lru")
        for seed in range(3):
            tree.bring(tree.load(str(seed), write_adapter(tmp_path / str(seed), rank=1, seed=seed)))
        tree.core.set_eval_parameters(EvalParameters(now=1.0, low_lora=3.0))
        for _ in range(5):
            tree.core.note_visit(tree.core.lora_nodes[tree.demand({"1": 1.0}).identity])
        identity = tree.demand({"1": 1.0}).identity
        tree.unload("1")
        tree.cache.evict_some(1)
        assert not tree.core.is_resident(identity)
        assert sum(node.is_resident for node in tree.core.lora_nodes.values()) == 2


def test_who_waits_is_not_evicted_first(tmp_path: Any):
    """A request that joins the queue makes recent what it will use, members of its mix included."""
    with Tree(pool_slots=200, host_slots=400) as tree:
        install_policy(tree.cache, Settings(retention_policy="stock"), "lru")
        for seed in range(3):
            tree.bring(tree.load(str(seed), write_adapter(tmp_path / str(seed), rank=1, seed=seed)))
        demand = tree.demand({"0": 1.0})
        tree.add_kv(demand, [1, 2, 3])
        other = tree.demand({"1": 1.0})
        tree.add_kv(other, [1, 2, 3])
        tree.settle()
        tree.cache.look_ahead(RadixKey(array("q", [1, 2, 3]), tree.key(demand)))
        tree.cache.evict_some(1)  # adapter 2, the oldest by now
        tree.cache.evict_some(1)
        assert tree.core.is_resident(demand.identity)
        assert tree.match(tree.key(demand), [1, 2, 3]).device_prefix_len == 3
        assert tree.match(tree.key(other), [1, 2, 3]).device_prefix_len == 0


def test_a_chosen_stock_policy_is_kept():
    with Tree(eviction_policy="lfu") as tree:
        install_policy(tree.cache, Settings(), "lfu")
        node = Node()
        node.hit_count = 7
        assert tree.core.policy.static_key(node) == (7, 0.0)


def test_a_mix_off_the_gpu_outlives_its_members_in_host_memory(tmp_path: Any):
    """Who looks ahead for one touches the members that are left."""
    with Tree(pool_slots=200, host_slots=400) as tree:
        for seed in range(2):
            tree.load(str(seed), write_adapter(tmp_path / str(seed), rank=1, seed=seed))
        demand = tree.demand({"0": 0.5, "1": 0.5})
        tree.bring_mix(demand)
        tree.settle()
        tree.cache.evict_some(1000)
        tree.core.touch(tree.core.lora_nodes[demand.identity].node)
        tree.cache.evict_host(1)
        left = set(tree.core.lora_nodes)
        assert demand.identity in left and not left.issuperset(demand.members)
        tree.cache.look_ahead(RadixKey(array("q", [1, 2, 3]), tree.key(demand)))
