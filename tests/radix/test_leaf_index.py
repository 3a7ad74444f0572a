"""The index is a set of leaves that gives them out in order of priority, like sorting them all each time does."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_lora_tree.radix.leaf_index import LeafIndex


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
        size = len(self.index._heap) + sum(map(len, self.index._retired))
        assert size <= 2 * (2 * len(self.nodes) + LeafIndex._SLACK + 1)


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


def test_the_cost_of_a_victim_does_not_grow_with_the_number_of_leaves() -> None:
    """Counted in evaluations of the priority, not in seconds."""
    calls = 0

    def priority(node: Node) -> int:
        nonlocal calls
        calls += 1
        return node.priority

    index = LeafIndex(priority)
    nodes = [Node(number, number) for number in range(10_000)]
    for node in nodes:
        index.add(node)
    calls = 0
    for _ in range(100):
        index.discard(index.pop_lowest())
    assert calls <= 200


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


def test_the_order_is_exact_while_a_heap_is_retired() -> None:
    index = LeafIndex(lambda node: node.priority)
    nodes = [Node(number, number) for number in range(1_000)]
    for node in nodes:
        index.add(node)
    highest = nodes[-1]
    while not index._retired:
        index.refresh(highest)  # entries that count no longer, until there are too many
    assert len(index._heap) < 10, "the new heap has hardly begun"
    highest.priority = -1
    index.refresh(highest)
    assert [index.pop_lowest() for _ in nodes] == [highest, *nodes[:-1]]
    newest = Node(2_000, 500)
    index.add(newest)
    assert index.pop_lowest() is newest and index.pop_lowest() is None


def test_a_late_comer_does_not_overtake_what_a_retired_heap_holds() -> None:
    index = LeafIndex(lambda node: node.priority)
    nodes = [Node(number, number) for number in range(1_000)]
    for node in nodes:
        index.add(node)
    while not index._retired:
        index.refresh(nodes[-1])
    for node in nodes[:8]:
        index.discard(node)  # the entries that were taken over already
    middle = Node(2_000, 50)
    index.add(middle)
    index.discard(nodes[8])
    assert [index.pop_lowest() for _ in range(45)] == [*nodes[9:51], middle, nodes[51], nodes[52]]
