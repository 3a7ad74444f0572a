"""The judge of the other tests: it takes PEFT's own answers, and nothing that is off by what the limits allow; and the limits
are such that float32 keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .judge import LOGPROB_TOLERANCE, Judge, Mix, random_prompts
from .server import Answer
from .test_exactness import mixes_of

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
    with pytest.raises(AssertionError, match="is not PEFT's") as failure:
        judge.check(prompt, answer(tokens=[*tokens[:3], (tokens[3] + 1) % 320, *tokens[4:]]), mix, 6)
    for part in (mix, prompt, tuple(logprobs), tokens[3]):  # all that it takes to ask again, and what PEFT says
        assert str(part) in str(failure.value)
    with pytest.raises(AssertionError, match="logprobs differ"):
        judge.check(prompt, answer(logprobs=[*logprobs[:5], logprobs[5] + 2 * LOGPROB_TOLERANCE]), mix, 6)
    with pytest.raises(AssertionError):
        judge.check(prompt, answer(), {"alpha": 0.7, "gamma": 0.31}, 6)
    with pytest.raises(AssertionError, match="5 tokens"):
        judge.check(prompt, answer(tokens[:5], logprobs[:5]), mix, 6)


def float32_error(judge: Judge, mix: Mix | None, tokens: list[int]) -> float:
    """How far PEFT's logprobs in float32 are from those in float64, but for one token in a hundred."""
    rounded, exact = (judge.judge(tokens[:1], tokens[1:], mix, in_float64)[0] for in_float64 in (False, True))
    errors = (torch.tensor(rounded, dtype=torch.float64) - torch.tensor(exact, dtype=torch.float64)).abs()
    return float(errors.quantile(0.99))


FLOAT32_ERROR = LOGPROB_TOLERANCE / 7
"""At twice as much, one answer of 40 tokens in 300 is beyond the limit, whoever gives it in float32."""


@pytest.mark.parametrize("model", ["random", "embedded"])
def test_float32_can_give_the_answers_that_are_asked_for(
    model: str, judge: Judge, embedded_judge: Judge, embedded: tuple[Path, dict[str, Path]], five: dict[str, Path]
) -> None:
    """No mix of these tests multiplies roundings so that a right server would now and then be called wrong."""
    judge, names = (judge, five) if model == "random" else (embedded_judge, embedded[1])
    tokens = random_prompts(1, 400, 256, seed=92)[0]
    errors = {str(mix): float32_error(judge, mix, tokens) for mix in mixes_of(sorted(names))}
    assert max(errors.values()) < FLOAT32_ERROR, errors


def test_a_large_weight_of_a_large_adapter_is_beyond_float32(judge: Judge) -> None:
    """PEFT contradicts itself there: what the limits are not for."""
    assert float32_error(judge, {"alpha": 2.5}, random_prompts(1, 400, 256, seed=92)[0]) > FLOAT32_ERROR


def test_the_last_word_is_in_float64_throughout(judge: Judge) -> None:
    """transformers' norm rounds to float32 whatever it is given."""
    norm = next(module for module in judge.oracle.model.modules() if isinstance(module, LlamaRMSNorm))
    hidden = torch.rand(3, len(norm.weight), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    root = (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    with torch.inference_mode():
        normal = norm.double()(hidden)
        norm.float()
    torch.testing.assert_close(normal, hidden / root * norm.weight.double(), rtol=1e-14, atol=0)
