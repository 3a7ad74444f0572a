"""Error of bf16 against float64, beside that of merged bf16 weights: of one product and of a served model (acceptance_gpu)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import requests
import torch
from peft.tuners.lora import LoraLayer
from transformers import LlamaForCausalLM

from benchmarks import results
from benchmarks.acceptance_small import (
    DECODE_GRAPHS,
    DEVICE,
    ON_GPU,
    Mix,
    Records,
    greedy,
    make_small,
    random_prompt,
    small_options,
    text,
    tree_options,
)  # fmt: skip
from benchmarks.server import Server, start_side_by_side
from tests.models import Oracle


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


MERGED_MIXES: tuple[Mix, ...] = (
    {"a": 1.0},
    {"c": 1.0},
    {"d": 1.0},
    {"a": 0.7, "b": 0.3},
    {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.4},
)


def bf16_served(work: Path) -> Records:
    """Error of served log probabilities in bf16 against PEFT in float64: ours, against merged bf16 weights served by SGLang
    with the same options and without LoRA.

    Prompts of 300 tokens, whose own log probabilities show prefill, and 64 greedy tokens, which show decoding with graphs; each
    server's answers are judged as they are. The head is computed in float32 in both: its rounding would hide the rest's.
    Ours with `join_operations`, and without (apart).
    """
    model, adapters = make_small(work)
    base = work / "small_bf16"
    LlamaForCausalLM.from_pretrained(model, torch_dtype=torch.bfloat16).save_pretrained(base)
    oracle = Oracle(base, adapters, device=DEVICE, dtype=torch.float64)
    merged = [save_merged(oracle, base, mix, work / f"merged{index}") for index, mix in enumerate(MERGED_MIXES)]
    options = [*DECODE_GRAPHS, "--enable-fp32-lm-head"]
    small = small_options(base, dtype="bfloat16")
    ours = {
        name: Server([*small, *tree_options(adapters, {"join_operations": joined}), *options], work / f"bf16_{name}.log")
        for name, joined in (("served", True), ("served_apart", False))
    }
    theirs = Server([*small_options(merged[0], dtype="bfloat16"), *options], work / "bf16_merged.log")
    rng = random.Random(29)
    prompts = [random_prompt(rng, 300) for _ in range(8)]
    errors: dict[tuple[str, str, int], float] = {}

    def measure(server: Server, who: str, index: int, lora_path: str | None) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: ask_all(server, prompt, 64, lora_path), prompts))
        prefill, decode = [], []
        for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
            _, exact, _ = oracle.judge(prompt[:1], [*prompt[1:], *tokens], MERGED_MIXES[index])
            off = [served - own for served, own in zip(logprobs, exact, strict=True)]
            prefill += off[: -len(tokens)]
            decode += off[-len(tokens) + 1 :]  # prefill makes the first
        errors[who, "prefill", index], errors[who, "decode", index] = root_mean_square(prefill), root_mean_square(decode)

    with ExitStack() as stack:
        start_side_by_side([*ours.values(), theirs], stack)
        for name, server in ours.items():
            server.wait()
            for index, mix in enumerate(MERGED_MIXES):
                measure(server, name, index, text(mix))
        invalid = sum(server.tree()["invalid_kv"] for server in ours.values())
        joined = int(re.findall(r"join_operations: (\d+) of", ours["served"].read_log())[-1])
        theirs.wait()
        for index, folder in enumerate(merged):
            answer = requests.post(f"{theirs.url}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=200)
            assert answer.ok and answer.json()["success"], answer.text
            measure(theirs, "merged", index, None)
    records = []
    for name, step, (kind, wanted) in product(ours, ("prefill", "decode"), (("adapters", 1), ("mixes", 2))):
        chosen = [index for index, mix in enumerate(MERGED_MIXES) if min(len(mix), 2) == wanted]
        own, other = (root_mean_square([errors[who, step, index] for index in chosen]) for who in (name, "merged"))
        each = ", ".join(f"{errors[name, step, index] / errors['merged', step, index]:.2f}" for index in chosen)
        records.append(
            results.record(
                f"bf16_{name}_error/{step}/{kind}",
                own,
                "nats",
                baseline=("merged bf16 weights, served without LoRA", other),
                limit="ratio <= 1.1",
                note=f"root mean square of log probabilities' errors against PEFT in float64; each of {len(chosen)}: {each}",
            )
        )
    records.append(results.record("joined_layers/bf16_served", joined, "linear layers", limit="value >= 16" if ON_GPU else None))
    return [*records, results.record("invalid_kv/bf16_served", invalid, "tokens", limit="value <= 0")]


def save_merged(oracle: Oracle, base: Path, mix: Mix, folder: Path) -> Path:
    """The base model's weights with a mix added, in float64, rounded to bf16 once."""
    model = LlamaForCausalLM.from_pretrained(base, torch_dtype=torch.float64).to(oracle.device)
    name = oracle.adapter_of(mix)
    with torch.inference_mode():
        for path, layer in oracle.model.base_model.model.named_modules():
            if isinstance(layer, LoraLayer) and name in layer.lora_A:
                model.get_submodule(path).weight += layer.get_delta_weight(name)
    model.bfloat16().save_pretrained(folder)
    return folder


def ask_all(server: Server, prompt: list[int], num_new: int, lora_path: str | None) -> tuple[list[int], list[float]]:
    """Greedy tokens; log probabilities of the prompt's tokens, from the second on, and of those."""
    answer = server.generate(
        input_ids=prompt, lora_path=lora_path, sampling_params=greedy(num_new), return_logprob=True, logprob_start_len=0
    )
    meta = answer["meta_info"]
    entries = [*meta["input_token_logprobs"][-len(prompt) + 1 :], *meta["output_token_logprobs"]]
    return answer["output_ids"], [entry[0] for entry in entries]


def root_mean_square(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5
