"""Acceptance on a GPU, in one run: exact answers with graphs off and on, bf16 error, the 8B shape.

    python -m benchmarks.acceptance_gpu [--phases eager graphs prefill_graphs bf16 llama8b] [--out FOLDER]

Needs one GPU (24 GB; the 8B shape needs 40 GB), SGLang 0.5.23 and this package. Nothing is downloaded: models and adapters
are random (speed does not depend on the weights; exactness is against PEFT on the same weights, in float32). What each
phase measures is said at its function. Results: ``acceptance_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.llama8b import write_adapter, write_config
from benchmarks.server import Server, start_side_by_side
from tests.models import ALL_LINEAR, Oracle, make_adapters, make_llama

Records = list[dict[str, Any]]
Mix = Mapping[str, float]

SMALL_ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR},
    "b": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "c": {"r": 32, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    "d": {"r": 3, "lora_alpha": 9, "target_modules": ALL_LINEAR, "rank_pattern": {"o_proj": 40}},
}
SMALL_MIXES: tuple[Mix | None, ...] = (
    None,
    {"a": 1.0},
    {"b": 1.0},
    {"c": 1.0},
    {"d": 1.0},
    {"a": 0.5},
    {"a": 0.7, "b": 0.3},
    {"c": 0.5, "d": -0.25},
    {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.4},
)


def text(mix: Mix | None) -> str | None:
    """A mix as ``lora_path``."""
    return None if mix is None else json.dumps(mix)


# ---- Exactness over the server ----


def check_answers(server: Server, oracle: Oracle, rng: random.Random, label: str) -> tuple[int, float, float]:
    """Greedy answers for every mix, alone and 32 in a batch, twice (the second time from history KV).

    Returns:
        Answers whose tokens differ from PEFT's; the largest difference of a token's log probability, with adapters and for
        the base model.
    """
    prompts = [[rng.randrange(2, 4000) for _ in range(rng.randrange(20, 300))] for _ in range(32)]
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
        prompt = [rng.randrange(2, 4000) for _ in range(200)]
        (tokens, exact), (same, rounded) = oracle._run(prompt, 32, mix), reference._run(prompt, 32, mix)
        if tokens == same:
            worst = max(worst, *(abs(a - b) for a, b in zip(exact, rounded, strict=True)))
    return worst


def small_options(work: Path) -> list[str]:
    """Options of a float32 server of a small model (made anew, always the same) with SMALL_ADAPTERS; a pool of 24,000 slots."""
    model = make_llama(work / "small", heads=16, kv_heads=8, layers=4, hidden=1024, vocab=4096)
    # As strong as trained adapters: a delta of about half the weights' size; stronger ones amplify every rounding error.
    adapters = make_adapters(model, work / "small_adapters", SMALL_ADAPTERS, std=0.08)
    options = ["--model-path", str(model), "--skip-tokenizer-init", "--lora-tree", "--dtype", "float32"]
    options += ["--max-total-tokens", "24000", "--hicache-ratio", "2", "--sampling-backend", "pytorch", "--lora-paths"]
    return [*options, *(f"{key}={path}" for key, path in adapters.items())]


def exactness(work: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str], note: str) -> Records:
    """`check_exactness` of a server of its own."""
    with Server([*small_options(work), *arguments], work / f"{name}.log", environment) as server:
        return check_exactness(work, name, server, note)


def check_exactness(work: Path, name: str, server: Server, note: str) -> Records:
    """Every adapter and mix against PEFT in float32, before and after everything was swapped out and back."""
    model, adapters = work / "small", {key: work / "small_adapters" / key for key in SMALL_ADAPTERS}
    oracle = Oracle(model, adapters, device="cuda", dtype=torch.float64)
    reference = Oracle(model, adapters, device="cuda")
    rng = random.Random(11)
    peft_error = compare_oracles(oracle, reference, random.Random(3))
    del reference
    wrong, worst, worst_base = check_answers(server, oracle, rng, name)
    before = server.tree()["counters"]["swap_outs"]
    for _ in range(12):  # base prompts that fill the pool push everything out
        prompt = [rng.randrange(2, 4000) for _ in range(3000)]
        server.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
    swapped = server.tree()["counters"]["swap_outs"] - before
    again, worst_again, worst_base_again = check_answers(server, oracle, rng, name + " after swap")
    tree = server.tree()
    del oracle
    torch.cuda.empty_cache()
    worst, worst_base = max(worst, worst_again), max(worst_base, worst_base_again)
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
        results.record(f"invalid_kv/{name}", tree["invalid_kv"], "tokens", limit="value <= 0"),
    ]


def prefill_graphs(work: Path) -> Records:
    """Exactness with prefill graphs; and request after request the same bits with prefill graphs, without, and eager.

    Bits are compared for prompts of a captured size: others are padded, and already the base model's products are rounded
    otherwise for another number of rows. For those it is the largest difference. Against eager it is the first token alone,
    which prefill makes: without decode graphs attention may split its sums otherwise.
    """
    captured, padded = (64, 512, 1024), (3, 30, 500, 513, 900, 1500)
    options = small_options(work)
    graphs = [*GRAPHS, "--cuda-graph-backend-prefill"]
    servers = {
        name: Server([*options, *arguments], work / f"prefill_graphs_{name}.log", FLOAT32)
        for name, arguments in (
            ("on", [*graphs, "breakable", "--cuda-graph-bs-prefill", *map(str, captured), "2048"]),
            ("off", [*graphs, "disabled"]),
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
                ask_logprobs(server, [rng.randrange(2, 4000) for _ in range(length)], mix)
                for length in (*captured, *padded)
                for mix in SMALL_MIXES
            ]
        log = servers["on"].read_log().splitlines()
        replays = sum("Prefill batch" in line and "graph: True" in line for line in log)
        records = [results.record("prefill_graphs_used", replays, "batches", limit="value >= 20")]
        note = "float32, triton attention with IEEE dots, decode and prefill graphs"
        records += check_exactness(work, "prefill_graphs", servers["on"], note)
    num_captured = len(captured) * len(SMALL_MIXES)
    for name, num_tokens in (("off", 8), ("eager", 1)):
        pairs = [(mine[:num_tokens], other[:num_tokens]) for mine, other in zip(answers["on"], answers[name], strict=True)]
        differing = sum(mine != other for mine, other in pairs[:num_captured])
        note = f"of {num_captured} answers, every log probability of {num_tokens} tokens"
        records.append(results.record(f"prefill_graphs_differ/{name}", differing, "answers", limit="value <= 0", note=note))
        worst = max(abs(one - two) for mine, other in pairs[num_captured:] for one, two in zip(mine, other, strict=True))
        note = "largest difference of a log probability, padded prompts"
        records.append(results.record(f"prefill_graphs_padded/{name}", worst, "nats", limit="value <= 0.0001", note=note))
    return records


def ask_logprobs(server: Server, prompt: list[int], mix: Mix | None) -> list[float]:
    """Log probabilities of eight greedy tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    answer = server.generate(input_ids=prompt, lora_path=text(mix), sampling_params=sampling, return_logprob=True)
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


# ---- bf16 against float64 ----


def bf16_error(work: Path) -> Records:
    """Error of one layer's bf16 output against float64: base GEMM + our kernels, against a GEMM with merged bf16 weights."""
    from sglang_lora_tree.kernels import AdapterTable, Pairs, PoolView, add_lora, dispatch

    torch.manual_seed(0)
    width, rank, tokens, layers, device = 1024, 16, 256, 1, "cuda"
    records: Records = []
    for module, d_in, d_out in ((3, 4096, 4096), (4, 4096, 14336), (6, 14336, 4096)):
        weight = (torch.randn(d_out, d_in, device=device) / d_in**0.5).bfloat16()
        x = torch.randn(tokens, d_in, device=device).bfloat16()
        members = [(index, share) for index, share in enumerate((0.5, 0.3, 0.7))]
        factors = [
            (
                (torch.randn(rank, d_in, device=device) / d_in**0.5).bfloat16(),
                (torch.randn(d_out, rank, device=device) * 0.3).bfloat16(),
            )
            for _ in members
        ]
        chunks_in, chunks_out = -(-d_in // width), -(-d_out // width)
        n = -(-rank * (chunks_in + chunks_out) // (2 * layers))
        planes = [torch.full((4 * n, width), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(2 * layers)]
        table = AdapterTable(len(members), 4 * n, layers, 64, device)
        order = torch.randperm(4 * n, device=device)
        for index, (a, b) in enumerate(factors):
            slots = order[index * n : (index + 1) * n]
            rows = torch.zeros(2 * layers * n, width, dtype=torch.bfloat16, device=device)
            pad_a = torch.zeros(rank, chunks_in * width, dtype=torch.bfloat16, device=device)
            pad_b = torch.zeros(rank, chunks_out * width, dtype=torch.bfloat16, device=device)
            pad_a[:, :d_in], pad_b[:, :d_out] = a, b.t()
            packed = torch.cat([pad_a.view(-1, width), pad_b.view(-1, width)])
            rows[: len(packed)] = packed
            for plane, part in zip(planes, rows.split(n), strict=True):
                plane[slots] = part
            row_start = torch.full((layers, 7), -1, dtype=torch.int32)
            ranks = torch.zeros((layers, 7), dtype=torch.int32)
            row_start[0, module], ranks[0, module] = 0, rank
            table.write(index, slots, row_start, ranks, torch.ones((layers, 7)))
        table.flush()
        block_t = dispatch.choose(tokens, torch.device(device)).block_t
        pairs = Pairs.allocate(table, 1, tokens, len(members), block_t)
        pairs.update([tokens], [members])
        ours = x @ weight.t()
        add_lora(ours, x, table, PoolView.from_planes(planes), pairs, 0, (module,), (0,), (d_out,))
        delta = sum(share * (b.double() @ a.double()) for (_, share), (a, b) in zip(members, factors, strict=True))
        exact = x.double() @ (weight.double() + delta).t()
        merged = x @ (weight.double() + delta).bfloat16().t()
        error = float((ours.double() - exact).norm() / exact.norm())
        merged_error = float((merged.double() - exact).norm() / exact.norm())
        records.append(
            results.record(
                f"bf16_error/{d_in}x{d_out}",
                error,
                "relative",
                baseline=("merged bf16 weights", merged_error),
                limit="ratio <= 1.1",
                note="mix of 3 at rank 16, 256 tokens, scattered slots, against float64",
            )
        )
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
        records.append(results.record("invalid_kv/llama8b", server.tree()["invalid_kv"], "tokens", limit="value <= 0"))
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


FLOAT32 = {
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",  # SGLang's norms on CUDA know half precision only
    "TRITON_F32_DEFAULT": "ieee",  # Triton's attention would multiply in TF32
}

GRAPHS = ["--attention-backend", "triton", "--cuda-graph-max-bs-decode", "32"]

PHASES: dict[str, Callable[[Path], Records]] = {
    "bf16": bf16_error,
    "eager": lambda work: exactness(
        work, "eager", ["--attention-backend", "torch_native"], FLOAT32, "float32, torch_native attention, no graphs"
    ),
    "graphs": lambda work: exactness(
        work,
        "graphs",
        [*GRAPHS, "--cuda-graph-backend-prefill", "disabled"],
        FLOAT32,
        "float32, triton attention with IEEE dots, decode CUDA graphs",
    ),
    "prefill_graphs": prefill_graphs,
    "llama8b": llama8b,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    report = results.Report("acceptance", results.gpu(), arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        for phase in arguments.phases:
            start = time.monotonic()
            try:
                report.add(*PHASES[phase](Path(folder)))
            except Exception as error:
                print(f"{phase} failed: {error}")
            print(f"{phase}: {time.monotonic() - start:.0f} s", flush=True)
            for log in Path(folder).glob("*.log"):
                (arguments.out / log.name).write_text(log.read_text()[-200000:])


if __name__ == "__main__":
    main()
