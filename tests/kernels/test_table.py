"""The device's table equals a dictionary of what was written, through any allocation, freeing and compaction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_lora_tree.kernels.table import NUM_MODULES, AdapterTable, RunAllocator

CAPACITY, SLOTS, LAYERS, MAX_RANK = 6, 24, 2, 20
SHAPE = (LAYERS, NUM_MODULES)


def entry(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row starts, ranks and scalings of an adapter that lacks some modules."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randint(0, MAX_RANK + 1, SHAPE, generator=generator, dtype=torch.int32)
    rank[torch.rand(SHAPE, generator=generator) < 0.3] = 0
    row_start = torch.randint(0, 4, SHAPE, generator=generator, dtype=torch.int32)
    row_start[rank == 0] = -1
    return row_start, rank, torch.rand(SHAPE, generator=generator)


class TableMachine(RuleBasedStateMachine):
    """Writes, clears and flushes in any order; device state is compared after each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AdapterTable(CAPACITY, SLOTS, LAYERS, MAX_RANK, "cpu")
        self.model: dict[int, tuple[torch.Tensor, ...]] = {}
        self.flushed = dict(self.model)
        tensors = (self.table.slots, self.table.row_start, self.table.first_slot)
        self.addresses = [tensor.data_ptr() for tensor in tensors]

    @rule(index=st.integers(0, CAPACITY - 1), count=st.integers(1, 12), seed=st.integers(0, 10**6))
    def write(self, index: int, count: int, seed: int) -> None:
        slots = torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed))
        others = sum(len(written[0]) for other, written in self.model.items() if other != index)
        if others + count > SLOTS:
            with pytest.raises(ValueError, match="slot_capacity"):
                self.table.write(index, slots, *entry(seed))
            return
        self.table.write(index, slots, *entry(seed))
        self.model[index] = (slots, *entry(seed))

    @rule(index=st.integers(0, CAPACITY - 1))
    def clear(self, index: int) -> None:
        self.table.clear(index)
        self.model.pop(index, None)

    @rule()
    def flush(self) -> None:
        self.table.flush()
        self.flushed = dict(self.model)

    @invariant()
    def device_equals_last_flush(self) -> None:
        table = self.table
        taken: set[int] = set()
        for index in range(CAPACITY):
            first, count = int(table.first_slot[index]), int(table.slot_count[index])
            if index not in self.flushed:
                assert count == 0 and (table.rank[index] == 0).all() and (table.row_start[index] == -1).all()
                continue
            slots, row_start, rank, scaling = self.flushed[index]
            assert torch.equal(table.slots[first : first + count].long(), slots)
            assert torch.equal(table.row_start[index], row_start)
            assert torch.equal(table.rank[index], rank)
            assert torch.equal(table.scaling[index], scaling)
            assert taken.isdisjoint(range(first, first + count)), "two adapters share entries of the slot table"
            taken.update(range(first, first + count))

    @invariant()
    def nothing_moved(self) -> None:
        tensors = (self.table.slots, self.table.row_start, self.table.first_slot)
        assert [tensor.data_ptr() for tensor in tensors] == self.addresses, "a captured graph would read stale memory"


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTable = TableMachine.TestCase


def test_compaction_before_and_after_flush():
    """A run that fits only after others are moved: those on the device already, and those not yet there."""
    table = AdapterTable(8, 10, LAYERS, MAX_RANK, "cpu")
    for index, count in enumerate([3, 3, 2, 2]):
        table.write(index, torch.arange(count) + 10 * index, *entry(index))
        if index == 1:
            table.flush()
    table.clear(0)
    table.clear(2)
    table.write(4, torch.arange(5) + 40, *entry(4))
    table.flush()
    for index, slots in {1: [10, 11, 12], 3: [30, 31], 4: [40, 41, 42, 43, 44]}.items():
        first, count = int(table.first_slot[index]), int(table.slot_count[index])
        assert table.slots[first : first + count].tolist() == slots


def test_rank_above_the_maximum_is_refused():
    table = AdapterTable(2, 10, LAYERS, MAX_RANK, "cpu")
    row_start, rank, scaling = torch.zeros(SHAPE), torch.full(SHAPE, MAX_RANK + 1), torch.ones(SHAPE)
    with pytest.raises(ValueError, match="max_rank"):
        table.write(0, torch.arange(3), row_start, rank, scaling)


def test_run_allocator_joins_gaps():
    runs = RunAllocator(10)
    firsts = [runs.allocate(count) for count in (2, 3, 5)]
    assert firsts == [0, 2, 5] and runs.allocate(1) is None
    runs.free(0, 2)
    runs.free(5, 5)
    assert runs.allocate(6) is None
    runs.free(2, 3)
    assert runs.allocate(10) == 0 and runs.num_free == 0
