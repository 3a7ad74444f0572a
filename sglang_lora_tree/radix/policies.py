"""What leaves first when memory is short: retention policies over one interface, and the registry of all of them.

In: nodes with their :class:`Usage`, and what is known of the whole tree (:class:`RetentionState`). Out: a key for each leaf;
the lowest leaves first. A policy decides nothing else: that only leaves go, that locked nodes stay and that adapters outlive
their KV is the tree's. Nothing here reads a clock: time is the plan's, or a count of requests.

``Settings.retention_policy`` chooses by name. The policies that SGLang has itself (lru, lfu, slru, ...) go by SGLang's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_lora_tree.radix.eval import TERMS, EvalParameters, log_recency, log_swap_out_term


class Usage:
    """What the tree remembers of a node for policies and for the advisor."""

    __slots__ = ("is_adapter", "last_request", "note", "used_at", "uses", "visits")

    def __init__(self, seconds: float, request: int) -> None:
        self.used_at = seconds
        """When a request last looked for it, by the plans' clock (0 before the first plan)."""
        self.visits = 0.0
        """Requests that used it, each weighted exp(-age / visit window) as of ``used_at``."""
        self.uses = 0
        """Requests that used it."""
        self.last_request = request
        """Number of the last of them, counted over the whole tree."""
        self.is_adapter = False
        self.note: Any = None
        """The policy's own."""

    def touch(self, seconds: float, window: float) -> None:
        """Somebody looks for it."""
        if seconds > self.used_at:
            self.visits *= math.exp((self.used_at - seconds) / window)
            self.used_at = seconds

    def copy(self) -> Usage:
        other = Usage(self.used_at, self.last_request)
        other.visits, other.uses, other.is_adapter, other.note = self.visits, self.uses, self.is_adapter, self.note
        return other


class Node(Protocol):
    """A tree node, as far as policies are concerned."""

    id: int
    key: Any
    """Its tokens; of a LoRA node, as many as it has slots."""
    last_access_time: float
    """Ticks: grows with every touch of any node."""
    usage: Usage

    @property
    def backuped(self) -> bool:
        """Host memory has a copy."""

    @property
    def evicted(self) -> bool:
        """Not on the GPU."""


@dataclass
class RetentionState:
    """What policies see of the whole tree."""

    bytes_per_slot: int = 131_072
    pool_slots: int = 100_000
    parameters: EvalParameters | None = None
    """Of the latest plan; None before the first."""
    requests: int = 0
    """Requests whose KV came to the tree."""
    resident_adapters: int = 0

    @property
    def seconds(self) -> float:
        return 0.0 if self.parameters is None else self.parameters.now

    @property
    def window(self) -> float:
        return 1.0 if self.parameters is None else self.parameters.visit_window

    def cost(self, node: Node) -> float:
        """Seconds until the node would be on the GPU again, were it to leave the tier that it is in."""
        parameters = self.parameters or _DEFAULTS
        slots = len(node.key)
        size = slots * self.bytes_per_slot
        copy = size / parameters.host_to_device_bytes_per_s
        if not node.evicted and node.backuped:
            return copy
        if node.usage.is_adapter:
            return copy + size / parameters.disk_bytes_per_s
        return slots / parameters.prefill_tokens_per_s


_DEFAULTS = EvalParameters()


class RetentionPolicy(Protocol):
    """An order in which leaves leave."""

    monotone: bool
    """Whether a use of a node, or a look for it, can only raise its key."""
    candidates: int
    """How many leaves of the lowest keys are compared by :meth:`exact`; 0: keys decide."""

    def static_key(self, node: Node) -> Any:
        """Lower leaves first. Between uses of the node and calls of :meth:`on_parameters` it may only grow."""

    def exact(self, node: Node, parameters: EvalParameters) -> float:
        """The value that the key stands for, at this moment; lower leaves first."""

    def on_parameters(self, parameters: EvalParameters | None) -> bool:
        """A plan has come (None: there is none any more). True if keys of nodes have changed by it."""

    def on_use(self, node: Node) -> None:
        """A request used the node; its usage is up to date already, but for ``last_request``."""

    def on_evict(self, node: Node) -> None:
        """The node leaves the GPU."""

    def on_remove(self, node: Node) -> None:
        """The node leaves the tree."""


class Policy:
    """A policy that remembers nothing, to start from."""

    monotone = True
    candidates = 0

    def __init__(self, state: RetentionState) -> None:
        self.state = state

    def static_key(self, node: Node) -> Any:
        return node.last_access_time

    def exact(self, node: Node, parameters: EvalParameters) -> float:
        raise AssertionError(f"{type(self).__name__} decides by its keys")

    def on_parameters(self, parameters: EvalParameters | None) -> bool:
        return False

    def on_use(self, node: Node) -> None: ...

    def on_evict(self, node: Node) -> None: ...

    def on_remove(self, node: Node) -> None: ...


class Stock(Policy):
    """One of SGLang's own (seam: ``sglang.srt.mem_cache.evict_policy``)."""

    # Those whose value of a leaf only grows while it stays a leaf.
    _MONOTONE = frozenset({"lru", "lfu", "fifo", "filo", "priority", "slru"})

    def __init__(self, name: str, strategy: Any) -> None:
        super().__init__(RetentionState())
        self.monotone = name in self._MONOTONE
        self.static_key = strategy.get_priority  # type: ignore[method-assign]


class Eval(Policy):
    """ELORA's score (Eq. 3-6). Until the first plan: least recently used.

    log cost + log visit - t / tau does not change between uses but for a shift that all leaves share, so it is a static key.
    What it leaves out (1 - sigmoid is not quite exponential for recent nodes; the LoRA term changes with every adapter that
    comes or goes) is decided exactly among the lowest few.

    Args:
        terms: factors of Eq. 6 to keep; fewer for comparisons.
    """

    candidates = 32

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
        return math.log(value)

    def exact(self, node: Node, parameters: EvalParameters) -> float:
        usage, age = node.usage, parameters.now - node.usage.used_at
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


class Branch(Policy):
    """ELORA's BFS: whole LoRA branches, least recently used first. Simplified: no more of a branch than is needed."""

    def static_key(self, node: Node) -> Any:
        owner = getattr(node, "lora_node", None)
        return (node if owner is None else owner.node).last_access_time, node.last_access_time


class Gdsf(Policy):
    """Greedy-Dual-Size-Frequency (Cherkasova 1998): L + uses x cost / size; L is the value of the last victim."""

    def __init__(self, state: RetentionState) -> None:
        super().__init__(state)
        self._inflation = 0.0

    def static_key(self, node: Node) -> Any:
        base = self._inflation if node.usage.note is None else node.usage.note
        return base + self._worth(node), node.last_access_time

    def _worth(self, node: Node) -> float:
        return max(node.usage.uses, 1) * self.state.cost(node) / len(node.key)

    def on_use(self, node: Node) -> None:
        node.usage.note = self._inflation

    def on_evict(self, node: Node) -> None:
        self._inflation = max(self._inflation, self.static_key(node)[0])


class Rrip(Policy):
    """Static RRIP with 2 bits (Jaleel et al., ISCA 2010): new nodes are predicted to come back late, used ones soon.

    Ageing all nodes by one step is a step of a shared counter back from theirs; ties leave in order of their last touch.
    """

    _LATE, _DISTANT = 2, 3

    def __init__(self, state: RetentionState) -> None:
        super().__init__(state)
        self._steps = 0

    def static_key(self, node: Node) -> Any:
        note = node.usage.note
        return self._steps - self._LATE if note is None else note, node.last_access_time

    def on_use(self, node: Node) -> None:
        usage = node.usage
        usage.note = self._steps - self._LATE if usage.uses <= 1 else self._steps

    def on_evict(self, node: Node) -> None:
        # Everybody was aged until the victim was distant.
        self._steps = max(self._steps, self.static_key(node)[0] + self._DISTANT)


POLICIES: dict[str, Callable[[RetentionState], RetentionPolicy]] = {
    "eval": Eval,
    **{f"eval_without_{term}": lambda state, term=term: Eval(state, TERMS - {term}) for term in sorted(TERMS)},  # type: ignore[misc]
    "eval_per_slot": lambda state: Eval(state, per_slot=True),
    "branch": Branch,
    "gdsf": Gdsf,
    "rrip": Rrip,
}
