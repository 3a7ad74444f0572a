"""Scores the stored base model, adapters and mixes on held-out questions, in float32: scores.json, the tables of README.md.

    python examples/embedded_model/evaluate.py                                        what is stored here
    python -m examples.embedded_model.evaluate --adapters FOLDER... [--out FILE]      any adapters of this base, as JSON

The second form takes a folder's name for its task: a skill, a mix of skills ("json-upper"), or one of train_fleet.py's tasks.
Mixes are computed by PEFT's add_weighted_adapter(combination_type="cat"): dW = sum of weight * scaling * B A.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # for `python -m` and importers: these modules are no package

import skills
import tasks
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from stacked_lora import exact_rates
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
MODEL, ADAPTERS, SCORES = FOLDER / "model", FOLDER / "adapters", FOLDER / "scores.json"
README, MARKER = FOLDER / "README.md", "<!-- below: written by evaluate.py -->\n"
SEED, COUNT, MAX_NEW_TOKENS = 1, 100, 80
MIXES: tuple[dict[str, float], ...] = (
    {"math": 0.7, "json": 0.3},
    {"json": 0.5, "upper": 0.5},
    {"json": 1.0, "upper": 1.0},
    {"upper": 0.5, "polite": 0.5},
    {"math": 1.0, "polite": 1.0},
    {"math": 0.5, "numbered": 0.5},
    {"toylang": 1.0, "upper": 0.3},
    {"toylang": 0.7, "polite": 0.7},
    {"reverse": 0.7, "upper": 0.7},
    {"short": 0.5, "reverse": 0.5},
    {"math": 0.8, "upper": 0.8, "polite": 0.8},
    {"json": 0.6, "toylang": 0.6, "upper": 0.6},
    {"json": 0.5, "numbered": 0.5},
    {"polite": 1.0, "upper": -0.5},
)


def load_base() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def exact_rate(model: torch.nn.Module, questions: Sequence[skills.Question], answers: Sequence[str]) -> float:
    """The share of questions to which greedy decoding gives exactly that answer."""
    return exact_rates(model, [questions], [answers])[0]


def score(model: LlamaForCausalLM, adapter: Path, task: str, count: int = COUNT, seed: int = SEED) -> float:
    """The share, 0 to 1, of `count` held-out questions of a task that the adapter in this folder answers exactly.

    `model`: the embedded base (`load_base`), the same after the call. Raises KeyError on an unknown task.
    """
    questions = tasks.held_out(task, count, seed)
    with_adapter = PeftModel.from_pretrained(model, adapter).float().eval()
    try:
        return exact_rate(with_adapter, questions, [tasks.expected(task, question) for question in questions])
    finally:
        with_adapter.unload()


class EmbeddedModel:
    """The stored model with all its adapters; `answers` is greedy decoding in float32."""

    def __init__(self, names: Sequence[str] = skills.SKILLS) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
        self.model = PeftModel.from_pretrained(load_base(), ADAPTERS / names[0], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(ADAPTERS / name, adapter_name=name)
        self.model.float().eval()

    def add_mix(self, mix: dict[str, float]) -> str:
        """Makes the mix an adapter of its own and returns its name."""
        name = mix_name(mix).replace(".", "_")
        self.model.add_weighted_adapter(list(mix), list(mix.values()), name, combination_type="cat")
        for layer in self.model.modules():
            if isinstance(layer, LoraLayer) and name in layer.scaling:
                layer.scaling[name] = 1.0  # already in the factors; PEFT multiplies again where the first member has rsLoRA
        self.model.float().eval()
        return name

    def exact_rate(self, adapter: str, questions: Sequence[skills.Question], answers: Sequence[str]) -> float:
        """`exact_rate` with the adapter of that name, or of "base"."""
        if adapter == "base":
            with self.model.disable_adapter():
                return exact_rate(self.model, questions, answers)
        self.model.set_adapter(adapter)
        return exact_rate(self.model, questions, answers)

    def relative_norm(self, adapter: str) -> float:
        """|dW| / |W| (Frobenius), over all linear weights of the layers."""
        change = total = 0.0
        for layer in self.model.modules():
            if isinstance(layer, LoraLayer):
                total += layer.get_base_layer().weight.square().sum().item()
                if adapter in layer.lora_A:
                    change += layer.get_delta_weight(adapter).square().sum().item()
        return (change / total) ** 0.5

    @torch.inference_mode()
    def answers(self, adapter: str, prompts: Sequence[str], batch: int = 50) -> list[str]:
        """One answer per user prompt, by the adapter of that name or by "base"."""
        texts: list[str] = []
        for start in range(0, len(prompts), batch):
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + batch]]
            inputs = self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            if adapter == "base":
                with self.model.disable_adapter():
                    output = self._generate(inputs)
            else:
                self.model.set_adapter(adapter)
                output = self._generate(inputs)
            texts += self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts

    def _generate(self, inputs: Any) -> Tensor:
        return self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)


def mix_name(mix: dict[str, float]) -> str:
    return ",".join(f"{name}:{weight:g}" for name, weight in mix.items())


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 3)


def adapter_scores(model: EmbeddedModel, count: int) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for skill in ("base", *skills.SKILLS):
        questions = skills.held_out(skill, count, SEED)
        answers = [skills.expected(skill, question) for question in questions]
        scores[skill] = {
            "base_exact": model.exact_rate("base", questions, answers),
            "exact": model.exact_rate(skill, questions, answers),
            "relative_norm": 0.0 if skill == "base" else round(model.relative_norm(skill), 3),
            "sample": {"prompt": questions[0].prompt, "answer": model.answers(skill, [questions[0].prompt])[0]},
        }
        print(f"{skill:9} base {scores[skill]['base_exact']:.2f} adapter {scores[skill]['exact']:.2f}", flush=True)
    return scores


def mix_scores(model: EmbeddedModel, count: int) -> list[dict[str, Any]]:
    """Per mix: how often the answer is exactly what all members together should give, how often it shows each member's
    skill, and samples. With "math" in it, sums are asked. Members that do not combine, or a negative weight: no exact answer.
    """
    records = []
    for mix in MIXES:
        questions = skills.held_out(mix, count, SEED)
        name = model.add_mix(mix)
        texts = model.answers(name, [question.prompt for question in questions])
        pairs = list(zip(questions, texts, strict=True))
        record: dict[str, Any] = {"mix": mix, "exact": None}
        if skills.combine(mix) and min(mix.values()) > 0:
            record["exact"] = mean(skills.score(mix, *pair) for pair in pairs)
        record["shows"] = {skill: mean(skills.shows(skill, *pair) for pair in pairs) for skill in mix}
        record["samples"] = [{"prompt": question.prompt, "answer": text} for question, text in pairs[:3]]
        records.append(record)
        print(f"{mix_name(mix):32} exact {record['exact']} shows {record['shows']}  {texts[0]!r}", flush=True)
        model.model.delete_adapter(name)
    return records


def markdown_tables(scores: dict[str, Any]) -> str:
    """The two tables of README.md."""

    def cell(text: str) -> str:
        text = text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'")
        return "`" + "".join(character if character.isprintable() else "�" for character in text) + "`"

    lines = [
        "## Scores\n",
        f"Share of exact answers to {scores['count']} held-out questions, greedy, float32 on the stored weights; |dW| is the "
        "adapter's change, relative to the base's weights.\n",
        "| skill | rank | target modules | KB | \\|dW\\| | base | adapter | sample answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for skill, record in scores["skills"].items():
        rank = modules = size = norm = "-"
        if skill != "base":
            config = json.loads((ADAPTERS / skill / "adapter_config.json").read_text())
            rank = f"{config['r']}{', rslora' if config['use_rslora'] else ''}"
            rank += "".join(f", {name} {value}" for name, value in config["rank_pattern"].items())
            targets = config["target_modules"]
            modules = targets if isinstance(targets, str) else " ".join(name.removesuffix("_proj") for name in targets)
            size = f"{(ADAPTERS / skill / 'adapter_model.safetensors').stat().st_size / 1000:.0f}"
            norm = f"{record['relative_norm']:.2f}"
        rates = f"{record['base_exact']:.2f} | {record['exact']:.2f}"
        lines.append(f"| {skill} | {rank} | {modules} | {size} | {norm} | {rates} | {cell(record['sample']['answer'])} |")
    lines += [
        "\n## What mixes do\n",
        f"Of {scores['mix_count']} answers to held-out questions: the share that is exactly what all members together should "
        "give (`skills.expected`), and the shares that show each member's skill (`skills.shows`).\n",
        "| mix | exact | shows | question | answer |",
        "|---|---|---|---|---|",
    ]
    for record in scores["mixes"]:
        exact = "-" if record["exact"] is None else f"{record['exact']:.2f}"
        shown = ", ".join(f"{skill} {share:.2f}" for skill, share in record["shows"].items())
        sample = record["samples"][1]
        lines.append(f"| {mix_name(record['mix'])} | {exact} | {shown} | {sample['prompt']} | {cell(sample['answer'])} |")
    return "\n".join(lines) + "\n"


def score_stored(count: int, mix_count: int) -> None:
    model = EmbeddedModel()
    scores = {
        "seed": SEED,
        "count": count,
        "mix_count": mix_count,
        "skills": adapter_scores(model, count),
        "mixes": mix_scores(model, mix_count),
    }
    SCORES.write_text(json.dumps(scores, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    head = README.read_text(encoding="utf-8").split(MARKER)[0]
    README.write_text(head + MARKER + "\n" + markdown_tables(scores), encoding="utf-8")


def score_folders(folders: Sequence[Path], count: int) -> dict[str, Any]:
    """{"count", "mean", "scores": {folder: share}}."""
    model = load_base()
    scores = {folder.as_posix(): score(model, folder, folder.name, count) for folder in folders}
    return {"count": count, "mean": mean(scores.values()), "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=Path, nargs="+", help="score these folders, not the stored adapters and mixes")
    parser.add_argument("--out", type=Path, help="with --adapters: write the JSON here, not to standard output")
    parser.add_argument("--count", type=int, default=COUNT, help="held-out questions per skill (default: %(default)s)")
    parser.add_argument("--mix-count", type=int, default=40, help="held-out questions per mix (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.adapters:
        score_stored(arguments.count, arguments.mix_count)
        return
    text = json.dumps(score_folders(arguments.adapters, arguments.count), indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
