"""Trains a fleet of adapters of one high rank, one per task of tasks.py, to see what compression to a lower rank costs.

    python examples/embedded_model/train_fleet.py --out FOLDER [--tasks quoted json-upper ...]

Each adapter is a PEFT folder named after its task; FOLDER/scores.json holds the scores (share of exact answers to held-out
questions) of base and adapter. The fleet's weights are not in the repository, its scores are: fleet_scores.json.
A task whose adapter is there is not trained again, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import tasks
import torch
from evaluate import MODEL, SEED, exact_rate, load_base
from peft import LoraConfig, get_peft_model
from train import Batch, fit, save_adapter

RANK, STEPS, LENGTH, BATCH, RATE = 48, 80, 160, 6, 3e-3
COUNT = 100


def task_documents(task: str, rng: random.Random) -> Iterator[corpus.Row]:
    """Single questions (a second one for half of them) and the task's answers; none of the questions is held out."""
    relation = "sum" if "math" in task else None
    while True:
        questions = corpus.sample_questions(rng, rng.choice((1, 1, 2)), relation)
        answers = [tasks.expected(task, question) for question in questions]
        yield corpus.conversation_row(questions, answers, [1.0] * len(questions), 0.0)


def task_batches(task: str) -> Iterator[Batch]:
    rows = corpus.packed_rows(task_documents(task, random.Random(f"{task} {SEED}")), LENGTH)
    for _ in range(STEPS):
        ids, weights = zip(*(next(rows) for _ in range(BATCH)), strict=True)
        yield torch.tensor(ids), torch.tensor(weights), None


def train_task(task: str, folder: Path) -> dict[str, float]:
    """Trains and stores the adapter of one task; its scores, and the base's."""
    torch.manual_seed(SEED)
    start = time.monotonic()
    base = load_base()
    questions = tasks.held_out(task, COUNT, SEED)
    answers = [tasks.expected(task, question) for question in questions]
    base_score = exact_rate(base, questions, answers)
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=RANK, target_modules="all-linear")
    model = get_peft_model(base, config, adapter_name=task)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    with tempfile.TemporaryDirectory() as temporary:
        fit(model, [optimizer], task_batches(task), STEPS, Path(temporary) / f"{task}.pt")
    save_adapter(model, task, folder, str(MODEL))
    model.float().eval()
    score = exact_rate(model, questions, answers)
    return {"base": base_score, "adapter": score, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapters and scores.json")
    parser.add_argument("--tasks", nargs="+", default=tasks.FLEET, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "scores.json"
    scores = json.loads(path.read_text()) if path.exists() else {}
    for task in arguments.tasks:
        if task in scores:
            continue
        scores[task] = train_task(task, arguments.out / task)
        print(f"{task:16} {scores[task]}", flush=True)
        path.write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
