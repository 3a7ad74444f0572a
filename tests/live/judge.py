"""What PEFT says about an answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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
        """AssertionError, which says how to ask again, unless the answer is PEFT's, token for token, with its logprobs."""
        if num_new is not None and len(answer.tokens) != num_new:
            fault: str | None = f"{len(answer.tokens)} tokens instead of {num_new}"
        else:
            fault = self._find_fault(prompt, answer, mix)
            if fault is not None:  # PEFT's float32 rounds as the server's does: its float64 has the last word
                fault = self._find_fault(prompt, answer, mix, exact=True)
        assert fault is None, f"{fault}\nmix {mix}, {answer}\nprompt {prompt}"

    def _find_fault(self, prompt: list[int], answer: Answer, mix: Mix | None, exact: bool = False) -> str | None:
        best, given, greedy = self.judge(prompt, answer.tokens, mix, exact)
        for place, (high, own) in enumerate(zip(best, given, strict=True)):
            if high - own >= TIE:
                return f"token {place}, {answer.tokens[place]}, is not PEFT's: its logprob is {own}, {greedy[place]} has {high}"
        off = [abs(own - served) for own, served in zip(given, answer.logprobs, strict=True)]
        if max(off) >= LOGPROB_TOLERANCE:
            place = off.index(max(off))
            return f"logprobs differ by up to {max(off)}: token {place} has {given[place]} by PEFT"
        return None

    def check_all(self, cases: Iterable[tuple[list[int], Mix | None]], answers: Iterable[Answer], num_new: int) -> None:
        for (prompt, mix), answer in zip(cases, answers, strict=True):
            self.check(prompt, answer, mix, num_new)

    @torch.inference_mode()
    def judge(
        self, prompt: list[int], tokens: Sequence[int], mix: Mix | None, exact: bool
    ) -> tuple[list[float], list[float], list[int]]:
        """Of each token's place after the prompt: the largest logprob, the token's own, and which token has the largest.

        Args:
            exact: in float64, not float32.
        """
        with self._lock:
            if mix:
                self.oracle.adapter_of(mix)  # made in float32, if it is new
            if exact:
                self.oracle.model.double()
            try:
                return self.oracle.judge(prompt, tokens, mix)
            finally:
                if exact:
                    self.oracle.model.float()  # loses nothing: that is what the weights are


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts that share no first token with each other as far as the vocabulary allows."""
    source = random.Random(seed)
    return [[source.randrange(3, vocab) for _ in range(length)] for _ in range(count)]
