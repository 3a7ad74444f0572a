"""What plans and orders cost the scheduler loop: time added per step with 100,000 nodes and 2,000 waiting requests.

The real hooks run on the real tree, with a real advisor process beside it; SGLang's own part of a pass is a bare walk over
the queue, timed alone and taken off. Every step is the dear one: there is room, so the queue is split, ordered and walked; a
request joins, and every eighth step one is admitted. A step is 10 ms, as a decode step, so that the advisor runs at its pace.

Run: ``python -m benchmarks.scheduler`` (``--quick`` for a look). Writes results/scheduler_cpu.json. Wall and CPU time are
both taken; on a machine busier than its cores the CPU time of the loop's thread is the number that is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from benchmarks import results
from sglang_lora_tree.config import Settings, publish_settings
from sglang_lora_tree.radix.eval import EvalParameters, eval_scores
from sglang_lora_tree.radix.residency import Demand
from sglang_lora_tree.scheduling import plan_hooks, queue_hooks, scheduler_hooks
from sglang_lora_tree.scheduling.client import AdvisorClient
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.plan_hooks import Plans
from sglang_lora_tree.scheduling.planner import Planner
from sglang_lora_tree.scheduling.protocol import Load, QueuedRow, Report
from sglang_lora_tree.scheduling.scheduler_hooks import STATE
from sglang_lora_tree.scheduling.waiting_queue import WINDOW, make_queue
from tests.radix.tree import Tree, write_adapter

NUM_ADAPTERS, NUM_ON_GPU, NUM_RUNNING = 200, 64, 64
STEP_SECONDS = 0.01


class Manager:
    """What the hooks ask the LoRA manager."""

    def __init__(self, tree: Tree, settings: Settings, demands: dict[str, Demand]) -> None:
        self.residency, self.settings, self.resolver = tree.residency, settings, self
        self._demands = {name: SimpleNamespace(demand=demand) for name, demand in demands.items()}

    def resolve(self, lora_id: str | None) -> Any:
        return None if lora_id is None else self._demands[lora_id]


class Scheduler:
    """What the hooks ask SGLang's scheduler, and a bare walk for its pass."""

    def __init__(self, num_waiting: int) -> None:
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=[], is_empty=lambda: False)
        self.policy = SimpleNamespace(policy=CacheAgnosticPolicy.FCFS, enable_priority_scheduling=False)
        self.lora_drainer = self.chunked_req = None
        self.max_loras_per_batch = 256
        self._draw = random.Random(0)
        self._number = 0
        self.running_batch.reqs = [self.make_request() for _ in range(NUM_RUNNING)]
        for _ in range(num_waiting):
            self.add()

    def make_request(self) -> Any:
        """Adapters by Zipf's law; one request in eight is a mix of two."""
        number, self._number = self._number, self._number + 1
        ranks = self._draw.choices(range(NUM_ADAPTERS), [1 / (rank + 1) for rank in range(NUM_ADAPTERS)], k=2)
        lora_id = f"a{ranks[0]}" if number % 8 or ranks[0] == ranks[1] else f"a{min(ranks)}+a{max(ranks)}"
        req = SimpleNamespace(rid=f"r{number}", lora_id=lora_id, origin_input_ids=[0] * 100, output_ids=[], to_finish=None)
        if STATE.queue is not None:
            req.lora_tree_ticket = STATE.queue.take_ticket(scheduler_hooks.members_of(lora_id), 100)
        return req

    def add(self, req: Any = None) -> None:
        req = req or self.make_request()
        self.waiting_queue.append(req)
        queue_hooks.note_queued(None, self, req)

    def walk(self, scheduler: Any, can_schedule: Callable[..., bool]) -> tuple[Any, Any]:
        """As SGLang's pass goes over the queue: up to the request whose tokens do not fit, which here is the first that may
        run; every eighth time it fits, and the one after it does not."""
        running_loras = {req.lora_id for req in self.running_batch.reqs}
        chosen, fits = None, self._number % 8 == 0
        for req in self.waiting_queue:
            if can_schedule(self, req, running_loras):
                if not fits or chosen is not None:
                    break
                chosen = req
                running_loras.add(req.lora_id)
        if chosen is None:
            return None, self.running_batch
        self.waiting_queue = [req for req in self.waiting_queue if req is not chosen]
        return SimpleNamespace(reqs=[chosen]), self.running_batch


def build(num_nodes: int, settings: Settings, folder: Path) -> tuple[Tree, dict[str, Demand]]:
    """A tree with that many KV nodes of six slots, under adapters on the GPU; demands of adapters and of all pairs."""
    slots = 8 * num_nodes + 40 * NUM_ADAPTERS
    tree = Tree(pool_slots=slots, host_slots=slots, settings=settings)
    identities = []
    for seed in range(NUM_ADAPTERS):
        tree.load(f"a{seed}", write_adapter(folder / f"a{seed}", seed=seed))
        demand = tree.demand({f"a{seed}": 1.0})
        assert demand is not None
        identities.append(demand)
    tree.bring(*(demand.identity for demand in identities[:NUM_ON_GPU]))
    free = tree.cache.token_to_kv_pool_allocator.alloc(6 * num_nodes)
    for number in range(num_nodes):
        demand, own = identities[number % NUM_ON_GPU], free[6 * number : 6 * number + 6]
        tree.insert(tree.key(demand), [1000 + number, 1, 2, 3, 4, 5], own)
    demands = {f"a{seed}": demand for seed, demand in enumerate(identities)}
    for low in range(NUM_ADAPTERS):
        for high in range(low + 1, NUM_ADAPTERS):
            members = (identities[low].identity, identities[high].identity)
            demands[f"a{low}+a{high}"] = Demand(f"mix:{low}+{high}", members)
    return tree, demands


class Times:
    """Wall and CPU microseconds of the parts of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def percentile(self, share: float, baseline: float = 0.0) -> float:
        return float(np.percentile(self.cpu, share)) - baseline


def run(num_nodes: int, num_waiting: int, steps: int) -> list[dict[str, Any]]:
    settings = Settings(max_resident_adapters=NUM_ADAPTERS)
    publish_settings(settings)
    with tempfile.TemporaryDirectory() as folder:
        tree, demands = build(num_nodes, settings, Path(folder))
        STATE.manager = Manager(tree, settings, demands)  # type: ignore[assignment]
        STATE.queue = make_queue(settings)
        client = AdvisorClient(settings)
        STATE.plans = Plans(tree.residency, STATE.queue, settings, client, tuple)
        STATE.plans.swapper.step = lambda now: None  # type: ignore[method-assign] # copies are measured apart
        scheduler = Scheduler(num_waiting)
        try:
            return _run(tree, scheduler, client, num_nodes, steps)
        finally:
            client.close()
            tree.close()


def _run(tree: Tree, scheduler: Scheduler, client: AdvisorClient, num_nodes: int, steps: int) -> list[dict[str, Any]]:
    plans, nodes = STATE.plans, [node for node in tree.nodes() if node.parent is not tree.core.virtual_root]
    assert plans is not None and STATE.queue is not None
    draw = random.Random(1)

    coming: list[Any] = []

    def messages() -> None:
        scheduler.add(coming.pop() if coming else None)
        step = plans.next_step(True)
        if step is not None:
            plans.apply(step)
        plan_hooks.work(scheduler)

    def one_pass() -> None:
        def original(scheduler: Scheduler) -> tuple[Any, Any]:
            STATE.adder = SimpleNamespace(can_run_list=[], rem_total_tokens=10_000)
            queue_hooks.order_queue(lambda *_: None, scheduler.policy, scheduler.waiting_queue, scheduler.running_batch)
            return scheduler.walk(scheduler, can_schedule)

        def can_schedule(scheduler: Scheduler, req: Any, running_loras: set[str | None]) -> bool:
            return scheduler_hooks.can_schedule(lambda *_: True, scheduler, req, running_loras)

        # An admitted adapter that is on disk stays there: reads are not the loop's time.
        scheduler_hooks.run_pass(original, scheduler)

    def all_of_it() -> None:
        messages()
        one_pass()

    def traffic() -> None:
        """What is not the loop's added time: SGLang makes requests, and the tree is used."""
        coming.append(scheduler.make_request())
        for node in draw.sample(nodes, 16):
            tree.core.note_use(node)

    # Until the advisor knows everything.
    tree.residency._start_reading = lambda identity: True  # type: ignore[method-assign]
    deadline = time.monotonic() + 240
    while client.counters.plans < 5 or tree.core.changes or plans.reporter._queue:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, f"the advisor does not get to know the tree: {client.counters}"
        messages()
        scheduler.waiting_queue.pop()
        time.sleep(0.0002)

    process = psutil.Process(client.pid)
    before, began, counters = process.cpu_times(), time.monotonic(), dataclasses.replace(client.counters)
    parts: dict[str, Times] = {}

    # Traffic is the tree's own time: taken before the clock starts.
    def timed(work: Callable[[], None]) -> Times:
        times = Times()
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in range(steps):
            traffic()
            single = measure_once(work)
            times.wall.append(single[0])
            times.cpu.append(single[1])
            time.sleep(STEP_SECONDS)
        gc.enable()
        gc.unfreeze()
        return times

    parts["all"] = timed(all_of_it)
    seconds = time.monotonic() - began
    after = process.cpu_times()
    advisor_share = (after.user + after.system - before.user - before.system) / seconds
    rate = (client.counters.reports + client.counters.plans - counters.reports - counters.plans) / seconds
    parts["messages"] = timed(messages)
    parts["pass"] = timed(one_pass)
    # SGLang's own walk over what the pass looks at.
    window = scheduler.waiting_queue[:WINDOW]
    whole, scheduler.waiting_queue = scheduler.waiting_queue, window
    bare = float(np.median(timed(lambda: scheduler.walk(scheduler, lambda *_: False) and None).cpu))
    scheduler.waiting_queue = whole
    return _records(parts, bare, num_nodes, rate, advisor_share)


def measure_once(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    work()
    return (time.perf_counter_ns() - wall) / 1e3, (time.thread_time_ns() - cpu) / 1e3


def _records(parts: dict[str, Times], bare: float, num_nodes: int, rate: float, advisor_share: float) -> list[dict[str, Any]]:
    everything = parts["all"]
    wall = np.percentile(everything.wall, [50, 99]) - bare
    note = f"CPU time; wall p50 {wall[0]:.0f}, p99 {wall[1]:.0f} us; {bare:.0f} us of SGLang's own walk taken off"
    records = [
        results.record(f"loop_added_p99_us/{num_nodes}", everything.percentile(99, bare), "us", limit="value <= 100", note=note),
        results.record(f"loop_added_p50_us/{num_nodes}", everything.percentile(50, bare), "us", note=note),
    ]
    for name, baseline in (("messages", 0.0), ("pass", bare)):
        for share in (50, 99):
            text = "plan taken, report made and sent" if name == "messages" else "queue split, ordered and walked"
            metric = f"loop_added_{name}_p{share}_us/{num_nodes}"
            records.append(results.record(metric, parts[name].percentile(share, baseline), "us", note=text))
    records.append(results.record(f"messages_per_s/{num_nodes}", rate, "1/s", note="reports and plans"))
    records.append(results.record(f"advisor_cpu_share/{num_nodes}", advisor_share, "cores", note="CPU seconds per second"))
    return records


def advisor_records(num_nodes: int, num_waiting: int) -> list[dict[str, Any]]:
    """The advisor's own work: Eval over every node, and a whole plan."""
    draw, mirror = np.random.default_rng(0), Mirror(300.0)
    queued = tuple(QueuedRow(number, 0.0, 100, (f"adapter:{number % NUM_ADAPTERS}",)) for number in range(num_waiting))
    load = Load(num_waiting, NUM_RUNNING, 10**6, 10**6, 256, 0.0, 0.0, 0.0, 0.0)
    mirror.apply(Report(1, 1, True, 1.0, load, queued=queued))
    mirror._allocate(num_nodes)
    mirror.slots[:] = draw.integers(1, 100, num_nodes)
    mirror.visits[:] = draw.random(num_nodes)
    mirror.on_host[:] = draw.random(num_nodes) < 0.5
    mirror.node_id[:] = np.arange(num_nodes)
    places, parameters, planner = np.arange(num_nodes), EvalParameters(now=10.0), Planner(Settings(), 1)
    scores = [measure_once(lambda: _discard(eval_scores(mirror.statistics(places), parameters)))[1] for _ in range(20)]
    plans = [measure_once(lambda: _discard(planner.plan(mirror)))[1] for _ in range(20)]
    return [
        results.record(f"eval_ms/{num_nodes}", float(np.median(scores)) / 1e3, "ms", limit="value <= 20", note="CPU time, numpy"),
        results.record(f"plan_ms/{num_nodes}", float(np.median(plans)) / 1e3, "ms", note=f"CPU time; {num_waiting} waiting"),
    ]


def _discard(value: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="3,000 nodes, 300 steps")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num_nodes, steps = (3_000, 300) if quick else (100_000, 1_000)
    records = [*run(num_nodes, 2_000, steps), *advisor_records(num_nodes, 2_000)]
    for entry in records:
        print(f"{entry['metric']:40s} {entry['value']:>10} {entry['unit']:6s} {entry['note']}")
    if not quick:
        print(results.write("scheduler", "cpu", records))


if __name__ == "__main__":
    main()
