"""A snapshot as text: pools, the tree, counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_lora_tree.observability import view
from sglang_lora_tree.observability.view import KINDS, Node, build, collapse, names_on_disk, with_base_heading

SHOWN = {"lora_nodes": 64, "children": 8, "depth": 6}
"""How much of the tree is listed before the rest is summed up (``view.collapse``)."""
BAR_WIDTH = 40
BAR_MARKS = {"adapter": "█", "mix": "▓", "history_kv": "▒", "running_kv": "░", "free": "·"}


def render_text(snapshot: dict[str, Any], show_all: bool = False) -> str:
    """The whole report.

    Args:
        snapshot: what ``GET /lora_tree`` answers.
        show_all: do not sum up long lists and deep branches.

    Raises:
        ValueError: not such an answer.
    """
    root = build(snapshot)
    if not show_all:
        root = collapse(root, **SHOWN)
    lines = [*_pools(snapshot), "", "virtual root", *_branches(with_base_heading(root))]
    if not snapshot.get("complete", True):
        lines.append(f"(the server lists only a part of its {snapshot['num_kv_nodes']} KV nodes)")
    on_disk = names_on_disk(snapshot)
    if on_disk:
        shown = on_disk if show_all else on_disk[:20]
        lines += ["", "on disk: " + ", ".join(shown) + _more(len(on_disk) - len(shown))]
    return "\n".join([*lines, "", *_counters(snapshot)]) + "\n"


def _pools(snapshot: dict[str, Any]) -> Iterator[str]:
    pool = snapshot["pool"]
    for tier, title in (("gpu", "GPU pool"), ("host", "host pool")):
        slots, size = pool["slots"][tier], pool[f"{tier}_size"]
        parts = ", ".join(f"{BAR_MARKS[kind]} {KINDS[kind]} {slots[kind]:,}" for kind in KINDS if slots[kind])
        megabytes = size * pool["slot_bytes"] / 1e6
        yield f"{title:<10}{_bar(slots, size)}  {size:,} slots ({megabytes:,.1f} MB): {parts}"
    tiers = snapshot["adapters"]
    where = {"gpu": "on the GPU", "loading": "loading", "host": "in host memory", "disk": "on disk"}
    parts = ", ".join(f"{tiers[tier]:,} {words}" for tier, words in where.items() if tiers[tier])
    yield f"{'adapters':<10}{snapshot['num_registered']:,} registered{': ' if parts else ''}{parts}"
    yield f"{'invalid KV':<10}: {snapshot['invalid_kv']:,}"


def _bar(slots: dict[str, int], size: int) -> str:
    """Kinds in proportion; a kind that is there shows, however little."""
    cells = ""
    for kind in KINDS:
        if kind != "free" and slots[kind] > 0:
            cells += BAR_MARKS[kind] * max(round(BAR_WIDTH * slots[kind] / max(size, 1)), 1)
    return cells[:BAR_WIDTH].ljust(BAR_WIDTH, BAR_MARKS["free"])


def _branches(node: Node, indent: str = "") -> Iterator[str]:
    for child in node.children:
        last = child is node.children[-1]
        yield indent + ("└─ " if last else "├─ ") + _describe(child)
        yield from _branches(child, indent + ("   " if last else "│  "))


def _describe(node: Node) -> str:
    label = f"{node.kind} {node.label}" if node.kind in ("adapter", "mix") else node.label
    if node.kind == "base":
        return label
    if node.num_nodes > 1:
        held = f"{node.gpu_slots:,} slots on the GPU, {node.host_slots:,} in host memory"
    else:
        held = f"{view.plural(node.slots, 'slot')} [{node.tier}]"
    return "  ".join([label, held, *view.counts(node)])


def _counters(snapshot: dict[str, Any]) -> Iterator[str]:
    yield "since start"
    for name, value in snapshot["counters"].items():
        yield f"  {name.replace('_', ' '):<22} {round(value, 3) if isinstance(value, float) else value:,}"


def _more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""
