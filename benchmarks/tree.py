"""The tree beside SGLang's: match, insert and evict per request, on the Mooncake conversation trace with 100 adapters.

Three systems see the same calls in one process: SGLang's default tree (``UnifiedRadixCache`` over its Rust core), ours
(``LoraTreeCache``, adapters as resident LoRA nodes) and SGLang's python core. They take turns request by request in a
rotating order, one thread, with the garbage collector at rest. Calls go through the cache, as the scheduler's do; slots
come from a counter, so that the pool's allocator (the same for all) is not measured. Node counts are reached with other
users' copies of the trace at 8 tokens a block; the timed requests have the trace's full length. Records without a policy in
their name are of lru, SGLang's default; those with one are of that policy, ours beside SGLang's, except for policies that only we
have (``reuse``, our default, and ``eval``), which stand beside SGLang's lru.

Run: ``python -m benchmarks.tree`` (``--quick`` for a look). Writes results/tree_cpu.json. Wall and CPU time are both
taken; on a machine busier than its cores the CPU time is the number that is reported (each record says which).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from benchmarks import results
from benchmarks.trace import Request, copies, find_trace, make_trace, read_trace
from benchmarks.tree_systems import DEFAULT, NUM_ADAPTERS, OURS, PYTHON, System

FILL_BLOCK = 8
SIZES = (1_000, 10_000, 100_000)
POLICIES = ("lru", "lfu", "slru", "fifo", "mru", "filo", "priority")
OUR_POLICIES = ("reuse", "eval")
"""The default, and the other one that is for use; compared with SGLang's default tree under its lru."""


class Workload:
    """The trace as calls: history and timed window of one user population, and filler from others."""

    def __init__(self, trace: list[Request], window: int) -> None:
        half = len(trace) // 2
        self.window = trace[half : half + window]
        wanted = {request.conversation for request in self.window}
        self.history = [request for request in trace[:half] if request.conversation in wanted]
        self.filler = self._others(trace)

    @staticmethod
    def _others(trace: list[Request]) -> Iterator[tuple[Any, int, int]]:
        """Other users' short requests without end: tokens, adapter, priority."""
        for number, (copy, request) in enumerate(copies(trace)):
            adapter = (request.conversation + 37 * copy) % NUM_ADAPTERS
            yield request.tokens(FILL_BLOCK, copy + 1), adapter, number % 10

    def full(self, requests: Sequence[Request]) -> Iterator[tuple[Any, int]]:
        for request in requests:
            yield request.tokens(), request.conversation % NUM_ADAPTERS


def rotating(systems: Sequence[System], turn: int) -> list[System]:
    """The systems in another order each turn, so that none always runs after the same neighbour."""
    shift = turn % len(systems)
    return [*systems[shift:], *systems[:shift]]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(systems: Sequence[System], workload: Workload, num_nodes: int) -> None:
    """History, then other users until the trees have ``num_nodes``; one request in five comes back (a hit)."""
    for tokens, adapter in workload.full(workload.history):
        for system in systems:
            system.fill(tokens, adapter)
    top_up(systems, workload, num_nodes)


def top_up(systems: Sequence[System], workload: Workload, num_nodes: int) -> None:
    counter = next(system for system in systems if system.name == OURS)
    again: list[tuple[Any, int, int]] = []
    for number, call in enumerate(workload.filler):
        if counter.num_nodes >= num_nodes:
            return
        for system in systems:
            system.fill(*call)
        if number % 5 == 0:
            again.append(call)
        if len(again) > 50:
            for system in systems:
                system.fill(*again[0])
            del again[0]


def fill_host(systems: Sequence[System], workload: Workload, num_nodes: int) -> None:
    counter = next(system for system in systems if system.name == OURS)
    for tokens, adapter, _ in workload.filler:
        if counter.num_nodes >= num_nodes:
            return
        for system in systems:
            system.fill_host(tokens, adapter)


def run_requests(systems: Sequence[System], workload: Workload) -> None:
    for turn, (tokens, adapter) in enumerate(workload.full(workload.window)):
        for system in rotating(systems, turn):
            system.serve(tokens, adapter)


def run_evictions(
    systems: Sequence[System], kind: str, evict: Callable[[System], None], calls: int, after: Callable[[], None]
) -> None:
    """Timed evictions in turns. The python core, whose calls take long, takes part in one of ten."""
    for turn in range(calls):
        for system in rotating(systems, turn):
            if system.name != PYTHON or turn % 10 == 0:
                system.plan()  # ten a second, and evictions are not much more frequent
                system.timed(kind, lambda s=system: evict(s))
        after()


def evict_all_ways(systems: Sequence[System], workload: Workload, num_nodes: int, calls: int) -> None:
    """After each call fillers come in until the trees are back at their size."""

    def refill() -> None:
        top_up(systems, workload, num_nodes)

    for count in (20, 2_000):
        params = EvictParams(num_tokens=count)
        run_evictions(systems, f"evict_{count}", lambda s, p=params: s.cache.evict(p), calls, refill)
        run_evictions(systems, f"alloc_{count}", lambda s, p=params: s.cache.evict_for_alloc(p), calls, refill)


def evict_host_all_ways(systems: Sequence[System], workload: Workload, num_nodes: int, calls: int) -> None:
    for count in (20, 2_000):
        run_evictions(
            systems,
            f"evict_host_{count}",
            lambda s, n=count: s.cache.evict_host(n),
            calls,
            after=lambda: fill_host(systems, workload, num_nodes),
        )


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside timed calls: it would charge one system for the objects of another."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()


class Report:
    """Percentiles of every repetition, and the records made of their medians."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
        self.load: list[float] = []
        self.records: list[dict[str, Any]] = []

    def take(self, systems: Sequence[System], scope: str) -> None:
        self.load.append(os.getloadavg()[0])
        for system in systems:
            for kind in system.times:
                for share in (0.5, 0.99, 1.0):
                    pair = tuple(system.percentile(kind, share, clock) for clock in (0, 1))
                    name = "walk" if system.hollow else system.name
                    self.samples.setdefault((name, f"{kind}/{scope}", share), []).append(pair)  # type: ignore[arg-type]

    def median(self, name: str, kind: str, share: float, clock: int) -> float:
        return statistics.median(pair[clock] for pair in self.samples[name, kind, share])

    def add(self, metric: str, kind: str, share: float, name: str = OURS, limit: str | None = None) -> None:
        """One percentile of one system beside the default tree's."""
        if (name, kind, share) not in self.samples:
            return
        cores = len(os.sched_getaffinity(0))
        clock = 1 if max(self.load) > cores else 0
        against = OURS if name == "walk" else DEFAULT
        value, baseline = (self.median(which, kind, share, clock) for which in (name, against))
        walls = [self.median(which, kind, share, 0) for which in (name, against)]
        note = f"{('wall', 'CPU')[clock]} time, load average up to {max(self.load):.1f} on {cores} cores"
        if clock:
            note += f"; wall: {walls[0]:.3g} beside {walls[1]:.3g} ms"
        title = {OURS: "with value copies", DEFAULT: "SGLang default tree (Rust core)"}[against]
        self.records.append(results.record(metric, value, "ms", baseline=(title, baseline), limit=limit, note=note))

    def add_size(self, size: int) -> None:
        for kind in ("match", "insert", "lock", "unlock"):
            for share, percentile in ((0.5, "p50"), (0.99, "p99")):
                self.add(f"{kind}_{percentile}_ms/{size}", f"{kind}/{size}", share)
        both = f"match_insert/{size}"
        self.add(f"match_insert_p50_ms/{size}", both, 0.5)
        self.add(f"match_insert_p99_ms/{size}", both, 0.99, limit="ratio <= 1.0")
        self.add(f"walk_p50_ms/{size}", both, 0.5, "walk")
        self.add(f"walk_p99_ms/{size}", both, 0.99, "walk", limit="value <= 0.5")
        self.add(f"python_core_match_insert_p99_ms/{size}", both, 0.99, PYTHON)

    def add_ours(self, size: int, policy: str) -> None:
        """Requests and evictions under a policy of ours."""
        for share, percentile, limit in ((0.5, "p50", None), (0.99, "p99", "ratio <= 1.0")):
            self.add(f"match_insert_{percentile}_ms/{size}/{policy}", f"match_insert/{size}/{policy}", share, limit=limit)
        self.add_evictions(size, policy)

    def add_evictions(self, size: int, policy: str) -> None:
        scope = f"{size}" if policy == "lru" else f"{size}/{policy}"
        for title, kind in (("evict", "evict"), ("evict_for_alloc", "alloc"), ("evict_host", "evict_host")):
            for count in (20, 2_000):
                tokens = "" if count == 20 else f"_{count}_tokens"
                self.add(f"{title}{tokens}_vs_default/{scope}", f"{kind}_{count}/{scope}", 0.5, limit="ratio <= 1.0")
                self.add(f"{title}{tokens}_p99_vs_default/{scope}", f"{kind}_{count}/{scope}", 0.99)
                self.add(f"{title}{tokens}_max_vs_default/{scope}", f"{kind}_{count}/{scope}", 1.0)
                self.add(f"python_core_{title}{tokens}/{scope}", f"{kind}_{count}/{scope}", 0.5, PYTHON)


def measure_requests(report: Report, trace: list[Request], size: int, window: int, calls: int) -> None:
    systems = [System(OURS), System(DEFAULT), System(PYTHON), System(OURS, hollow=True)]
    workload = Workload(trace, window)
    fill(systems, workload, size)
    with quiet_collector():
        run_requests(systems, workload)
        evict_all_ways(systems[:3], workload, size, calls)
    report.take(systems, f"{size}")


def measure_host(report: Report, trace: list[Request], size: int, policy: str, calls: int) -> None:
    names = (OURS, DEFAULT, PYTHON) if policy == "lru" else (OURS, DEFAULT)
    systems = [System(name, policy) for name in names]
    workload = Workload(trace, 0)
    fill_host(systems, workload, size)
    with quiet_collector():
        evict_host_all_ways(systems, workload, size, calls)
    report.take(systems, f"{size}" if policy == "lru" else f"{size}/{policy}")


def measure_policy(report: Report, trace: list[Request], size: int, policy: str, calls: int) -> None:
    systems = [System(name, policy) for name in (OURS, DEFAULT)]
    workload = Workload(trace, 0)
    fill(systems, workload, size)
    with quiet_collector():
        evict_all_ways(systems, workload, size, calls)
    report.take(systems, f"{size}/{policy}")


def measure_ours(report: Report, trace: list[Request], size: int, policies: Sequence[str], window: int, calls: int) -> None:
    """Policies of ours and SGLang's default tree, in turns."""
    ours, default = [System(OURS, ours_policy=policy) for policy in policies], System(DEFAULT)
    workload = Workload(trace, window)
    fill([*ours, default], workload, size)
    with quiet_collector():
        run_requests([*ours, default], workload)
        evict_all_ways([*ours, default], workload, size, calls)
    for system in ours:
        report.take([system, default], f"{size}/{system.ours_policy}")
        if system.ours_policy == "eval":
            report.records += agreement(system, size)
    del workload
    on_host, default = [System(OURS, ours_policy=policy) for policy in policies], System(DEFAULT)
    workload = Workload(trace, 0)
    fill_host([*on_host, default], workload, size)
    with quiet_collector():
        evict_host_all_ways([*on_host, default], workload, size, calls)
    for system in on_host:
        report.take([system, default], f"{size}/{system.ours_policy}")


def agreement(system: System, size: int) -> Iterator[dict[str, Any]]:
    """How often the victims of an index are those of the exact order: among the lowest tenth of the leaves, and one by one.

    Twice: as it is, and with a tau so long that all was used within it, where keys are at their worst.
    """
    core = system.cache.tree_core
    usual, parameters = core.policy.candidates, core.retention.parameters
    for suffix, tau in (("", parameters.tau), ("/long_tau", parameters.now)):
        core.set_eval_parameters(replace(parameters, tau=tau))
        leaves = list(core.evictable_device_leaves)
        lowest = sorted(leaves, key=core._exact_value)[: max(1, len(leaves) // 10)]
        wanted = set(map(id, lowest))
        for candidates, title in ((1, "keys"), (usual, "index")):
            core.policy.candidates = candidates
            index = core._make_index()
            for leaf in leaves:
                index.add(leaf)
            victims = [index.pop_lowest() for _ in lowest]
            found = statistics.fmean(id(victim) in wanted for victim in victims)
            in_place = statistics.fmean(victim is leaf for victim, leaf in zip(victims, lowest, strict=True))
            note = f"{len(lowest)} of {len(leaves)} leaves, tau {tau:.0f} s; "
            note += "keys decide" if candidates == 1 else f"exact values decide among the {candidates} of lowest keys"
            unit = "share of the lowest tenth"
            yield results.record(f"eval_{title}_agreement/{size}{suffix}", found, unit, note=note)
            yield results.record(f"eval_{title}_agreement_in_place/{size}{suffix}", in_place, unit, note=note)
        core.policy.candidates = usual


def measure_memory(report: Report, trace: list[Request], size: int) -> None:
    """Resident bytes a node, keys and slot numbers (8 bytes a token each) included, and what a tree adds to one full
    garbage collection. To be called first, while the process has no freed memory to use again."""
    calls = list(islice(Workload(trace, 0).filler, size))
    spent, pauses, trees = {}, {}, []  # the first tree lives on while the second is measured
    for name in (OURS, DEFAULT):
        before, pause = resident_bytes(), collection_ms()
        system = System(name)
        for number, call in enumerate(calls):
            system.fill(*call)
            if name == OURS and system.num_nodes >= size:
                del calls[number + 1 :]
        spent[name] = (resident_bytes() - before) / size
        pauses[name] = collection_ms() - pause
        trees.append(system)
    memory = (f"memory_per_node/{size}", spent[OURS], "bytes")
    baseline = ("SGLang default tree (Rust core)", spent[DEFAULT])
    report.records.append(results.record(*memory, baseline=baseline, note="resident memory; keys and slot numbers included"))
    note = "what the tree adds to one full garbage collection; SGLang freezes long-lived objects"
    report.records.append(results.record(f"full_collection_ms/{size}", max(pauses[OURS], 0.0), "ms", note=note))


def collection_ms() -> float:
    gc.collect()
    start = time.thread_time()
    gc.collect()
    return 1e3 * (time.thread_time() - start)


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trace", type=Path, help="Mooncake conversation trace, .jsonl.gz")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="nodes; none: policies alone")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES[1:]), help="besides lru, at the largest size")
    parser.add_argument("--ours", nargs="*", default=list(OUR_POLICIES), help="policies of ours, at each of --ours-sizes")
    parser.add_argument("--ours-sizes", type=int, nargs="*", default=list(SIZES), help="nodes")
    parser.add_argument("--window", type=int, default=1_000, help="timed requests per repetition")
    parser.add_argument("--calls", type=int, default=200, help="timed evictions of each kind per repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1,000 nodes once, for a look; writes nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.policies, options.ours_sizes, options.repetitions = [1_000], [], [1_000], 1
        options.window, options.calls = min(options.window, 100), min(options.calls, 20)

    torch.set_num_threads(1)
    path = options.trace or find_trace(Path.cwd())
    trace = make_trace() if path is None else read_trace(path)
    report, largest = Report(), max(options.sizes or SIZES)
    if options.sizes:
        measure_memory(report, trace, min(largest, 10_000))
    for _ in range(options.repetitions):
        for size in options.sizes:
            measure_requests(report, trace, size, options.window, options.calls)
            measure_host(report, trace, size, "lru", options.calls)
            print(f"{size} nodes, load average {os.getloadavg()[0]:.1f}", flush=True)
    for size in options.sizes:
        report.add_size(size)
        report.add_evictions(size, "lru")
    finish(report, options, path)
    for size in options.ours_sizes if options.ours else ():
        measure_ours(report, trace, size, options.ours, options.window, options.calls)
        for policy in options.ours:
            report.add_ours(size, policy)
        print(f"{size} nodes, {', '.join(options.ours)}, load average {os.getloadavg()[0]:.1f}", flush=True)
        finish(report, options, path)
    for policy in options.policies:
        measure_policy(report, trace, largest, policy, options.calls)
        measure_host(report, trace, largest, policy, options.calls)
        report.add_evictions(largest, policy)
        print(f"{policy}, load average {os.getloadavg()[0]:.1f}", flush=True)
        finish(report, options, path)
    print(results.table(report.records))
    return report


def finish(report: Report, options: argparse.Namespace, path: Path | None) -> None:
    """Write what there is; said again after every policy, since each takes minutes."""
    made_up = "made-up trace with Mooncake's statistics"
    for entry in report.records:
        if path is None and made_up not in entry["note"]:
            entry["note"] = f"{entry['note']}; {made_up}".lstrip("; ")
    if not options.quick:
        results.merge("tree", "cpu", report.records)


if __name__ == "__main__":
    main()
