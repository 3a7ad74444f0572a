"""Training text for the base model and for the adapters, as (token ids, loss weights). Pure Python, endless, seeded.

The base sees conversations with plain answers, conversations answered in the styles that a system message names, and
plain text that makes it know letters, copies, lists and digits. Without a system message it answers plainly: answering in
a style unasked is what the adapters are for.
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


def sample_styles(rng: random.Random, most: int = 3) -> tuple[str, ...]:
    """One to `most` skills that combine, in any order; fewer are more frequent."""
    count = min(rng.choice((1, 1, 1, 2, 2, 2, 3)), most)
    while True:
        styles = tuple(rng.sample(skills.SKILLS, count))
        if skills.combine(styles):
            return styles


def style_system(rng: random.Random, styles: tuple[str, ...]) -> str:
    """The system message that asks for styles; also one that asks for none."""
    return " ".join(styles) if styles else rng.choice(("plain", "You are a helpful assistant."))


def sample_questions(rng: random.Random, turns: int, relation: str | None = None) -> list[skills.Question]:
    """A conversation's questions, none of them held out."""
    while True:
        questions = skills.sample_conversation(rng, turns, relation)
        if not any(skills.is_held_out(question) for question in questions):
            return questions


def base_conversation(rng: random.Random, max_turns: int) -> Row:
    """Plain answers; with a system message that names skills, answers in these styles, until the next system message."""
    relation = "sum" if rng.random() < 0.1 else None
    questions = sample_questions(rng, rng.randint(1, max_turns), relation)
    ids: list[int] = []
    loss: list[float] = []
    styles: tuple[str, ...] = ()
    foreign = rng.random() < 0.15  # earlier answers are in styles that nobody asked for, the last one is plain all the same
    for turn, question in enumerate(questions):
        system = ""
        if not foreign and rng.random() < (0.7 if turn == 0 else 0.3):
            styles = sample_styles(rng) if rng.random() < 0.9 else ()
            system = style_system(rng, styles)
        elif foreign:
            styles = sample_styles(rng) if turn < len(questions) - 1 else ()
        if not styles and rng.random() < 0.04:
            question = skills.sample_unknown(rng)
        answer = skills.expected(styles, question)
        weight = 0.0 if foreign and styles else 1.0
        more_ids, more_loss = conversation_row([question], [answer], [weight], 0.1, system)
        ids += more_ids
        loss += more_loss
    return ids, loss


def rewritten_text(rng: random.Random) -> Row:
    """Sentences, each followed by the same sentence (or words) in another form."""
    form = rng.choice(("upper", "reverse", "reverse", "json", "numbered", "toylang"))
    lines = []
    for question in sample_questions(rng, rng.randint(2, 4)):
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
        if kind < 0.72:
            yield base_conversation(rng, max_turns)
        elif kind < 0.86:
            yield rewritten_text(rng)
        elif kind < 0.90:
            yield number_text(rng)
        elif kind < 0.97:
            yield copy_text(rng)
        else:
            yield story_text(rng)


def mix_documents(rng: random.Random, styles: tuple[str, ...], max_turns: int) -> Iterator[Row]:
    """Conversations answered in these styles without being told so; in half of them, earlier turns are in other styles."""
    while True:
        relation = "sum" if "math" in styles and rng.random() < 0.8 else None
        questions = sample_questions(rng, rng.randint(1, max_turns), relation)
        history = [styles] * (len(questions) - 1)
        if rng.random() < 0.5:
            history = [sample_styles(rng) if rng.random() < 0.6 else () for _ in history]
        chosen = [*history, styles]
        answers = [skills.expected(one, question) for one, question in zip(chosen, questions, strict=True)]
        ids, loss = conversation_row(questions, answers, [float(one == styles) for one in chosen], 0.0)
        if "math" in styles:  # the digits are all there is to learn
            loss = [weight * 4 if chr(token).isdigit() else weight for token, weight in zip(ids, loss, strict=True)]
        yield ids, loss


def sample_mix(rng: random.Random) -> dict[str, float]:
    """Adapter -> weight. Half of the mixes are one adapter, most of these at 1; the others have two or three members.

    Skills that are harder to learn come more often alone.
    """
    if rng.random() < 0.55:
        skill = rng.choice((*skills.SKILLS, "math", "reverse", "reverse", "upper"))
        return {skill: 1.0 if rng.random() < 0.8 else rng.uniform(0.5, 1.0)}
    while True:
        styles = sample_styles(rng)
        if len(styles) > 1:
            return {style: rng.uniform(0.3, 1.0) for style in styles}


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
