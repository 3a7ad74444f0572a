"""Eval, the retention score: what keeping a node on the GPU saves (ELORA, Shi et al., HPCA 2026, Eq. 3-6).

    Eval_i = min(1, NowLoRA_i / Low_lora) x cost_i x visit_i x (1 - sigmoid(t_i / tau))

In: statistics of nodes and the parameters of a plan. Out: scores; the lowest leave first, the highest come in first. Nothing
here reads a clock: time is ``EvalParameters.now``, which the entry rank sends to every rank. Scores are logarithms, because
the recency term of a node that has not been used for an hour is below the smallest float.

The paper leaves two things open, and both are parameters here (docs/eval.md has the measurements): the unit ``tau`` of t, and
what the LoRA term does at swap-out, where read literally it makes an adapter the *sooner* victim the fewer adapters there are.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_lora_tree.config import LORA_TERMS, Settings


@dataclass(frozen=True)
class EvalParameters:
    """All that the loop takes from a plan. Immutable; applied at one point of the loop, on every rank alike."""

    version: int = 0
    """Of the plan; larger is newer."""
    now: float = 0.0
    """Seconds on the entry rank's clock when the plan was made. Any origin; never falls."""
    tau: float = Settings.eval_tau_seconds
    """Seconds: the unit of t in Eq. 5."""
    low_lora: float = 0.0
    """Adapters that should be resident (Eq. 3); 0: not known, no LoRA term."""
    lora_term: str = Settings.eval_lora_term
    """What Eq. 4 does at swap-out. literal: an adapter's score is multiplied by min(1, (resident - 1) / Low_lora), KV's by
    min(1, resident / Low_lora). protect: adapters keep their score and KV's is multiplied, so KV leaves first while adapters
    are short. off: no term."""
    visit_window: float = Settings.eval_visit_window_seconds
    """Seconds after which a visit counts 1/e in visit probabilities."""
    usage: dict[str, float] = field(default_factory=dict)
    """Identity of an adapter (``identity.adapter_identity``) -> probability that a request uses it (prob_i of Eq. 3)."""
    host_to_device_bytes_per_s: float = 49.7e9
    """This and the next two: of an H200 (benchmarks/results/swap_in_h200.json), until a plan has what was measured here."""
    disk_bytes_per_s: float = 1.5e9
    prefill_tokens_per_s: float = 40e3
    """What it costs to compute KV again of which no copy is left."""

    def __post_init__(self) -> None:
        for name in ("tau", "visit_window", "host_to_device_bytes_per_s", "disk_bytes_per_s", "prefill_tokens_per_s"):
            _check(name, _is_number(getattr(self, name)) and getattr(self, name) > 0, "a number above 0", self)
        _check("now", _is_number(self.now), "a finite number", self)
        _check("low_lora", _is_number(self.low_lora) and self.low_lora >= 0, "a number of at least 0", self)
        _check("version", type(self.version) is int and self.version >= 0, "a whole number of at least 0", self)
        _check("lora_term", self.lora_term in LORA_TERMS, f"one of {', '.join(LORA_TERMS)}", self)
        usage = self.usage
        if not isinstance(usage, dict) or not all(
            isinstance(name, str) and _is_number(share) and 0 <= share <= 1 for name, share in usage.items()
        ):
            _check("usage", False, "a mapping of identities to probabilities", self)

    def to_message(self) -> dict[str, Any]:
        """As plain values, for orjson."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @classmethod
    def from_message(cls, message: Any) -> EvalParameters:
        """What :meth:`to_message` made.

        Raises:
            ValueError: not a mapping, an unknown or missing name, or a value out of range; names which.
        """
        if not isinstance(message, dict):
            raise ValueError(f"Eval parameters: want a mapping, got {type(message).__name__}")
        names = {entry.name for entry in dataclasses.fields(cls)}
        wrong = sorted(str(name) for name in names.symmetric_difference(message))
        if wrong:
            raise ValueError(f"Eval parameters: missing or unknown: {', '.join(wrong)}")
        return cls(**message)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, holds: bool, wanted: str, parameters: EvalParameters) -> None:
    if not holds:
        raise ValueError(f"Eval parameters: {name} = {getattr(parameters, name)!r}: want {wanted}")


# ---- The equations, one by one ----


def low_lora(probabilities: NDArray[np.float64], batch_size: float) -> float:
    """Eq. 3: how many different adapters a batch of ``batch_size`` requests is expected to need.

    Args:
        probabilities: (adapters,) probability that a request uses each.
        batch_size: mean number of requests in a batch over the last seconds (the paper takes 5).
    """
    return float(np.sum(1.0 - (1.0 - np.clip(probabilities, 0.0, 1.0)) ** batch_size))


def lora_term(now_lora: float, low_lora: float) -> float:
    """Eq. 4: min(1, NowLoRA / Low_lora); 1 where Low_lora is 0."""
    return 1.0 if low_lora <= 0 else min(1.0, now_lora / low_lora)


def retain_term(cost: float, visit: float, age: float, tau: float = 1.0) -> float:
    """Eq. 5: cost x visit x (1 - sigmoid(age / tau)); cost and age in seconds."""
    return cost * visit / (1.0 + math.exp(min(age / tau, 700.0)))


def log_recency(age: float, tau: float) -> float:
    """log(1 - sigmoid(age / tau)). For ages of several tau it is -age / tau, which makes a key that never changes."""
    x = max(age, 0.0) / tau
    return -(x + math.log1p(math.exp(-x)))


def log_swap_out_term(is_adapter: bool, resident: int, parameters: EvalParameters) -> float:
    """log of Eq. 4 for a victim, in the direction that ``parameters.lora_term`` says.

    Args:
        resident: adapters on the GPU before the victim leaves.
    """
    if parameters.lora_term == "off" or parameters.low_lora <= 0:
        return 0.0
    if parameters.lora_term == "literal":
        left = resident - 1 if is_adapter else resident
    elif is_adapter:
        return 0.0
    else:
        left = resident
    return math.log(lora_term(max(left, _ALMOST_NONE), parameters.low_lora))


_ALMOST_NONE = 1e-3  # in place of 0 adapters left, whose logarithm no sum survives

# ---- The same over many nodes ----


@dataclass(frozen=True)
class EvalStatistics:
    """What Eval needs of n nodes, as arrays of length n, and of the tree."""

    slots: NDArray[np.int64]
    is_adapter: NDArray[np.bool_]
    has_copy: NDArray[np.bool_]
    """Whether host memory has (or, after a swap-out, will have) it; else the next use reads the disk or computes KV again."""
    visits: NDArray[np.float64]
    """Requests that used the node, each weighted exp(-age / visit_window) as of ``used_at``."""
    used_at: NDArray[np.float64]
    """Seconds, on the clock of ``EvalParameters.now``: when a request last used it."""
    resident_adapters: int
    bytes_per_slot: int
    total_visits: float = 1.0
    """Requests altogether, weighted likewise as of now; only scales the scores."""


TERMS = frozenset({"lora", "cost", "visit", "recency"})


def eval_scores(
    statistics: EvalStatistics,
    parameters: EvalParameters,
    swap_in: bool = False,
    terms: frozenset[str] = TERMS,
) -> NDArray[np.float64]:
    """log Eval (Eq. 6) of every node: (n,) float64, -inf for nodes never used.

    Args:
        swap_in: nodes are candidates to come in (Eq. 4 with one adapter more) rather than to leave.
        terms: those of ``TERMS`` to multiply; fewer for comparisons.
    """
    age = np.maximum(parameters.now - statistics.used_at, 0.0)
    scores = np.zeros(len(age))
    if "lora" in terms:
        scores += _lora_terms(statistics, parameters, swap_in)
    if "cost" in terms:
        scores += np.log(node_costs(statistics, parameters))
    if "visit" in terms:
        with np.errstate(divide="ignore"):
            scores += np.log(statistics.visits) - age / parameters.visit_window - math.log(statistics.total_visits)
    if "recency" in terms:
        scores -= np.logaddexp(0.0, age / parameters.tau)
    return scores


def node_costs(statistics: EvalStatistics, parameters: EvalParameters) -> NDArray[np.float64]:
    """cost_i of Eq. 5: (n,) seconds until a node would be on the GPU again."""
    slots = statistics.slots.astype(np.float64)
    size = slots * statistics.bytes_per_slot
    copy = size / parameters.host_to_device_bytes_per_s
    lost = np.where(
        statistics.is_adapter, copy + size / parameters.disk_bytes_per_s, slots / parameters.prefill_tokens_per_s
    )
    return np.where(statistics.has_copy, copy, lost)


def _lora_terms(statistics: EvalStatistics, parameters: EvalParameters, swap_in: bool) -> NDArray[np.float64]:
    resident = statistics.resident_adapters
    if not swap_in:
        adapter, other = (log_swap_out_term(is_adapter, resident, parameters) for is_adapter in (True, False))
    elif parameters.lora_term == "off":
        return np.zeros(len(statistics.slots))
    else:
        adapter, other = (
            math.log(lora_term(max(count, _ALMOST_NONE), parameters.low_lora)) for count in (resident + 1, resident)
        )
    return np.where(statistics.is_adapter, adapter, other)
