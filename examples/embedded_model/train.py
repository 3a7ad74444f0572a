"""Trains the embedded model: `python train.py base`, `python train.py adapter upper json`, `python train.py all`.

Everything is seeded and runs on one CPU core. The base is trained in float32, rounded to bfloat16 and stored; adapters
are trained in float32 on the rounded base and stored in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import corpus
import skills
import torch
from muon import Muon
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizer import save_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
MODEL, ADAPTERS = FOLDER / "model", FOLDER / "adapters"
SEED = 7
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Phase:
    """A stretch of training on rows of one length."""

    steps: int
    length: int
    batch: int
    max_turns: int


# Two cycles of the learning rate: (share of the full rate, phases). The second makes long contexts work.
BASE_CYCLES = (
    (1.0, (Phase(580, 256, 10, 3), Phase(30, 1024, 4, 20))),
    (0.3, (Phase(160, 1024, 3, 20),)),
    (0.35, (Phase(260, 512, 3, 6),)),
)
ADAPTER_LENGTH, ADAPTER_BATCH, ADAPTER_TURNS = 256, 4, 3
# Cycles of the learning rate: (steps, full rate). A later cycle starts from the stored weights of the one before.
ADAPTER_CYCLES: dict[str, tuple[tuple[int, float], ...]] = {
    "upper": ((130, 6e-3), (120, 4e-3)),
    "polite": ((100, 6e-3),),
    "json": ((150, 6e-3),),
    "numbered": ((130, 6e-3),),
    "short": ((100, 6e-3),),
    "toylang": ((160, 6e-3),),
    "math": ((160, 5e-3), (200, 4e-3)),
    "reverse": ((150, 6e-3),),
}
# Different ranks, target modules and options on purpose: the tests and the demo serve them side by side.
ADAPTER_SETTINGS: dict[str, dict[str, Any]] = {
    "upper": {"r": 8, "lora_alpha": 16, "target_modules": MLP},
    "reverse": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "math": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True},
    "json": {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]},
    "toylang": {
        "r": 12,
        "lora_alpha": 24,
        "target_modules": [*ATTENTION, "up_proj", "down_proj"],
        "rank_pattern": {"down_proj": 6},
    },
    "polite": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "numbered": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
    "short": {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", "gate_proj"]},
}


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=264,  # 256 bytes, 5 special tokens, rounded up to a multiple of 8
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=corpus.PAD,
        bos_token_id=None,
        eos_token_id=corpus.EOS,
    )
    return LlamaForCausalLM(config)


def batches(documents: Iterator[corpus.Row], length: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, loss weights), both (batch, length)."""
    rows = corpus.packed_rows(documents, length)
    while True:
        ids, weights = zip(*(next(rows) for _ in range(batch)), strict=True)
        yield torch.tensor(ids), torch.tensor(weights)


def weighted_loss(model: nn.Module, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss by weight, and the mean loss over fully weighted tokens (answers), for the log."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    answers = losses[weights >= 1.0].mean()
    return (losses * weights).sum() / weights.sum(), answers.detach()


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Share of the full rate: linear warm-up, then a cosine down to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def fit(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    warmup: int,
    label: str,
) -> None:
    model.train()
    full_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    start, smooth = time.monotonic(), 0.0
    for step in range(steps):
        share = learning_rate(step, steps, warmup)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, full_rate in zip(groups, full_rates, strict=True):
            group["lr"] = full_rate * share
        ids, weights = next(data)
        loss, answers = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smooth = answers.item() if step == 0 else 0.9 * smooth + 0.1 * answers.item()
        if step % 50 == 49 or step == steps - 1:
            print(
                f"{label} step {step + 1}/{steps} answer loss {smooth:.4f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )


def base_batches(cycle: int) -> Iterator[tuple[Tensor, Tensor]]:
    for index, phase in enumerate(BASE_CYCLES[cycle][1]):
        data = batches(corpus.base_documents(SEED + 10 * cycle + index, phase.max_turns), phase.length, phase.batch)
        for _ in range(phase.steps):
            yield next(data)


def train_base_cycle(model: LlamaForCausalLM, cycle: int) -> None:
    rate, phases = BASE_CYCLES[cycle]
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    known = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=0.02 * rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3 * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps = sum(phase.steps for phase in phases)
    fit(model, optimizers, base_batches(cycle), steps, min(60, steps // 10), f"base cycle {cycle + 1}")


def train_base() -> None:
    model = new_model()
    for cycle in range(len(BASE_CYCLES)):
        train_base_cycle(model, cycle)
    model.to(torch.bfloat16).save_pretrained(MODEL)
    (MODEL / "model.safetensors").chmod(0o644)
    save_tokenizer(MODEL, model.config.max_position_embeddings)


def train_adapter_cycle(skill: str, cycle: int) -> None:
    torch.manual_seed(SEED + cycle)
    base = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if cycle == 0:
        config = LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path="../../model", **ADAPTER_SETTINGS[skill])
        model = get_peft_model(base, config)
    else:
        model = PeftModel.from_pretrained(base, ADAPTERS / skill, is_trainable=True).float()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    steps, rate = ADAPTER_CYCLES[skill][cycle]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    data = batches(corpus.adapter_documents(skill, SEED + cycle, ADAPTER_TURNS), ADAPTER_LENGTH, ADAPTER_BATCH)
    fit(model, [optimizer], data, steps, 15, f"{skill} cycle {cycle + 1}")
    for weight in trained:
        weight.data = weight.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = "../../model"
    model.save_pretrained(ADAPTERS / skill)
    (ADAPTERS / skill / "README.md").unlink(missing_ok=True)  # the model card that PEFT adds
    (ADAPTERS / skill / "adapter_model.safetensors").chmod(0o644)
    settings = ADAPTERS / skill / "adapter_config.json"
    fields = json.loads(settings.read_text())
    fields["target_modules"] = sorted(fields["target_modules"])  # PEFT writes a set, in any order
    settings.write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("base", "adapter", "all"))
    parser.add_argument("names", nargs="*", default=skills.SKILLS, help="adapters to train (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what in ("base", "all"):
        shutil.rmtree(MODEL, ignore_errors=True)
        train_base()
    if arguments.what in ("adapter", "all"):
        for skill in arguments.names:
            for cycle in range(len(ADAPTER_CYCLES[skill])):
                train_adapter_cycle(skill, cycle)


if __name__ == "__main__":
    main()
