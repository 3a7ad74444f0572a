"""Serving with adapters against the base model and SGLang's own LoRA backends, on one GPU, in one run.

    python -m benchmarks.kernels [--cases decode/1 prefill/8 ...] [--servers base triton_v2 ours ...] [--out FOLDER]
    python -m benchmarks.kernels --prefill-graphs

Needs one GPU with 140 GB (up to five servers of the Llama-3-8B shape with random weights stand side by side; one works at a
time). The file is written after the base model's first measurement and after every case; a server that is not up in time is
left out. 32 requests of 256 prompt tokens make 128 tokens each (decode); 8 requests of 1,024 prompt tokens make one (prefill); a
request of 64, alone, makes one (short: what an agent's next turn waits for), ten times. A number
is the median of three runs after one that warms up; the base model runs first and last. SGLang's own backends have a server
for adapters of rank 16 and one, triton_v2_rank_64, for the others; csgmv, the slower one, runs only if it is named. ours_apart is
without `join_operations`. Our host tier copies what is used a second time (``write_through_selective``): no prompt of these runs
is. Results: ``kernels_<gpu>.json``.

With ``--prefill-graphs``: the base model, triton_v2 and ours with CUDA graphs for prefills too, and ours without, adapters of
rank 16 alone; what has the graphs is compared with the base model that has them. Results: ``kernels_prefill_graphs_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.llama8b import write_adapter, write_config
from benchmarks.server import Server

Mix = Mapping[str, float]
Records = list[dict[str, Any]]
RUNS = 3
START_SECONDS = 240
KINDS = {"prefill": (8, 1024, 1, 1), "short": (1, 64, 1, 10), "decode": (32, 256, 128, 1)}
"""Kind of case -> requests at once, prompt tokens and new tokens of each, times one after the other."""
WITHOUT_GRAPHS = ("base", "triton_v2", "triton_v2_rank_64", "ours", "ours_apart")
WITH_GRAPHS = ("base_prefill_graphs", "triton_v2_prefill_graphs", "ours_prefill_graphs", "ours")
SERVERS = tuple(dict.fromkeys((*WITHOUT_GRAPHS, *WITH_GRAPHS, "csgmv")))
APART = '{"join_operations": false}'
_SEEDS = itertools.count()


@dataclass(frozen=True)
class Case:
    """What the requests of a batch ask for.

    Attributes:
        name: its kind (`KINDS`), then what it asks for.
        mixes: request i has mix i modulo their number.
        wanted: tokens per second over the base model's.
    """

    name: str
    mixes: Sequence[Mix]
    wanted: float | None = None

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    def is_for(self, server: str) -> bool:
        """Whether a server has the adapters, and can serve mixes of them."""
        rank_16 = all(name.startswith("r16_") for mix in self.mixes for name in mix)
        if server == "ours":
            return True
        if server in ("ours_prefill_graphs", "ours_apart"):
            return rank_16
        can_serve = all(len(mix) == 1 for mix in self.mixes) and rank_16 == (server != "triton_v2_rank_64")
        return can_serve and not server.startswith("base")


def _distinct(rank: int, count: int) -> list[Mix]:
    return [{f"r{rank}_{index}": 1.0} for index in range(count)]


_MIXES = [{f"r16_{(index + offset) % 8}": 0.5 - 0.1 * offset for offset in range(3)} for index in range(8)]
CASES = (
    Case("decode/1", _distinct(16, 1), 0.95),
    Case("decode/8", _distinct(16, 8), 0.93),
    Case("decode/32", _distinct(16, 32), 0.85),
    Case("decode/mix3of8", _MIXES, 0.85),
    Case("decode/mixed_ranks", [{f"r{rank}_{index}": 1.0} for index in range(2) for rank in (8, 16, 32, 64)], 0.90),
    Case("decode/8_r4", _distinct(4, 8), 0.95),
    Case("decode/8_r8", _distinct(8, 8)),
    Case("decode/8_r32", _distinct(32, 8)),
    Case("decode/8_r64", _distinct(64, 8)),
    Case("prefill/8", _distinct(16, 8), 0.90),
    Case("prefill/mix3of8", _MIXES),
    Case("short/1", _distinct(16, 1)),
    Case("short/mix3of8", _MIXES),
)
ADAPTERS = {16: 32, 4: 8, 8: 8, 32: 8, 64: 8}
"""Rank -> how many adapters of it."""


def run_once(server: Server, case: Case | None, rng: random.Random, kind: str) -> float:
    """Tokens per second: tokens made for decode, else prompt tokens. case None: the base model."""
    bs, prompt_length, num_new, times = KINDS[kind]
    mixes = [case.mixes[index % len(case.mixes)] for index in range(bs)] if case else [None] * bs
    start = time.monotonic()
    for _ in range(times):
        body: dict[str, Any] = {
            "input_ids": [[rng.randrange(2, 120000) for _ in range(prompt_length)] for _ in range(bs)],
            "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
        }
        if case:
            body["lora_path"] = [_as_path(mix) for mix in mixes]
        answers = server.generate(**body)
        assert all(answer["meta_info"]["completion_tokens"] == num_new for answer in answers)
    return times * bs * (num_new if kind == "decode" else prompt_length) / (time.monotonic() - start)


def _as_path(mix: Mix | None) -> str | None:
    if mix is None or list(mix.values()) == [1.0]:
        return None if mix is None else next(iter(mix))
    return json.dumps(mix)


def measure(server: Server, case: Case | None, kind: str) -> list[float]:
    """RUNS rates, after one run that compiles and loads."""
    rng = random.Random(next(_SEEDS))  # no prompt comes twice: nothing is answered from history KV
    return [run_once(server, case, rng, kind) for _ in range(RUNS + 1)][1:]


def make_servers(work: Path) -> dict[str, Server]:
    """Base model, SGLang's two backends, and ours, without and with prefill graphs; same settings."""
    model = write_config(work / "llama8b")
    common = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16"]
    common += ["--attention-backend", "triton", "--cuda-graph-max-bs-decode", "32", "--mem-fraction-static", "0.95"]
    small = [*common, "--max-total-tokens", "14000"]
    eager = ["--cuda-graph-backend-prefill", "disabled"]
    # Few sizes start faster; these are the batches' own: all requests at once, or the first alone and then the rest.
    graphs = ["--cuda-graph-backend-prefill", "breakable", "--chunked-prefill-size", "8192"]
    graphs += ["--cuda-graph-bs-prefill", "64", "256", "512", "1024", "2048", "4096", "7168", "7936", "8192"]
    paths = [f"r{rank}_{index}={work}/r{rank}_{index}" for rank, count in ADAPTERS.items() for index in range(count)]
    rank_16 = [path for path in paths if path.startswith("r16_")]

    def stock(rank: int, at_once: int, loaded: Sequence[str]) -> list[str]:
        sizes = ["--max-lora-rank", str(rank), "--max-loras-per-batch", str(at_once), "--max-loaded-loras", str(len(loaded))]
        return [*small, "--enable-lora", *sizes, "--lora-target-modules", "all", "--lora-paths", *loaded]

    stock_16, stock_64 = stock(16, 32, rank_16), stock(64, 8, [path for path in paths if path not in rank_16[2:]])
    ours = [*common, "--max-loras-per-batch", "32"]
    ours += ["--hicache-ratio", "1.1", "--hicache-write-policy", "write_through_selective"]
    ours += ["--max-loaded-loras", "64", "--lora-tree"]  # last: settings may follow
    fewer = ["--max-total-tokens", "50000", "--lora-paths", *rank_16]
    return {
        "base": Server([*small, *eager], work / "base.log"),
        "base_prefill_graphs": Server([*small, *graphs], work / "base_prefill_graphs.log"),
        "csgmv": Server([*stock_16, *eager, "--lora-backend", "csgmv"], work / "csgmv.log"),
        "triton_v2": Server([*stock_16, *eager, "--lora-backend", "triton_v2"], work / "triton_v2.log"),
        "triton_v2_rank_64": Server([*stock_64, *eager, "--lora-backend", "triton_v2"], work / "triton_v2_rank_64.log"),
        "triton_v2_prefill_graphs": Server([*stock_16, *graphs, "--lora-backend", "triton_v2"], work / "triton_v2_graphs.log"),
        "ours": Server([*ours, *eager, "--max-total-tokens", "130000", "--lora-paths", *paths], work / "ours.log"),
        "ours_apart": Server([*ours, APART, *eager, *fewer], work / "ours_apart.log"),
        "ours_prefill_graphs": Server([*ours, *graphs, *fewer], work / "ours_graphs.log"),
    }


def write_adapters(work: Path) -> None:
    """Seconds on many cores, a minute on few."""
    todo = [(rank, index) for rank, count in ADAPTERS.items() for index in range(count)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: write_adapter(work / f"r{job[0]}_{job[1]}", 100 * job[0] + job[1], job[0]), todo))


def serve(work: Path, names: Sequence[str] | None, server_names: Sequence[str], write: Callable[[Records], object]) -> Records:
    """All cases on all servers; `write` is given what is known after each case, so that a run cut short has its results."""
    servers = {name: server for name, server in make_servers(work).items() if name in server_names}
    rates: dict[tuple[str, str], list[float]] = {}
    if set(servers) - {"base", "base_prefill_graphs"}:
        write_adapters(work)
    with ExitStack() as stack:

        def start(item: tuple[int, str]) -> str | None:
            time.sleep(4 * item[0])  # each looks at the free memory while it starts
            server = servers[item[1]]
            try:
                stack.callback(server.stop)
                server.start()
                server.wait(START_SECONDS)
            except RuntimeError as error:
                server.stop()
                print(f"{item[1]}: {error}", flush=True)
                return None
            print(f"{item[1]} is up after {servers[item[1]].start_seconds:.0f} s", flush=True)
            return item[1]

        with ThreadPoolExecutor(len(servers)) as pool:
            up = [name for name in pool.map(start, enumerate(servers)) if name is not None]
        chosen = [case for case in CASES if names is None or case.name in names]
        for kind in (kind for kind in KINDS if any(case.kind == kind for case in chosen)):
            for name in ("base", "base_prefill_graphs"):
                if name in up:
                    rates[name, kind] = measure(servers[name], None, kind)
                    print(name, kind, [round(rate) for rate in rates[name, kind]], flush=True)
            write(make_records(chosen, rates))
            for case in (case for case in chosen if case.kind == kind):
                for name in up:
                    if case.is_for(name):
                        try:
                            rates[name, case.name] = measure(servers[name], case, kind)
                            print(name, case.name, [round(rate) for rate in rates[name, case.name]], flush=True)
                        except (RuntimeError, OSError) as error:
                            print(f"{name} {case.name}: {error}", flush=True)
                write(make_records(chosen, rates))
            for name in ("base", "base_prefill_graphs"):
                if name in up:
                    rates[name, kind] += measure(servers[name], None, kind)
                    print(name, kind, [round(rate) for rate in rates[name, kind]], flush=True)
            write(make_records(chosen, rates))
    return make_records(chosen, rates)


def make_records(cases: Sequence[Case], rates: Mapping[tuple[str, str], list[float]]) -> Records:
    """The base models' rates, and every case's over that of the base model with the same prefills."""
    records = [
        results.record(f"{label}_rate/{name}", statistics.median(values), "tok/s")
        for (name, label), values in rates.items()
        if label in KINDS
    ]
    for case in cases:
        kind, _, rest = case.name.partition("/")
        for name in SERVERS:
            base = "base_prefill_graphs" if ("base", kind) not in rates or name.endswith("prefill_graphs") else "base"
            if (name, case.name) not in rates or (base, kind) not in rates:
                continue
            metric = f"{kind}_vs_base/{rest}" + ("" if name == "ours" else f"/{name}")
            limit = f"ratio >= {case.wanted}" if name.startswith("ours") and case.wanted else None
            value, baseline = statistics.median(rates[name, case.name]), statistics.median(rates[base, kind])
            records.append(results.record(metric, value, "tok/s", baseline=(f"{base} without LoRA", baseline), limit=limit))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--servers", nargs="+", choices=SERVERS)
    parser.add_argument("--prefill-graphs", action="store_true")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    machine = results.gpu()
    topic = "kernels_prefill_graphs" if arguments.prefill_graphs else "kernels"
    with tempfile.TemporaryDirectory() as folder:
        try:
            records = serve(
                Path(folder),
                arguments.cases,
                arguments.servers or (WITH_GRAPHS if arguments.prefill_graphs else WITHOUT_GRAPHS),
                lambda records: results.write(topic, machine, records, arguments.out),
            )
            print(results.table(records))
        finally:
            for log in Path(folder).glob("*.log"):
                (arguments.out / log.name).write_text(log.read_text()[-100000:])


if __name__ == "__main__":
    main()
