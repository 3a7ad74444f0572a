"""The advisor's picture is the tree's and the queue's, whatever comes and goes; and plans are made of what is in it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_lora_tree.config import Settings
from sglang_lora_tree.radix.eval import EvalParameters, low_lora
from sglang_lora_tree.scheduling.advisor import Advisor
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.planner import NUM_CANDIDATES, Planner
from sglang_lora_tree.scheduling.protocol import ABSENT, Load, Plan, Report, Resync, parse_reply
from sglang_lora_tree.scheduling.waiting_queue import SMALL_WINDOW

LOAD = Load(0, 4, 1000, 1000, 256, 0.0, 0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the tree."""

    id: int
    parent: int
    identity: str | None
    slots: int
    on_gpu: bool
    on_host: bool
    visits: float
    used_at: float


class Reports:
    """Numbers reports, and makes rows."""

    def __init__(self) -> None:
        self.sequence = 0
        self.sets: list[tuple[str, ...]] = []

    def make(
        self,
        now: float = 0.0,
        load: Load = LOAD,
        is_reset: bool = False,
        nodes: Sequence[Node] = (),
        removed: Sequence[int] = (),
        queued: Sequence[tuple[int, tuple[str, ...]]] = (),
    ) -> Report:
        self.sequence += 1
        known = len(self.sets)
        requests = [value for number, members in queued for value in (number, 0.0, 9, self._place(members))]
        rows: list[float] = []
        for node in nodes:
            adapter = ABSENT if node.identity is None else self._place((node.identity,))
            rows += (node.id, node.parent, adapter, node.slots, node.on_gpu + 2 * node.on_host, node.visits, node.used_at)
        for node_id in removed:
            rows += (node_id, 0, ABSENT, 0, ABSENT, 0, 0)
        return Report(1, self.sequence, is_reset or self.sequence == 1, now, load, self.sets[known:], requests, rows)

    def _place(self, members: tuple[str, ...]) -> int:
        if members not in self.sets:
            self.sets.append(members)
        return self.sets.index(members)


def adapter(node_id: int, name: str, on_gpu: bool, on_host: bool = True, slots: int = 15, visits: float = 1.0) -> Node:
    return Node(node_id, 0, name, slots, on_gpu, on_host, visits, 0.0)


def test_random_changes_end_in_the_same_picture() -> None:
    draw, reports, mirror = random.Random(0), Reports(), Mirror(300.0)
    truth: dict[int, Node] = {}
    gone: set[int] = set()  # ids never come back
    for _ in range(50):
        nodes, removed = [], []
        for node_id in draw.sample(range(1, 3000), 60):
            if node_id in truth and draw.random() < 0.4:
                del truth[node_id]
                gone.add(node_id)
                removed.append(node_id)
            elif node_id not in gone:
                name = f"a{node_id}" if node_id % 10 == 0 else None
                row = Node(node_id, node_id // 10, name, draw.randint(1, 99), draw.random() < 0.5, True, draw.random(), 1.0)
                truth[node_id] = row
                nodes += [dataclasses.replace(row, slots=7), row]  # the last row counts
        assert mirror.apply(reports.make(nodes=nodes, removed=removed))
    assert len(mirror) == len(truth) and gone
    places = np.array([mirror._places[node_id] for node_id in truth])
    for name in ("slots", "on_gpu", "visits", "used_at", "parent"):
        assert getattr(mirror, name)[places].tolist() == [getattr(row, name) for row in truth.values()]
    assert {name: mirror.node_id[place] for name, place in mirror.identities.items()} == {
        row.identity: node_id for node_id, row in truth.items() if row.identity
    }
    expected = {
        node_id for node_id, row in truth.items() if not row.on_gpu and (row.parent not in truth or truth[row.parent].on_gpu)
    }
    assert set(mirror.node_id[mirror.swap_in_candidates()].tolist()) == expected
    assert mirror.apply(reports.make(is_reset=True)) and len(mirror) == 0


def test_a_row_of_an_unknown_set_is_garbage() -> None:
    report = dataclasses.replace(Reports().make(), requests=(1, 0.0, 9, 4))
    with pytest.raises(ValueError, match="set 4 of 0"):
        Mirror(300.0).apply(report)


def test_a_missing_report_is_noticed() -> None:
    reports, mirror = Reports(), Mirror(300.0)
    assert mirror.apply(reports.make())
    reports.make()
    assert not mirror.apply(reports.make())
    assert not mirror.apply(reports.make()), "until everything is reported again"
    assert mirror.apply(reports.make(is_reset=True))


def test_requests_that_ended_unseen_are_noticed() -> None:
    reports, mirror = Reports(), Mirror(300.0)
    rows = [(number, ()) for number in range(1000)]
    assert mirror.apply(reports.make(queued=rows, load=dataclasses.replace(LOAD, waiting=1000)))
    assert not mirror.apply(reports.make(load=dataclasses.replace(LOAD, waiting=10)))


def test_low_lora_by_hand() -> None:
    """The worked example: probabilities 0.5, 0.3, 0.2 and a batch of 4 need 2.29 adapters."""
    reports, mirror = Reports(), Mirror(300.0)
    names = ["a"] * 5 + ["b"] * 3 + ["c"] * 2
    mirror.apply(reports.make(queued=[(number, (name,)) for number, name in enumerate(names)]))
    assert mirror.usage == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    assert Planner(Settings(), 1).parameters(mirror).low_lora == pytest.approx(2.29, abs=0.01)
    assert low_lora(np.array([0.5, 0.3, 0.2]), 4) == pytest.approx(2.29, abs=0.01)


def test_batch_size_is_that_of_the_last_five_seconds() -> None:
    reports, mirror = Reports(), Mirror(300.0)
    for now, running in ((0.0, 100), (6.0, 10), (8.0, 20)):
        mirror.apply(reports.make(now, dataclasses.replace(LOAD, running=running)))
    assert mirror.batch_size == 15
    for running in (16, 18, 20):
        mirror.apply(reports.make(8.0, dataclasses.replace(LOAD, running=running)))
    assert mirror.batch_size == 15 and len(mirror._batches) == 2, "a loop that sleeps reports the same moment again and again"


def test_rates_are_measured() -> None:
    reports, mirror = Reports(), Mirror(300.0)
    mirror.apply(reports.make(load=dataclasses.replace(LOAD, load_bytes=6e10, load_seconds=2.0)))
    parameters = Planner(Settings(), 1).parameters(mirror)
    assert parameters.host_to_device_bytes_per_s == 3e10
    assert parameters.disk_bytes_per_s == EvalParameters().disk_bytes_per_s, "nothing was read"


# ---- Plans ----


def plan_for(*reports: Report, settings: Settings | None = None) -> Plan:
    mirror = Mirror(300.0)
    for report in reports:
        assert mirror.apply(report)
    return Planner(settings or Settings(theta_seconds=5), 1).plan(mirror)


def test_prefetch_is_in_the_order_of_admission() -> None:
    nodes = (adapter(1, "gpu", on_gpu=True), adapter(2, "host", on_gpu=False))
    wanted = [("disk",), ("gpu",), ("host", "disk"), ("more", "host")]
    queued = list(enumerate(wanted))
    load = dataclasses.replace(LOAD, waiting=4)
    assert plan_for(Reports().make(nodes=nodes, queued=queued, load=load)).prefetch == ("disk", "host", "more")
    # Ten seconds later all are overdue: the order is that of arrival, which is the same here but for LAG's choice.
    late = plan_for(Reports().make(10.0, nodes=nodes, queued=queued[::-1], load=load))
    assert late.prefetch == ("disk", "host", "more")


def test_candidates_are_those_whose_adapters_are_there() -> None:
    nodes = (adapter(1, "gpu", on_gpu=True),)
    queued = [(number, ("gpu",) if number % 10 == 0 else (f"a{number}",)) for number in range(1000)]
    plan = plan_for(Reports().make(nodes=nodes, queued=queued, load=dataclasses.replace(LOAD, waiting=1000)))
    looked_at = SMALL_WINDOW // 2
    assert plan.candidates == tuple(number for number in range(looked_at, 1000) if number % 10 == 0)[:NUM_CANDIDATES]
    assert len(plan.prefetch) == 32


def test_swap_in_is_by_eval_and_fits_below_the_threshold() -> None:
    nodes = tuple(adapter(number, f"a{number}", on_gpu=False, slots=100, visits=float(number)) for number in range(1, 9))
    report = Reports().make(nodes=nodes, load=dataclasses.replace(LOAD, free_slots=550))
    assert plan_for(report).swap_in == (8, 7), "250 slots are left below 70 %"
    full = Reports().make(nodes=nodes, load=dataclasses.replace(LOAD, free_slots=300))
    assert plan_for(full).swap_in == ()


# ---- The process's logic ----


def test_an_advisor_asks_until_it_knows_and_survives_garbage() -> None:
    advisor, reports = Advisor(Settings(), 1), Reports()
    assert [parse_reply(reply) for reply in advisor.replies(0.0)] == [Resync(1)]
    assert advisor.replies(0.5) == [], "not twice a second"
    advisor.take(b"garbage")
    advisor.take(dataclasses.replace(reports.make(), epoch=9).to_bytes())
    assert advisor.num_dropped == 1 and [parse_reply(reply) for reply in advisor.replies(2.0)] == [Resync(1)]
    advisor.take(Reports().make().to_bytes())
    (plan,) = advisor.replies(3.0)
    assert isinstance(parse_reply(plan), Plan)
