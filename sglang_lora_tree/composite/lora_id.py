"""The ``lora_id`` of a request: one self-describing string, so that every process and rank sees the mix with no table
and no message.

SGLang passes ``lora_id`` on unread (``Req.lora_id``, ``ForwardBatch.lora_ids``, the prefix cache's key). One adapter
at weight exactly 1 keeps its own registry id; any other mix is ``mix:<id>*<bits>,...``, sorted by id, where bits are
the eight hex digits of the float32 weight that the kernels multiply with. Equal mixes give equal strings, different
mixes different ones.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence

_PREFIX = "mix:"
_MEMBER = re.compile(r"([^*,]+)\*([0-9a-f]{8})")


def encode_lora_id(members: Sequence[tuple[str, float]]) -> str | None:
    """The ``lora_id`` of (registry id, weight) pairs, in any order.

    Pairs with one id add up (in float64, then rounded to float32), zero weights drop out.

    Returns:
        The string; None when no weight is left (the base model).

    Raises:
        ValueError: a weight that is not finite in float32, or an id that could not be told apart in the string.
    """
    weights: dict[str, list[float]] = {}
    for member, weight in members:
        if not member or member.startswith(_PREFIX) or "*" in member or "," in member:
            raise ValueError(f"adapter id {member!r} cannot stand in a lora_id: want SGLang's 32 hex digits")
        weights.setdefault(member, []).append(weight)
    packed = {member: _pack(math.fsum(parts), member) for member, parts in sorted(weights.items())}
    kept = {member: bits for member, bits in packed.items() if bits & 0x7FFFFFFF}  # neither 0.0 nor -0.0
    if not kept:
        return None
    if list(kept.values()) == [_pack(1.0, "")]:
        return next(iter(kept))
    return _PREFIX + ",".join(f"{member}*{bits:08x}" for member, bits in kept.items())


def decode_lora_id(lora_id: str) -> tuple[tuple[str, float], ...]:
    """The (registry id, weight) pairs of a ``lora_id``, sorted by id.

    Raises:
        ValueError: a string that :func:`encode_lora_id` cannot have made.
    """
    if not lora_id.startswith(_PREFIX):
        return ((lora_id, 1.0),)
    matches = [_MEMBER.fullmatch(part) for part in lora_id[len(_PREFIX) :].split(",")]
    members = tuple((match[1], struct.unpack(">f", bytes.fromhex(match[2]))[0]) for match in matches if match)
    if len(members) < len(matches) or encode_lora_id(members) != lora_id:
        raise ValueError(
            f"lora_id {lora_id!r} is malformed: want an adapter id, or mix:<id>*<8 hex digits>,... sorted by id"
        )
    return members


def _pack(weight: float, member: str) -> int:
    try:
        if math.isfinite(weight):
            return int.from_bytes(struct.pack(">f", weight), "big")
    except OverflowError:
        pass
    raise ValueError(f"weight {weight!r} of adapter {member!r} is not a finite float32")
