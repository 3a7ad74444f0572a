"""What the scheduler and the advisor say to each other, and what the entry rank tells the other ranks.

    scheduler -> advisor    Report   what has changed since the last one; dropped when the advisor is slow
    advisor -> scheduler    Plan     what the loop takes over, at most every 100 ms; also its sign of life
    advisor -> scheduler    Resync   "I have missed something": everything is reported again, little by little
    entry rank -> ranks     Step     the clock, and a plan if there is one; rides on SGLang's broadcast of requests

Bytes are JSON (orjson) with a version and a kind. Whatever does not parse to exactly one of these is a ValueError, for the
receiver to count and drop. Times are seconds of the entry rank's clock since its scheduler started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import orjson

from sglang_lora_tree.radix.eval import EvalParameters

VERSION = 1
MAX_BYTES = 1 << 20
"""Of one message."""
MAX_NAMED = 256
"""Requests, or nodes, that one list of a plan may name."""


@dataclass(frozen=True)
class QueuedRow:
    """A request that waits."""

    arrival: int
    arrived_at: float
    length: int
    """Tokens of its prompt."""
    members: tuple[str, ...]
    """Identities of its adapters."""


@dataclass(frozen=True)
class NodeRow:
    """A node of the tree."""

    id: int
    parent: int
    identity: str | None
    """Of a LoRA node; None for KV and mix nodes."""
    slots: int
    on_gpu: bool
    on_host: bool
    visits: float
    used_at: float


@dataclass(frozen=True)
class Load:
    """How full everything is."""

    waiting: int
    running: int
    pool_slots: int
    free_slots: int
    bytes_per_slot: int
    load_bytes: float
    """Copied from host memory to the GPU since start..."""
    load_seconds: float
    """... and the time that took, where it is measured."""
    read_bytes: float
    """Likewise from disk."""
    read_seconds: float


@dataclass(frozen=True)
class Report:
    """Changes since the report before; rows replace what was known of the same request or node."""

    epoch: int
    """Number of the advisor process it is meant for."""
    sequence: int
    is_reset: bool
    """Forget everything: what follows is all there is."""
    now: float
    load: Load
    queued: tuple[QueuedRow, ...] = ()
    left: tuple[int, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    removed: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        return _pack(
            "report",
            {
                "epoch": self.epoch,
                "sequence": self.sequence,
                "is_reset": self.is_reset,
                "now": self.now,
                "load": [getattr(self.load, name) for name in _LOAD],
                "queued": [(row.arrival, row.arrived_at, row.length, row.members) for row in self.queued],
                "left": self.left,
                "nodes": [
                    (row.id, row.parent, row.identity, row.slots, row.on_gpu, row.on_host, row.visits, row.used_at)
                    for row in self.nodes
                ],
                "removed": self.removed,
            },
        )


@dataclass(frozen=True)
class Plan:
    """What the loop takes from the advisor."""

    epoch: int
    number: int
    """Grows with every plan of an epoch."""
    parameters: EvalParameters
    candidates: tuple[int, ...] = ()
    """Requests of a long queue, by arrival, that should be looked at soon, the best first."""
    prefetch: tuple[str, ...] = ()
    """Identities of adapters that waiting requests need, in the order in which these will be admitted."""
    swap_in: tuple[int, ...] = ()
    """Ids of nodes in host memory whose parents are on the GPU, the highest Eval first."""
    hit_probability: float = 0.0
    """Share of requests whose adapters are on the GPU, by the usage probabilities; for metrics."""

    def to_bytes(self) -> bytes:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return _pack("plan", {**named, "parameters": self.parameters.to_message()})


@dataclass(frozen=True)
class Resync:
    """The advisor knows nothing, or has missed a report."""

    epoch: int

    def to_bytes(self) -> bytes:
        return _pack("resync", {"epoch": self.epoch})


@dataclass(frozen=True)
class Step:
    """What every rank applies at the same point of its loop."""

    now: float
    plan: Plan | None = None
    is_fallback: bool = False
    """No plan can be had: SGLang's order of the queue, and least recently used leaves, until the next plan."""


_LOAD = tuple(field.name for field in fields(Load))


def parse_report(data: bytes) -> Report:
    """The report in a message; ValueError if it is none."""
    body = _unpack(data, {"report": Report})
    load = _list(body, "load", _number)
    if len(load) != len(_LOAD):
        raise ValueError("load: wrong number of values")
    counts = {name: int(value) for name, value in zip(_LOAD[:5], load, strict=False)}
    return Report(
        _count(body["epoch"], "epoch"),
        _count(body["sequence"], "sequence"),
        _flag(body["is_reset"], "is_reset"),
        _number(body["now"], "now"),
        Load(**counts, load_bytes=load[5], load_seconds=load[6], read_bytes=load[7], read_seconds=load[8]),
        _list(body, "queued", _queued_row),
        _list(body, "left", _count),
        _list(body, "nodes", _node_row),
        _list(body, "removed", _count),
    )


def parse_reply(data: bytes) -> Plan | Resync:
    """The plan, or the wish, in a message of an advisor; ValueError if it is neither."""
    body = _unpack(data, {"plan": Plan, "resync": Resync})
    epoch = _count(body["epoch"], "epoch")
    if "number" not in body:
        return Resync(epoch)
    return Plan(
        epoch,
        _count(body["number"], "number"),
        EvalParameters.from_message(body["parameters"]),
        _list(body, "candidates", _count, MAX_NAMED),
        _list(body, "prefetch", _text, MAX_NAMED),
        _list(body, "swap_in", _count, MAX_NAMED),
        _number(body["hit_probability"], "hit_probability"),
    )


# ---- Parts ----


def _pack(kind: str, body: Mapping[str, Any]) -> bytes:
    return orjson.dumps({"version": VERSION, "kind": kind, **body})


def _unpack(data: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MAX_BYTES} are read")
    body = orjson.loads(data)  # its error is a ValueError
    if not isinstance(body, dict) or body.pop("version", None) != VERSION:
        raise ValueError(f"not a message of version {VERSION}")
    kind = body.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"kind {kind!r}: want {' or '.join(kinds)}")
    names = {field.name for field in fields(kinds[kind])}
    if names != set(body):
        raise ValueError(f"{kind}: missing or unknown: {', '.join(sorted(names.symmetric_difference(body)))}")
    return body


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: want a whole number of at least 0, got {value!r:.80}")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name}: want a number, got {value!r:.80}")
    return value


def _flag(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name}: want true or false, got {value!r:.80}")
    return value


def _text(value: Any, name: str) -> str:
    if type(value) is not str or len(value) > 256:
        raise ValueError(f"{name}: want a short text, got {value!r:.80}")
    return value


def _list(body: Mapping[str, Any], name: str, parse: Callable[[Any, str], Any], most: int | None = None) -> tuple[Any, ...]:
    values = body[name]
    if not isinstance(values, list) or (most is not None and len(values) > most):
        raise ValueError(f"{name}: want a list{'' if most is None else f' of at most {most}'}")
    return tuple(parse(value, name) for value in values)


def _row(value: Any, name: str, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{name}: want rows of {length} values")
    return value


def _queued_row(value: Any, name: str) -> QueuedRow:
    arrival, arrived_at, length, members = _row(value, name, 4)
    names = tuple(_text(member, name) for member in _row(members, name, len(members) if isinstance(members, list) else -1))
    return QueuedRow(_count(arrival, name), _number(arrived_at, name), _count(length, name), names)


def _node_row(value: Any, name: str) -> NodeRow:
    node_id, parent, identity, slots, on_gpu, on_host, visits, used_at = _row(value, name, 8)
    return NodeRow(
        _count(node_id, name),
        _count(parent, name),
        None if identity is None else _text(identity, name),
        _count(slots, name),
        _flag(on_gpu, name),
        _flag(on_host, name),
        _number(visits, name),
        _number(used_at, name),
    )
