"""Where each adapter lies in the pool: device tensors that kernels, and captured CUDA graphs, read."""

from __future__ import annotations

from bisect import insort
from typing import Any

import numpy as np
import torch

from sglang_lora_tree.kernels.staging import upload

NUM_MODULES = 7
"""M: q, k, v, o, gate, up, down projections, in the order of adapters/base_shape.py's MODULES."""
RANK_TILE = 16
"""Kernels work on ranks in tiles of this many rows; z is padded to a multiple of it."""


class RunAllocator:
    """First-fit allocator of runs of consecutive numbers in range(capacity)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_free = capacity
        self._gaps: list[tuple[int, int]] = [(0, capacity)]  # (first, count): sorted, never adjacent

    def allocate(self, count: int) -> int | None:
        """Take the first gap that holds `count` numbers and return the first of them; None if no gap is long enough."""
        assert count > 0, f"a run has at least one number, got {count}"
        for position, (first, length) in enumerate(self._gaps):
            if length >= count:
                rest = (first + count, length - count)
                self._gaps[position : position + 1] = [rest] if rest[1] else []
                self.num_free -= count
                return first
        return None

    def free(self, first: int, count: int) -> None:
        """Give back a run, joining it with the gaps on both sides."""
        insort(self._gaps, (first, count))
        self.num_free += count
        position = self._gaps.index((first, count))
        start, stop = max(position - 1, 0), position + 2
        joined: list[tuple[int, int]] = []
        for gap in self._gaps[start:stop]:
            if joined:
                last_first, last_count = joined[-1]
                assert last_first + last_count <= gap[0], f"run ({first}, {count}) was free already"
                if last_first + last_count == gap[0]:
                    joined[-1] = (last_first, last_count + gap[1])
                    continue
            joined.append(gap)
        self._gaps[start:stop] = joined

    def reset(self, used: int) -> None:
        """Start again with range(used) taken and the rest one gap."""
        self.num_free = self.capacity - used
        self._gaps = [(used, self.num_free)] if self.num_free else []


class AdapterTable:
    """For each adapter index: its slots, and per layer and module its first row, rank and scaling.

    The device tensors are allocated once and only ever changed in place, so a CUDA graph captured with them stays
    valid whatever adapters come, go or move. `write` and `clear` change the host's side only; `flush` brings the device
    up to date, on the current stream and without synchronisation: call it on the stream that the kernels run on.

    Everything per adapter lies in one record, so that a changed adapter is one copy. The tensors below are views:
    they are strided over A, contiguous inside.

    Attributes
    ----------
    slots : Tensor
        int32 (slot_capacity,): the slots of all adapters, each adapter's in one run.
    first_slot, slot_count : Tensor
        int32 (A,): where an adapter's run in `slots` starts, and its length n.
    row_start : Tensor
        int32 (A, L, M): number of the module's first row; -1 = the adapter lacks the module.
        Row i lies in plane i // n at slot slots[first_slot + i % n].
    rank : Tensor
        int32 (A, L, M): 0 = the adapter lacks the module.
    scaling : Tensor
        float32 (A, L, M).
    """

    def __init__(
        self, capacity: int, slot_capacity: int, num_layers: int, max_rank: int, device: torch.device | str
    ) -> None:
        """Allocate an empty table.

        Parameters
        ----------
        capacity : int
            A: how many adapters can be in the table at once.
        slot_capacity : int
            How many slots they can have together. The pool's size is always enough.
        num_layers : int
            L: the model's layers.
        max_rank : int
            The largest rank of any adapter to come: it fixes z's shape, and with it CUDA graphs.
        device : torch.device or str
        """
        assert capacity > 0 and slot_capacity > 0 and num_layers > 0 and max_rank > 0, "an empty table is of no use"
        self.capacity = capacity
        self.slot_capacity = slot_capacity
        self.num_layers = num_layers
        self.max_rank = max_rank
        self.padded_rank = -(-max_rank // RANK_TILE) * RANK_TILE
        self.device = torch.device(device)

        size = num_layers * NUM_MODULES
        self._host_records = torch.zeros(capacity, 3 * size + 2, dtype=torch.int32)
        self._records = torch.empty_like(self._host_records, device=self.device)
        self.row_start, self.rank, self.scaling, self.first_slot, self.slot_count = self._views(self._records)
        self._host = self._views(self._host_records)
        self._host[0].fill_(-1)
        self.slots = torch.zeros(slot_capacity, dtype=torch.int32, device=self.device)

        self.lookups: dict[tuple[object, ...], Any] = {}
        """What the plain-torch path has read from the device tensors; emptied when they change."""
        self.largest_rank = np.zeros(capacity, dtype=np.int32)
        """(A,), on the host: the largest rank of any of an adapter's modules, 0 = no adapter there."""
        self.version = 0
        """Counts the changes; whoever keeps something made from the table compares it."""

        self._allocator = RunAllocator(slot_capacity)
        self._runs: dict[int, tuple[int, int]] = {}  # adapter index -> (first, count) as it shall be
        self._device_runs: dict[int, tuple[int, int]] = {}  # ... as `slots` on the device has it
        self._pending_slots: dict[int, torch.Tensor] = {}  # written, not yet on the device
        self._dirty: set[int] = set(range(capacity))
        self.flush()

    def _views(self, records: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = (self.num_layers, NUM_MODULES)
        size = self.num_layers * NUM_MODULES
        row_start, rank, scaling = (
            records[:, part * size : (part + 1) * size].unflatten(1, shape) for part in range(3)
        )
        return row_start, rank, scaling.view(torch.float32), records[:, 3 * size], records[:, 3 * size + 1]

    @property
    def record_stride(self) -> int:
        """Elements from one adapter to the next, in every tensor but `slots`."""
        return self._records.stride(0)

    def write(
        self, index: int, slots: torch.Tensor, row_start: torch.Tensor, rank: torch.Tensor, scaling: torch.Tensor
    ) -> None:
        """Put an adapter at `index`, in place of the one that is there. Seen by kernels after `flush`.

        Parameters
        ----------
        index : int
            In range(A).
        slots : Tensor
            Integers (n,), n > 0, on the CPU or on the table's device (then nothing waits for their values), any order.
            Read at `flush`: do not change them before.
        row_start, rank : Tensor
            Integers (L, M) on the CPU; row_start is -1 exactly where rank is 0.
        scaling : Tensor
            Floats (L, M) on the CPU.

        Raises
        ------
        ValueError
            If there is no room for n more slots, or a rank is above the table's max_rank.
        """
        assert 0 <= index < self.capacity, f"adapter index {index} is outside range({self.capacity})"
        assert slots.dim() == 1 and len(slots) > 0, f"slots must be (n,) with n > 0, got {tuple(slots.shape)}"
        shape = (self.num_layers, NUM_MODULES)
        for name, value in (("row_start", row_start), ("rank", rank), ("scaling", scaling)):
            assert tuple(value.shape) == shape, f"{name} must be {shape}, got {tuple(value.shape)}"
        assert torch.equal(row_start < 0, rank <= 0), "row_start must be -1 exactly where rank is 0"
        assert int(row_start.max()) < len(slots) * 2 * self.num_layers, "row_start points past the adapter's slots"
        if int(rank.max()) > self.max_rank:
            raise ValueError(f"rank {int(rank.max())} is above the table's max_rank {self.max_rank}: raise max_rank")
        replaced = self._runs.get(index, (0, 0))[1]
        if len(slots) > self._allocator.num_free + replaced:
            raise ValueError(
                f"adapter {index} needs {len(slots)} entries of the slot table, {self._allocator.num_free + replaced} "
                f"of {self.slot_capacity} are free: raise slot_capacity (the pool's size is always enough)"
            )
        self.clear(index)
        self.version += 1
        self.largest_rank[index] = int(rank.max())
        first = self._allocator.allocate(len(slots))
        if first is None:
            self._compact()
            first = self._allocator.allocate(len(slots))
            assert first is not None, "a compacted table has one gap of all that is free"
        self._runs[index] = (first, len(slots))
        self._pending_slots[index] = slots
        host_row_start, host_rank, host_scaling, host_first_slot, host_slot_count = self._host
        host_row_start[index] = row_start
        host_rank[index] = rank
        host_scaling[index] = scaling
        host_first_slot[index] = first
        host_slot_count[index] = len(slots)
        self._dirty.add(index)

    def clear(self, index: int) -> None:
        """Take an adapter out; no effect if there is none. Seen by kernels after `flush`."""
        assert 0 <= index < self.capacity, f"adapter index {index} is outside range({self.capacity})"
        run = self._runs.pop(index, None)
        if run is None:
            return
        self.version += 1
        self.largest_rank[index] = 0
        self._allocator.free(*run)
        self._device_runs.pop(index, None)
        self._pending_slots.pop(index, None)
        self._host_records[index] = 0
        self._host[0][index] = -1
        self._dirty.add(index)

    def flush(self) -> None:
        """Bring the device up to date: one copy per run of changed adapters, one per adapter written.

        Ordered on the current stream; does not wait for the device.
        """
        if self._dirty:
            self.lookups.clear()
        self._move_slots()
        for index, slots in self._pending_slots.items():
            first, count = self._device_runs[index] = self._runs[index]
            target = self.slots[first : first + count]
            if slots.device.type == self.device.type:
                target.copy_(slots)
            else:
                upload(target, slots.to(torch.int32))
        self._pending_slots.clear()
        for start, stop in _ranges(sorted(self._dirty)):
            upload(self._records[start:stop], self._host_records[start:stop])
        self._dirty.clear()

    def _compact(self) -> None:
        """Give every adapter a new run, without gaps between them, in the order in which they lie."""
        used = 0
        for index, (first, count) in sorted(self._runs.items(), key=lambda item: item[1]):
            if first != used:
                self._runs[index] = (used, count)
                self._host[3][index] = used
                self._dirty.add(index)
            used += count
        self._allocator.reset(used)

    def _move_slots(self) -> None:
        """Move runs that a compaction has given another place; on the device, the host need not know the slots."""
        moved = {index: run for index, run in self._device_runs.items() if self._runs[index] != run}
        if not moved:
            return
        source = torch.arange(self.slot_capacity)
        for index, (old_first, count) in moved.items():
            first = self._runs[index][0]
            source[first : first + count] = torch.arange(old_first, old_first + count)
            self._device_runs[index] = self._runs[index]
        device_source = torch.empty_like(source, device=self.device)
        upload(device_source, source)
        self.slots.copy_(self.slots[device_source])


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted distinct numbers as (start, stop) ranges: [1, 2, 5] -> [(1, 3), (5, 6)]."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges
