"""The grammar of mixes: one parser for every form a user may write, one canonical form.

A mix stands for dW = sum_i w_i s_i B_i A_i, the weighted sum of the members' updates. (LoRAX's and PEFT's "linear" sum
the A and B matrices apart and get cross terms; the request shape is theirs, the meaning is not.)

Forms, each for one prompt::

    "math"                                   one adapter
    "math:0.7,json:0.3"                      name:weight, split at the last ':' of each part; no weight means 1
    {"math": 0.7, "json": 0.3}               an object
    [{"name": "math", "scale": 0.7}, ...]    a list of entries; "id" for "name", "weight" for "scale"
    {"ids": ["math"], "weights": [0.7]}      LoRAX's merged_adapters; merge_strategy "linear" only

The last three may also be JSON text. A string that equals a known name is that name, before anything in it is parsed.
Weights may be negative; they are rounded to float32, which is what the kernels multiply with, and to nothing coarser.
Members named twice add up, a weight of zero drops out, and a mix with no member left is the base model.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_MEMBERS = 8

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_ENTRY_FIELDS = frozenset(("name", "id", "scale", "weight"))
_MERGED_FIELDS = frozenset(("ids", "weights", "merge_strategy", "density", "majority_sign_method"))
_SHOWN_CHARACTERS = 200


class MixError(ValueError):
    """A mix that cannot be served; the message names the input, the place, the cause and the cure."""


class UnknownAdapterError(MixError):
    """A member that no registered adapter is called; ``name`` is what was asked for."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Mix:
    """A canonical mix: members sorted by name, no name twice, every weight a finite float32 value that is not zero."""

    members: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.members]
        assert names and names == sorted(set(names)), f"members must be sorted and unique, got {names}"
        assert all(weight != 0 and weight == _float32(weight) for _, weight in self.members), f"{self.members}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)

    @property
    def text(self) -> str:
        """The canonical text, which :func:`parse_mix` reads back to an equal mix: JSON, or a bare name where that
        is unambiguous."""
        (name, weight), *others = self.members
        if not others and weight == 1.0 and name == name.strip() and not set(name) & set(":,{["):
            return name
        return "{" + ",".join(f"{json.dumps(name)}:{_decimal(weight)}" for name, weight in self.members) + "}"


@dataclass(frozen=True)
class _Member:
    """A member as written: not yet rounded, merged or looked up. ``place`` says where in the input it stands."""

    name: str
    weight: float
    place: str


def parse_mix(
    value: Any, known: Callable[[str], bool], max_members: int = DEFAULT_MAX_MEMBERS, *, examples: Iterable[str] = ()
) -> Mix | None:
    """Read one prompt's mix in any of the forms above.

    Args:
        value: what the user wrote; None and "" are the base model.
        known: whether an adapter of that name is registered.
        max_members: most adapters in one mix.
        examples: known names, to be listed when a member is unknown.

    Returns:
        The canonical mix; None is the base model.

    Raises:
        UnknownAdapterError: a member that is not registered.
        MixError: anything else that is wrong.
    """
    shown = _shorten(value)
    try:
        written = _read(value, known)
        weights: dict[str, list[float]] = {}
        for member in written:
            if not known(member.name):
                raise UnknownAdapterError(
                    f"{member.place}: no adapter is called {_shorten(member.name)}{_listing(examples)}", member.name
                )
            weights.setdefault(member.name, []).append(_finite(member.weight, member.place))
        # fsum is exact, so the order in which a user names a member twice does not matter.
        sums = {name: _finite(math.fsum(parts), f"member {name!r}, added up") for name, parts in weights.items()}
        members = tuple(sorted((name, _float32(weight)) for name, weight in sums.items() if _float32(weight) != 0))
        if len(members) > max_members:
            raise MixError(
                f"{len(members)} adapters, but at most {max_members} can be mixed; "
                "name fewer, or raise the setting max_members"
            )
    except UnknownAdapterError as error:
        raise UnknownAdapterError(f"mix {shown}: {error}", error.name) from None
    except MixError as error:
        raise MixError(f"mix {shown}: {error}") from None
    if not members:
        return None
    mix = Mix(members)
    if mix.text not in mix.names and known(mix.text):
        raise MixError(
            f"mix {shown}: an adapter is registered under the very text {mix.text!r} of this mix; rename that adapter"
        )
    return mix


def is_one_mix(value: Sequence[Any]) -> bool:
    """Whether a list is one mix (entries with a name), not one mix per prompt."""
    return any(isinstance(item, Mapping) and _is_entry(item, lambda name: False) for item in value)


def _read(value: Any, known: Callable[[str], bool]) -> list[_Member]:
    if value is None:
        return []
    if isinstance(value, str):
        return _read_text(value, known)
    if isinstance(value, Mapping):
        if isinstance(value.get("ids"), list):
            return _read_merged(value)
        if _is_entry(value, known):
            return [_read_entry(value, "the entry")]
        return _read_object(value)
    if isinstance(value, (list, tuple)):
        return _read_list(value)
    raise MixError(f'a mix is a name, text, an object or a list, not {_type(value)}; write for example {{"math": 0.7}}')


def _read_text(text: str, known: Callable[[str], bool]) -> list[_Member]:
    if text == "":
        return []
    if known(text):
        return [_Member(text, 1.0, "member 1")]
    if text.lstrip().startswith(("{", "[")):
        return _read(decode_json(text), known)
    members, start = [], 0
    for index, part in enumerate(text.split(","), 1):
        place = f"member {index} (at character {start + 1})"
        start += len(part) + 1
        name, colon, number = (piece.strip() for piece in part.rpartition(":"))
        if not colon:
            name, weight = part.strip(), 1.0
        elif _NUMBER.fullmatch(number) or _NOT_FINITE.fullmatch(number):
            weight = float(number)
        elif known(part.strip()):
            name, weight = part.strip(), 1.0
        else:
            raise MixError(
                f"{place}: the weight {_shorten(number)} is not a number; write name:weight, "
                'or {"name": weight} as JSON when a name holds a colon or a comma'
            )
        if not name:
            raise MixError(f"{place}: the name is empty; write name:weight")
        members.append(_Member(name, weight, place))
    return members


class _Object(dict[str, Any]):
    """A JSON object that remembers members named twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def decode_json(text: str | bytes) -> Any:
    """JSON whose objects remember in ``pairs`` what they name twice; MixError if it is none."""
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        raise MixError(f"begins like JSON but is not: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError):
        raise MixError("begins like JSON but cannot be read: a number too long or nested too deep") from None


def _read_object(value: Mapping[str, Any]) -> list[_Member]:
    members = []
    for index, (name, weight) in enumerate(getattr(value, "pairs", value.items()), 1):
        place = f"member {index} ({_shorten(name)})"
        members.append(_Member(_name(name, place), _weight(weight, place), place))
    return members


def _read_list(value: Sequence[Any]) -> list[_Member]:
    members = []
    for index, entry in enumerate(value, 1):
        if not isinstance(entry, Mapping):
            raise MixError(
                f'element {index}: want {{"name": ..., "scale": ...}}, got {_type(entry)}; '
                "for one mix per prompt write a list of lists or of objects, as long as the batch"
            )
        members.append(_read_entry(entry, f"element {index}"))
    return members


def _is_entry(value: Mapping[str, Any], known: Callable[[str], bool]) -> bool:
    """An entry has a name ({"name": "math", "scale": 0.7}); an object of weights may have an adapter called "name"."""
    if isinstance(value.get("name"), str) or isinstance(value.get("id"), str):
        return True
    looks_like_one = bool(value) and value.keys() <= _ENTRY_FIELDS and not value.keys().isdisjoint(("name", "id"))
    return looks_like_one and not all(known(name) for name in value)


def refuse_repeats(value: Mapping[str, Any], place: str, fields: Container[str]) -> None:
    """MixError if an object names one of these fields twice: JSON parsers take the last in silence."""
    counts = Counter(name for name, _ in getattr(value, "pairs", ()) if name in fields)
    repeated = next((name for name, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise MixError(f"{place}: {_shorten(repeated)} is given {counts[repeated]} times; give it once")


def _read_entry(entry: Mapping[str, Any], place: str) -> _Member:
    refuse_repeats(entry, place, _ENTRY_FIELDS)
    unknown = [field for field in entry if field not in _ENTRY_FIELDS]
    if unknown:
        raise MixError(
            f'{place}: unknown field {_shorten(unknown[0])}; an entry has "name" (or "id") and "scale" (or "weight")'
        )
    names = [_name(entry[field], place) for field in ("name", "id") if entry.get(field) is not None]
    weights = [_weight(entry[field], place) for field in ("scale", "weight") if entry.get(field) is not None]
    if not names:
        raise MixError(f'{place}: no name; write {{"name": "math", "scale": 0.7}}')
    if names[0] != names[-1] or (weights and weights[0] != weights[-1]):
        raise MixError(f"{place}: two fields disagree; give the name once and the weight once")
    return _Member(names[0], weights[0] if weights else 1.0, place)


def _read_merged(value: Mapping[str, Any]) -> list[_Member]:
    refuse_repeats(value, "the object", _MERGED_FIELDS)
    unknown = [field for field in value if field not in _MERGED_FIELDS]
    if unknown:
        raise MixError(f"unknown field {_shorten(unknown[0])}; known are {', '.join(sorted(_MERGED_FIELDS))}")
    strategy = value.get("merge_strategy")
    if strategy not in (None, "linear"):
        raise MixError(f'merge_strategy {_shorten(strategy)} is not served exactly, so it is refused; use "linear"')
    ids, weights = value["ids"], value.get("weights")
    if not isinstance(weights, list) or len(weights) != len(ids):
        got = f"{len(weights)} weights" if isinstance(weights, list) else "no list of weights"
        raise MixError(f"{len(ids)} ids but {got}; give one weight per id")
    members = []
    for index, (name, weight) in enumerate(zip(ids, weights, strict=True), 1):
        place = f"id {index}"
        members.append(_Member(_name(name, place), _weight(weight, place), place))
    return members


def _name(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise MixError(f"{place}: an adapter is named by text, got {_shorten(value)}; see GET /v1/models for the names")
    return value


def _weight(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MixError(f"{place}: the weight must be a number, got {_type(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _finite(weight: float, place: str) -> float:
    if math.isnan(weight):
        raise MixError(f"{place}: the weight is NaN; give a finite number")
    try:
        if math.isfinite(weight):
            _float32(weight)
            return weight
    except OverflowError:
        pass
    raise MixError(f"{place}: the weight {weight:g} is out of the range of float32; give a finite number below 3.4e38")


def _float32(weight: float) -> float:
    """The nearest float32 value. Raises OverflowError above the range."""
    rounded: float = struct.unpack("<f", struct.pack("<f", weight))[0]
    return rounded


def _decimal(weight: float) -> str:
    """The shortest decimal that reads back (through float64) to the same float32; nine digits always do."""
    for digits in range(1, 10):
        text = f"{weight:.{digits}g}"
        try:
            if _float32(float(text)) == weight:
                return text
        except OverflowError:  # rounded up, beyond the largest float32
            continue
    raise AssertionError(f"{weight!r} is not a float32 value")


def _listing(examples: Iterable[str]) -> str:
    names = sorted(examples)
    if not names:
        return "; load one with --lora-paths or POST /load_lora_adapter"
    more = f" and {len(names) - 5} more, listed by GET /v1/models" if len(names) > 5 else ""
    return f"; known are {', '.join(map(_shorten, names[:5]))}{more}"


def _type(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def _shorten(value: Any) -> str:
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deep to be written
        text = _type(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
