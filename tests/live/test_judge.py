"""The judge of the other tests: it takes PEFT's own answers, and nothing that is off by what the limits allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from .judge import LOGPROB_TOLERANCE, Judge, random_prompts
from .server import Answer

MIX = {"alpha": 0.7, "gamma": 0.3}


@pytest.fixture(scope="module")
def judge(llama: Path, five: dict[str, Path]) -> Judge:
    return Judge(llama, five)


@pytest.mark.parametrize("mix", [None, {"beta": 1.0}, MIX])
def test_judge(judge: Judge, mix: dict[str, float] | None) -> None:
    """PEFT's greedy answer passes; another token, a logprob beyond the limit, another weight or a missing token do not."""
    prompt = random_prompts(1, 12, 320, seed=91)[0]
    tokens, logprobs = judge.oracle._run(prompt, 6, mix)

    def answer(tokens: list[int] = tokens, logprobs: list[float] = logprobs) -> Answer:
        return Answer(tuple(tokens), tuple(logprobs), 0, len(prompt), {}, "")

    judge.check(prompt, answer(), mix, 6)
    with pytest.raises(AssertionError, match="is not PEFT's"):
        judge.check(prompt, answer(tokens=[*tokens[:3], (tokens[3] + 1) % 320, *tokens[4:]]), mix, 6)
    with pytest.raises(AssertionError, match="logprobs differ"):
        judge.check(prompt, answer(logprobs=[*logprobs[:5], logprobs[5] + 2 * LOGPROB_TOLERANCE]), mix, 6)
    with pytest.raises(AssertionError):
        judge.check(prompt, answer(), {"alpha": 0.7, "gamma": 0.31}, 6)
    with pytest.raises(AssertionError, match="5 tokens"):
        judge.check(prompt, answer(tokens[:5], logprobs[:5]), mix, 6)
