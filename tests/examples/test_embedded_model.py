"""The embedded model: its tokenizer round-trips, it stays small, and the stored adapters score as scores.json says."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "embedded_model"
sys.path.insert(0, str(FOLDER))

import corpus  # noqa: E402
import skills  # noqa: E402
import torch  # noqa: E402
from evaluate import EmbeddedModel, exact_rate  # noqa: E402

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
    questions = skills.held_out(skill, count=5, seed=SCORES["seed"] + 1)
    prompts = [question.prompt for question in questions]
    recorded = SCORES["skills"][skill]
    adapter = exact_rate(skill, questions, embedded_model.answers(skill, prompts))
    base = exact_rate(skill, questions, embedded_model.answers("base", prompts))
    assert adapter >= recorded["exact"] - 0.3
    assert base <= recorded["base_exact"] + 0.3
    assert recorded["exact"] >= recorded["base_exact"] + 0.4, "the adapter has a skill that the base has not"


@pytest.mark.parametrize("skill", ["base", *skills.SKILLS])
def test_every_skill_shows_in_its_own_answer_and_not_in_the_base_answer(skill: str) -> None:
    for question in skills.held_out(skill, count=50, seed=9):
        answer = skills.expected(skill, question)
        assert skills.score(skill, question, answer) == 1.0 and skills.similarity(skill, question, answer) == 1.0
        if answer != question.answer:
            assert skills.shows(skill, question, answer), (question, answer)
            assert skills.score(skill, question, question.answer) == 0.0


def test_training_never_sees_held_out_questions() -> None:
    seen = {question.prompt for question in skills.held_out("base", count=200, seed=1)}
    documents = corpus.adapter_documents("upper", seed=0, max_turns=1)
    for _ in range(2000):
        ids, _ = next(documents)
        prompt = bytes(ids[1 : ids.index(corpus.ASSISTANT)]).decode()
        assert prompt not in seen
