"""ELORA's Eval as a policy."""

from __future__ import annotations

import math
from typing import Any

from sglang_lora_tree.radix.eval import TERMS, EvalParameters, log_recency, log_swap_out_term
from sglang_lora_tree.radix.policies.base import Node, Policy, RetentionState


class Eval(Policy):
    """ELORA's score (Eq. 3-6). Until the first plan: least recently used.

    log cost + log visit - t / tau does not change between uses but for a shift that all leaves share, so it is a static key.
    What it leaves out (1 - sigmoid is not quite exponential for recent nodes; the LoRA term changes with every adapter that
    comes or goes) is decided exactly among the lowest few.

    Args:
        terms: factors of Eq. 6 to keep; fewer for comparisons.
        per_slot: our change (docs/eval.md): the value is a slot's, and KV that would have to be computed again counts
            ``RECOMPUTING``-fold, because that delays everybody, where a read or a copy delays one request.
    """

    candidates = 32
    RECOMPUTING = 16.0

    def __init__(self, state: RetentionState, terms: frozenset[str] = TERMS, per_slot: bool = False) -> None:
        super().__init__(state)
        self._terms = terms
        self._per_slot = per_slot
        self._rate: float | None = None

    def static_key(self, node: Node) -> Any:
        if self._rate is None:
            return (node.last_access_time,)
        usage = node.usage
        return (self._log_value(node) + usage.used_at * self._rate, node.last_access_time)

    def _log_value(self, node: Node) -> float:
        value = 1.0
        if "visit" in self._terms:
            value *= max(node.usage.visits, 1e-9)
        if "cost" in self._terms:
            value *= self.state.cost(node)
        if self._per_slot:
            value /= len(node.key)
            if not node.usage.is_adapter and (node.evicted or not node.backuped):
                value *= self.RECOMPUTING
        return math.log(value)

    def exact(self, node: Node) -> float:
        parameters = self.state.parameters
        if parameters is None:
            return node.last_access_time
        usage, age = node.usage, self.state.seconds - node.usage.used_at
        value = self._log_value(node)
        if "visit" in self._terms:
            value -= age / parameters.visit_window
        if "recency" in self._terms:
            value += log_recency(age, parameters.tau)
        if "lora" in self._terms:
            value += log_swap_out_term(usage.is_adapter, self.state.resident_adapters, parameters)
        return value

    def on_parameters(self, parameters: EvalParameters | None) -> bool:
        before, self._rate = self._rate, None
        if parameters is not None:
            self._rate = 0.0
            if "visit" in self._terms:
                self._rate += 1 / parameters.visit_window
            if "recency" in self._terms:
                self._rate += 1 / parameters.tau
        return self._rate != before
