"""What the scheduler and the advisor say to each other, and what the entry rank tells the other ranks.

    scheduler -> advisor    Report   what has changed since the last one; dropped when the advisor is slow
    advisor -> scheduler    Plan     what the loop takes over, at most every 100 ms; also its sign of life
    advisor -> scheduler    Resync   "I have missed something": everything is reported again, little by little
    entry rank -> ranks     Step     the clock, and a plan if there is one; rides on SGLang's broadcast of requests

Messages are JSON (orjson) with a version and a kind; a report's rows follow as float64 after a line feed, because a hundred of
them are written in the time that JSON takes for ten, and the thread that writes shares the interpreter with the loop. Whatever
does not parse to exactly one of these is a ValueError, for the receiver to count and drop. Times are seconds of the entry
rank's clock since its scheduler started.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import orjson

from sglang_lora_tree.radix.eval import EvalParameters

Rows = Sequence[float]
VERSION = 2
MAX_BYTES = 1 << 20
"""Of one message."""
MAX_NAMED = 256
"""Requests, or nodes, that one list of a plan may name."""


NODE_ROW = ("id", "parent", "adapter", "slots", "tier", "visits", "used_at")
"""Of a node. adapter: place in the table of sets of a LoRA node's identity, or -1; tier: 1 if on the GPU, plus 2 if in host
memory, or -1 if the node has left the tree."""
REQUEST_ROW = ("arrival", "arrived_at", "length", "members")
"""Of a request that waits. members: place in the table of sets of its adapters' identities, or -1 if it waits no longer."""
ABSENT = -1.0
_EXACT = float(1 << 53)  # whole numbers up to here survive as float64


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
    """Changes since the report before, oldest first; a row replaces what was known of its request or node."""

    epoch: int
    """Number of the advisor process it is meant for."""
    sequence: int
    is_reset: bool
    """Forget everything, the table of sets too: what follows is all there is."""
    now: float
    load: Load
    sets: Sequence[Sequence[str]] = ()
    """New entries of the table of sets of identities, which rows refer to by place."""
    requests: Rows = ()
    """:data:`REQUEST_ROW` after :data:`REQUEST_ROW`, flat."""
    nodes: Rows = ()
    """:data:`NODE_ROW` after :data:`NODE_ROW`, flat."""

    def to_bytes(self) -> bytes:
        header = {
            "epoch": self.epoch,
            "sequence": self.sequence,
            "is_reset": self.is_reset,
            "now": self.now,
            "load": [getattr(self.load, name) for name in _LOAD],
            "sets": self.sets,
            "requests": len(self.requests) // len(REQUEST_ROW),
            "nodes": len(self.nodes) // len(NODE_ROW),
        }
        return b"".join((_pack("report", header), b"\n", array("d", self.requests), array("d", self.nodes)))


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
    """The report in a message, its rows as arrays of one row each; ValueError if it is none."""
    _check_size(data)
    line, _, rows = data.partition(b"\n")
    body = _unpack(line, {"report": Report})
    load = _list(body, "load", _number)
    if len(load) != len(_LOAD):
        raise ValueError("load: wrong number of values")
    counts = {name: int(value) for name, value in zip(_LOAD[:5], load, strict=False)}
    num_requests, num_nodes = (_count(body[name], name) for name in ("requests", "nodes"))
    split = num_requests * len(REQUEST_ROW)
    if len(rows) != 8 * (split + num_nodes * len(NODE_ROW)):
        raise ValueError(f"rows: {len(rows)} bytes do not hold {num_requests} requests and {num_nodes} nodes")
    values = np.frombuffer(rows, np.float64)
    if not (np.abs(values) < _EXACT).all():  # false for what is not finite, too
        raise ValueError("rows: a value out of range")
    return Report(
        _count(body["epoch"], "epoch"),
        _count(body["sequence"], "sequence"),
        _flag(body["is_reset"], "is_reset"),
        _number(body["now"], "now"),
        Load(**counts, load_bytes=load[5], load_seconds=load[6], read_bytes=load[7], read_seconds=load[8]),
        _list(body, "sets", _set),
        values[:split].reshape(-1, len(REQUEST_ROW)),  # type: ignore[arg-type]
        values[split:].reshape(-1, len(NODE_ROW)),  # type: ignore[arg-type]
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
        _counts(body, "candidates"),
        _list(body, "prefetch", _text, MAX_NAMED),
        _counts(body, "swap_in"),
        _number(body["hit_probability"], "hit_probability"),
    )


# ---- Parts ----


def _pack(kind: str, body: Mapping[str, Any]) -> bytes:
    return orjson.dumps({"version": VERSION, "kind": kind, **body})


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MAX_BYTES} are read")


def _unpack(data: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    _check_size(data)
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


def _counts(body: dict[str, Any], name: str) -> tuple[int, ...]:
    """As ``_list`` of ``_count``, without a call per value: the thread that parses plans shares the interpreter with the loop."""
    values = body[name]
    are_counts = isinstance(values, list) and set(map(type, values)) <= {int} and min(values, default=0) >= 0
    if not are_counts or len(values) > MAX_NAMED:
        raise ValueError(f"{name}: want a list of at most {MAX_NAMED} whole numbers of at least 0")
    return tuple(values)


def _set(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: want lists of identities")
    return tuple(_text(member, name) for member in value)
