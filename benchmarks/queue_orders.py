"""Orders of the waiting queue on a simulated server: time to the first token over theta, rate, burstiness and cluster size.

What is real: the orders, the window over a long queue, admission control, fairness and the advisor's planner, as the server
runs them. What is not: the model and the memory. Adapters are all of one size and leave least recently used first; copies
and steps take what ``workloads.json`` says was measured on an H200. History KV plays no part here (benchmarks/policies.py has
it).

Run: ``python -m benchmarks.queue_orders`` (about three minutes of one core). Writes results/queue_sim.json and docs/lag.png.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import results
from sglang_lora_tree.config import Settings
from sglang_lora_tree.scheduling import waiting_queue
from sglang_lora_tree.scheduling.advisor import VISIT_WINDOW
from sglang_lora_tree.scheduling.mirror import Mirror
from sglang_lora_tree.scheduling.orders import Situation
from sglang_lora_tree.scheduling.planner import Planner
from sglang_lora_tree.scheduling.protocol import Load
from sglang_lora_tree.scheduling.swapper import PREFETCH_SHARE
from sglang_lora_tree.scheduling.waiting_queue import Ticket, arrival_of, make_queue

ROOT = Path(__file__).resolve().parents[1]
COSTS = json.loads((ROOT / "benchmarks" / "workloads.json").read_text())["costs"]
ADAPTER_BYTES = 640 * 131_072
NUM_ADAPTERS, NUM_ON_GPU, NUM_ON_HOST = 200, 32, 100
PROMPT, OUTPUT = 512, 64
"""Mean tokens; both are drawn from geometric distributions."""
MOST_ADAPTERS = 256
"""In one batch: what ``--max-loras-per-batch`` is unless set."""
CHUNK = 8192
"""Prompt tokens of one prefill batch."""
NUM_REQUESTS = 3000
SEEDS = (0, 1, 2)
SLO = 1.0
"""Seconds to the first token that users put up with."""
OFF = 1e9
"""A theta that nobody reaches."""


@dataclass(eq=False)
class Request:
    """One request of the trace."""

    arrived_at: float
    members: tuple[str, ...]
    prompt: int
    left: int
    """Output tokens to come."""
    seen: bool = False
    lora_tree_ticket: Ticket = field(init=False)


@dataclass
class Outcome:
    """What one run measured."""

    ttft: list[float] = field(default_factory=list)
    refused: int = 0
    loads: int = 0
    found: list[bool] = field(default_factory=list)
    """Whether a request's adapters were there when a pass first looked at it."""
    batch: list[int] = field(default_factory=list)
    """Different adapters in the running batch, each step."""
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.ttft, share))


def make_trace(
    rate: float, cv: float, seed: int, skew: float = 1.0, count: int = NUM_REQUESTS, num_adapters: int = NUM_ADAPTERS
) -> list[Request]:
    """Gamma arrivals of a coefficient of variation, adapters by Zipf's law, one request in five a mix of two."""
    draw, arrays = random.Random(seed), np.random.default_rng(seed)
    gaps = arrays.gamma(1 / cv**2, cv**2 / rate, count)
    weights = [1 / (rank + 1) ** skew for rank in range(num_adapters)]
    trace, now = [], 0.0
    for gap in gaps:
        now += float(gap)
        members = draw.choices(range(num_adapters), weights, k=2 if draw.random() < 0.2 else 1)
        prompt, output = (1 + int(draw.expovariate(1 / mean)) for mean in (PROMPT, OUTPUT))
        trace.append(Request(now, tuple(dict.fromkeys(f"a{member}" for member in members)), min(prompt, CHUNK), output))
    return trace


class Tier:
    """Adapters on the GPU, and those with a copy in host memory; the rest is on disk."""

    def __init__(self) -> None:
        self.gpu: OrderedDict[str, None] = OrderedDict()
        self.host: OrderedDict[str, None] = OrderedDict()
        self.arriving: dict[str, float] = {}
        """Adapter -> when its copy is done; it has its place on the GPU already."""
        self.link_free = 0.0
        self.loads = 0
        self.disk_free = [0.0] * COSTS["disk_readers"]

    def bring(self, name: str, now: float, locked: set[str]) -> None:
        """Start to bring an adapter in, unless everything on the GPU is in use."""
        if len(self.gpu) >= NUM_ON_GPU:
            victim = next((other for other in self.gpu if other not in locked and other not in self.arriving), None)
            if victim is None:
                return
            del self.gpu[victim]
        start = now
        if name not in self.host:
            reader = min(range(len(self.disk_free)), key=self.disk_free.__getitem__)
            start = self.disk_free[reader] = max(self.disk_free[reader], now) + ADAPTER_BYTES / COSTS["disk_bytes_per_s"]
            self.host[name] = None
            while len(self.host) > NUM_ON_HOST:
                self.host.popitem(last=False)
        self.host.move_to_end(name)
        done = self.link_free = max(self.link_free, start) + ADAPTER_BYTES / COSTS["host_to_device_bytes_per_s"]
        self.gpu[name] = None
        self.arriving[name] = done
        self.loads += 1

    def advance(self, now: float) -> None:
        self.arriving = {name: done for name, done in self.arriving.items() if done > now}


class Advice:
    """The advisor's planner over this server's queue, and what the swapper does with its plans.

    Args:
        parts: of a plan that are carried out: "candidates", "prefetch".
    """

    def __init__(self, settings: Settings, tier: Tier, parts: Container[str]) -> None:
        self._planner = Planner(settings, 1)
        self._mirror = Mirror(VISIT_WINDOW)
        self._mirror.is_resident = tier.gpu.__contains__  # type: ignore[method-assign]
        self._mirror.resident = lambda: set(tier.gpu)  # type: ignore[method-assign]
        self._tier = tier
        self._parts = parts
        self._period = settings.plan_milliseconds / 1e3
        self._next_plan = 0.0
        self._prefetch: deque[str] = deque()
        self._ahead: dict[str, float] = {}
        """Adapters that came in ahead, and until when they are kept for their first use."""
        self._grace = settings.grace_seconds

    def step(self, queue: Any, waiting: Sequence[Request], running: Sequence[Request], now: float) -> None:
        """Once per step of the loop: a plan if it is time, then at most one read and one copy."""
        if now >= self._next_plan:
            self._next_plan = now + self._period
            self._mirror.queue = {row.arrival: row for row in (request.lora_tree_ticket.waiting for request in waiting)}
            self._mirror.now = now
            self._mirror.load = Load(len(waiting), len(running), NUM_ON_GPU, 0, ADAPTER_BYTES, 0.0, 0.0, 0.0, 0.0)
            plan = self._planner.plan(self._mirror)
            if "candidates" in self._parts:
                queue.want(plan.candidates)
            if "prefetch" in self._parts:
                self._prefetch = deque(plan.prefetch)
        in_use = {member for request in running for member in request.members}
        self._ahead = {name: until for name, until in self._ahead.items() if now < until and name not in in_use}
        if self._prefetch and self._tier.link_free <= now and len(self._ahead) < PREFETCH_SHARE * NUM_ON_GPU:
            name = self._prefetch.popleft()
            if name not in self._tier.gpu:
                self._tier.bring(name, now, in_use.union(self._ahead))
                self._ahead[name] = now + self._grace


def simulate(trace: Iterable[Request], settings: Settings, parts: Container[str] = ()) -> Outcome:
    """Serve a trace; the loop is SGLang's: prompts first while there is room, then a step of everybody.

    Args:
        parts: of plans that are carried out (:class:`Advice`); none: no advisor.
    """
    queue, tier, outcome = make_queue(settings), Tier(), Outcome()
    advice = Advice(settings, tier, parts) if parts else None
    coming = [dataclasses.replace(request) for request in trace]
    coming.reverse()
    waiting: list[Request] = []
    running: list[Request] = []
    now = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[-1].arrived_at)
        queue.now = now
        while coming and coming[-1].arrived_at <= now:
            request = coming.pop()
            request.lora_tree_ticket = queue.take_ticket(request.members, request.prompt)
            waiting_row = dataclasses.replace(request.lora_tree_ticket.waiting, arrived_at=request.arrived_at)
            request.lora_tree_ticket.waiting = waiting_row
            queue.note_queued(request)
            waiting.append(request)
        if queue.control is not None:
            waiting = _refuse(queue, waiting, outcome, now)
        tier.advance(now)
        if advice is not None:
            advice.step(queue, waiting, running, now)
        admitted: list[Request] = []
        if waiting and len(running) < COSTS["max_running"]:
            waiting, admitted = _admit(queue, tier, waiting, running, now, settings, outcome)
        if admitted:
            tokens = sum(request.prompt for request in admitted)
            if queue.control is not None:
                queue.control.note_started(len(admitted), tokens, now, not waiting)
            now += COSTS["decode_step_s"] + tokens / COSTS["prefill_tokens_per_s"]
            outcome.ttft += [now - request.arrived_at for request in admitted]
            running += admitted
        elif running:
            now += COSTS["decode_step_s"]
            for request in running:
                request.left -= 1
                if queue.fair is not None:
                    queue.fair.charge(request.members, 0, 1)
            running = [request for request in running if request.left > 0]
        elif waiting:
            now = min([*tier.arriving.values(), now + COSTS["decode_step_s"]])
        outcome.batch.append(len({member for request in running for member in request.members}))
    outcome.seconds = now
    outcome.loads = tier.loads
    return outcome


def _refuse(queue: Any, waiting: list[Request], outcome: Outcome, now: float) -> list[Request]:
    before, kept = 0, []
    for request in waiting:
        row = request.lora_tree_ticket.waiting
        if queue.control.retry_after(0 if queue.control.is_overloaded else before, row, now) is None:
            before += row.length
            kept.append(request)
        else:
            outcome.refused += 1
    return kept


def _admit(
    queue: Any,
    tier: Tier,
    waiting: list[Request],
    running: list[Request],
    now: float,
    settings: Settings,
    outcome: Outcome,
) -> tuple[list[Request], list[Request]]:
    """One pass over the queue."""
    window, rest = queue.split(waiting), waiting
    in_use = {member for request in running for member in request.members}
    window = queue.arrange(sorted(window, key=arrival_of), Situation(now, frozenset(in_use), tier.gpu), object())
    limit = settings.cluster_adapters if settings.queue_order == "clusters" else MOST_ADAPTERS
    admitted: list[Request] = []
    tokens = 0
    held = set(in_use)
    looked_at = 0
    for request in window:
        if len(running) + len(admitted) >= COSTS["max_running"] or (admitted and tokens + request.prompt > CHUNK):
            break
        looked_at += 1
        if in_use and len(in_use.union(request.members)) > limit:
            continue
        held.update(request.members)
        if not request.seen:
            request.seen = True
            outcome.found.append(all(name in tier.gpu and name not in tier.arriving for name in request.members))
        for name in request.members:
            if name not in tier.gpu:
                tier.bring(name, now, held)
        if all(name in tier.gpu and name not in tier.arriving for name in request.members):
            admitted.append(request)
            in_use.update(request.members)
            tokens += request.prompt
            for name in request.members:
                tier.gpu.move_to_end(name)
    chosen = {id(request) for request in admitted}
    if queue.fair is not None:
        for request in admitted:
            queue.fair.charge(request.members, request.prompt)
    left = [request for request in window if id(request) not in chosen]
    queue.note_pass(looked_at == len(window), len(running) + len(admitted) >= COSTS["max_running"])
    return queue.join(left, rest), admitted


# ---- What is measured ----

THETAS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, OFF)


ADVICE: dict[str, tuple[str, ...]] = {
    "off": (), "order": ("candidates",), "prefetch": ("prefetch",), "all": ("candidates", "prefetch"),
}  # fmt: skip
FOUND = "share of requests whose adapters were on the GPU when a pass first looked at them"


def satisfaction(ttft: Iterable[float], num_requests: int) -> float:
    """S-LoRA's mean reward (appendix B; the function is its code's): 1 at once, falling with the square, 0 from the SLO on."""
    return sum(max(0.0, 1 - (seconds / SLO) ** 2) for seconds in ttft) / num_requests


def run_all(traces: list[list[Request]], parts: Container[str] = (), **settings: Any) -> dict[str, float]:
    """Means over traces."""
    chosen, rows = Settings(**settings), []
    for trace in traces:
        outcome = simulate(trace, chosen, parts=parts)
        slo = sum(value <= SLO for value in outcome.ttft) / len(trace)
        rows.append(
            {
                "p50": outcome.percentile(50),
                "p99": outcome.percentile(99),
                "max": max(outcome.ttft),
                "mean": float(np.mean(outcome.ttft)),
                "loads": outcome.loads / len(trace),
                "found": float(np.mean(outcome.found)),
                "slo": slo,
                "satisfaction": satisfaction(outcome.ttft, len(trace)),
                "refused": outcome.refused / len(trace),
                "adapters": float(np.mean(outcome.batch)),
                "throughput": (len(trace) - outcome.refused) / outcome.seconds,
            }
        )
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def find_capacity() -> float:
    """Requests a second when everything waits from the start, first come first served."""
    trace = [dataclasses.replace(request, arrived_at=0.0) for request in make_trace(100.0, 1.0, 0)]
    return NUM_REQUESTS / simulate(trace, Settings(queue_order="fcfs")).seconds


def main() -> None:
    capacity = find_capacity()
    print(f"capacity {capacity:.1f} requests/s")
    records = [results.record("capacity", capacity, "1/s", note="first come first served, all at once")]
    tables: dict[str, Any] = {"capacity": capacity}

    def traces(load: float, cv: float = 1.0) -> list[list[Request]]:
        return [make_trace(load * capacity, cv, seed) for seed in SEEDS]

    def keep(name: str, row: dict[str, float], note: str) -> None:
        tables[name] = row
        print(name, {key: round(value, 3) for key, value in row.items()})
        for share in ("p50", "p99"):
            records.append(results.record(f"{name}/ttft_{share}_s", row[share], "s", note=note))
        records.append(results.record(f"{name}/ttft_mean_s", row["mean"], "s", note=note))
        records.append(
            results.record(f"{name}/copies", row["loads"], "", note=f"adapters copied to the GPU, per request; {note}")
        )

    for load in (0.8, 0.95, 1.1):
        loads = traces(load, 2.0)
        for order in ("fcfs", "lcfs", "least_adapters", "random", "clusters"):
            keep(f"order/{order}/load{load}", run_all(loads, queue_order=order, theta_seconds=OFF), "theta off")
        for theta in THETAS:
            label = "off" if theta == OFF else f"{theta:g}"
            keep(f"lag/theta{label}/load{load}", run_all(loads, queue_order="lag", theta_seconds=theta), "gamma arrivals, cv 2")
    for window in (8, 16, 64):
        with mock.patch.object(waiting_queue, "SMALL_WINDOW", window):
            row = run_all(traces(0.95, 2.0))
        keep(f"window/{window}/load0.95", row, "requests that a pass looks at while only age decides; default theta")
    for load, cv in ((0.8, 1.0), (0.95, 1.0), (1.1, 1.0), (1.3, 1.0), (0.9, 4.0), (0.9, 8.0)):
        loads = traces(load, cv)
        for name, chosen in (
            ("fcfs", {"queue_order": "fcfs"}),
            ("lcfs", {"queue_order": "lcfs"}),
            ("abort", {"queue_order": "fcfs", "ttft_slo_seconds": SLO}),
        ):
            row = run_all(loads, **chosen)
            key = f"{name}/load{load}/cv{cv:g}"
            tables[f"slo/{key}"] = row
            note = f"share of all requests with a first token within {SLO:g} s; {row['refused']:.3f} refused"
            records.append(results.record(f"slo/{key}", row["slo"], "", note=note))
            note = f"mean over all requests of 1 - (seconds to the first token / {SLO:g})^2, 0 for later and refused ones"
            records.append(results.record(f"satisfaction/{key}", row["satisfaction"], "", note=note))
            print(name, load, cv, {key: round(value, 3) for key, value in row.items()})
    for limit in (1, 2, 4, 8, 16, 32):
        row = run_all(traces(0.8, 2.0), queue_order="clusters", cluster_adapters=limit, theta_seconds=0.5)
        keep(f"clusters/{limit}/load0.8", row, "adapters in one batch at most")
    many = [make_trace(1.0, 1.0, seed, skew=0.5, count=2000, num_adapters=1000) for seed in SEEDS]
    burst, many = (
        [[dataclasses.replace(request, arrived_at=0.0) for request in trace[:2000]] for trace in each]
        for each in (traces(1.0), many)
    )
    for name, loads, theta in (
        ("load0.95", traces(0.95, 2.0), 1.0),
        ("burst", burst, 1.0),
        ("burst", burst, OFF),
        ("burst_of_1000_adapters", many, 1.0),
        ("burst_of_1000_adapters", many, OFF),
    ):
        label = "off" if theta == OFF else f"{theta:g}"
        for advice, parts in ADVICE.items():
            row = run_all(loads, parts, theta_seconds=theta)
            key = f"advisor/{advice}/theta{label}/{name}"
            keep(key, row, "what of plans is carried out; burst: 2,000 requests at once")
            records.append(results.record(f"{key}/found", row["found"], "", note=FOUND))
            records.append(results.record(f"{key}/throughput", row["throughput"], "1/s", note="requests served"))
    print(results.write("queue", "sim", records))
    plot(tables)


def plot(tables: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    positions = range(len(THETAS))
    labels = ["off" if theta == OFF else f"{theta:g}" for theta in THETAS]
    for axis, load in zip(axes, (0.8, 0.95, 1.1), strict=True):
        for share, colour in (("p50", "tab:blue"), ("p99", "tab:red")):
            values = [tables[f"lag/theta{label}/load{load}"][share] for label in labels]
            axis.plot(positions, values, "o-", color=colour, label=f"LAG, {share}")
            axis.axhline(tables[f"order/fcfs/load{load}"][share], color=colour, linestyle=":", label=f"fcfs, {share}")
        axis.set_xticks(positions, labels)
        axis.set_yscale("log")
        axis.set_title(f"{load:g} of capacity")
        axis.set_xlabel("theta (s)")
    axes[0].set_ylabel("time to the first token (s)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "lag.png", dpi=120)


if __name__ == "__main__":
    main()
