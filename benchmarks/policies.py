"""Retention policies side by side: hit rates, bytes moved and time to first token, in the simulator (``benchmarks.simulator``).

What is compared, how scarce memory is, the rates and every cost are in ``workloads.json``, fixed before the first run.
Six parts:

* rates: the main policies over ten rates, both pool sizes, three workloads;
* adapters: the main policies over numbers of adapters and ways to spread them;
* all: every policy, and Belady's rule as a bound, at one rate;
* no_plans: Eval without the advisor, at one rate;
* sensitivity: what Eval's parameters do, at one rate;
* loops: when copies of adapters may start, who waits for them, and how many may come in with one batch, at one rate
  (``benchmarks.simulator``).

Run: ``python -m benchmarks.policies`` (693 runs, about 25 minutes on one core; ``--part NAME`` for one). Each part
leaves its runs in ``results/policies/``; all that are there go into results/policies_sim.json and docs/policies.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.oracle import make_oracle
from benchmarks.simulator import ADAPTER_SLOTS, LOOPS, Outcome, Simulator
from benchmarks.workloads import CONSTANTS, Workload, build
from sglang_lora_tree.radix.identity import adapter_identity

WORKLOADS = ("mooncake", "azure", "sgd")
MAIN = ("lru", "rrip", "eval", "reuse+")
"""A plus: requests touch what they will use when they arrive (``look_ahead``), as SGLang has it for its lru."""
ALL = (
    "lru", "lru+", "lfu", "slru", "gdsf", "rrip", "hawkeye", "halp", "branch",
    "eval", "eval+", "eval_without_cost", "eval_without_lora", "eval_without_recency", "eval_without_visit",
    "eval_per_slot", "eval_per_slot+",
    "reuse", "reuse+", "oracle",
)  # fmt: skip
LATE_ADAPTERS = (1, 2, 4, 5, 8)
"""How many adapters may come in with one batch (``late_slots``), where that is bounded; copies of five take a decode step."""
RUNS = results.RESULTS / "policies"
_DESIGN = CONSTANTS["design"]


@dataclass(frozen=True)
class Case:
    """One run."""

    workload: str
    adapters: int
    spread: str
    pool_share: float
    rate_share: float
    policy: str
    parameters: tuple[tuple[str, Any], ...] = ()
    plan_period: float | None = CONSTANTS["plan_period_s"]
    """None: no plan ever comes."""
    loop: str = "synchronous"
    seed: int = 0
    """Of the workload's draws."""
    swap_in_below: float | None = None
    """None: nothing comes in unasked."""
    late_slots: int | None = None
    """None: any number of adapters may come in with one batch."""

    def is_of(self, run: dict[str, Any]) -> bool:
        """Whether ``run`` is this case's outcome."""
        # A run that is older than a field was played as the field's default has it.
        older = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        wanted, older = json.loads(json.dumps([self.__dict__, older]))
        return all({**older, **run}.get(name) == value for name, value in wanted.items())

    def run(self) -> dict[str, Any]:
        """Play it; the outcome as plain numbers."""
        workload, top, working_set = _workload(self.workload, self.adapters, self.spread, self.seed)
        jobs = workload.at_rate(top * self.rate_share)
        pool = int(working_set * self.pool_share)
        name = self.policy.removesuffix("+")
        numbers = {adapter_identity(f"{number:064x}"): number for number in range(self.adapters)}
        policy: Any = make_oracle(jobs, numbers) if name == "oracle" else name
        simulator = Simulator(
            policy,
            pool,
            int(pool * CONSTANTS["host_over_pool"]),
            self.adapters,
            parameters=dict(self.parameters),
            plan_period=self.plan_period,
            look_ahead=self.policy.endswith("+"),
            loop=self.loop,
            late_slots=self.late_slots,
            swap_in_below=self.swap_in_below,
        )
        return {**self.__dict__, "rate": top * self.rate_share, "pool_slots": pool, **_summary(simulator.run(jobs))}


def _as_lines(runs: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n"


def _summary(outcome: Outcome) -> dict[str, float]:
    ordered = sorted(outcome.ttft)
    return {
        "ttft_mean_s": outcome.mean_ttft,
        "ttft_p50_s": ordered[len(ordered) // 2],
        "ttft_p99_s": ordered[int(0.99 * len(ordered))],
        "kv_hit_rate": outcome.kv_hit_rate,
        "gpu_kv_hit_rate": outcome.gpu_kv_hit_rate,
        "adapter_hit_rate": outcome.adapter_hit_rate,
        "adapter_host_hit_rate": outcome.adapter_host_hits / max(outcome.adapter_uses, 1),
        "adapter_reads": outcome.adapter_reads,
        "loaded_gb": outcome.loaded_bytes / 1e9,
        "swap_ins": outcome.swap_ins,
        "swap_ins_used": outcome.swap_ins_used,
        "has_room": statistics.fmean(outcome.has_room) if outcome.has_room else 0.0,
        "near_low_lora": statistics.fmean(outcome.near_low_lora) if outcome.near_low_lora else 0.0,
        "above_low_lora": statistics.fmean(outcome.above_low_lora) if outcome.above_low_lora else 0.0,
    }


@lru_cache(maxsize=2)
def _workload(name: str, adapters: int, spread: str, seed: int) -> tuple[Workload, float, int]:
    workload = build(name, adapters, spread, CONSTANTS["num_jobs"][name], seed)
    top = workload.capacity() * CONSTANTS["top_rate_over_capacity"]
    slots = workload.working_set(top, CONSTANTS["window_s"]) + ADAPTER_SLOTS * int(workload.counts["adapters used"])
    print(f"{name}, {adapters} adapters, {spread}: {workload.counts}; top rate {top:.2f}/s, working set {slots} slots")
    return workload, top, slots


# ---- The parts ----


def _usual(workload: str, policy: str, **changes: Any) -> Case:
    """What all parts but rates and adapters vary from."""
    return Case(
        workload, _DESIGN["adapters"], _DESIGN["spread"], CONSTANTS["pool_shares"][0], _DESIGN["rate"], policy, **changes
    )


def rates() -> Iterator[Case]:
    small, large = CONSTANTS["pool_shares"]
    for share, of_rates in ((small, CONSTANTS["rates"]), (large, _DESIGN["rates_of_large_pool"])):
        for workload in WORKLOADS:
            for rate in reversed(of_rates):
                for policy in MAIN:
                    yield Case(workload, _DESIGN["adapters"], _DESIGN["spread"], share, rate, policy)


def adapters() -> Iterator[Case]:
    for number, spread in _DESIGN["adapters_and_spreads"]:
        for workload in WORKLOADS:
            for policy in MAIN:
                yield Case(workload, number, spread, CONSTANTS["pool_shares"][0], _DESIGN["rate"], policy)


def all_policies() -> Iterator[Case]:
    for workload in WORKLOADS:
        for policy in ALL:
            yield _usual(workload, policy)


def sensitivity() -> Iterator[Case]:
    for workload in _DESIGN["sensitivity_workloads"]:
        for name, values in _DESIGN["sensitivity"].items():
            for value in values:
                of_case = name in ("plan_period", "swap_in_below")
                yield _usual(workload, "eval", **({name: value} if of_case else {"parameters": ((name, value),)}))


def no_plans() -> Iterator[Case]:
    """What Eval does without the advisor, to be compared with its run in the part ``all``."""
    for workload in WORKLOADS:
        yield _usual(workload, "eval", plan_period=None)


def loops() -> Iterator[Case]:
    """Several draws of each workload: near capacity one draw differs from another by more than what is asked for."""
    variants: list[dict[str, Any]] = [{"loop": loop} for loop in LOOPS]
    variants += [{"loop": "by_layer", "late_slots": count * ADAPTER_SLOTS} for count in LATE_ADAPTERS]
    cases = product(_DESIGN["loops"]["seeds"], _DESIGN["loops"]["adapters_and_spreads"], WORKLOADS, variants)
    for seed, (number, spread), workload, variant in cases:
        share = CONSTANTS["pool_shares"][0]
        yield Case(workload, number, spread, share, _DESIGN["rate"], "reuse+", seed=seed, **variant)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "all": all_policies,
    "no_plans": no_plans,
    "rates": rates,
    "sensitivity": sensitivity,
    "adapters": adapters,
    "loops": loops,
}


def run_part(name: str) -> None:
    """Play a part's cases and leave them in ``results/policies``; those that are there already are not played again."""
    RUNS.mkdir(parents=True, exist_ok=True)
    begin, path = time.monotonic(), RUNS / f"{name}.json"
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for case in PARTS[name]():
        if any(case.is_of(run) for run in runs):
            continue
        runs.append(case.run())
        last = runs[-1]
        print(
            f"  {case.policy:<22}{dict(case.parameters) or ''} {case.loop} {case.late_slots or ''} "
            f"pool {case.pool_share:g} rate {case.rate_share:g}: "
            f"TTFT {1e3 * last['ttft_mean_s']:.1f} ms, P50 {1e3 * last['ttft_p50_s']:.1f}, P99 {1e3 * last['ttft_p99_s']:.0f}, "
            f"hits: KV {last['kv_hit_rate']:.3f}, adapters {last['adapter_hit_rate']:.3f}",
            flush=True,
        )
        path.write_text(_as_lines(runs), encoding="utf-8")
    print(f"{name}: {len(runs)} runs in {time.monotonic() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="one part (may be repeated); none: all")
    parser.add_argument("--report", action="store_true", help="only write the records and plots from the runs that are there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        for part in arguments.part or PARTS:
            run_part(part)
    from benchmarks.policies_report import write_report

    write_report({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))}, Path("docs"))


if __name__ == "__main__":
    main()
