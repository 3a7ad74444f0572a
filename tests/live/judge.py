"""What PEFT says about an answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from models import Oracle

from .server import Answer

LOGPROB_TOLERANCE = 1e-4
TIE = 2e-5
"""Two tokens whose log probabilities differ by less are equally greedy in float32."""

Mix = Mapping[str, float]


class Judge:
    """PEFT's model with all adapters of a test; safe to call from threads.

    One forward pass over prompt and answer judges every token: if each one is PEFT's greedy choice after those before
    it, the answer is PEFT's greedy answer.
    """

    def __init__(self, model: Path, adapters: Mapping[str, Path]) -> None:
        self.oracle = Oracle(model, adapters)
        self._lock = threading.Lock()

    def check(self, prompt: list[int], answer: Answer, mix: Mix | None, num_new: int | None = None) -> None:
        """AssertionError unless the answer is PEFT's, token for token, with its logprobs."""
        assert num_new is None or len(answer.tokens) == num_new, f"{len(answer.tokens)} tokens instead of {num_new}"
        fault = self._find_fault(prompt, answer, mix)
        if fault is not None:
            # Weights far from 1 amplify PEFT's own float32 rounding (up to 7e-5 at weight 2.5): its float64 has the last word.
            fault = self._find_fault(prompt, answer, mix, exact=True)
        assert fault is None, f"{mix}: {fault}"

    def _find_fault(self, prompt: list[int], answer: Answer, mix: Mix | None, exact: bool = False) -> str | None:
        best, given = self._judge(prompt, answer.tokens, mix, exact)
        gaps = [high - own for high, own in zip(best, given, strict=True)]
        if max(gaps) >= TIE:
            return f"token {gaps.index(max(gaps))} of {list(answer.tokens)} is not PEFT's"
        off = [abs(own - served) for own, served in zip(given, answer.logprobs, strict=True)]
        if max(off) >= LOGPROB_TOLERANCE:
            return f"logprobs differ by up to {max(off)} (token {off.index(max(off))})"
        return None

    def check_all(self, cases: Iterable[tuple[list[int], Mix | None]], answers: Iterable[Answer], num_new: int) -> None:
        for (prompt, mix), answer in zip(cases, answers, strict=True):
            self.check(prompt, answer, mix, num_new)

    @torch.inference_mode()
    def _judge(self, prompt: list[int], tokens: tuple[int, ...], mix: Mix | None, exact: bool) -> tuple[list[float], list[float]]:
        ids = torch.tensor([[*prompt, *tokens]])
        with self._lock:
            model: Any = self.oracle.model
            if mix:
                self._activate(mix)
            if exact:
                model.double()
            try:
                with nullcontext() if mix else model.disable_adapter():
                    logits = model(input_ids=ids).logits
            finally:
                if exact:
                    model.float()  # loses nothing: that is what the weights are
        distribution = torch.log_softmax(logits[0, len(prompt) - 1 : -1].double(), -1)
        best = distribution.max(-1).values
        given = distribution.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return best.tolist(), given.tolist()

    def _activate(self, mix: Mix) -> None:
        if len(mix) == 1 and next(iter(mix.values())) == 1.0:
            self.oracle.model.set_adapter(next(iter(mix)))
        else:
            self.oracle.model.set_adapter(self.oracle._mix(mix))


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts that share no first token with each other as far as the vocabulary allows."""
    source = random.Random(seed)
    return [[source.randrange(3, vocab) for _ in range(length)] for _ in range(count)]
