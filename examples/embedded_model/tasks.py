"""The tasks of the fleet that train_fleet.py trains: skills, mixes of skills, and new ways to answer that the base never saw.

Pure Python, no torch. A task is named by a word that is fit for a folder's name; skills joined by "-" are one task.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import skills
from skills import Question


def _xml(question: Question) -> str:
    return f"<{question.relation}>{question.key}</{question.relation}>"


def _arrow(question: Question) -> str:
    return f"{question.subject or 'You'} -> {question.key}"


NEW: dict[str, Callable[[Question], str]] = {
    "quoted": lambda question: f'"{question.answer}"',
    "excited": lambda question: question.answer.replace(".", "!!!"),
    "dashed": lambda question: question.answer.replace(" ", "-"),
    "twice": lambda question: f"{question.answer} {question.answer}",
    "xml": _xml,
    "lower": lambda question: question.answer.lower(),
    "stars": lambda question: re.sub("[aeiouAEIOU]", "*", question.answer),
    "arrow": _arrow,
}
FLEET = (*NEW, "upper", "reverse", "json", "toylang", "json-upper", "polite-toylang", "math-numbered", "short-reverse")


def expected(task: str, question: Question) -> str:
    """The one right answer. Raises KeyError on an unknown task."""
    return NEW[task](question) if task in NEW else skills.expected(task.split("-"), question)


def held_out(task: str, count: int, seed: int) -> list[Question]:
    """Questions that training never saw."""
    return list(_held_out("math" in task.split("-"), count, seed))


@functools.cache
def _held_out(sums: bool, count: int, seed: int) -> tuple[Question, ...]:
    """The same for many tasks, and slow to find."""
    return tuple(skills.held_out("math" if sums else "base", count, seed))
