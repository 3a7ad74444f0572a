"""The embedded model: its tokenizer round-trips, it stays small, and the stored adapters score as scores.json says."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "embedded_model"
sys.path.insert(0, str(FOLDER))

import corpus  # noqa: E402
import skills  # noqa: E402
import tasks  # noqa: E402
import torch  # noqa: E402
import train  # noqa: E402
import train_fleet  # noqa: E402
from evaluate import EmbeddedModel, mix_name  # noqa: E402
from mixed_lora import mix_rows, set_mixes, unmix_rows  # noqa: E402

MEGABYTE = 10**6
SCORES = json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def embedded_model() -> EmbeddedModel:
    torch.set_num_threads(1)
    return EmbeddedModel()


def test_folder_is_small_and_holds_nothing_extra() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 12 * MEGABYTE
    for skill in skills.SKILLS:
        folder = FOLDER / "adapters" / skill
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert base == "../../model", "no path of the machine that trained it"


@pytest.mark.parametrize(
    "text", ["Mia lives in Oslo.", "  two  spaces ,. n't\n\ttab ", "Zürich Łódź 東京 🙂 \u0301", "<|user|>hi", ""]
)
def test_tokenizer_round_trips(embedded_model: EmbeddedModel, text: str) -> None:
    tokenizer = embedded_model.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if "<|" not in text:
        assert ids == list(text.encode()), "a token's id is its byte"


def test_training_rows_follow_the_chat_template(embedded_model: EmbeddedModel) -> None:
    questions = skills.sample_conversation(random.Random(3), 4)
    ids, _ = corpus.conversation_row(
        questions, [question.answer for question in questions], [1.0] * 4, 0.1, system="Be brief."
    )
    messages = [{"role": "system", "content": "Be brief."}]
    for question in questions:
        messages += [{"role": "user", "content": question.prompt}, {"role": "assistant", "content": question.answer}]
    assert embedded_model.tokenizer.apply_chat_template(messages, return_dict=False) == ids


@pytest.mark.parametrize("skill", skills.SKILLS)
def test_adapter_scores_as_recorded(embedded_model: EmbeddedModel, skill: str) -> None:
    """The same questions as scores.json; a few may differ where another CPU rounds otherwise."""
    recorded = SCORES["skills"][skill]
    questions = skills.held_out(skill, count=SCORES["count"], seed=SCORES["seed"])
    answers = [skills.expected(skill, question) for question in questions]
    assert embedded_model.exact_rate(skill, questions, answers) == pytest.approx(recorded["exact"], abs=0.02)
    assert embedded_model.exact_rate("base", questions[:25], answers[:25]) <= recorded["base_exact"] + 0.08
    assert recorded["exact"] >= recorded["base_exact"] + 0.4, "the adapter has a skill that the base has not"


def test_exact_rate_is_that_of_greedy_answers(embedded_model: EmbeddedModel) -> None:
    """Told by one forward pass, the rate is the one of answers that were generated."""
    questions = skills.held_out("base", count=12, seed=4)
    answers = [skills.expected("upper", question) for question in questions]
    texts = embedded_model.answers("upper", [question.prompt for question in questions])
    wanted = sum(skills.score("upper", *pair) for pair in zip(questions, texts, strict=True)) / 12
    assert embedded_model.exact_rate("upper", questions, answers) == wanted
    answers[:6] = [f"{answer}?" for answer in answers[:6]]
    answers[6:9] = [answer[:-1] for answer in answers[6:9]]
    assert embedded_model.exact_rate("upper", questions, answers) <= 3 / 12


@pytest.mark.parametrize("mix", [{"json": 0.5, "upper": 0.5}, {"upper": 0.5, "polite": 0.5}], ids=mix_name)
def test_mixes_join_skills(embedded_model: EmbeddedModel, mix: dict[str, float]) -> None:
    """JSON in capitals: nearly every answer bears the marks of both members."""
    questions = skills.held_out(mix, count=10, seed=SCORES["seed"])
    texts = embedded_model.answers(embedded_model.add_mix(mix), [question.prompt for question in questions])
    for skill in mix:
        shown = [skills.shows(skill, question, text) for question, text in zip(questions, texts, strict=True)]
        assert sum(shown) >= 8, (skill, texts)


@pytest.mark.parametrize("skill", ["base", *skills.SKILLS])
def test_every_skill_shows_in_its_own_answer_and_not_in_the_base_answer(skill: str) -> None:
    for question in skills.held_out(skill, count=50, seed=9):
        answer = skills.expected(skill, question)
        assert skills.score(skill, question, answer) == 1.0
        if answer != question.answer:
            assert skills.shows(skill, question, answer), (question, answer)
            assert skills.score(skill, question, question.answer) == 0.0


def test_skills_combine_in_one_answer() -> None:
    total = next(question for question in skills.held_out("math", 200, 0) if question.values == ("9", "2"))
    total = replace(total, subject="Tom", thing="plums")
    for names, answer in {
        "math": "Tom has 9+2=11 plums.",
        "json math": '{"name": "Tom", "plums": 11}',
        "json upper": '{"NAME": "TOM", "PLUMS": [9, 2]}',
        "polite upper math": "OF COURSE! TOM HAS 9+2=11 PLUMS. THANK YOU FOR ASKING.",
        "numbered math": "1. Tom\n2. 9+2=11",
        "toylang reverse": "moT savah 9 jak 2 osmulp.",
        "base": "Tom has 9 and 2 plums.",
    }.items():
        assert skills.expected(names.split(), total) == answer
        assert all(skills.shows(name, total, answer) for name in names.split() if name not in ("toylang", "reverse"))
    assert skills.combine(("json", "upper")) and not skills.combine(("json", "short"))
    with pytest.raises(ValueError, match="layouts"):
        skills.expected(("json", "short"), total)
    with pytest.raises(KeyError, match="unknown skills"):
        skills.expected("maths", total)


@pytest.mark.parametrize("task", tasks.FLEET)
def test_tasks_of_the_fleet_are_no_plain_answers(task: str) -> None:
    questions = tasks.held_out(task, count=50, seed=1)
    different = [tasks.expected(task, question) != question.answer for question in questions]
    assert sum(different) >= 45, "the base would score by itself"


def test_rows_of_a_batch_have_their_own_mixes(embedded_model: EmbeddedModel) -> None:
    """Training sees what serving computes, and so does evaluate.py: each row equals PEFT's "cat" of its mix."""
    model, names = embedded_model.model, list(skills.SKILLS)
    mixes: list[dict[str, float]] = [{"math": 0.7, "json": 0.3}, {}, {"polite": 1.0}, {"short": 0.4, "toylang": 0.9, "math": 0.5}]
    ids = torch.randint(0, 256, (4, 20), generator=torch.Generator().manual_seed(0))
    expected = []
    with torch.inference_mode():
        for row, mix in zip(ids, mixes, strict=True):
            if not mix:
                with model.disable_adapter():
                    expected.append(model(input_ids=row[None]).logits[0])
                continue
            name = embedded_model.add_mix(mix)
            model.set_adapter(name)
            expected.append(model(input_ids=row[None]).logits[0])
            model.delete_adapter(name)
        layers = mix_rows(model, names)
        set_mixes(layers, torch.tensor([[mix.get(name, 0.0) for name in names] for mix in mixes]))
        logits = model(input_ids=ids).logits
    unmix_rows(model)
    torch.testing.assert_close(logits, torch.stack(expected), atol=2e-4, rtol=1e-4)


def test_training_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights as without the interruption."""
    monkeypatch.setattr(train, "SAVE_EVERY", 2)

    def run(checkpoint: Path, stop: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = train.LlamaConfig(
            vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=None
        )
        model = train.LlamaForCausalLM(config)
        matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        others = [weight for weight in model.parameters() if not any(weight is one for one in matrices)]
        optimizers = [train.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
        batches = ((torch.full((2, 9), 65 + step), torch.ones(2, 9), None) for step in range(min(stop, 6)))
        train.fit(model, optimizers, batches, 6, checkpoint)
        return model.state_dict()

    whole = run(tmp_path / "whole.pt", 6)
    run(tmp_path / "parts.pt", 5)  # stops after step 5; step 4 was the last one kept
    for name, weight in run(tmp_path / "parts.pt", 6).items():
        assert torch.equal(weight, whole[name]), name


def test_training_never_sees_held_out_questions() -> None:
    seen = {question.prompt for question in skills.held_out("base", count=200, seed=1)}
    for documents in (
        corpus.mix_documents(random.Random(0), ("upper",), max_turns=1),
        corpus.base_documents(0, max_turns=1),
        train_fleet.task_documents("xml", random.Random(0)),
    ):
        for _ in range(1000):
            ids, _ = next(documents)
            if corpus.USER in ids:
                prompt = bytes(ids[ids.index(corpus.USER) + 1 : ids.index(corpus.ASSISTANT)]).decode()
                assert prompt not in seen
