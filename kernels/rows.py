"""Where a pool row starts: the piece of address arithmetic that the Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_addresses(
    rows, mask, pointers, slots, slot_count, W: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return pointers to pool rows: row i starts in plane i // n at slot slots[i % n].

    rows int32 (R,), mask bool (R,): masked rows give a null pointer, not to be loaded from. slots points at the
    adapter's run, slot_count is its length n. The product slot * W is taken in int64: pools exceed 2^31 elements.
    """
    plane = tl.load(pointers + rows // slot_count, mask=mask, other=0)
    if ALIGNED:
        plane = tl.multiple_of(plane, 16)  # lets the loads be 16 bytes wide; addresses read from a table hide it
    slot = tl.load(slots + rows % slot_count, mask=mask, other=0)
    return plane.to(tl.pointer_type(DTYPE)) + slot.to(tl.int64) * W


def block_width(width: int, largest: int = 128) -> int:
    """How many elements of a chunk of W a kernel takes at once.

    A function of W alone, so that additions keep their order whatever the batch; at least the 16 that tl.dot needs.
    """
    return max(16, min(triton.next_power_of_2(width), largest))

