"""Policies that learn from what was kept and what was not, for comparison; both are simplified."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sglang_lora_tree.radix.policies.base import Node, Policy, RetentionState


class Hawkeye(Policy):
    """Hawkeye (Jain and Lin, ISCA 2016): would Belady's rule have hit? Kinds of nodes for which it would are kept.

    Simplified: a kind is a LoRA node and a class of size, where the paper has the address of the instruction; the past is
    kept in steps of 8 requests; the whole cache is one set; sizes count in slots.
    """

    _STEP = 8
    _STEPS = 512
    _MOST = 7

    def __init__(self, state: RetentionState) -> None:
        super().__init__(state)
        self._occupied = np.zeros(self._STEPS, np.int64)
        """Slots that Belady's rule would hold in each of the latest steps, as a ring."""
        self._cleared = 0
        self._friendly: dict[Any, int] = {}

    def static_key(self, node: Node) -> Any:
        return self._friendly.get(self._kind(node), 0) >= 0, node.last_access_time

    @staticmethod
    def _kind(node: Any) -> Any:
        owner = getattr(node, "lora_node", None)
        return None if owner is None else owner.node.id, node.usage.is_adapter, len(node.key).bit_length()

    def on_use(self, node: Node) -> None:
        now, before = self.state.requests // self._STEP, node.usage.last_request // self._STEP
        while self._cleared < now:
            self._cleared += 1
            self._occupied[self._cleared % self._STEPS] = 0
        if node.usage.uses <= 1:
            return
        if now - before < self._STEPS:
            steps = np.arange(before, max(now, before + 1)) % self._STEPS
            would_hit = self._occupied[steps].max() + len(node.key) <= self.state.pool_slots
            if would_hit:
                self._occupied[steps] += len(node.key)
        else:
            would_hit = False
        self._train(node, 1 if would_hit else -1)

    def on_evict(self, node: Node) -> None:
        if self.static_key(node)[0]:
            self._train(node, -1)  # it was taken for friendly and had to go

    def _train(self, node: Node, step: int) -> None:
        kind = self._kind(node)
        self._friendly[kind] = min(max(self._friendly.get(kind, 0) + step, -self._MOST - 1), self._MOST)


class Halp(Policy):
    """HALP (Song et al., NSDI 2023): of a few least recently used candidates, a learned preference picks the victim.

    Simplified: a linear model of pairs (logistic regression) where the paper has a small neural network; four candidates;
    pairs are successive victims, of which the one that is wanted back first should have been kept.
    """

    candidates = 4
    _RATE = 0.05
    _REMEMBERED = 2_000

    def __init__(self, state: RetentionState) -> None:
        super().__init__(state)
        self._weights = np.array([-1.0, 0.0, 0.0, 0.0])
        self._lessons = 0
        self._seen: dict[int, np.ndarray] = {}
        """Node id of a victim -> what it looked like then; oldest first."""
        self._rivals: dict[int, int] = {}
        """Node id of a victim -> of the victim before it."""

    def exact(self, node: Node) -> float:
        return float(self._weights @ self._features(node))

    def moment(self) -> Any:
        return self.state.requests, self._lessons

    def _features(self, node: Node) -> np.ndarray:
        usage = node.usage
        age = self.state.requests - usage.last_request
        return np.array([math.log1p(age), math.log1p(usage.uses), math.log(len(node.key)), float(usage.is_adapter)])

    def on_evict(self, node: Node) -> None:
        if self._seen:
            self._rivals[node.id] = next(reversed(self._seen))
        self._seen[node.id] = self._features(node)
        while len(self._seen) > self._REMEMBERED:
            oldest = next(iter(self._seen))
            del self._seen[oldest]
            self._rivals.pop(oldest, None)

    def on_use(self, node: Node) -> None:
        winner, rival = self._seen.pop(node.id, None), self._rivals.pop(node.id, None)
        loser = None if rival is None else self._seen.get(rival)
        if winner is None or loser is None:
            return
        difference = winner - loser
        error = 1.0 / (1.0 + math.exp(min(float(self._weights @ difference), 50.0)))
        self._weights = self._weights + self._RATE * error * difference
        self._lessons += 1
