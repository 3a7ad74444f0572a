"""ELORA's Eval as a policy."""

from __future__ import annotations

import math
from typing import Any

from sglang_lora_tree.radix.eval import TERMS, EvalParameters, log_recency, log_swap_out_term
from sglang_lora_tree.radix.policies.base import Node, Policy, RetentionState


class Eval(Policy):
    """ELORA's score (Eq. 3-6). Until the first plan: least recently used.

    log cost + log visit - t / tau does not change between uses but for a shift that all leaves of a class share, so without
    the shift it is a static key. Classes are what the rest depends on: adapter or KV (the LoRA term, which changes with every
    adapter that comes or goes), and what bringing the node back takes (a copy, the disk or computing: their measured rates change
    with every plan). What the key leaves out (1 - sigmoid is not quite exponential for recent nodes) is decided exactly
    among the lowest few of each class.

    Args:
        terms: factors of Eq. 6 to keep; fewer for comparisons.
        per_slot: our change (docs/eval.md): the value is a slot's, and KV that would have to be computed again counts
            ``RECOMPUTING``-fold, because that delays everybody, where a read or a copy delays one request.
    """

    candidates = 32
    classes = True
    RECOMPUTING = 16.0

    def __init__(self, state: RetentionState, terms: frozenset[str] = TERMS, per_slot: bool = False) -> None:
        super().__init__(state)
        self._terms = terms
        self._has_visit, self._has_cost, self._has_recency = "visit" in terms, "cost" in terms, "recency" in terms
        self._per_slot = per_slot
        self._size_power = self._has_cost - per_slot
        """Of the number of slots in the value, within a class: costs are in proportion to it."""
        self._rate: float | None = None

    def static_key(self, node: Node) -> Any:
        if self._rate is None:
            return node.last_access_time
        usage = node.usage
        value = max(usage.visits, 1e-9) if self._has_visit else 1.0
        if self._size_power:
            value *= len(node.key) ** self._size_power
        return math.log(value) + usage.used_at * self._rate

    def class_of(self, node: Node) -> Any:
        return node.usage.is_adapter, not node.evicted and node.backuped

    def value(self, known: Any, lowest: Node) -> float:
        return self.exact(lowest)

    def _log_value(self, node: Node) -> float:
        value = max(node.usage.visits, 1e-9) if self._has_visit else 1.0
        if self._has_cost:
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

    def refine(self, node: Node, key: Any) -> float:
        parameters = self.state.parameters
        if parameters is None or not self._has_recency:
            return key
        # 1 - sigmoid(x) = exp(-x) / (1 + exp(-x)), and the key has the numerator.
        age = max(self.state.seconds - node.usage.used_at, 0.0)
        return key - math.log1p(math.exp(-age / parameters.tau))

    def moment(self) -> Any:
        return self.state.plans, self.state.resident_adapters

    def on_parameters(self, parameters: EvalParameters | None) -> bool:
        before, self._rate = self._rate, None
        if parameters is not None:
            self._rate = 0.0
            if "visit" in self._terms:
                self._rate += 1 / parameters.visit_window
            if "recency" in self._terms:
                self._rate += 1 / parameters.tau
        return self._rate != before
