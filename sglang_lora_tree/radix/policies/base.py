"""What a retention policy is, and what it may look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_lora_tree.radix.eval import EvalParameters


class Usage:
    """What the tree remembers of a node for policies and for the advisor."""

    __slots__ = ("depth", "is_adapter", "last_look", "last_request", "note", "used_at", "uses", "visits")

    def __init__(self, seconds: float, request: int) -> None:
        self.used_at = seconds
        """When a request last looked for it, by the plans' clock (0 before the first plan)."""
        self.visits = 0.0
        """Requests that used it, each weighted exp(-age / visit window) as of ``used_at``."""
        self.uses = 0
        """Requests that used it."""
        self.last_request = request
        """Number of the last of them, counted over the whole tree."""
        self.last_look = request
        """How many requests had come when one last looked for it."""
        self.depth = 0
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
        other.last_look, other.depth = self.last_look, self.depth
        return other


class Node(Protocol):
    """A tree node, as far as policies are concerned."""

    id: int
    parent: Any
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
    seconds: float = 0.0
    """When that came, on the clock that the ranks share; 0 before the first."""
    window: float = 1.0
    """Its visit window."""
    plans: int = 0
    """How often a plan came or went."""
    requests: int = 0
    """Requests whose KV came to the tree."""
    resident_adapters: int = 0

    def set_parameters(self, parameters: EvalParameters | None, now: float | None = None) -> None:
        """A plan has come at this time (None: when it was made), or there is none any more."""
        self.parameters = parameters
        self.plans += 1
        if parameters is None:
            self.seconds, self.window = 0.0, 1.0
        else:
            self.seconds, self.window = parameters.now if now is None else now, parameters.visit_window

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

    candidates: int
    """How many leaves of the lowest keys (of each class) are compared by :meth:`refine`; 0: keys decide."""
    classes: bool
    """Whether leaves are kept by :meth:`class_of`, and :meth:`value` says which class gives the next victim."""

    def static_key(self, node: Node) -> Any:
        """Lower leaves first. It should change when the node is used or touched only, and by :meth:`on_parameters`."""

    def exact(self, node: Node) -> float:
        """The value that the key stands for, at this moment; lower leaves first."""

    def refine(self, node: Node, key: Any) -> float:
        """As :meth:`exact`, given the node's key, but for what all nodes of its class share."""

    def moment(self) -> Any:
        """While this stays the same, so do :meth:`refine` and :meth:`value` of nodes that nobody uses or touches."""

    def class_of(self, node: Node) -> Any:
        """Keys order the leaves of one class only."""

    def value(self, known: Any, lowest: Node) -> float:
        """Value of a class's lowest leaf; the lowest of all leaves first."""

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

    candidates = 0
    classes = False

    def __init__(self, state: RetentionState) -> None:
        self.state = state

    def static_key(self, node: Node) -> Any:
        return node.last_access_time

    def exact(self, node: Node) -> float:
        raise AssertionError(f"{type(self).__name__} decides by its keys")

    def refine(self, node: Node, key: Any) -> float:
        return self.exact(node)

    def moment(self) -> Any:
        return None

    def class_of(self, node: Node) -> Any:
        raise AssertionError(f"{type(self).__name__} has no classes")

    def value(self, known: Any, lowest: Node) -> float:
        raise AssertionError(f"{type(self).__name__} has no classes")

    def on_parameters(self, parameters: EvalParameters | None) -> bool:
        return False

    def on_use(self, node: Node) -> None: ...

    def on_evict(self, node: Node) -> None: ...

    def on_remove(self, node: Node) -> None: ...
