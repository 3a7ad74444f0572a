"""The index is a set of leaves that gives them out in order of priority, like sorting them all each time does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.cache_hooks import install_policy
from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.radix.leaf_index import ClassIndex, LeafIndex, SortedEntries
from tests.radix.tree import Tree, write_adapter


@dataclass(eq=False)
class Node:
    id: int
    priority: int = 0


class Machine(RuleBasedStateMachine):
    """``offered``: leaves that were given out and not filed again since."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [Node(number) for number in range(12)]
        self.index = LeafIndex(lambda node: node.priority)
        self.model: set[Node] = set()
        self.offered: set[Node] = set()

    numbers = st.integers(0, 11)

    @rule(number=numbers)
    def add(self, number: int) -> None:
        self.index.add(self.nodes[number])
        self.model.add(self.nodes[number])

    @rule(number=numbers)
    def discard(self, number: int) -> None:
        self.index.discard(self.nodes[number])
        self.model.discard(self.nodes[number])
        self.offered.discard(self.nodes[number])

    @rule(number=numbers, amount=st.integers(0, 9))
    def rise(self, number: int, amount: int) -> None:
        """A hit: nobody tells the index."""
        self.nodes[number].priority += amount

    @rule(number=numbers, amount=st.integers(0, 9))
    def fall(self, number: int, amount: int) -> None:
        self.nodes[number].priority -= amount
        self.index.refresh(self.nodes[number])
        self.offered.discard(self.nodes[number])

    @rule(times=st.integers(1, 200))
    def refresh_often(self, times: int) -> None:
        for _ in range(times):
            for node in self.nodes:
                self.index.refresh(node)
        self.offered.clear()

    @rule()
    def pop(self) -> None:
        candidates = self.model - self.offered
        node = self.index.pop_lowest()
        if not candidates:
            assert node is None
        else:
            assert node in candidates
            assert node.priority == min(candidate.priority for candidate in candidates)
            self.offered.add(node)

    @invariant()
    def it_is_the_set(self) -> None:
        assert self.index == self.model and len(self.index) == len(self.model)
        assert self.index - set() == self.model and self.index & self.model == self.model
        assert all((node in self.index) == (node in self.model) for node in self.nodes)
        assert None not in self.index

    @invariant()
    def it_stays_small(self) -> None:
        size = len(self.index._order) + sum(map(len, self.index._former))
        assert size == len(self.index._entries) <= len(self.model), "an entry outlives its leaf"


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_in_any_order = Machine.TestCase


def test_equal_priorities_leave_in_the_order_of_filing() -> None:
    """Ranks file leaves in the same order, so they choose the same victims."""
    nodes = [Node(number) for number in (5, 3, 9, 1)]
    index = LeafIndex(lambda node: node.priority)
    for node in nodes:
        index.add(node)
    index.refresh(nodes[0])
    assert [index.pop_lowest() for _ in nodes] == [*nodes[1:], nodes[0]]


def test_a_leaf_that_is_added_again_is_offered_once() -> None:
    node = Node(1)
    index = LeafIndex(lambda node: node.priority)
    index.add(node)
    index.discard(node)
    index.add(node)
    assert index.pop_lowest() is node
    assert index.pop_lowest() is None


class CountedPriority:
    """A node's priority, and how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, node: Node) -> int:
        self.calls += 1
        return node.priority


def test_the_cost_of_a_victim_does_not_grow_with_the_number_of_leaves() -> None:
    """Counted in evaluations of the priority, not in seconds."""
    priority = CountedPriority()
    index = LeafIndex(priority)
    nodes = [Node(number, number) for number in range(10_000)]
    for node in nodes:
        index.add(node)
    priority.calls = 0
    for _ in range(100):
        index.discard(index.pop_lowest())
    assert priority.calls <= 200


def test_another_order_takes_over_little_by_little() -> None:
    """Counted in evaluations of the priority: no single call looks at all leaves, and in the end the new order rules."""
    sign, calls = 1, 0

    def priority(node: Node) -> int:
        nonlocal calls
        calls += 1
        return sign * node.priority

    index = LeafIndex(priority)
    nodes = [Node(number, number) for number in range(1_000)]
    for node in nodes:
        index.add(node)
    most = 0
    for another in (-1, 1, -1):
        sign, calls = another, 0
        index.file_all()
        most = max(most, calls)
        for _ in range(10):
            calls = 0
            leaf = index.pop_lowest()
            most = max(most, calls)
            assert leaf is not None
            index.refresh(leaf)  # declined
    for _ in range(1_000):
        index.refresh(nodes[0])
    assert most <= 200
    assert [index.pop_lowest() for _ in nodes] == nodes[::-1]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200))
def test_sorted_entries_are_a_sorted_list(steps: list[tuple[bool, int]]) -> None:
    entries, model = SortedEntries(), []
    entries._LENGTH = 3  # type: ignore[misc]
    for ticket, (is_new, value) in enumerate(steps):
        if is_new or not model:
            entry: Any = (value, ticket, None, entries)
            entries.add(entry)
            model.append(entry)
            model.sort()
        else:
            entries.remove(model.pop(value % len(model)))
        assert len(entries) == len(model) and bool(entries) == bool(model)
        assert entries.first(len(model)) == model and entries.first(5) == model[:5]
        if model:
            assert entries.lowest() == model[0]


def test_touches_without_end_leave_no_work_for_a_victim() -> None:
    """Counted in evaluations: a leaf that was touched is filed at its place, and its old place is gone."""
    priority = CountedPriority()
    index = LeafIndex(priority)
    nodes = [Node(number, number) for number in range(5_000)]
    for node in nodes:
        index.add(node)
    for node in nodes[1:]:
        node.priority += 10_000
        index.refresh(node)
    priority.calls = 0
    assert [index.pop_lowest() for _ in range(5)] == nodes[:5]
    assert priority.calls == 5 and len(index._order) == len(nodes) - 5


def test_priorities_that_all_grow_without_a_word_cost_one_victim_little() -> None:
    priority = CountedPriority()
    index = LeafIndex(priority)
    nodes = [Node(number, number) for number in range(1_000)]
    for node in nodes:
        index.add(node)
    for node in nodes:
        node.priority += 10_000
    priority.calls, victims = 0, []
    for _ in nodes:
        victims.append(index.pop_lowest())
        assert priority.calls <= LeafIndex._MOST + 1
        priority.calls = 0
    assert set(victims) == set(nodes)
    assert victims[0] is nodes[0], "of those that were lowest before, the lowest"


def test_classes_that_all_change_without_a_word_cost_one_victim_little() -> None:
    calls, now = 0, 0

    def classify(node: Node) -> int:
        nonlocal calls
        calls += 1
        return now

    index = ClassIndex(lambda: LeafIndex(lambda node: node.priority), classify, lambda known, leaf: 0.0, lambda: None)
    nodes = [Node(number, number) for number in range(1_000)]
    for node in nodes:
        index.add(node)
    calls, now = 0, 1
    victims = [index.pop_lowest()]
    assert calls <= 2 * (ClassIndex._MOST + 1)
    victims += [index.pop_lowest() for _ in nodes[1:]]
    assert set(victims) == set(nodes) and index.pop_lowest() is None


# ---- In the tree ----


class Counter:
    """Calls of a policy's functions; a leaf that is looked at costs one or two."""

    def __init__(self, policy: Any) -> None:
        self.keys = self.exact = 0
        key, exact, refine = policy.static_key, policy.exact, policy.refine

        def counted_key(node: Any) -> Any:
            self.keys += 1
            return key(node)

        def counted_exact(node: Any) -> float:
            self.exact += 1
            return exact(node)

        def counted_refine(node: Any, key: Any) -> float:
            self.exact += 1
            return refine(node, key)

        policy.static_key, policy.exact, policy.refine = counted_key, counted_exact, counted_refine

    def take(self) -> tuple[int, int]:
        taken = self.keys, self.exact
        self.keys = self.exact = 0
        return taken


KEYS_OF_OTHERS = ("branch", "gdsf", "hawkeye")
"""Policies whose keys depend on more than the node's own uses and touches."""


def assert_keys_are_right(tree: Tree) -> None:
    """Every leaf is filed by what it is worth now, but for those that another order has not taken over yet."""
    for index in (tree.core.evictable_device_leaves, tree.core.evictable_host_leaves):
        if isinstance(index, ClassIndex):
            for known, queue in index._queues.items():
                assert all(tree.core._eviction_class(leaf) == known for leaf in queue)
        for order in index._queues.values() if isinstance(index, ClassIndex) else [index]:
            for key, _, leaf, entries in order._entries.values():
                assert entries is not order._order or key == tree.core._eviction_priority(leaf), f"node {leaf.id}"


def plan(number: int, **changes: Any) -> EvalParameters:
    return EvalParameters(version=number, now=float(number), low_lora=4.0, **changes)


@pytest.mark.parametrize("name", ["eval", "eval_per_slot", "reuse", "stock", "gdsf", "rrip", "halp", "branch", "hawkeye"])
def test_a_victim_costs_little_whatever_happened_before(name: str, tmp_path: Any) -> None:
    """First uses, second uses, backups, plans with other rates, adapters that leave, the advisor's end: no call evaluates all."""
    rng, leaves = random.Random(3), 500
    with Tree(pool_slots=4_000, host_slots=9_000) as tree:
        install_policy(tree.cache, Settings(retention_policy=name), "lru")
        counter = Counter(tree.core.policy)
        for seed in range(3):
            tree.bring(tree.load(str(seed), write_adapter(tmp_path / str(seed), rank=1, seed=seed)))
        demands = [tree.demand({str(seed): 1.0}) for seed in range(2)]
        prompts = [[rng.randrange(50) for _ in range(5)] for _ in range(leaves)]
        tree.core.set_eval_parameters(plan(1))

        def victim_costs() -> None:
            counter.take()
            tree.cache.evict_some(1)
            keys, exact = counter.take()
            # Of each class: candidates, what is corrected or taken over, and what the victim itself and its parent take.
            assert keys <= 200 and exact <= 150, f"{keys} keys and {exact} exact values for one victim"
            if name not in KEYS_OF_OTHERS:
                assert_keys_are_right(tree)

        def add_all() -> None:
            for prompt in prompts:
                tree.add_kv(rng.choice(demands), prompt)
            tree.settle()

        # As at a request's end without a backup: nobody locks what it leaves, and so files it again.
        threshold, tree.core.write_through_threshold = tree.core.write_through_threshold, 1_000
        for prompt in prompts:
            tree.insert(tree.key(rng.choice(demands)), prompt, tree.allocator.alloc(len(prompt)))
        tree.core.write_through_threshold = threshold
        assert len(tree.core.evictable_device_leaves) > 400
        victim_costs()
        for prompt in prompts:
            for demand in demands:
                tree.match(tree.key(demand), prompt)
        victim_costs()
        add_all()
        victim_costs()
        for number, rate in enumerate((1e9, 60e9, 5e9), start=2):
            counter.take()
            tree.core.set_eval_parameters(plan(number, host_to_device_bytes_per_s=rate, disk_bytes_per_s=rate / 9))
            assert sum(counter.take()) == 0, "the plan itself evaluates nothing"
            victim_costs()
        identity = tree.demand({"2": 1.0}).identity
        tree.core.note_visit(tree.core.lora_nodes[identity])
        tree.unload("2")
        tree.cache.evict_some(1)
        assert not tree.core.is_resident(identity)
        victim_costs()
        tree.core.set_eval_parameters(None)
        victim_costs()
        tree.core.set_eval_parameters(plan(9, tau=1.0))
        victim_costs()
