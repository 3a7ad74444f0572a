"""What leaves first when memory is short: retention policies over one interface, and the registry of all of them.

In: nodes with their :class:`Usage`, and what is known of the whole tree (:class:`RetentionState`). Out: a key for each leaf;
the lowest leaves first. A policy decides nothing else: that only leaves go, that locked nodes stay and that adapters outlive
their KV is the tree's. Nothing here reads a clock: time is the plan's, or a count of requests.

``Settings.retention_policy`` chooses by name. The policies that SGLang has itself (lru, lfu, slru, ...) go by SGLang's names.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_lora_tree.radix.eval import TERMS
from sglang_lora_tree.radix.policies.base import Node, Policy, RetentionPolicy, RetentionState, Usage
from sglang_lora_tree.radix.policies.classic import Branch, Gdsf, Rrip, Stock
from sglang_lora_tree.radix.policies.eval_policy import Eval
from sglang_lora_tree.radix.policies.learned import Halp, Hawkeye
from sglang_lora_tree.radix.policies.reuse_policy import Reuse

__all__ = ["DEFAULT_POLICY", "POLICIES", "Node", "Policy", "RetentionPolicy", "RetentionState", "Stock", "Usage"]


DEFAULT_POLICY = "reuse"
"""By measurement: docs/eval.md."""

POLICIES: dict[str, Callable[[RetentionState], RetentionPolicy]] = {
    "eval": Eval,
    **{f"eval_without_{term}": lambda state, term=term: Eval(state, TERMS - {term}) for term in sorted(TERMS)},  # type: ignore[misc]
    "eval_per_slot": lambda state: Eval(state, per_slot=True),
    "reuse": Reuse,
    "branch": Branch,
    "gdsf": Gdsf,
    "halp": Halp,
    "hawkeye": Hawkeye,
    "rrip": Rrip,
}
