"""What the advisor is told is true: after any traffic its picture is the tree's and the queue's, and a report is small."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.orders import Fcfs
from sglang_lora_tree.scheduling.protocol import NODE_ROW, REQUEST_ROW, Report, parse_report
from sglang_lora_tree.scheduling.reporter import ROWS_AT_A_TIME, Reporter
from sglang_lora_tree.scheduling.waiting_queue import Ticket, WaitingQueue
from tests.radix.tree import Tree


@dataclass
class Client:
    """Plays the thread that talks, and the advisor's end; ``deaf`` loses reports."""

    mirror: Mirror = field(default_factory=lambda: Mirror(300.0))
    needs_reset: bool = True
    deaf: bool = False
    epoch: int = 1
    next_sequence: int = 1
    largest: int = 0
    collect: Callable[[], Report] | None = None

    def talk(self) -> None:
        assert self.collect is not None
        report = self.collect()
        self.next_sequence += 1
        self.largest = max(self.largest, len(report.nodes) // len(NODE_ROW) + len(report.requests) // len(REQUEST_ROW))
        if not self.deaf and not self.mirror.apply(parse_report(report.to_bytes())):
            self.needs_reset = True


@dataclass(eq=False)
class Request:
    lora_tree_ticket: Ticket


def check_picture(mirror: Mirror, tree: Tree) -> None:
    rows = {node.id: tree.core.row_of(node) for node in tree.nodes()}
    assert len(mirror) == len(rows)
    for node_id, (_, parent, identity, slots, on_gpu, on_host, visits, used_at) in rows.items():
        place = mirror._places[node_id]
        seen = (mirror.parent[place], mirror.slots[place], mirror.on_gpu[place], mirror.on_host[place])
        assert seen == (parent, slots, on_gpu, on_host), f"node {node_id}: {seen}"
        assert mirror.is_adapter[place] == (identity is not None)
        assert mirror.visits[place] == visits and mirror.used_at[place] <= used_at
    assert set(mirror.identities) == {row[2] for row in rows.values() if row[2]}


def test_the_picture_is_the_tree(tree: Tree) -> None:
    draw, client = random.Random(1), Client()
    reporter = Reporter(tree.residency, client)  # type: ignore[arg-type]
    for round_number in range(30):
        weights = dict.fromkeys(draw.sample("abcdef", draw.choice((1, 1, 2))), 1.0) if draw.random() < 0.9 else None
        demand = tree.demand(weights)
        for member in () if demand is None else demand.members:
            tree.bring(member)
        if demand is not None:
            tree.bring_mix(demand)
        start = draw.choice(((1, 2, 3), (1, 2, 9), (5,)))
        tree.add_kv(demand, [*start, *draw.choices(range(10, 14), k=draw.randint(1, 12))])
        if draw.random() < 0.3:
            tree.cache.evict_some(draw.randint(1, 60))
        tree.settle()
        if round_number == 15:
            client.deaf = True
        if round_number == 18:
            client.deaf = False
        if round_number == 22:
            tree.flush()
        reporter.step(float(round_number), [], 0)
        client.talk()
    for now in (30.0, 31.0):
        reporter.step(now, [], 0)
        client.talk()
    check_picture(client.mirror, tree)
    assert reporter.is_done


def test_a_report_is_small_whatever_has_changed(tree: Tree) -> None:
    client, queue = Client(), WaitingQueue(Fcfs())
    reporter = Reporter(tree.residency, client)  # type: ignore[arg-type]
    waiting = [Request(queue.take_ticket(("adapter:x",), 3)) for _ in range(1000)]
    reporter.step(0.0, waiting, 0)  # a reset: all of them, little by little
    assert client.largest == 0 and not reporter.is_done, "the loop makes no rows"
    while not reporter.is_done:
        client.talk()
    assert ROWS_AT_A_TIME / 2 < client.largest <= ROWS_AT_A_TIME
    assert sorted(client.mirror.queue) == list(range(1000))


def test_the_queue(tree: Tree) -> None:
    client, queue = Client(), WaitingQueue(Fcfs())
    reporter = Reporter(tree.residency, client)  # type: ignore[arg-type]
    waiting = [Request(queue.take_ticket(("adapter:x",), 3)) for _ in range(100)]
    reporter.step(0.0, waiting, 0)
    client.talk()
    assert sorted(client.mirror.queue) == list(range(100))
    assert client.mirror.queue[7].length == 3 and client.mirror.usage == {"adapter:x": 1.0}
    reporter.note_admitted(waiting[:10])
    reporter.note_queued(waiting[0])  # retracted
    swift = Request(queue.take_ticket(()))
    reporter.note_queued(swift)
    reporter.note_admitted([swift])  # came and went between two reports
    reporter.step(1.0, [waiting[0], *waiting[10:]], 1)
    client.talk()
    assert sorted(client.mirror.queue) == [0, *range(10, 100)]
