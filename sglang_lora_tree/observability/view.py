"""A snapshot as a tree of nodes with everything that text and picture show of them. No SGLang, no server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = {
    "adapter": "adapters",
    "mix": "mixes",
    "history_kv": "history KV",
    "running_kv": "running KV",
    "free": "free",
}
"""What a slot can hold (see ``snapshot.KINDS``), in words."""


@dataclass(eq=False)
class Node:
    """One node of the tree, or several KV nodes of one LoRA node that are shown as one."""

    kind: str
    """"virtual root", "adapter", "mix", "kv"; "more": LoRA nodes, with their KV, that are not shown one by one; "base": a heading
    that is no node (:func:`with_base_heading`)."""
    label: str
    identity: str = ""
    slots: int = 0
    gpu_slots: int = 0
    host_slots: int = 0
    locked_slots: int = 0
    """On the GPU and locked: running KV, if it is KV."""
    loading: bool = False
    locks: int = 0
    visits: int = 0
    members: tuple[str, ...] = ()
    """Identities of a mix's adapters."""
    num_nodes: int = 1
    children: list[Node] = field(default_factory=list)

    @property
    def tier(self) -> str:
        """ "GPU+host", "GPU", "host", "loading" (the copy to the GPU is under way); "" for the virtual root."""
        if self.kind == "virtual root":
            return ""
        if self.loading:
            return "loading"
        return "+".join(name for name, slots in (("GPU", self.gpu_slots), ("host", self.host_slots)) if slots)

    def below(self) -> Iterator[Node]:
        """All nodes below this one."""
        stack = list(self.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


def build(snapshot: dict[str, Any]) -> Node:
    """The virtual root of a snapshot's tree: LoRA nodes, mix nodes, KV; running KV first, then by visits.

    Raises:
        ValueError: not a snapshot with nodes.
    """
    if not isinstance(snapshot.get("nodes"), list) or "pool" not in snapshot:
        raise ValueError("the answer has no tree in it")
    nodes: dict[int, Node] = {}
    root: Node | None = None
    for entry in snapshot["nodes"]:
        slots = int(entry["slots"])
        node = nodes[entry["id"]] = Node(
            kind=entry["kind"],
            label=label_of(entry),
            identity=entry.get("identity", ""),
            slots=slots,
            gpu_slots=slots if entry["gpu"] else 0,
            host_slots=slots if entry["host"] else 0,
            locked_slots=slots if entry["gpu"] and entry["locks"] else 0,
            loading=entry["loading"],
            locks=entry["locks"],
            visits=entry["visits"],
            members=tuple(member["identity"] for member in entry.get("members", ())),
        )
        if entry["parent"] is None:
            root = node
        else:
            nodes[entry["parent"]].children.append(node)
    if root is None:
        raise ValueError("the answer has no virtual root in it")
    order = {"adapter": 0, "mix": 1, "kv": 2}
    for node in nodes.values():
        node.children.sort(key=lambda child: (order[child.kind], not _is_running(child), -child.visits, child.label))
    return root


def _is_running(node: Node) -> bool:
    return node.kind == "kv" and node.locks > 0


def label_of(entry: dict[str, Any]) -> str:
    """What a node is called: an adapter's name, a mix as users write it, or how much KV."""
    if entry["kind"] == "adapter":
        return printable(entry["name"])
    if entry["kind"] == "mix":
        return ", ".join(
            printable(member["name"]) + ("" if member["weight"] is None else f":{member['weight']:.6g}")
            for member in entry["members"]
        )
    return "KV" if entry["kind"] == "kv" else "virtual root"


def summarize(nodes: list[Node]) -> Node:
    """Several nodes, and all below them, as one KV node."""
    everything = [node for top in nodes for node in (top, *top.below())]
    count = sum(node.num_nodes for node in everything)
    return Node(
        kind="kv",
        label="KV" if count == 1 else f"{count:,} KV nodes",
        slots=sum(node.slots for node in everything),
        gpu_slots=sum(node.gpu_slots for node in everything),
        host_slots=sum(node.host_slots for node in everything),
        locked_slots=sum(node.locked_slots for node in everything),
        loading=any(node.loading for node in everything),
        locks=sum(node.locks for node in everything),
        visits=sum(node.visits for node in everything),
        num_nodes=count,
    )


def collapse(node: Node, lora_nodes: int, children: int, depth: int) -> Node:
    """A copy that is short enough to look at: what is left out is summed up, never dropped.

    Args:
        node: a virtual root, or any node below it.
        lora_nodes: LoRA and mix nodes kept, at most.
        children: KV nodes kept below one node, at most.
        depth: levels of KV nodes kept, at most.
    """
    upper = [child for child in node.children if child.kind != "kv"]
    kv_nodes = [child for child in node.children if child.kind == "kv"]
    most_visited = sorted(upper, key=lambda child: -child.visits)[:lora_nodes]
    kept = [collapse(child, lora_nodes, children, depth) for child in upper if child in most_visited]
    if len(kept) < len(upper):
        rest = [child for child in upper if child not in most_visited]
        label = f"{len(rest):,} more adapters and mixes, with their KV"
        kept.append(replace(summarize(rest), kind="more", label=label))
    if depth > 1 and len(kv_nodes) <= children:
        kept += [collapse(child, lora_nodes, children, depth - 1) for child in kv_nodes]
    elif depth > 1 and children > 1:
        kept += [collapse(child, lora_nodes, children, depth - 1) for child in kv_nodes[: children - 1]]
        kept.append(summarize(kv_nodes[children - 1 :]))
    elif kv_nodes:
        kept.append(summarize(kv_nodes))
    return replace(node, children=kept)


def with_base_heading(root: Node) -> Node:
    """A copy with a heading above the base model's KV, which hangs below the virtual root itself. Not to be collapsed again."""
    kv_nodes = [child for child in root.children if child.kind == "kv"]
    if not kv_nodes:
        return root
    heading = Node(kind="base", label="base model", children=kv_nodes)
    return replace(root, children=[*(child for child in root.children if child.kind != "kv"), heading])


def names_on_disk(snapshot: dict[str, Any]) -> list[str]:
    """Registered adapters that are in no pool, so that the tree has no node for them."""
    return sorted(printable(name) for name, adapter in snapshot["registered"].items() if adapter["tier"] == "disk")


def printable(name: str) -> str:
    """A name that cannot steer a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)


def counts(node: Node) -> list[str]:
    """Visits and locks in words, where there are any."""
    return [plural(count, word) for count, word in ((node.visits, "visit"), (node.locks, "lock")) if count]


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
