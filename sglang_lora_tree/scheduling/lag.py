"""LAG, the LoRA-aware greedy order (DyMerge-LoRA, section 4.2 and Algorithm 1).

The next request is always the one whose set of adapters L(r) adds the fewest to S, the adapters on the GPU or already
chosen for the batch: the lexicographic minimum of (\\|L(r) \\\\ S\\|, place in SGLang's order). Its adapters then join S. A
mix's members count once each.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence

from sglang_lora_tree.scheduling.orders import QueueOrder, Situation, Waiting


class Lag(QueueOrder):
    """The greedy order, in O(n log n): requests with the same adapters move together.

    Args:
        steps: adapters to bring in that are chosen one by one; a pass waits for no more. The rest stays as it is given.
    """

    def __init__(self, steps: int = sys.maxsize) -> None:
        self._steps = steps

    def arrange(self, waiting: Sequence[Waiting], situation: Situation) -> list[int]:
        groups: dict[tuple[str, ...], list[int]] = {}
        for position, request in enumerate(waiting):
            groups.setdefault(request.members, []).append(position)
        running, resident = situation.running, situation.resident
        arranged: list[int] = []
        missing: dict[tuple[str, ...], int] = {}
        wanted_by: dict[str, list[tuple[str, ...]]] = {}
        for members, positions in groups.items():
            absent = [member for member in members if member not in running and member not in resident]
            if not absent:
                arranged += positions
                continue
            missing[members] = len(absent)
            for member in absent:
                wanted_by.setdefault(member, []).append(members)
        arranged.sort()
        # Entries are never corrected, only joined by better ones: the best of a group comes up first.
        heap = [(count, groups[members][0], members) for members, count in missing.items()]
        heapq.heapify(heap)
        steps = self._steps
        while heap and steps:
            count, first, members = heapq.heappop(heap)
            if missing.get(members) != count:
                continue
            steps -= 1
            arranged.append(first)
            covered = []
            for member in members:
                for other in wanted_by.pop(member, ()):
                    missing[other] -= 1
                    if missing[other]:
                        heapq.heappush(heap, (missing[other], groups[other][0], other))
                    else:
                        del missing[other]
                        covered += groups[other]
            covered.remove(first)
            arranged += sorted(covered)
        return arranged + sorted(position for members in missing for position in groups[members])
