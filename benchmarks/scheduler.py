"""What plans and orders cost the scheduler loop: time added per step with 100,000 nodes and 2,000 waiting requests.

The real hooks run on the real tree, with a real advisor process beside it. One step of the loop per decode step of 10 ms
(8.4 on an H200), of which the thread spends half in Python and small tensors, as SGLang's does, and half waiting awake.
Traffic: 64 requests run, and every eighth step one of them ends and another comes (12.5 a second: 64 answers of 512 tokens);
then SGLang goes over the queue, admits one and finds no room for the next, while in the other steps it sees at once that the
batch is full. A request touches 32 nodes (400 a second). One request in eight is a mix; one in twenty waits for an adapter.

Counted: every hook that SGLang's loop calls, from its first line to its last; while SGLang's own code runs, in the middle of a
pass too, the clock stands still. Not counted: what belongs to a request rather than to a step (its identity, the walk of
``look_ahead``), the tree's own bookkeeping, reads and copies (a plan's replace those that a pass would have started), and the
thread that makes and sends reports and takes plans in, whose CPU time is given apart.

Run: ``python -m benchmarks.scheduler`` (``--quick`` for a look). Writes results/scheduler_cpu.json. All times are CPU times of
the loop's thread, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from benchmarks import results
from sglang_lora_tree.config import Settings, publish_settings
from sglang_lora_tree.radix.cache_hooks import install_policy
from sglang_lora_tree.radix.eval import EvalParameters, eval_scores
from sglang_lora_tree.radix.residency import Demand
from sglang_lora_tree.scheduling import overload_hooks, plan_hooks, queue_hooks, scheduler_hooks
from sglang_lora_tree.scheduling.client import AdvisorClient
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.plan_hooks import Plans
from sglang_lora_tree.scheduling.planner import Planner
from sglang_lora_tree.scheduling.protocol import Load, Report
from sglang_lora_tree.scheduling.scheduler_hooks import STATE
from sglang_lora_tree.scheduling.waiting_queue import SMALL_WINDOW, make_queue
from tests.radix.tree import Tree, write_adapter

NUM_ADAPTERS, NUM_ON_GPU, NUM_RUNNING, NUM_IN_MIXES = 200, 150, 64, 4
STEP_SECONDS, STEPS_PER_REQUEST, NODES_PER_REQUEST = 0.01, 8, 32
DECODE_STEP_US = 8400.0


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
        self.running_batch = SimpleNamespace(reqs=[], is_empty=lambda: False, batch_is_full=True)
        self.policy = SimpleNamespace(policy=CacheAgnosticPolicy.FCFS, enable_priority_scheduling=False)
        self.lora_drainer = self.chunked_req = None
        self.max_loras_per_batch = 256
        self._draw = random.Random(0)
        self._weights = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
        self._number = 0
        self.running_batch.reqs = [self.make_request() for _ in range(NUM_RUNNING)]
        for _ in range(num_waiting):
            self.add(self.make_request())

    def make_request(self) -> Any:
        """Adapters by Zipf's law; one request in eight is a mix of two of the most popular."""
        number, self._number = self._number, self._number + 1
        (rank,) = self._draw.choices(range(NUM_ADAPTERS), self._weights)
        low, high = sorted(self._draw.sample(range(NUM_IN_MIXES), 2))
        lora_id = f"a{rank}" if number % 8 else f"a{low}+a{high}"
        req = SimpleNamespace(rid=f"r{number}", lora_id=lora_id, origin_input_ids=[0] * 100, output_ids=[], to_finish=None)
        demand = scheduler_hooks.demand_of(req).demand  # type: ignore[union-attr]
        req.lora_tree_ticket = STATE.queue.take_ticket(demand.members, 100, demand)  # type: ignore[union-attr]
        return req

    def add(self, req: Any) -> None:
        self.waiting_queue.append(req)
        queue_hooks.note_queued(None, self, req)

    def walk(self, can_schedule: Callable[..., bool]) -> tuple[Any, Any]:
        """As SGLang's pass goes over the queue: the first that may run fits, the second does not."""
        running_loras = {req.lora_id for req in self.running_batch.reqs}
        chosen = None
        for req in self.waiting_queue:
            if can_schedule(self, req, running_loras):
                if chosen is not None:
                    self.running_batch.batch_is_full = True
                    break
                chosen = req
                running_loras.add(req.lora_id)
        if chosen is None:
            return None, self.running_batch
        self.waiting_queue = [req for req in self.waiting_queue if req is not chosen]
        return SimpleNamespace(reqs=[chosen]), self.running_batch


def build(num_nodes: int, settings: Settings, folder: Path) -> tuple[Tree, dict[str, Demand]]:
    """A tree with that many KV nodes of six slots, under adapters on the GPU; demands of adapters and of mixes."""
    slots = 8 * num_nodes + 40 * NUM_ADAPTERS
    tree = Tree(pool_slots=slots, host_slots=slots, settings=settings)
    install_policy(tree.cache, settings, "lru")
    identities = []
    for seed in range(NUM_ADAPTERS):
        tree.load(f"a{seed}", write_adapter(folder / f"a{seed}", seed=seed))
        demand = tree.demand({f"a{seed}": 1.0})
        assert demand is not None
        identities.append(demand)
    tree.bring(*(demand.identity for demand in identities))
    for demand in identities[NUM_ON_GPU:]:
        tree.cache.evict_adapter(tree.core.lora_nodes[demand.identity])
    free = tree.cache.token_to_kv_pool_allocator.alloc(6 * num_nodes)
    for number in range(num_nodes):
        demand, own = identities[number % NUM_ON_GPU], free[6 * number : 6 * number + 6]
        tree.insert(tree.key(demand), [1000 + number, 1, 2, 3, 4, 5], own)
    demands = {f"a{seed}": demand for seed, demand in enumerate(identities)}
    for low in range(NUM_IN_MIXES):
        for high in range(low + 1, NUM_IN_MIXES):
            mix = demands[f"a{low}+a{high}"] = tree.demand({f"a{low}": 1.0, f"a{high}": 1.0})  # type: ignore[assignment]
            tree.bring_mix(mix)
    tree.settle()
    return tree, demands


class Meter:
    """CPU time of the thread while our code runs, in microseconds."""

    def __init__(self) -> None:
        self._nanoseconds = 0
        self._since = 0

    def on(self) -> None:
        """SGLang calls a hook, or comes back into one."""
        self._since = time.thread_time_ns()

    def off(self) -> None:
        """The hook returns, or calls what it stands around."""
        self._nanoseconds += time.thread_time_ns() - self._since

    def take(self) -> float:
        """What has come together since the last call."""
        taken, self._nanoseconds = self._nanoseconds / 1e3, 0
        return taken


METER = Meter()


class Times:
    """CPU microseconds that our code added to steps."""

    def __init__(self) -> None:
        self.added: list[float] = []
        self.kinds: list[frozenset[str]] = []
        """What happened in each step."""

    def add(self, added: float, kinds: frozenset[str]) -> None:
        self.added.append(added)
        self.kinds.append(kinds)


def run(num_nodes: int, num_waiting: int, steps: int) -> list[dict[str, Any]]:
    settings = Settings(max_resident_adapters=NUM_ADAPTERS)
    publish_settings(settings)
    with tempfile.TemporaryDirectory() as folder:
        tree, demands = build(num_nodes, settings, Path(folder))
        STATE.manager = Manager(tree, settings, demands)  # type: ignore[assignment]
        STATE.queue = make_queue(settings)
        client = AdvisorClient(settings)
        STATE.plans = Plans(tree.residency, STATE.queue, settings, client, tuple)
        for start in ("_read_next", "_fetch_next", "_swap_in_next"):  # copies are not counted: none is started
            setattr(STATE.plans.swapper, start, lambda *_: None)
        tree.cache.has_load_slot = lambda: False  # type: ignore[method-assign]
        scheduler = Scheduler(num_waiting)
        try:
            return _Run(tree, scheduler, client).records(num_nodes, steps)
        finally:
            client.close()
            tree.close()


class _Run:
    """Steps of the loop, timed."""

    def __init__(self, tree: Tree, scheduler: Scheduler, client: AdvisorClient) -> None:
        assert STATE.plans is not None and STATE.plans.reporter is not None
        self.tree, self.scheduler, self.client = tree, scheduler, client
        self.plans, self.reporter = STATE.plans, STATE.plans.reporter
        self.nodes = [node for node in tree.nodes() if node.parent is not tree.core.virtual_root]
        self.draw = random.Random(1)
        self.coming: list[Any] = []
        self.applied = 0

    def step(self) -> None:
        """All that our hooks do in one step of SGLang's loop."""
        METER.on()
        for req in self.coming:
            self.scheduler.add(req)
        step = self.plans.next_step(bool(self.coming))
        if step is not None:
            self.plans.apply(step)
        scheduler_hooks.poll(self.scheduler)
        plan_hooks.work(self.scheduler)
        overload_hooks.refuse_late(self.scheduler)
        result = scheduler_hooks.run_pass(self._sglang, self.scheduler, running_batch=self.scheduler.running_batch)
        overload_hooks.count_service(result, self.scheduler)
        METER.off()

    def _sglang(self, scheduler: Scheduler, running_batch: Any) -> tuple[Any, Any]:
        METER.off()
        result = None, running_batch
        if not running_batch.batch_is_full and scheduler.waiting_queue:
            adder = SimpleNamespace(can_run_list=[], rem_total_tokens=10_000)
            METER.on()
            scheduler_hooks.remember_adder(None, adder)
            queue_hooks.order_queue(lambda *_: None, scheduler.policy, scheduler.waiting_queue, running_batch)
            METER.off()
            result = scheduler.walk(_can_schedule)
        METER.on()
        return result

    def traffic(self, number: int) -> None:
        """What is SGLang's own time: a request ends, its tokens and those of the next go to the tree."""
        self.coming = []
        if number % STEPS_PER_REQUEST == 0:
            self.coming = [self.scheduler.make_request()]
            self.scheduler.running_batch.batch_is_full = False
            for node in self.draw.sample(self.nodes, NODES_PER_REQUEST):
                self.tree.core.note_use(node)
            self.swap_adapters()

    def swap_adapters(self) -> None:
        """The adapter that a request at the front of the queue waits for has come, and another, which nobody uses, has gone."""
        core = self.tree.core
        front = self.scheduler.waiting_queue[:SMALL_WINDOW]
        wanted = {member for req in front for member in req.lora_tree_ticket.waiting.members}
        absent = sorted(member for member in wanted if not core.is_resident(member))
        if len(absent) > 1:
            gone = [node for node in core.lora_nodes.values() if node.is_resident and not node.is_mix and not node.is_locked]
            gone = [node for node in gone if not node.resident_mixes and node.identity not in wanted]
            self.tree.cache.evict_adapter(self.draw.choice(gone))
            self.tree.bring(absent[0])

    def kinds(self) -> frozenset[str]:
        before, self.applied = self.applied, self.plans.counters.applied
        happened = {"applies": self.applied > before, "admits": bool(self.coming)}
        return frozenset(name for name, holds in happened.items() if holds) or frozenset({"neither"})

    def until_all_is_told(self) -> None:
        deadline = time.monotonic() + 240
        while self.client.counters.plans < 5 or not self.reporter.is_done:
            assert time.monotonic() < deadline, f"the advisor does not get to know the tree: {self.client.counters}"
            self.coming = []
            self.step()
            time.sleep(0.002)
        METER.take()

    def records(self, num_nodes: int, steps: int) -> list[dict[str, Any]]:
        self.until_all_is_told()
        process, counters = psutil.Process(self.client.pid), dataclasses.replace(self.client.counters)
        clock = time.pthread_getcpuclockid(self.client._threads[0].ident)  # type: ignore[arg-type]
        before, talked, began = process.cpu_times(), time.clock_gettime(clock), time.monotonic()
        times = self._timed(steps, STEP_SECONDS)
        seconds, after = time.monotonic() - began, process.cpu_times()
        talking = (time.clock_gettime(clock) - talked) / seconds
        advisor_share = (after.user + after.system - before.user - before.system) / seconds
        messages = self.client.counters.reports + self.client.counters.plans - counters.reports - counters.plans
        print(f"counters: {self.client.counters}, window {STATE.queue.window_size}")  # type: ignore[union-attr]
        records = _records(times, num_nodes)
        records += _records_of_machine(num_nodes, self._timed(4 * steps, 0.0))
        for name, value, unit, note in (
            ("messages_per_s", messages / seconds, "1/s", "reports and plans"),
            ("talking_thread_cpu_share", talking, "cores", "of the scheduler's process: rows, reports, plans checked"),
            ("advisor_cpu_share", advisor_share, "cores", "the advisor's process"),
        ):
            records.append(results.record(f"{name}/{num_nodes}", value, unit, note=note))
        return records

    def _timed(self, steps: int, seconds: float) -> Times:
        """Steps, with other work of so many seconds between them."""
        times = Times()
        for number in _uncollected(steps):
            self.traffic(number)
            self.step()
            times.add(METER.take(), self.kinds())
            do_other_work(seconds)
        return times


def _can_schedule(scheduler: Any, req: Any, running_loras: set[str | None]) -> bool:
    METER.on()
    can = scheduler_hooks.can_schedule(lambda *_: True, scheduler, req, running_loras)
    METER.off()
    return can


def _uncollected(steps: int) -> Iterator[int]:
    """Numbers of steps between which Python's collector, which is not ours, does not run (SGLang freezes it, too)."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield from range(steps)
    gc.enable()
    gc.unfreeze()


_OTHERS = torch.zeros(64, 64)


def do_other_work(seconds: float) -> None:
    """What the thread does for the rest of a step: SGLang's Python and small tensors, and then it waits for the GPU, awake."""
    if not seconds:
        return
    end = time.perf_counter() + seconds
    middle = end - seconds / 2
    while time.perf_counter() < middle:
        rows = torch.cat([_OTHERS, _OTHERS])[torch.arange(64)]
        names = sorted({number: str(number) for number in range(200)}.values())
        assert rows.sum().item() == 0 and len(names) == 200
    while time.perf_counter() < end:
        pass


def measure_once(work: Callable[[], None]) -> float:
    """Microseconds of CPU time."""
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e3


def _records(times: Times, num_nodes: int) -> list[dict[str, Any]]:
    added = times.added
    note = f"CPU time of {len(added)} steps, in hooks only"
    name = f"loop_added_p99_us/{num_nodes}"
    records = [
        results.record(name, float(np.percentile(added, 99)), "us", limit="value <= 100", note=note),
        results.record(f"loop_added_p50_us/{num_nodes}", float(np.percentile(added, 50)), "us", note=note),
        results.record(
            f"loop_added_share_of_step/{num_nodes}",
            float(np.mean(added)) / DECODE_STEP_US,
            "ratio",
            limit="value <= 0.01",
            note=f"mean {np.mean(added):.1f} us over a decode step of {DECODE_STEP_US / 1e3} ms (H200, Llama-3-8B shape)",
        ),
    ]
    for kind, text in (
        ("admits", "a request joined, the queue was ordered and walked, one was admitted"),
        ("applies", "a plan was applied"),
        ("neither", "none of these"),
    ):
        chosen = [cost for cost, kinds in zip(added, times.kinds, strict=True) if kind in kinds]
        for share in (50, 99) if chosen else ():
            metric = f"loop_added_{kind}_p{share}_us/{num_nodes}"
            records.append(results.record(metric, float(np.percentile(chosen, share)), "us", note=f"{len(chosen)} steps: {text}"))
    return records


def _records_of_machine(num_nodes: int, warm: Times) -> list[dict[str, Any]]:
    """The same steps one after another, and what the pause between steps does to any code on this machine."""
    note = f"{len(warm.added)} steps one after another, nothing between them"
    records = [
        results.record(f"loop_added_back_to_back_p{share}_us/{num_nodes}", value, "us", note=note)
        for share, value in zip((50, 99), np.percentile(warm.added, [50, 99]).tolist(), strict=True)
    ]
    numbers = list(range(20))

    def plain() -> None:
        for number in numbers:
            _discard(str(number))

    costs = []
    for seconds in (0.0, STEP_SECONDS):
        times = []
        for _ in range(200):
            times.append(measure_once(plain))
            do_other_work(seconds)
        costs.append(float(np.median(times)))
    note = f"40 calls of Python: {costs[0]:.1f} us one after another, {costs[1]:.1f} us once per step"
    records.append(results.record("machine_slowdown", costs[1] / costs[0], "ratio", note=note))
    return records


def advisor_records(num_nodes: int, num_waiting: int) -> list[dict[str, Any]]:
    """The advisor's own work: Eval over every node, and a whole plan."""
    draw, mirror = np.random.default_rng(0), Mirror(300.0)
    requests = [value for number in range(num_waiting) for value in (number, 0.0, 100, number % NUM_ADAPTERS)]
    load = Load(num_waiting, NUM_RUNNING, 10**6, 10**6, 256, 0.0, 0.0, 0.0, 0.0)
    sets = [(f"adapter:{number}",) for number in range(NUM_ADAPTERS)]
    mirror.apply(Report(1, 1, True, 1.0, load, sets, requests))
    mirror._allocate(num_nodes)
    mirror.is_known[:] = True
    mirror.slots[:] = draw.integers(1, 100, num_nodes)
    mirror.visits[:] = draw.random(num_nodes)
    mirror.on_host[:] = draw.random(num_nodes) < 0.5
    mirror.node_id[:] = np.arange(num_nodes)
    places, parameters, planner = np.arange(num_nodes), EvalParameters(now=10.0), Planner(Settings(), 1)
    scores = [measure_once(lambda: _discard(eval_scores(mirror.statistics(places), parameters))) for _ in range(20)]
    plans = [measure_once(lambda: _discard(planner.plan(mirror))) for _ in range(20)]
    return [
        results.record(f"eval_ms/{num_nodes}", float(np.median(scores)) / 1e3, "ms", limit="value <= 20", note="CPU time, numpy"),
        results.record(f"plan_ms/{num_nodes}", float(np.median(plans)) / 1e3, "ms", note=f"CPU time; {num_waiting} waiting"),
    ]


def _discard(value: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="3,000 nodes, 300 steps")
    parser.add_argument("--name", default="cpu", help="of the results file: results/scheduler_NAME.json")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    num_nodes, steps = (3_000, 300) if quick else (100_000, 1_000)
    records = [*run(num_nodes, 2_000, steps), *advisor_records(num_nodes, 2_000)]
    for entry in records:
        print(f"{entry['metric']:40s} {entry['value']:>10} {entry['unit']:6s} {entry['note']}")
    if not quick:
        print(results.merge("scheduler", arguments.name, records))


if __name__ == "__main__":
    main()
