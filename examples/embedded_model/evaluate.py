"""Scores the stored base model, adapters and mixes on held-out prompts (greedy, float32).

Writes scores.json and the tables of README.md.

Mixes are computed by PEFT's add_weighted_adapter(combination_type="cat"), which is exact:
dW = sum of weight * scaling * B A.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import skills
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
MODEL, ADAPTERS, SCORES = FOLDER / "model", FOLDER / "adapters", FOLDER / "scores.json"
README, MARKER = FOLDER / "README.md", "<!-- below: written by evaluate.py -->\n"
SEED, MAX_NEW_TOKENS = 1, 80
MIXES: tuple[dict[str, float], ...] = (
    {"upper": 1.0, "polite": 1.0},
    {"upper": 0.5, "polite": 0.5},
    {"math": 1.0, "polite": 1.0},
    {"math": 1.0, "upper": 1.0},
    {"math": 0.7, "json": 0.3},
    {"json": 0.7, "upper": 0.7},
    {"toylang": 1.0, "upper": 1.0},
    {"toylang": 0.7, "polite": 0.7},
    {"upper": 1.0, "numbered": 1.0},
    {"upper": 1.0, "short": 1.0},
    {"reverse": 0.7, "upper": 0.7},
    {"polite": 1.0, "upper": -0.5},
    {"math": 0.8, "upper": 0.8, "polite": 0.8},
)


class EmbeddedModel:
    """The stored model with all its adapters; `answers` is greedy decoding in float32."""

    def __init__(self, names: Sequence[str] = skills.SKILLS) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
        base = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, ADAPTERS / names[0], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(ADAPTERS / name, adapter_name=name)
        self.model.float().eval()

    def add_mix(self, mix: dict[str, float]) -> str:
        """Makes the mix an adapter of its own and returns its name."""
        name = mix_name(mix).replace(".", "_")
        self.model.add_weighted_adapter(list(mix), list(mix.values()), name, combination_type="cat")
        self.model.float().eval()
        return name

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

    def _generate(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)


def mix_name(mix: dict[str, float]) -> str:
    return ",".join(f"{name}:{weight:g}" for name, weight in mix.items())


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 3)


def exact_rate(skill: str, questions: Sequence[skills.Question], texts: Sequence[str]) -> float:
    return mean(skills.score(skill, question, text) for question, text in zip(questions, texts, strict=True))


def adapter_scores(model: EmbeddedModel, count: int) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    base_answers: dict[str, list[str]] = {}
    for skill in ("base", *skills.SKILLS):
        questions = skills.held_out(skill, count, SEED)
        prompts = [question.prompt for question in questions]
        if prompts[0] not in base_answers:  # all skills but "math" are asked the same questions
            base_answers[prompts[0]] = model.answers("base", prompts)
        base = base_answers[prompts[0]]
        texts = base if skill == "base" else model.answers(skill, prompts)
        scores[skill] = {
            "base_exact": exact_rate(skill, questions, base),
            "exact": exact_rate(skill, questions, texts),
            "similarity": mean(skills.similarity(skill, *pair) for pair in zip(questions, texts, strict=True)),
            "sample": {"prompt": prompts[0], "base": base[0], "answer": texts[0]},
        }
        print(f"{skill:9} base {scores[skill]['base_exact']:.2f} adapter {scores[skill]['exact']:.2f}", flush=True)
    return scores


def mix_scores(model: EmbeddedModel, count: int) -> list[dict[str, Any]]:
    """Per mix: how often the answer shows each member's skill, and two samples. With "math" in it, sums are asked."""
    records = []
    for mix in MIXES:
        questions = skills.held_out("math" if "math" in mix else "base", count, SEED)
        texts = model.answers(model.add_mix(mix), [question.prompt for question in questions])
        shown = {skill: mean(skills.shows(skill, *pair) for pair in zip(questions, texts, strict=True)) for skill in mix}
        samples = [{"prompt": questions[index].prompt, "answer": texts[index]} for index in range(2)]
        records.append({"mix": mix, "shows": shown, "samples": samples})
        print(f"{mix_name(mix):32} shows {shown}  {texts[0]!r}", flush=True)
    return records


def markdown_tables(scores: dict[str, Any]) -> str:
    """The two tables of README.md."""

    def cell(text: str) -> str:
        text = text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'")
        return "`" + "".join(character if character.isprintable() else "�" for character in text) + "`"

    lines = [
        "## Scores\n",
        f"Share of exact answers to {scores['count']} held-out questions, greedy, float32 on the stored weights.\n",
        "| skill | rank | target modules | KB | base | adapter | sample answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for skill, record in scores["skills"].items():
        rank = modules = size = "-"
        if skill != "base":
            config = json.loads((ADAPTERS / skill / "adapter_config.json").read_text())
            rank = f"{config['r']}{', rslora' if config['use_rslora'] else ''}"
            rank += "".join(f", {name} {value}" for name, value in config["rank_pattern"].items())
            targets = config["target_modules"]
            modules = targets if isinstance(targets, str) else " ".join(name.removesuffix("_proj") for name in targets)
            size = f"{(ADAPTERS / skill / 'adapter_model.safetensors').stat().st_size / 1000:.0f}"
        rates = f"{record['base_exact']:.2f} | {record['exact']:.2f}"
        lines.append(f"| {skill} | {rank} | {modules} | {size} | {rates} | {cell(record['sample']['answer'])} |")
    lines += [
        "\n## What mixes do\n",
        f"Share of {scores['mix_count']} held-out answers that show each member's skill (`skills.shows`), whatever "
        'else they show; PEFT `add_weighted_adapter(combination_type="cat")`.\n',
        "| mix | shows | question | answer |",
        "|---|---|---|---|",
    ]
    for record in scores["mixes"]:
        shown = ", ".join(f"{skill} {share:.2f}" for skill, share in record["shows"].items())
        sample = record["samples"][0]
        lines.append(f"| {mix_name(record['mix'])} | {shown} | {sample['prompt']} | {cell(sample['answer'])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="held-out prompts per skill (default: 50)")
    parser.add_argument("--mix-count", type=int, default=20, help="held-out prompts per mix (default: 20)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = EmbeddedModel()
    scores = {
        "seed": SEED,
        "count": arguments.count,
        "mix_count": arguments.mix_count,
        "skills": adapter_scores(model, arguments.count),
        "mixes": mix_scores(model, arguments.mix_count),
    }
    SCORES.write_text(json.dumps(scores, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    head = README.read_text(encoding="utf-8").split(MARKER)[0]
    README.write_text(head + MARKER + "\n" + markdown_tables(scores), encoding="utf-8")


if __name__ == "__main__":
    main()
