"""Acceptance on a GPU, in one run: exact answers with graphs off and on and while adapters come in, bf16 error, the 8B shape.

    python -m benchmarks.acceptance_gpu [--phases eager graphs loads late_loads prefill_graphs ...] [--out FOLDER]

Needs one GPU (24 GB; the 8B shape needs 40 GB), SGLang 0.5.23 and this package. Nothing is downloaded: models and adapters
are random (speed does not depend on the weights; exactness is against PEFT on the same weights, in float32). What each
phase measures is said at its function. Results: ``acceptance_<gpu>.json``. Exit code 1 if a phase failed.

Without a GPU eager, graphs, loads, late_loads and bf16_served run on the CPU platform with a tiny model, without graphs, to try
them.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.acceptance_bf16 import bf16_error, bf16_served
from benchmarks.acceptance_loads import late_loads, late_loads_graphs, loads
from benchmarks.acceptance_small import (
    DECODE_GRAPHS,
    DEVICE,
    FLOAT32,
    ON_GPU,
    PREFILL_GRAPHS,
    SMALL_ADAPTERS,
    SMALL_MIXES,
    Mix,
    Records,
    ask,
    make_small,
    push_out,
    random_prompt,
    small_options,
    swap_in_record,
    text,
    tree_options,
)  # fmt: skip
from benchmarks.llama8b import write_adapter, write_config
from benchmarks.server import Server, start_side_by_side
from tests.models import Oracle

# ---- Exactness over the server ----


def check_answers(server: Server, oracle: Oracle, rng: random.Random, label: str) -> tuple[int, float, float]:
    """Greedy answers for every mix, alone and 32 in a batch, twice (the second time from history KV).

    Returns:
        Answers whose tokens differ from PEFT's; the largest difference of a token's log probability, with adapters and for
        the base model.
    """
    prompts = [random_prompt(rng, rng.randrange(20, 300)) for _ in range(32)]
    mixes = [SMALL_MIXES[index % len(SMALL_MIXES)] for index in range(32)]
    lengths = [128 if index < 2 else 24 for index in range(32)]
    wanted = [oracle._run(*case) for case in zip(prompts, lengths, mixes, strict=True)]
    wrong, worst, worst_base = 0, 0.0, 0.0

    def compare(index: int, answer: Any) -> None:
        nonlocal wrong, worst, worst_base
        tokens, logprobs = wanted[index]
        if answer["output_ids"] != tokens:
            wrong += 1
            print(f"{label}: {mixes[index]} answers {answer['output_ids'][:8]}..., PEFT {tokens[:8]}...")
            return
        difference = max(
            abs(want - got[0]) for want, got in zip(logprobs, answer["meta_info"]["output_token_logprobs"], strict=True)
        )
        if mixes[index] is None:
            worst_base = max(worst_base, difference)
        else:
            worst = max(worst, difference)

    def body(index: int) -> dict[str, Any]:
        return {
            "input_ids": prompts[index],
            "lora_path": text(mixes[index]),
            "sampling_params": {"temperature": 0, "max_new_tokens": len(wanted[index][0]), "ignore_eos": True},
            "return_logprob": True,
        }

    for _ in range(2):
        for index in range(len(SMALL_MIXES)):
            compare(index, server.generate(**body(index)))
        with ThreadPoolExecutor(32) as pool:
            for index, answer in enumerate(pool.map(lambda index: server.generate(**body(index)), range(32))):
                compare(index, answer)
    return wrong, worst, worst_base


def compare_oracles(oracle: Oracle, reference: Oracle, rng: random.Random) -> float:
    """How far PEFT's own float32 is from float64: the largest difference of a token's log probability, adapters and mixes."""
    worst = 0.0
    for mix in SMALL_MIXES[1:]:
        prompt = random_prompt(rng, 200)
        (tokens, exact), (same, rounded) = oracle._run(prompt, 32, mix), reference._run(prompt, 32, mix)
        if tokens == same:
            worst = max(worst, *(abs(a - b) for a, b in zip(exact, rounded, strict=True)))
    return worst


def exactness(work: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str], note: str) -> Records:
    """`check_exactness` of a server of its own."""
    model, adapters = make_small(work)
    with Server([*small_options(model), *tree_options(adapters), *arguments], work / f"{name}.log", environment) as server:
        return check_exactness(work, name, server, note)


def check_exactness(work: Path, name: str, server: Server, note: str) -> Records:
    """Every adapter and mix against PEFT in float32, before and after everything was swapped out and back."""
    model, adapters = work / "small", {key: work / "small_adapters" / key for key in SMALL_ADAPTERS}
    oracle = Oracle(model, adapters, device=DEVICE, dtype=torch.float64)
    reference = Oracle(model, adapters, device=DEVICE)
    rng = random.Random(11)
    peft_error = compare_oracles(oracle, reference, random.Random(3))
    del reference
    wrong, worst, worst_base = check_answers(server, oracle, rng, name)
    swapped = push_out(server, rng, len(SMALL_ADAPTERS))
    again, worst_again, worst_base_again = check_answers(server, oracle, rng, name + " after swap")
    tree = server.tree()
    del oracle
    if ON_GPU:
        torch.cuda.empty_cache()
    worst, worst_base = max(worst, worst_again), max(worst_base, worst_base_again)
    least = f"value >= {len(SMALL_ADAPTERS)}"
    return [
        results.record(f"exact_wrong_answers/{name}", wrong + again, "answers", limit="value <= 0", note=note),
        results.record(
            f"exact_logprob_difference/{name}",
            worst,
            "nats",
            baseline=("PEFT in float32 against PEFT in float64", peft_error),
            limit="value <= 0.0001",
            note=f"{note}; against PEFT in float64; base model without adapters {worst_base:.2g}; largest over 164 answers of "
            f"24 to 128 tokens, {swapped} adapters swapped out in between",
        ),
        results.record(f"exact_swapped_out/{name}", swapped, "adapters", limit=least, note="between the answers compared"),
        results.record(f"invalid_kv/{name}", tree["invalid_kv"], "tokens", limit="value <= 0"),
        swap_in_record(name, tree["counters"]),
    ]


# ---- Prefill graphs ----


def prefill_graphs(work: Path) -> Records:
    """Exactness with prefill graphs, and `compare_prefill_graphs`, in float32."""
    return compare_prefill_graphs(work, "prefill_graphs", "float32", FLOAT32)


def joined_graphs(work: Path) -> Records:
    """`compare_prefill_graphs` in bf16, where the operations that follow the linear layers add the adapters' part."""
    return compare_prefill_graphs(work, "joined_graphs", "bfloat16", {})


def compare_prefill_graphs(work: Path, label: str, dtype: str, environment: Mapping[str, str]) -> Records:
    """Request after request the same bits with prefill graphs, without, and eager; in float32 exactness with them too.

    Bits are compared for prompts of a captured size: others are padded, and already the base model's products are rounded
    otherwise for another number of rows. For those it is the largest difference. Against eager it is the first token alone,
    which prefill makes: without decode graphs attention may split its sums otherwise. In bf16 without the base model's
    requests, whose norms a prefill graph computes as those of requests with adapters, in an order of their own.
    """
    exact = dtype == "float32"
    captured, padded = (64, 512, 1024), (3, 30, 500, 513, 900, 1500)
    mixes = SMALL_MIXES if exact else SMALL_MIXES[1:]
    model, adapters = make_small(work)
    options = [*small_options(model, dtype=dtype), *tree_options(adapters)]
    servers = {
        name: Server([*options, *arguments], work / f"{label}_{name}.log", environment)
        for name, arguments in (
            ("on", PREFILL_GRAPHS),
            ("off", DECODE_GRAPHS),
            ("eager", ["--attention-backend", "triton", "--disable-cuda-graph"]),
        )
    }
    answers: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        start_side_by_side(servers.values(), stack)
        for name, server in servers.items():
            server.wait()
            rng = random.Random(17)
            answers[name] = [
                ask(server, random_prompt(rng, length), mix, 8)[1] for length in (*captured, *padded) for mix in mixes
            ]
        log = servers["on"].read_log().splitlines()
        replays = sum("Prefill batch" in line and "graph: True" in line for line in log)
        records = [results.record(f"{label}_used", replays, "batches", limit="value >= 20")]
        if exact:
            note = "float32, triton attention with IEEE dots, decode and prefill graphs"
            records += check_exactness(work, label, servers["on"], note)
    num_captured = len(captured) * len(mixes)
    for name, num_tokens in (("off", 8), ("eager", 1)):
        pairs = [(mine[:num_tokens], other[:num_tokens]) for mine, other in zip(answers["on"], answers[name], strict=True)]
        differing = sum(mine != other for mine, other in pairs[:num_captured])
        note = f"{dtype}, of {num_captured} answers, every log probability of {num_tokens} tokens"
        records.append(results.record(f"{label}_differ/{name}", differing, "answers", limit="value <= 0", note=note))
        if exact:
            worst = max(abs(one - two) for mine, other in pairs[num_captured:] for one, two in zip(mine, other, strict=True))
            note = "largest difference of a log probability, padded prompts"
            records.append(results.record(f"{label}_padded/{name}", worst, "nats", limit="value <= 0.0001", note=note))
    return records


# ---- The 8B shape ----


def llama8b(work: Path) -> Records:
    """Llama-3-8B's shape, random weights, bf16: 32 requests of 256 + 128 tokens, base, 8 adapters, mixes of 3."""
    folder = write_config(work / "llama8b")
    adapters = {f"x{index}": write_adapter(work / f"x{index}", index) for index in range(8)}
    options = ["--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--lora-tree"]
    options += ["--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch"]
    options += ["--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled"]
    options += ["--max-total-tokens", "40000", "--mem-fraction-static", "0.6"]
    options += ["--lora-paths", *(f"{name}={path}" for name, path in adapters.items())]
    rng = random.Random(5)
    names = list(adapters)
    cases: dict[str, Callable[[int], Mix | None]] = {
        "base": lambda _: None,
        "8_adapters": lambda index: {names[index % 8]: 1.0},
        "mixes_of_3": lambda index: {names[(index + step) % 8]: weight for step, weight in ((0, 0.5), (1, 0.3), (3, 0.2))},
    }
    records: Records = []
    with Server(options, work / "llama8b.log") as server:
        speed: dict[str, float] = {}
        for case, choose in cases.items():
            run_32(server, rng, choose, 16)  # compiles kernels, brings adapters in
            speed[case] = statistics.median(run_32(server, rng, choose, 128) for _ in range(3))
        for case in ("8_adapters", "mixes_of_3"):
            records.append(
                results.record(
                    f"serve_8b/{case}",
                    speed[case],
                    "tokens/s",
                    baseline=("the base model, same server", speed["base"]),
                    note="32 parallel requests, 256 prompt + 128 new tokens, decode graphs",
                )
            )
        tree = server.tree()
        records.append(results.record("invalid_kv/llama8b", tree["invalid_kv"], "tokens", limit="value <= 0"))
        records.append(swap_in_record("llama8b", tree["counters"]))
    return records


def run_32(server: Server, rng: random.Random, choose: Callable[[int], Mix | None], num_new: int) -> float:
    """Tokens per second of 32 parallel requests."""
    prompts = [[rng.randrange(2, 120000) for _ in range(256)] for _ in range(32)]
    start = time.monotonic()
    with ThreadPoolExecutor(32) as pool:
        answers = list(
            pool.map(
                lambda index: server.generate(
                    input_ids=prompts[index],
                    lora_path=text(choose(index)),
                    sampling_params={"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
                ),
                range(32),
            )
        )
    assert all(len(answer["output_ids"]) == num_new for answer in answers)
    return 32 * num_new / (time.monotonic() - start)


PHASES: dict[str, Callable[[Path], Records]] = {
    "bf16": bf16_error,
    "eager": lambda work: exactness(
        work, "eager", ["--attention-backend", "torch_native"], FLOAT32, "float32, torch_native attention, no graphs"
    ),
    "graphs": lambda work: exactness(
        work, "graphs", DECODE_GRAPHS, FLOAT32, "float32, triton attention with IEEE dots, decode CUDA graphs"
    ),
    "loads": loads,
    "late_loads": late_loads,
    "late_loads_graphs": late_loads_graphs,
    "prefill_graphs": prefill_graphs,
    "joined_graphs": joined_graphs,
    "bf16_served": bf16_served,
    "llama8b": llama8b,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = results.Report("acceptance", results.gpu(), arguments.out)
    failed = []
    if not ON_GPU:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the servers
    with tempfile.TemporaryDirectory() as folder:
        for phase in arguments.phases:
            start = time.monotonic()
            try:
                report.add(*PHASES[phase](Path(folder)))
            except Exception as error:
                print(f"{phase} failed: {error}")
                failed.append(phase)
            print(f"{phase}: {time.monotonic() - start:.0f} s", flush=True)
            for log in Path(folder).glob("*.log"):
                (arguments.out / log.name).write_text(log.read_text()[-200000:])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
