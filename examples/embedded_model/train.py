"""Trains the embedded model, seeded, on one CPU core: `python train.py all`, `train.py base`, `train.py adapters`.

The base is trained in float32, rounded to bfloat16 and stored; the adapters are trained on the rounded base, all at once
and in mixes, and stored in bfloat16. Progress is kept in --work: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import corpus
import skills
import torch
from mixed_lora import MixedLinear, mix_rows, set_mixes, unmix_rows
from muon import Muon
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tokenizer import save_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
MODEL, ADAPTERS = FOLDER / "model", FOLDER / "adapters"
WORK = FOLDER.parents[1] / ".embedded_training"
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


# Short rows first, for more answers per second; the last ones make long conversations work.
BASE_PHASES = (Phase(300, 128, 32, 1), Phase(1000, 256, 16, 3), Phase(200, 512, 8, 6), Phase(80, 1024, 4, 20))
# From a base that already speaks (--start), at half the rate.
CONTINUED_PHASES = (Phase(330, 224, 12, 2), Phase(30, 512, 6, 6), Phase(12, 1024, 3, 20))
CONTINUED_RATE = 0.5
ADAPTER_PHASES = (Phase(225, 160, 12, 1), Phase(25, 256, 6, 3))
ADAPTER_RATE = 2.5e-3
SAVE_EVERY = 50
# Different ranks, target modules and options on purpose: the tests and the demo serve them side by side. All scale by 2
# (rsLoRA: alpha over the root of the rank), so that weights mean about the same for all.
ADAPTER_SETTINGS: dict[str, dict[str, Any]] = {
    "upper": {"r": 8, "lora_alpha": 16, "target_modules": MLP},
    "reverse": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "math": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
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


def weighted_loss(model: nn.Module, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss by weight, and the mean loss over fully weighted tokens (answers), for the log."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    answers = losses[weights >= 1.0].mean()
    return (losses * weights).sum() / weights.sum(), answers.detach()


def learning_rate(step: int, steps: int) -> float:
    """Share of the full rate: linear warm-up, full for the first 60 %, then a line down to 2 %."""
    warmup = min(40, steps // 8)
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, 0.02 + 0.98 * (steps - step) / (steps * 0.4))


Batch = tuple[Tensor, Tensor, Tensor | None]
"""Token ids and loss weights, both (batch, length), and the adapters' weights in each row (batch, adapters)."""


def base_batches(phases: Sequence[Phase]) -> Iterator[Batch]:
    for index, phase in enumerate(phases):
        rows = corpus.packed_rows(corpus.base_documents(SEED + index, phase.max_turns), phase.length)
        for _ in range(phase.steps):
            ids, weights = zip(*(next(rows) for _ in range(phase.batch)), strict=True)
            yield torch.tensor(ids), torch.tensor(weights), None


def adapter_batches() -> Iterator[Batch]:
    rng = random.Random(f"mixes {SEED}")
    for phase in ADAPTER_PHASES:
        for _ in range(phase.steps):
            mixes = [corpus.sample_mix(rng) for _ in range(phase.batch)]
            rows = [next(corpus.packed_rows(corpus.mix_documents(rng, (*mix,), phase.max_turns), phase.length)) for mix in mixes]
            ids, weights = zip(*rows, strict=True)
            shares = torch.tensor([[mix.get(name, 0.0) for name in skills.SKILLS] for mix in mixes])
            yield torch.tensor(ids), torch.tensor(weights), shares


def fit(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    data: Iterator[Batch],
    steps: int,
    checkpoint: Path,
    mixed: Sequence[MixedLinear] = (),
) -> None:
    """Trains the trainable weights; goes on from `checkpoint` if it is there, and writes it every SAVE_EVERY steps."""
    device = next(model.parameters()).device
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    full_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    first, seconds, smooth = 0, 0.0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        if state["steps"] != steps:
            raise SystemExit(f"{checkpoint} is of a run of {state['steps']} steps, not {steps}: delete it or give another --work")
        first, seconds, smooth = state["step"], state["seconds"], state["smooth"]
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(state["weights"][name])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        print(f"{checkpoint.stem}: goes on after step {first}", flush=True)
    model.train()
    start = time.monotonic() - seconds
    for step, (ids, weights, shares) in enumerate(data):
        if step < first:
            continue
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, full_rate in zip(groups, full_rates, strict=True):
            group["lr"] = full_rate * learning_rate(step, steps)
        if shares is not None:
            set_mixes(mixed, shares.to(device))
        loss, answers = weighted_loss(model, ids.to(device), weights.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smooth = answers.item() if step == 0 else 0.95 * smooth + 0.05 * answers.item()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            seconds = time.monotonic() - start
            print(f"{checkpoint.stem} step {step + 1}/{steps} answer loss {smooth:.4f}, {seconds:.0f} s", flush=True)
            state = {"step": step + 1, "steps": steps, "seconds": seconds, "smooth": smooth, "weights": trained}
            state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)


def train_base(work: Path, device: str, start: Path | None) -> None:
    """From random weights, or from those in the folder `start`; the result is work/model."""
    model = new_model() if start is None else LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    model.to(device)
    phases, share = (BASE_PHASES, 1.0) if start is None else (CONTINUED_PHASES, CONTINUED_RATE)
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    known = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=0.02 * share, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3 * share, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    fit(model, optimizers, base_batches(phases), sum(phase.steps for phase in phases), work / "base.pt")
    model.to("cpu", torch.bfloat16).save_pretrained(work / "model")
    (work / "model" / "model.safetensors").chmod(0o644)
    save_tokenizer(work / "model", model.config.max_position_embeddings)


def load_factors(model: PeftModel, name: str, folder: Path) -> None:
    """The adapter in `folder` (same ranks and modules), to the scaling that `model` gives it: the same dW."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    rank = config["r"] ** 0.5 if config["use_rslora"] else config["r"]
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and name in layer.lora_A:
            assert not config["alpha_pattern"]
            given = config["lora_alpha"] / config["rank_pattern"].get(path.rpartition(".")[2], rank)
            layer.lora_A[name].weight.data.copy_(tensors[f"{path}.lora_A.weight"])
            layer.lora_B[name].weight.data.copy_(tensors[f"{path}.lora_B.weight"] * (given / layer.scaling[name]))


def train_adapters(work: Path, device: str, start: Path | None) -> None:
    """On the base in work/model; the results are work/adapters/<name>."""
    torch.manual_seed(SEED)
    base = LlamaForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    configs = {
        name: LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path="../../model", **ADAPTER_SETTINGS[name])
        for name in skills.SKILLS
    }
    model = PeftModel(base, configs[skills.SKILLS[0]], adapter_name=skills.SKILLS[0])
    for name in skills.SKILLS[1:]:
        model.add_adapter(name, configs[name])
    if start is not None:
        for name in skills.SKILLS:
            load_factors(model, name, start / name)
    trained = [weight.requires_grad_() for name, weight in model.named_parameters() if "lora_" in name]
    mixed = mix_rows(model.to(device), skills.SKILLS)
    optimizer = torch.optim.AdamW(trained, lr=ADAPTER_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    steps = sum(phase.steps for phase in ADAPTER_PHASES)
    fit(model, [optimizer], adapter_batches(), steps, work / "adapters.pt", mixed)
    unmix_rows(model)
    model.to("cpu")
    for name in skills.SKILLS:
        save_adapter(model, name, work / "adapters" / name)


def save_adapter(model: PeftModel, name: str, folder: Path, base: str = "../../model") -> None:
    """In bfloat16, as PEFT saves it, without its model card and in a fixed order; `base` is written as the base's place."""
    for path, weight in model.named_parameters():
        if "lora_" in path and f".{name}." in path:
            weight.data = weight.data.to(torch.bfloat16)
    model.peft_config[name].base_model_name_or_path = base
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary, selected_adapters=[name], save_embedding_layers=False)
        saved = next(Path(temporary).rglob("adapter_config.json")).parent
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(saved / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        fields = json.loads((saved / "adapter_config.json").read_text())
    fields["target_modules"] = sorted(fields["target_modules"])  # PEFT writes a set, in any order
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("base", "adapters", "all"))
    parser.add_argument("--work", type=Path, default=WORK, help="keeps progress and results (default: .embedded_training)")
    parser.add_argument("--start", type=Path, help="train the base from this one, shorter (default: from random weights)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda; the same seeds, other roundings (default: cpu)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / ".gitignore").write_text("*\n")
    if arguments.what in ("base", "all"):
        train_base(arguments.work, arguments.device, arguments.start)
        shutil.copytree(arguments.work / "model", MODEL, dirs_exist_ok=True)
    if arguments.what in ("adapters", "all"):
        train_adapters(arguments.work, arguments.device, arguments.start)
        shutil.copytree(arguments.work / "adapters", ADAPTERS, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
