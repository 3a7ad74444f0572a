"""Names of subtrees: what makes two requests share history KV, and nothing else does.

An adapter is known by the digest of its tensors, a mix by its (digest, float32 weight bits) pairs. SGLang joins a request's
``extra_key`` and ``lora_id`` without a separator, so a crafted ``extra_key`` could name another adapter's KV; here every
field carries its length.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

BASE_IDENTITY = ""


def adapter_identity(digest: str) -> str:
    """Identity of one adapter at weight 1 (also of a mix that reduces to it)."""
    return "adapter:" + digest


def mix_identity(members: Iterable[tuple[str, float]]) -> str:
    """Identity of a weighted mix.

    Args:
        members: (digest, weight) pairs in any order; equal digests add up, zero weights drop out.

    Returns:
        ``BASE_IDENTITY`` if nothing is left, the adapter's identity for one adapter at weight 1, else a digest over the
        pairs sorted by digest, with the float32 bits of each weight: no rounding, so different mixes never meet.

    Raises:
        ValueError: the weights of one adapter add up to more than a float32 holds.
    """
    pairs = canonical_members(members)
    if not pairs:
        return BASE_IDENTITY
    if len(pairs) == 1 and pairs[0][1] == 1.0:
        return adapter_identity(pairs[0][0])
    canonical = b"".join(
        struct.pack("<I", len(digest)) + digest.encode() + struct.pack("<f", weight) for digest, weight in pairs
    )
    return "mix:" + hashlib.sha256(canonical).hexdigest()


def canonical_members(members: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """(digest, weight) pairs with equal digests added up (in float64), rounded to float32, zeros dropped, sorted."""
    totals: dict[str, float] = {}
    for digest, weight in members:
        totals[digest] = totals.get(digest, 0.0) + weight
    rounded = ((digest, to_float32(weight)) for digest, weight in totals.items())
    return sorted((digest, weight) for digest, weight in rounded if weight != 0.0)


def to_float32(weight: float) -> float:
    """The float32 value nearest to ``weight``, which is the one the kernel multiplies with.

    Raises:
        ValueError: there is none. Two names of one adapter may come to this although each name's weight is a float32.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", weight))[0])
    except OverflowError:
        raise ValueError(
            f"the weights of one adapter (under all its names) add up to {weight:g}, beyond float32: give smaller weights"
        ) from None


def namespace_key(identity: str, extra_key: str | None) -> str | None:
    """The ``extra_key`` under which a request's KV is filed: length-prefixed identity, then the user's own key.

    None for the base model without a key, as in SGLang, so that base-model KV hangs under the root directly.
    """
    if identity == BASE_IDENTITY and extra_key is None:
        return None
    return f"{len(identity)}:{identity}{extra_key or ''}"


def identity_of(key: str | None) -> str:
    """The identity inside a key made by :func:`namespace_key`; the base model's for any other key."""
    if not key:
        return BASE_IDENTITY
    length, separator, rest = key.partition(":")
    if not separator or len(length) > 3 or not (length.isascii() and length.isdigit()):
        return BASE_IDENTITY
    return rest[: int(length)]
