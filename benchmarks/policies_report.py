"""Records and plots of the policy benchmark, from the runs that ``benchmarks.policies`` left."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.simulator import ADAPTER_SLOTS
from benchmarks.workloads import TOKENS_PER_SLOT

Run = dict[str, Any]
_PAPER = {"lru": 1.42, "rrip": 1.35}
"""How many times ELORA's mean TTFT the paper gives for these (HPCA 2026, sections VIII-F and VIII-H)."""
_PAIRS = [("lru", "eval"), ("rrip", "eval"), ("lru", "reuse+"), ("rrip", "reuse+"), ("lru+", "reuse+"), ("eval", "reuse+")]
_COLORS = {"lru": "tab:gray", "lru+": "tab:brown", "rrip": "tab:purple", "eval": "tab:orange", "reuse+": "tab:blue"}


_MEASURES = {
    "ttft": ("ttft_mean_s", "ms", 1e3, "mean"),
    "ttft_p99": ("ttft_p99_s", "ms", 1e3, ""),
    "kv_hit_rate": ("kv_hit_rate", "share", 1, "prompt tokens not computed again"),
    "gpu_kv_hit_rate": ("gpu_kv_hit_rate", "share", 1, "prompt tokens found on the GPU"),
    "adapter_hit_rate": ("adapter_hit_rate", "share", 1, "requests that found their adapter on the GPU"),
    "adapter_reads": ("adapter_reads", "reads", 1, "adapters read from disk"),
    "loaded_gb": ("loaded_gb", "GB", 1, "from host memory to the GPU, adapters and KV"),
    "near_low_lora": ("near_low_lora", "share", 1, "of plans that found Low_lora adapters on the GPU, within 5 %; paper: 0.948"),
    "above_low_lora": ("above_low_lora", "share", 1, "of plans that found more"),
}
"""Metric -> key of a run, unit, scale, note."""


def write_report(parts: dict[str, list[Run]], docs: Path) -> None:
    """Write results/policies_sim.json and docs/policies.png."""
    records = [*_headline(parts), *_of_rates(parts.get("rates", [])), *_of_all(parts.get("all", []))]
    records += [*_of_no_plans(parts), *_of_adapters(parts.get("adapters", [])), *_of_sensitivity(parts)]
    records += _of_loops(parts.get("loops", []))
    path = results.write("policies", "sim", records)
    print(results.table(records))
    print(f"{path}, {_plot(parts, docs)}")


def ratios(runs: Sequence[Run], over: str, under: str) -> list[float]:
    """Mean TTFT under policy ``over`` by that under ``under``, for each case that both played."""

    def case(run: Run) -> tuple[Any, ...]:
        names = ("workload", "adapters", "spread", "pool_share", "rate_share")
        return tuple(run[name] for name in names)

    below = {case(run): run["ttft_mean_s"] for run in runs if run["policy"] == under}
    return [
        run["ttft_mean_s"] / below[case(run)] for run in runs if run["policy"] == over and below.get(case(run), 0) > 0
    ]


def _plain(parts: dict[str, list[Run]]) -> list[Run]:
    """Runs with the default parameters, each case once."""
    runs = [run for name in ("all", "rates", "adapters") for run in parts.get(name, [])]
    return list({str({key: run[key] for key in _KEY}): run for run in runs}.values())


_KEY = ("workload", "adapters", "spread", "pool_share", "rate_share", "policy")


def _headline(parts: dict[str, list[Run]]) -> Iterable[dict[str, Any]]:
    runs = _plain(parts)
    for over, under in _PAIRS:
        found = ratios(runs, over, under)
        if found:
            name = f"ttft_{over}_over_{under}".replace("+", "_look_ahead")
            wanted = _PAPER.get(over)
            yield results.record(
                name,
                statistics.geometric_mean(found),
                "ratio",
                limit=None if wanted is None else f"value >= {wanted}",
                note=f"simulated; geometric mean over {len(found)} cases, from {min(found):.2f} to {max(found):.2f}",
            )


def _of_rates(runs: list[Run]) -> Iterable[dict[str, Any]]:
    for workload, share in sorted({(run["workload"], run["pool_share"]) for run in runs}):
        of_case = [run for run in runs if (run["workload"], run["pool_share"]) == (workload, share)]
        for over, under in (("lru", "eval"), ("rrip", "eval"), ("lru", "reuse+")):
            found = ratios(of_case, over, under)
            if found:
                name = f"ttft_{over}_over_{under}/{workload}/{share:g}".replace("+", "_look_ahead")
                note = f"{len(found)} rates, geometric mean; max {max(found):.2f}"
                yield results.record(name, statistics.geometric_mean(found), "ratio", note=note)


def _of_all(runs: list[Run]) -> Iterable[dict[str, Any]]:
    for workload in dict.fromkeys(run["workload"] for run in runs):
        of_case = {run["policy"]: run for run in runs if run["workload"] == workload}
        for policy, run in of_case.items():
            case = f"{run['adapters']} adapters {run['spread']}, pool {run['pool_share']:.0%} of the working set, "
            case += f"{run['rate']:.1f} requests/s"
            for name, (key, unit, scale, note) in _MEASURES.items():
                yield results.record(
                    f"{name}/{workload}/{policy}",
                    scale * run[key],
                    unit,
                    baseline=("lru", scale * of_case["lru"][key]),
                    note=f"{note}; {case}" if note else case,
                )


def _of_no_plans(parts: dict[str, list[Run]]) -> Iterable[dict[str, Any]]:
    with_plans = {run["workload"]: run for run in parts.get("all", []) if run["policy"] == "eval"}
    for run in parts.get("no_plans", []):
        on = with_plans.get(run["workload"])
        if on is not None:
            note = f"Eval's mean TTFT without plans over with them; adapters found {run['adapter_hit_rate']:.3f}, with plans "
            note += f"{on['adapter_hit_rate']:.3f}; KV {run['kv_hit_rate']:.3f}, with plans {on['kv_hit_rate']:.3f}"
            yield results.record(
                f"ttft_no_plans_over_plans/{run['workload']}", run["ttft_mean_s"] / on["ttft_mean_s"], "ratio", note=note
            )


def _of_adapters(runs: list[Run]) -> Iterable[dict[str, Any]]:
    cases = dict.fromkeys((run["workload"], run["adapters"], run["spread"]) for run in runs)
    for workload, number, spread in cases:
        of_case = [run for run in runs if (run["workload"], run["adapters"], run["spread"]) == (workload, number, spread)]
        for under in ("eval", "reuse+"):
            found = ratios(of_case, "lru", under)
            if found:
                name = f"ttft_lru_over_{under}/{workload}/{number}_{spread}".replace("+", "_look_ahead")
                note = f"rate {of_case[0]['rate']:.1f}/s, pool {of_case[0]['pool_share']:.0%}"
                yield results.record(name, found[0], "ratio", note=note)


def _of_sensitivity(parts: dict[str, list[Run]]) -> Iterable[dict[str, Any]]:
    bases = {run["workload"]: run for run in parts.get("all", []) if run["policy"] == "eval"}
    for run in parts.get("sensitivity", []):
        base = bases.get(run["workload"])
        note = f"hits: KV {run['kv_hit_rate']:.3f}, adapters {run['adapter_hit_rate']:.3f}"
        if run["parameters"]:
            name, value = run["parameters"][0]
        elif run.get("swap_in_below") is not None:
            name, value = "swap_in_below", run["swap_in_below"]
            note += f"; {run['swap_ins']} nodes came in unasked, {run['swap_ins_used']} of them were used within the grace time; "
            note += f"below the threshold were {run['has_room']:.4f} of the plans"
        else:
            name, value = "plan_period", run["plan_period"]
        yield results.record(
            f"eval_ttft/{run['workload']}/{name}/{value}",
            1e3 * run["ttft_mean_s"],
            "ms",
            baseline=None if base is None else ("eval with its defaults", 1e3 * base["ttft_mean_s"]),
            note=note,
        )


def _of_loops(runs: list[Run]) -> Iterable[dict[str, Any]]:
    def name_of(run: Run) -> str:
        late_slots = run.get("late_slots")
        return run["loop"] if late_slots is None else f"{run['loop']}_late_slots_{late_slots}"

    def of(workload: str, adapters: int, loop: str) -> list[Run]:
        wanted = (workload, adapters, loop)
        return sorted((run for run in runs if (run["workload"], run["adapters"], name_of(run)) == wanted), key=itemgetter("seed"))

    def more(of_case: list[Run], other: str, key: str) -> str:
        """The least and the most milliseconds over another loop, of the draws."""
        beside = of(of_case[0]["workload"], of_case[0]["adapters"], other)
        each = [1e3 * run[key] - 1e3 * another[key] for run, another in zip(of_case, beside, strict=True)]
        return f"over {other}, draw by draw: {min(each):+.1f} to {max(each):+.1f}"

    for workload, adapters, loop in dict.fromkeys((run["workload"], run["adapters"], name_of(run)) for run in runs):
        of_case, fenced = of(workload, adapters, loop), of(workload, adapters, "fenced")
        bound = of_case[0].get("late_slots")
        on_gpu, on_host = (
            statistics.fmean(run[key] for run in of_case) for key in ("adapter_hit_rate", "adapter_host_hit_rate")
        )
        for name in ("p50", "p99", "mean"):
            values, others = ([1e3 * run[f"ttft_{name}_s"] for run in each] for each in (of_case, fenced))
            note = f"mean over {len(values)} draws, from {min(values):.1f} to {max(values):.1f}; "
            note += more(of_case, "fenced", f"ttft_{name}_s")
            if bound is not None:
                note += "; " + more(of_case, "by_layer", f"ttft_{name}_s")
            note += f"; adapters at the first look: {on_gpu:.3f} on the GPU, {on_host:.3f} in host memory only"
            if bound is not None:
                note += f"; with one batch come in at most {bound} slots of {TOKENS_PER_SLOT} tokens, {ADAPTER_SLOTS} an adapter"
            yield results.record(
                f"loops/{workload}/{adapters}/{loop}/ttft_{name}",
                statistics.fmean(values),
                "ms",
                baseline=("fenced", statistics.fmean(others)),
                note=note,
            )


def _plot(parts: dict[str, list[Run]], docs: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = parts.get("rates", [])
    smallest = min((run["pool_share"] for run in runs), default=0.0)
    runs = [run for run in runs if run["pool_share"] == smallest]
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    rows: list[tuple[str, Callable[[Run], float]]] = [
        ("mean TTFT, ms", lambda run: 1e3 * run["ttft_mean_s"]),
        ("prompt tokens found", lambda run: run["kv_hit_rate"]),
        ("adapters found on the GPU", lambda run: run["adapter_hit_rate"]),
    ]
    figure, axes = pyplot.subplots(len(rows), max(len(workloads), 1), figsize=(11, 8), squeeze=False)
    for column, workload in enumerate(workloads):
        for row, (label, value) in enumerate(rows):
            axis = axes[row][column]
            for policy in dict.fromkeys(run["policy"] for run in runs):
                of_curve = [run for run in runs if (run["workload"], run["policy"]) == (workload, policy)]
                points = sorted((run["rate"], value(run)) for run in of_curve)
                axis.plot(*zip(*points, strict=True), marker=".", label=policy, color=_COLORS.get(policy))
            axis.set_xlabel("requests/s")
            axis.grid(alpha=0.3)
            if row == 0:
                axis.set_yscale("log")
                axis.set_title(workload)
            if column == 0:
                axis.set_ylabel(label)
    axes[0][0].legend()
    figure.tight_layout()
    path = docs / "policies.png"
    figure.savefig(path, dpi=90)
    return path
