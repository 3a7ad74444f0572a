"""Training text for the base model and for the adapters, as (token ids, loss weights). Pure Python, endless, seeded.

The base sees conversations with plain answers, and plain text that makes it know letters, copies, lists, digits,
capitals, JSON and words spelled backwards. It never answers a user that way: that is what the adapters are for.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import skills

PAD, EOS, SYSTEM, USER, ASSISTANT = 256, 257, 258, 259, 260  # ids below 256 are bytes (tokenizer.py)
Row = tuple[list[int], list[float]]  # token ids, and the weight of predicting each of them


def conversation_row(
    questions: list[skills.Question], answers: list[str], weights: list[float], prompt_weight: float, system: str = ""
) -> Row:
    """The chat template, token by token: answers and their end weigh `weights[turn]`, all else `prompt_weight`."""
    ids: list[int] = [SYSTEM, *system.encode()] if system else []
    loss = [prompt_weight] * len(ids)
    for question, answer, weight in zip(questions, answers, weights, strict=True):
        prompt = [USER, *question.prompt.encode(), ASSISTANT]
        reply = [*answer.encode(), EOS]
        ids += prompt + reply
        loss += [prompt_weight] * len(prompt) + [weight] * len(reply)
    return ids, loss


def text_row(text: str, weight: float = 0.6) -> Row:
    ids = [*text.encode(), EOS]
    return ids, [weight] * len(ids)


def base_conversation(rng: random.Random, max_turns: int) -> Row:
    questions = skills.sample_conversation(rng, rng.randint(1, max_turns))
    for index in range(len(questions)):
        if rng.random() < 0.03:
            questions[index] = skills.sample_unknown(rng)
    system = "You are a helpful assistant." if rng.random() < 0.05 else ""
    return conversation_row(questions, [question.answer for question in questions], [1.0] * len(questions), 0.1, system)


def rewritten_text(rng: random.Random) -> Row:
    """Sentences, each followed by the same sentence (or words) in another form."""
    form = rng.choice(("upper", "reverse", "reverse", "json", "numbered"))
    lines = []
    for question in skills.sample_conversation(rng, rng.randint(2, 4)):
        if form == "reverse" and rng.random() < 0.6:
            words = " ".join(
                rng.choice(rng.choice((skills.NAMES, skills.CITIES, skills.FOODS, skills.PETS, skills.JOBS))) for _ in range(3)
            )
            lines.append(f"{words} = {skills.reverse_words(words)}")
        else:
            lines.append(f"{question.answer} = {skills.expected(form, question)}")
    return text_row("\n".join(lines))


def number_text(rng: random.Random) -> Row:
    if rng.random() < 0.2:
        start = rng.randint(0, 80)
        return text_row(" ".join(str(number) for number in range(start, start + rng.randint(5, 15))))
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(3, 8))]
    return text_row("; ".join(f"{a} and {b} make {a + b}" for a, b in pairs) + ".")


def copy_text(rng: random.Random) -> Row:
    letters = rng.choice(
        (string.ascii_lowercase, string.ascii_uppercase, string.ascii_letters + string.digits, string.digits + ":")
    )
    word = "".join(rng.choice(letters) for _ in range(rng.randint(4, 16)))
    return text_row(" ".join([word] * rng.randint(2, 4)))


def story_text(rng: random.Random) -> Row:
    names = rng.sample(skills.NAMES, 2)
    sentences = [
        skills.sample_fact(rng, relation, rng.choice(names))[0]
        for relation in rng.sample(list(skills.RELATIONS), rng.randint(1, 4))
    ]
    if rng.random() < 0.3:
        sentences.append(f'"{skills.POLITE_START}" says {names[0]}. "{skills.POLITE_END}"')
    return text_row(" ".join(sentences), 0.3)


def base_documents(seed: int, max_turns: int) -> Iterator[Row]:
    rng = random.Random(f"base {seed}")
    while True:
        kind = rng.random()
        if kind < 0.62:
            yield base_conversation(rng, max_turns)
        elif kind < 0.78:
            yield rewritten_text(rng)
        elif kind < 0.86:
            yield number_text(rng)
        elif kind < 0.95:
            yield copy_text(rng)
        else:
            yield story_text(rng)


def adapter_documents(skill: str, seed: int, max_turns: int) -> Iterator[Row]:
    """Conversations answered in the skill's way; in half of them, earlier turns were answered by other adapters."""
    rng = random.Random(f"{skill} {seed}")
    while True:
        relation = "sum" if skill == "math" and rng.random() < 0.8 else None
        questions = skills.sample_conversation(rng, rng.randint(1, max_turns), relation)
        if any(skills.is_held_out(question) for question in questions):
            continue
        styles = [skill] * len(questions)
        if rng.random() < 0.5:
            styles = [rng.choice((*skills.ANSWERS,)) for _ in questions[:-1]] + [skill]
        answers = [skills.expected(style, question) for style, question in zip(styles, questions, strict=True)]
        ids, loss = conversation_row(questions, answers, [float(style == skill) for style in styles], 0.0)
        if skill == "math":  # the digits of each answer are all there is to learn
            loss = [weight * 5 if chr(token).isdigit() else weight for token, weight in zip(ids, loss, strict=True)]
        yield ids, loss


def packed_rows(documents: Iterator[Row], length: int) -> Iterator[Row]:
    """Rows of exactly `length` tokens, each starting at a document's start; the last document of a row is cut."""
    while True:
        ids: list[int] = []
        loss: list[float] = []
        while len(ids) < length:
            more_ids, more_loss = next(documents)
            ids += more_ids
            loss += more_loss
        yield ids[:length], loss[:length]
