"""A snapshot as a picture: the layered tree from left to right; solid: on the GPU, dashed: in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from sglang_lora_tree.observability import view
from sglang_lora_tree.observability.view import KINDS, Node, build, collapse, names_on_disk, with_base_heading

COLOURS = {
    "adapter": "#3b6fb6",
    "mix": "#8e5bb5",
    "history_kv": "#2f9e87",
    "running_kv": "#ee8a2e",
    "free": "#e9ebee",
    "virtual root": "#3a4250",
}
INK, FAINT = "#2b313b", "#8a929e"
DETAILS: tuple[dict[str, int], ...] = (
    {"lora_nodes": 48, "children": 12, "depth": 6},
    {"lora_nodes": 48, "children": 8, "depth": 5},
    {"lora_nodes": 48, "children": 4, "depth": 4},
    {"lora_nodes": 48, "children": 2, "depth": 3},
    {"lora_nodes": 48, "children": 1, "depth": 1},
)
"""Tried in turn until the picture has at most ``MAX_ROWS`` rows."""
MAX_ROWS = 72
MAX_MEMBER_EDGES = 40

# All lengths are inches.
ROW, MARGIN, HEADER, FOOTER = 0.42, 0.35, 1.75, 1.05
COLUMNS = (MARGIN, 2.2)
"""Left edges of the virtual root and of the second layer."""
GAP = 0.35
WIDTHS = {"virtual root": 1.0, "more": 4.2, "kv": 1.35}
SECOND_LAYER_WIDTHS = (2.85, 5.2)
"""Of adapters and mixes, by the longest name."""
SUM_WIDTHS = (1.5, 4.5)
"""Of several KV nodes in one box, by their slots."""
LETTER = 0.071
HEIGHT = 0.3


@dataclass(frozen=True)
class Box:
    """Where a node is drawn; y grows downwards."""

    node: Node
    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        return self.x + self.width


def draw_png(snapshot: dict[str, Any], file: str | PathLike[str], dpi: int = 150) -> None:
    """Draw a snapshot.

    Args:
        snapshot: what ``GET /lora_tree`` answers.
        file: a path that ends in .png (or another suffix that matplotlib knows).
        dpi: dots per inch.

    Raises:
        ValueError: not such an answer.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    root = with_base_heading(_fit(build(snapshot)))
    boxes: list[Box] = []
    rows = _place(root, 0, 0, Scale.of(root), boxes)
    width = max(max(box.right for box in boxes) + MARGIN, 10.5)
    height = HEADER + rows * ROW + FOOTER
    figure = Figure((width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    _draw_header(axes, snapshot, width)
    _draw_edges(axes, boxes)
    for box in boxes:
        _draw_box(axes, box)
    _draw_footer(axes, snapshot, height)
    figure.savefig(file, dpi=dpi)


# ---- Layout ----


def _fit(root: Node) -> Node:
    for detail in DETAILS:
        fitting = collapse(root, **detail)
        if _count_rows(fitting) <= MAX_ROWS:
            break
    return fitting


def _count_rows(node: Node) -> int:
    return sum(map(_count_rows, node.children)) or 1


@dataclass(frozen=True)
class Scale:
    """What widths depend on: the longest name, and the largest sum of KV nodes."""

    second_layer_width: float
    most_slots: int

    @classmethod
    def of(cls, root: Node) -> Scale:
        letters = max((len(node.label) + len(_figures(node)) for node in root.children if node.kind != "more"), default=0)
        narrow, wide = SECOND_LAYER_WIDTHS
        sums = (node.slots for node in root.below() if node.kind == "kv" and node.num_nodes > 1)
        return cls(min(max(LETTER * (letters + 5), narrow), wide), max(sums, default=0))

    def left(self, level: int) -> float:
        """Where a level's boxes start; the virtual root is level 0."""
        if level < 2:
            return COLUMNS[level]
        return COLUMNS[1] + self.second_layer_width + GAP + 0.1 + (level - 2) * (WIDTHS["kv"] + GAP)

    def width(self, node: Node) -> float:
        if node.kind == "kv" and node.num_nodes > 1:
            narrow, wide = SUM_WIDTHS
            return narrow + (wide - narrow) * node.slots / max(self.most_slots, 1)
        return WIDTHS.get(node.kind, self.second_layer_width)


def _place(node: Node, row: int, level: int, scale: Scale, boxes: list[Box]) -> int:
    """Give a node and all below it a place, from a row on; returns the rows taken."""
    taken = 0
    for child in node.children:
        taken += _place(child, row + taken, level + 1, scale, boxes)
    rows = max(taken, 1)
    boxes.append(Box(node, scale.left(level), HEADER + (row + rows / 2) * ROW, scale.width(node)))
    return rows


def _figures(node: Node) -> str:
    """What stands on the right of an adapter or a mix."""
    return "" if node.kind == "base" else " · ".join([f"{node.slots:,}", *view.counts(node)])


# ---- Drawing ----


def _colour(node: Node) -> str:
    if node.kind == "kv":
        return COLOURS["running_kv" if node.locks else "history_kv"]
    return COLOURS.get(node.kind, FAINT)


def _draw_edges(axes: Any, boxes: Sequence[Box]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    place = {id(box.node): box for box in boxes}
    for box in boxes:
        for child in box.node.children:
            end = place[id(child)]
            middle = (box.right + end.x) / 2
            curve = [(box.right, box.y), (middle, box.y), (middle, end.y), (end.x, end.y)]
            path = Path(curve, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
            axes.add_patch(PathPatch(path, fill=False, edgecolor="#c3c9d1", linewidth=1.1, zorder=1))
    adapters = {box.node.identity: box for box in boxes if box.node.kind == "adapter"}
    members = [(box, adapters[member]) for box in boxes for member in box.node.members if member in adapters]
    for mix, adapter in members[:MAX_MEMBER_EDGES]:
        out = 0.1 + 0.03 * min(abs(mix.y - adapter.y) / ROW, 14)
        curve = [(mix.x, mix.y), (mix.x - out, mix.y), (mix.x - out, adapter.y), (adapter.x, adapter.y)]
        path = Path(curve, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
        axes.add_patch(PathPatch(path, fill=False, edgecolor=COLOURS["mix"], linewidth=1.0, linestyle=(0, (1, 1.6)), zorder=2))


def _draw_box(axes: Any, box: Box) -> None:
    node, colour = box.node, _colour(box.node)
    if node.kind in ("base", "more"):
        _rectangle(axes, box, "#f4f5f7", "#c3c9d1")
        _write(axes, box, node.label, "" if node.kind == "base" else f"{node.slots:,}", INK)
        return
    if node.gpu_slots and node.host_slots and node.num_nodes == 1:
        shadow = Box(node, box.x + 0.05, box.y + 0.05, box.width)
        _rectangle(axes, shadow, "white", colour, zorder=2, linestyle=(0, (2, 1.5)))
    if node.num_nodes > 1:
        _draw_sum(axes, box)
        _write(axes, box, f"{node.num_nodes:,} nodes", f"{node.slots:,}", INK, halo=True, weight="normal")
        return
    solid = (node.kind == "virtual root" or node.gpu_slots > 0) and not node.loading
    style: dict[str, Any] = {} if solid else {"hatch": "//"} if node.loading else {"linestyle": (0, (3, 2))}
    _rectangle(axes, box, colour if solid else "white", colour, **style)
    ink = "white" if solid else colour
    if node.kind in ("kv", "virtual root"):
        text = node.label if node.kind == "virtual root" else " · ".join([f"{node.slots:,}", *view.counts(node)[:1]])
        middle = box.x + box.width / 2
        axes.text(middle, box.y, text, ha="center", va="center", fontsize=7.5, color=ink, zorder=5)
    else:
        _write(axes, box, node.label, _figures(node), ink, halo=node.loading)


def _draw_sum(axes: Any, box: Box) -> None:
    """Several KV nodes: running KV, history KV on the GPU, and what is in host memory only, in proportion."""
    node = box.node
    frame = _rectangle(axes, box, "white", COLOURS["history_kv"], linestyle=(0, (3, 2)))
    x = box.x
    for slots, colour in ((node.locked_slots, "running_kv"), (node.gpu_slots - node.locked_slots, "history_kv")):
        length = box.width * slots / max(node.slots, 1)
        (bar,) = axes.barh(box.y, length, height=HEIGHT, left=x, color=COLOURS[colour], zorder=3)
        bar.set_clip_path(frame)
        x += length


def _write(axes: Any, box: Box, label: str, note: str, ink: str, halo: bool = False, weight: str = "bold") -> None:
    """A name on the left of a box, its figures on the right."""
    from matplotlib.patheffects import withStroke

    style: dict[str, Any] = {"va": "center", "color": ink, "zorder": 5, "parse_math": False}  # names may hold a $
    if halo:
        style["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
    room = int(box.width / LETTER) - len(note) - 3
    size = 8.5 if weight == "bold" else 7.5
    axes.text(box.x + 0.1, box.y, _shorten(label, room), fontsize=size, weight=weight, **style)
    axes.text(box.right - 0.1, box.y, note, ha="right", fontsize=7, **style)


def _rectangle(axes: Any, box: Box, face: str, edge: str, zorder: int = 3, **style: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    corner = (box.x + 0.07, box.y - HEIGHT / 2 + 0.07)
    patch = FancyBboxPatch(corner, box.width - 0.14, HEIGHT - 0.14, boxstyle="round,pad=0.07", zorder=zorder, **style)
    patch.set(facecolor=face, edgecolor=edge, linewidth=1.3)
    return axes.add_patch(patch)


def _draw_header(axes: Any, snapshot: dict[str, Any], width: float) -> None:
    tiers = snapshot["adapters"]
    axes.text(MARGIN, 0.38, "LoRA tree", fontsize=15, weight="bold", color=INK, va="center")
    note = (
        f"{snapshot['num_registered']:,} adapters registered:  {tiers['gpu']:,} on the GPU,  "
        + (f"{tiers['loading']:,} loading,  " if tiers["loading"] else "")
        + f"{tiers['host']:,} in host memory,  {tiers['disk']:,} on disk      "
        f"{snapshot['num_kv_nodes']:,} KV nodes      invalid KV: {snapshot['invalid_kv']:,}"
    )
    axes.text(width - MARGIN, 0.38, note, fontsize=8.5, color=INK, va="center", ha="right")
    pool = snapshot["pool"]
    left, right = COLUMNS[1], width - MARGIN
    for number, (tier, title) in enumerate((("gpu", "GPU pool"), ("host", "host pool"))):
        y, size = 0.72 + 0.42 * number, max(pool[f"{tier}_size"], 1)
        megabytes = size * pool["slot_bytes"] / 1e6
        axes.text(MARGIN, y + 0.05, title, fontsize=9, color=INK, va="center")
        note = f"{size:,} slots, {megabytes:,.1f} MB"
        axes.text(MARGIN, y + 0.21, note, fontsize=6.5, color=FAINT, va="center")
        x = left
        for kind in KINDS:
            slots = pool["slots"][tier][kind]
            length = (right - left) * max(slots, 0) / size
            axes.barh(y + 0.12, length, height=0.24, left=x, color=COLOURS[kind], zorder=3)
            text = f"{KINDS[kind]} {slots:,}"
            if length > 0.075 * len(text):
                ink = FAINT if kind == "free" else "white"
                axes.text(x + length / 2, y + 0.12, text, fontsize=7, color=ink, ha="center", va="center", zorder=4)
            x += length


def _draw_footer(axes: Any, snapshot: dict[str, Any], height: float) -> None:
    y = height - FOOTER + 0.35
    on_disk = names_on_disk(snapshot)
    notes = []
    if on_disk:
        notes.append("on disk: " + _shorten(", ".join(on_disk), 120))
    if not snapshot.get("complete", True):
        notes.append("only a part of the KV nodes is listed")
    if notes:
        axes.text(MARGIN, y, "     ".join(notes), fontsize=8, color=FAINT, va="center", parse_math=False)
    x, y = MARGIN, height - 0.32
    for kind in ("adapter", "mix", "history_kv", "running_kv"):
        _swatch(axes, x, y, COLOURS[kind], COLOURS[kind])
        x = _legend_text(axes, x, y, {"adapter": "adapter", "mix": "mix"}.get(kind, KINDS[kind]))
    x += 0.25
    grey = FAINT
    _swatch(axes, x, y, grey, grey)
    x = _legend_text(axes, x, y, "on the GPU")
    _swatch(axes, x + 0.03, y + 0.03, "white", grey, linestyle=(0, (2, 1.5)))
    _swatch(axes, x, y, grey, grey)
    x = _legend_text(axes, x, y, "GPU and host")
    _swatch(axes, x, y, "white", grey, linestyle=(0, (3, 2)))
    x = _legend_text(axes, x, y, "host only")
    _swatch(axes, x, y, "white", grey, hatch="//////")
    x = _legend_text(axes, x, y, "loading")
    axes.text(x + 0.1, y, "slots · visits · locks", fontsize=7.5, color=FAINT, va="center")


def _swatch(axes: Any, x: float, y: float, face: str, edge: str, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    style = {"linewidth": 1.0, "zorder": 4, **style}
    axes.add_patch(Rectangle((x, y - 0.07), 0.24, 0.14, facecolor=face, edgecolor=edge, **style))


def _legend_text(axes: Any, x: float, y: float, text: str) -> float:
    axes.text(x + 0.34, y, text, fontsize=7.5, color=INK, va="center")
    return x + 0.34 + 0.066 * len(text) + 0.14


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(length - 1, 1)] + "…"
