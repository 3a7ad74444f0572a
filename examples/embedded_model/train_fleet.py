"""Trains a fleet of adapters of one high rank, one per task of tasks.py, to see what compression to a lower rank costs.

    python examples/embedded_model/train_fleet.py --out FLEET [--device cuda] [--decays 0 1 ...] [--seconds 130]

All adapters are trained at once, each on its task alone, and the whole fleet once per weight decay: what an adapter loses
depends on how fast its spectrum falls, and decay decides that (AdamW on A and B keeps |A|^2 + |B|^2 small, and with it the
nuclear norm of B A). FLEET/decay_<d>/<task> are PEFT folders, FLEET/scores.json holds the shares of exact answers to
held-out questions. The weights are not in the repository, the scores are: fleet_scores.json. Minutes on a large GPU; on one
CPU core a day, so there use few --tasks and --steps; a run adds its scores to those of earlier runs into the same folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import corpus
import tasks
import torch
from evaluate import MODEL, SEED, load_base
from peft import LoraConfig
from safetensors.torch import save_file
from stacked_lora import StackedLinear, exact_rates, linear_paths, new_factors, peft_tensors, stack, unstack
from torch import Tensor, nn

RANK, LENGTH, BATCH, STEPS, RATE = 48, 160, 16, 3000, 2e-3
DECAYS = (0.0, 1.0, 4.0)
ROWS = 24_000
"""Different rows of text per task."""
COUNT = 200


def task_documents(task: str, rng: random.Random) -> Iterator[corpus.Row]:
    """Single questions (a second one for half of them) and the task's answers; none of the questions is held out."""
    relation = "sum" if "math" in task else None
    while True:
        questions = corpus.sample_questions(rng, rng.choice((1, 1, 2)), relation)
        answers = [tasks.expected(task, question) for question in questions]
        yield corpus.conversation_row(questions, answers, [1.0] * len(questions), 0.0)


def task_rows(task: str, count: int) -> tuple[Tensor, Tensor]:
    """Token ids int16 and loss weights bool, both (count, LENGTH)."""
    rows = corpus.packed_rows(task_documents(task, random.Random(f"{task} {SEED}")), LENGTH)
    ids, weights = zip(*(next(rows) for _ in range(count)), strict=True)
    return torch.tensor(ids, dtype=torch.int16), torch.tensor(weights) > 0


def read_tasks(names: Sequence[str], count: int) -> tuple[Tensor, Tensor]:
    """`task_rows` of every task, (tasks, count, LENGTH). Forks: before CUDA starts."""
    with multiprocessing.get_context("fork").Pool(min(len(names), len(os.sched_getaffinity(0)))) as pool:
        found = pool.starmap(task_rows_as_bytes, [(name, count) for name in names])
    shape = (len(names), count, LENGTH)
    ids = torch.frombuffer(bytearray(b"".join(ids for ids, _ in found)), dtype=torch.int16).view(shape)
    return ids, torch.frombuffer(bytearray(b"".join(weights for _, weights in found)), dtype=torch.bool).view(shape)


def task_rows_as_bytes(task: str, count: int) -> tuple[bytes, bytes]:
    """Tensors would travel between processes through shared memory, of which containers have little."""
    ids, weights = task_rows(task, count)
    return ids.numpy().tobytes(), weights.numpy().tobytes()


def learning_rate(progress: float) -> float:
    """Share of the full rate: warm-up, full for the first half, then a line down to 0."""
    return min(progress / 0.03 + 0.02, 1.0, 2 * (1 - progress))


def losses(model: nn.Module, ids: Tensor, weights: Tensor, adapters: int) -> Tensor:
    """Mean loss over the answers' tokens, per adapter."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    each = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].reshape(adapters, -1).float()
    return (each.view(adapters, -1) * weight).sum(1) / weight.sum(1).clamp_min(1)


def fit(
    model: nn.Module,
    layers: Sequence[StackedLinear],
    data: tuple[Tensor, Tensor],
    decays: Sequence[float],
    steps: int,
    batch: int,
    seconds: float,
) -> int:
    """Trains the stacked adapters, every task once per decay; returns the steps taken until `steps`, or `seconds` are over."""
    device = layers[0].a.device
    trained = [weight for layer in layers for weight in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda")
    num_tasks, rows = data[0].shape[:2]
    adapters = num_tasks * len(decays)
    decay = torch.tensor(decays, device=device).repeat_interleave(num_tasks)[:, None, None]
    start, progress, step = time.monotonic(), 0.0, 0
    while progress < 1:
        rate = RATE * learning_rate(progress)
        optimizer.param_groups[0]["lr"] = rate
        first = step * batch % (rows - batch + 1)
        ids, weights = (part[:, first : first + batch].to(device).repeat(len(decays), 1, 1).flatten(0, 1) for part in data)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = losses(model, ids.long(), weights, adapters)
        found.sum().backward()
        with torch.no_grad():
            for weight in trained:  # a decay per adapter, which the optimizer does not know
                weight.mul_(1 - rate * decay)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0 or step == 20:
            by_decay = " ".join(f"{value:.4f}" for value in found.detach().view(len(decays), -1).mean(1).tolist())
            print(f"step {step}, {time.monotonic() - start:.0f} s, mean loss by decay {by_decay}", flush=True)
        progress = max(step / steps, (time.monotonic() - start) / seconds)
    return step


def save(model: nn.Module, index: int, folder: Path) -> None:
    """One adapter as a PEFT folder, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(peft_tensors(model, index), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, StackedLinear)})
    LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(MODEL),
        r=RANK,
        lora_alpha=RANK,
        target_modules=targets,
        inference_mode=True,
    ).save_pretrained(str(folder))


def score(model: nn.Module, names: Sequence[str], count: int) -> list[float]:
    """Of a stacked model whose adapters have these tasks."""
    questions = [tasks.held_out(name, count, SEED) for name in names]
    answers = [[tasks.expected(name, question) for question in asked] for name, asked in zip(names, questions, strict=True)]
    return exact_rates(model, questions, answers)


def train(
    names: Sequence[str], decays: Sequence[float], out: Path, device: str, steps: int, batch: int, rows: int, seconds: float
) -> None:
    start = time.monotonic()
    data = read_tasks(names, rows)
    if device != "cpu":
        data = data[0].to(device), data[1].to(device)
    print(f"{rows} rows of {len(names)} tasks after {time.monotonic() - start:.0f} s", flush=True)
    model = load_base().requires_grad_(False).to(device)
    adapters = [(decay, name) for decay in decays for name in names]
    fresh = new_factors(linear_paths(model), len(names), RANK, torch.Generator().manual_seed(SEED))
    # Every decay starts from the same factors.
    layers = stack(model, {path: (a.repeat(len(decays), 1, 1), b.repeat(len(decays), 1, 1)) for path, (a, b) in fresh.items()})
    base = score(model, [name for _, name in adapters], COUNT)  # B is 0
    taken = fit(model, layers, data, decays, steps, batch, seconds - (time.monotonic() - start))
    for index, (decay, name) in enumerate(adapters):
        save(model, index, out / f"decay_{decay:g}" / name)
    found = score(model, [name for _, name in adapters], COUNT)
    unstack(model)
    trained = {"steps": taken, "rows": batch}
    scores: dict[str, dict[str, Any]] = {}
    for (decay, name), before, after in zip(adapters, base, found, strict=True):
        by_task = scores.setdefault(f"decay_{decay:g}", {})
        by_task[name] = {"base": round(before, 4), "adapter": round(after, 4), **trained}
    print(json.dumps(scores), flush=True)
    add_scores(out / "scores.json", scores)


def add_scores(file: Path, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """To those of earlier runs into the same folder: on a CPU a fleet is trained a few tasks at a time."""
    known = json.loads(file.read_text()) if file.is_file() else {"rank": RANK, "count": COUNT}
    for decay, by_task in scores.items():
        known[decay] = known.get(decay, {}) | by_task
    file.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapters and scores.json")
    parser.add_argument("--tasks", nargs="+", default=tasks.FLEET, help="default: %(default)s")
    parser.add_argument("--decays", nargs="+", type=float, default=DECAYS, help="a fleet each (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH, help="rows per adapter and step (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="different rows of text per task (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="the last step comes before, the rate falls in time for it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = arguments.device, arguments.steps, arguments.batch, arguments.rows, arguments.seconds
    train(arguments.tasks, arguments.decays, arguments.out, *options)


if __name__ == "__main__":
    main()
