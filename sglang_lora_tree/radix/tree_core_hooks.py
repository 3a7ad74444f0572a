"""SGLang's tree core with two more layers: the virtual root, then LoRA nodes and mix nodes, then KV nodes.

Replaces ``sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore`` by :class:`LoraTreeCore` (through the public
registry ``register_tree_core_backend``). A walk that belongs to an adapter or a mix starts at its node instead of at the root:
``match_prefix``, ``begin_insert``, ``resume_insert``, ``match_full_device_prefix``, ``root_node_handle``. The walks themselves
are in ``plain_core_hooks``, locks that reach a mix's members in ``lora_component_hooks``.

A LoRA node is an ordinary node whose value is the adapter's slots, so leaf-first eviction and top-first loading *are* the
usage dependency (ELORA, section V). A mix node owns one page (a node without a value is dead to the core) and has an edge
to each member: while it is on the GPU none of them can be a leaf, and while it is locked they are locked.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_lora_tree.radix.identity import BASE_IDENTITY, identity_of
from sglang_lora_tree.radix.lora_component_hooks import LoraFullComponent
from sglang_lora_tree.radix.lora_node_hooks import LoraNode, ResidencyListener
from sglang_lora_tree.radix.plain_core_hooks import PlainTreeCore

TREE_CORE_NAME = "lora_tree"

# No tokenizer or multimodal hash makes these token numbers, so no request's key can meet a LoRA node's.
_ADAPTER_TOKEN = -(1 << 40)
# Larger than any priority of a policy: clock ticks, hits, priorities of requests.
_UNREGISTERED = float(1 << 40)
_UNKNOWN: Any = object()


class LoraTreeCore(PlainTreeCore):
    """The tree core; see the module's docstring. Called from the scheduler thread only, as SGLang's is."""

    def __init__(self, params: Any, components: dict[ComponentType, Any]) -> None:
        assert isinstance(components.get(ComponentType.FULL), LoraFullComponent), "the factory installs LoraFullComponent"
        self.listener = ResidencyListener()
        self.changes: dict[int, None] | None = None
        """Ids of nodes that came, changed their tier, were used or left, oldest first, for whoever empties it; None: nobody."""
        self.resets = 0
        """How often the tree has been emptied."""
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self.resets += 1
        if self.changes is not None:
            self.changes.clear()
        self.retention.resident_adapters = 0
        self.virtual_root = self.root_node
        self.lora_nodes: dict[str, LoraNode] = {}
        # Mixes come in endless variety, so what asks for some of them must not go through all.
        self.adapters: dict[str, LoraNode] = {}
        self.resident_mixes: dict[str, LoraNode] = {}
        self._mixes_of: dict[str, dict[str, LoraNode]] = {}
        self._by_node: dict[int, LoraNode] = {}

    # ---- Second layer ----

    def lora_node_of(self, node: UnifiedTreeNode) -> LoraNode | None:
        """The LoRA or mix node that a node hangs below (or is); None for base-model KV and the virtual root."""
        # A node never changes subtree, so each asks its parent once and remembers. (Not in its __dict__, which would have to be
        # made first: Python keeps attributes without one.)
        if node is self.virtual_root:
            return None
        known = getattr(node, "lora_node", _UNKNOWN)
        if known is _UNKNOWN:
            path = [node]
            while (above := path[-1].parent) is not self.virtual_root:
                known = getattr(above, "lora_node", _UNKNOWN)
                if known is not _UNKNOWN:
                    break
                path.append(above)
            known = None if known is _UNKNOWN else known
            for below in path:
                below.lora_node = known
        return known

    def add_adapter(self, identity: str, host_slots: torch.Tensor) -> LoraNode:
        """Add a LoRA node whose rows are already in host memory (host first, so that eviction is a pure drop)."""
        return self._add_lora_node(identity, host_slots, members=())

    def add_mix(self, identity: str, members: Sequence[str], host_slots: torch.Tensor) -> LoraNode:
        """Add a mix node, one page, not on the GPU yet. Its members must be in the tree."""
        missing = [member for member in members if member not in self.lora_nodes]
        assert members and not missing, f"mix {identity} lacks members in the tree: {missing}"
        return self._add_lora_node(identity, host_slots, members=tuple(members))

    def _add_lora_node(self, identity: str, host_slots: torch.Tensor, members: tuple[str, ...]) -> LoraNode:
        assert identity != BASE_IDENTITY and identity not in self.lora_nodes, f"{identity!r} is in the tree already"
        assert self.root_node is self.virtual_root, "no walk may be under way"
        key = RadixKey(array("q", [_ADAPTER_TOKEN]) * len(host_slots), "lora-node:" + identity)
        result = self.insert_host(self.virtual_root.id, key, host_slots, hash_value=[])
        assert result.inserted_host_node is not None and not result.cache_actions
        node = self.node_by_id(result.inserted_host_node)
        lora_node = LoraNode(identity, node, members)
        node.lora_node = lora_node
        node.usage.is_adapter = not members
        self.evictable_host_leaves.refresh(node)
        self.lora_nodes[identity] = self._by_node[node.id] = lora_node
        if not members:
            self.adapters[identity] = lora_node
        for member in members:
            self._mixes_of.setdefault(member, {})[identity] = lora_node
        return lora_node

    def mixes_of(self, identity: str) -> Iterable[LoraNode]:
        """The mixes in the tree that an adapter is a member of, oldest first."""
        return self._mixes_of.get(identity, {}).values()

    def materialize(self, lora_node: LoraNode, device_slots: torch.Tensor) -> None:
        """Put a mix node on the GPU; its page has no content, so there is nothing to copy."""
        assert lora_node.is_mix and not lora_node.is_resident, "adapters come through load_back"
        missing = [member for member in lora_node.members if not self.is_resident(member)]
        assert not missing, f"mix {lora_node.identity} before its members {missing}"
        self._unevict_node_on_insert(lora_node.node, device_slots)
        self.note_resident(lora_node)

    def is_resident(self, identity: str) -> bool:
        lora_node = self.lora_nodes.get(identity)
        return lora_node is not None and lora_node.is_resident

    def set_registered(self, identity: str, registered: bool) -> None:
        """Say whether a name still refers to an adapter; a subtree without one leaves first, wherever it is."""
        lora_node = self.lora_nodes.get(identity)
        if lora_node is None or lora_node.registered == registered:
            return
        lora_node.registered = registered
        stack = [lora_node.node]
        while stack:
            node = stack.pop()
            self.evictable_device_leaves.refresh(node)
            self.evictable_host_leaves.refresh(node)
            stack.extend(node.children.values())

    def note_visit(self, lora_node: LoraNode) -> None:
        """A request that needs the node has been admitted."""
        lora_node.visits += 1
        self.note_use(lora_node.node)

    def note_resident(self, lora_node: LoraNode) -> None:
        """Bookkeeping of a second-layer node that has just got its device slots."""
        for member in lora_node.members:
            self.lora_nodes[member].resident_mixes += 1
            self._update_evictable_leaf_sets(self.lora_nodes[member].node)
        if lora_node.is_mix:
            self.resident_mixes[lora_node.identity] = lora_node
        else:
            self.retention.resident_adapters += 1
        self.listener.on_resident(lora_node)

    def note_evicted(self, lora_node: LoraNode) -> None:
        """Bookkeeping of a second-layer node that is about to lose its device slots."""
        for member in lora_node.members:
            owner = self.lora_nodes[member]
            owner.resident_mixes -= 1
            assert owner.resident_mixes >= 0, f"{member} has fewer than no resident mixes"
            self._update_evictable_leaf_sets(owner.node)
        if lora_node.is_mix:
            del self.resident_mixes[lora_node.identity]
        else:
            self.retention.resident_adapters -= 1
        self.listener.on_evicted(lora_node)

    def least_valuable(self, identities: Iterable[str]) -> LoraNode | None:
        """The adapter or mix to evict first among these, of those that nobody uses or holds; None if all are in use."""
        candidates = [self.lora_nodes[identity] for identity in identities]
        unlocked = [lora_node for lora_node in candidates if not lora_node.is_locked]
        return min(unlocked, key=lambda lora_node: self._eviction_priority(lora_node.node), default=None)

    def device_nodes_of(self, lora_node: LoraNode) -> list[UnifiedTreeNode]:
        """All nodes on the GPU that need an adapter or mix, and itself: each before those that it needs."""
        return [
            node
            for top in (*self.mixes_of(lora_node.identity), lora_node)
            for node in reversed(list(self.subtree(top)))
            if node.component_data[BASE_COMPONENT_TYPE].value is not None
        ]

    def find(self, node_id: int) -> LoraNode | None:
        """The second-layer node with this id, if it is one."""
        return self._by_node.get(node_id)

    # ---- Walks start at the request's node ----

    @contextmanager
    def _rooted_at(self, node: UnifiedTreeNode) -> Iterator[None]:
        assert self.root_node is self.virtual_root, "walks do not nest"
        self.root_node = node
        try:
            yield
        finally:
            self.root_node = self.virtual_root

    def _anchor(self, extra_key: str | None) -> UnifiedTreeNode | None:
        """Where a request's walk starts; None if its adapter is not in the tree (it is on disk)."""
        identity = identity_of(extra_key)
        if identity == BASE_IDENTITY:
            return self.virtual_root
        lora_node = self.lora_nodes.get(identity)
        return None if lora_node is None else lora_node.node

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        anchor = self._anchor(params.key.extra_key)
        if anchor is None:
            return self._empty_match_result
        if anchor is self.virtual_root:
            return super().match_prefix(params)
        assert self.root_node is self.virtual_root, "walks do not nest"
        self.root_node = anchor
        try:
            result = super().match_prefix(params)
        finally:
            self.root_node = self.virtual_root
        if result.last_device_node == self.virtual_root.id:
            # A key shorter than a page: the core's shared empty result knows only one root.
            result = result._replace(
                last_device_node=anchor.id, last_host_node=anchor.id, best_match_node=anchor.id
            )
        return result

    def begin_insert(self, params: InsertParams) -> Any:
        anchor = self._anchor(params.key.extra_key)
        assert anchor is not None, f"KV of {identity_of(params.key.extra_key)} without its adapter in the tree"
        if anchor is self.virtual_root:
            return super().begin_insert(params)
        assert anchor.component_data[BASE_COMPONENT_TYPE].value is not None, "KV inserted below an absent adapter"
        assert self.root_node is self.virtual_root, "walks do not nest"
        self.root_node = anchor
        try:
            return super().begin_insert(params)
        finally:
            self.root_node = self.virtual_root

    def resume_insert(self) -> Any:
        state = self._ongoing_insert_walk_state
        anchor = None if state is None else self._anchor(state.params.key.extra_key)
        if anchor is None or anchor is self.virtual_root:
            return super().resume_insert()
        with self._rooted_at(anchor):
            return super().resume_insert()

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        anchor = self._anchor(key.extra_key)
        if anchor is None:
            return 0, self.virtual_root.id, 0
        if anchor is self.virtual_root:
            return super().match_full_device_prefix(key)
        with self._rooted_at(anchor):
            return super().match_full_device_prefix(key)

    def root_node_handle(self, extra_key: str | None = None) -> int:
        anchor = self._anchor(extra_key)
        return self.virtual_root.id if anchor is None else anchor.id

    def anchor_of(self, node_id: int) -> int:
        """The node (second layer, or the virtual root) above the KV that ends at a node."""
        lora_node = self.lora_node_of(self.node_by_id(node_id))
        return self.virtual_root.id if lora_node is None else lora_node.node.id

    # ---- What the advisor is told ----

    def note_use(self, node: UnifiedTreeNode) -> None:
        super().note_use(node)
        self._note_changed(node)

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        super()._update_evictable_leaf_sets(node)
        if self.changes is not None:
            self._note_changed(node)

    def _split_node(self, key: RadixKey, child: UnifiedTreeNode, split_len: int) -> tuple[UnifiedTreeNode, Any]:
        upper, action = super()._split_node(key, child, split_len)
        self._note_changed(upper)
        self._note_changed(child)
        return upper, action

    def _note_changed(self, node: UnifiedTreeNode) -> None:
        if self.changes is not None and node is not self.virtual_root:
            self.changes[node.id] = None

    def note_all_changed(self) -> None:
        """Whoever empties ``changes`` wants to hear of every node."""
        if self.changes is not None:
            self.changes.update(dict.fromkeys(self._node_arena))
            self.changes.pop(self.virtual_root.id, None)

    def get_node(self, node_id: int) -> UnifiedTreeNode | None:
        """A node, if it is still in the tree."""
        return self._node_arena.get(node_id)

    def row_of(self, node: UnifiedTreeNode) -> tuple[int, int, str | None, int, bool, bool, float, float]:
        """A node's id, parent, identity (LoRA nodes), slots, whether on the GPU and on the host, visits, last use."""
        lora_node = self._by_node.get(node.id)
        data, usage = node.component_data[BASE_COMPONENT_TYPE], node.usage
        return (
            node.id,
            node.parent.id,
            None if lora_node is None or lora_node.is_mix else lora_node.identity,
            len(node.key),
            data.value is not None,
            data.host_value is not None,
            usage.visits,
            usage.used_at,
        )

    # ---- Eviction order ----

    def _eviction_priority(self, node: UnifiedTreeNode) -> Any:
        priority = self.policy.static_key(node)
        if self._is_registered(node):
            return priority
        # Before everything that a name still refers to. A bare number where the policy gives one: the index compares them.
        return (priority[0] - _UNREGISTERED, *priority[1:]) if isinstance(priority, tuple) else priority - _UNREGISTERED

    def _is_registered(self, node: UnifiedTreeNode) -> bool:
        try:
            lora_node = node.lora_node
        except AttributeError:
            lora_node = self.lora_node_of(node)
        return lora_node is None or lora_node.registered

    def _exact_value(self, node: UnifiedTreeNode) -> float:
        return super()._exact_value(node) - (0.0 if self._is_registered(node) else _UNREGISTERED)

    def _refined_value(self, node: UnifiedTreeNode, key: Any) -> float:
        value = super()._refined_value(node, key)
        return value if self.policy.classes or self._is_registered(node) else value - _UNREGISTERED

    def _eviction_class(self, node: UnifiedTreeNode) -> Any:
        return super()._eviction_class(node) if self._is_registered(node) else _UNREGISTERED

    def _class_value(self, known: Any, lowest: UnifiedTreeNode) -> float:
        return -math.inf if known is _UNREGISTERED else super()._class_value(known, lowest)

    def _worth(self, leaf: UnifiedTreeNode) -> float | None:
        """What decides between leaves, beside the priority; None: the priority alone."""
        if self.policy.classes:
            return self._class_value(self._eviction_class(leaf), leaf)
        return self._exact_value(leaf) if self.policy.candidates else None

    def _is_device_leaf(self, node: UnifiedTreeNode) -> bool:
        if not super()._is_device_leaf(node):
            return False
        lora_node = self._by_node.get(node.id)
        return lora_node is None or not lora_node.resident_mixes

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        super()._remove_leaf_from_parent(node)
        if self.changes is not None:
            self._note_changed(node)
        lora_node = self._by_node.pop(node.id, None) if node.parent is self.virtual_root else None
        if lora_node is not None:
            del self.lora_nodes[lora_node.identity]
            self.adapters.pop(lora_node.identity, None)
            for member in lora_node.members:
                mixes = self._mixes_of[member]
                del mixes[lora_node.identity]
                if not mixes:
                    del self._mixes_of[member]
            self.listener.on_removed(lora_node)

    # ---- Checks ----

    def check_invariants(self) -> None:
        """Assert what must hold between any two operations (invariant 2, and the edges of mixes)."""
        assert self.root_node is self.virtual_root, "a walk left its root behind"
        mixes: dict[str, int] = dict.fromkeys(self.lora_nodes, 0)
        for lora_node in self.lora_nodes.values():
            assert lora_node.host_slots is not None, f"{lora_node.identity} is not in host memory"
            if lora_node.is_mix and lora_node.is_resident:
                for member in lora_node.members:
                    assert self.is_resident(member), f"{lora_node.identity} is on the GPU without {member}"
                    mixes[member] += 1
        found = {mix.identity for mix in self.lora_nodes.values() if mix.is_mix}
        assert found == {name for of_one in self._mixes_of.values() for name in of_one}, "mixes without edges"
        assert set(self.adapters) == set(self.lora_nodes) - found, "adapters are not those of the tree"
        assert set(self.resident_mixes) == {name for name in found if self.is_resident(name)}, "other mixes are on the GPU"
        for identity, count in mixes.items():
            owner = self.lora_nodes[identity]
            assert owner.resident_mixes == count, f"{identity}: {owner.resident_mixes} resident mixes noted, {count} found"
            if count:
                assert owner.node not in self.evictable_device_leaves, f"{identity} is evictable below a resident mix"
        for node in self._node_arena.values():
            if node is self.virtual_root or node.parent is self.virtual_root:
                continue
            if node.component_data[BASE_COMPONENT_TYPE].value is not None:
                top = self.lora_node_of(node)
                assert top is None or top.is_resident, f"invalid KV: node {node.id} without {top and top.identity}"

    def fingerprint(self) -> int:
        """56 bits over every node's id, parent, locks and slots in both pools, and what every leaf is worth, to compare ranks.

        The values go in because ranks that have learned different ones still have the same tree, until the next victim.
        """
        digest = hashlib.blake2b(digest_size=7)
        for node in self._node_arena.values():
            if node is self.virtual_root:
                continue
            data = node.component_data[BASE_COMPONENT_TYPE]
            digest.update(repr((node.id, node.parent.id, data.lock_ref, data.host_lock_ref)).encode())
            for slots in (data.value, data.host_value):
                digest.update(b"absent" if slots is None else slots.cpu().numpy().tobytes())
        for leaf in (*self.evictable_device_leaves, *self.evictable_host_leaves):
            digest.update(repr((leaf.id, self._eviction_priority(leaf), self._worth(leaf))).encode())
        return int.from_bytes(digest.digest(), "big")

    def count_invalid_kv(self) -> int:
        """Tokens of KV on the GPU whose adapter, or a member of whose mix, is not (invariant 2: always 0)."""
        return sum(
            len(node.component_data[BASE_COMPONENT_TYPE].value)
            for lora_node in self.lora_nodes.values()
            if not (lora_node.is_resident and all(self.is_resident(member) for member in lora_node.members))
            for node in self.subtree(lora_node)
            if node is not lora_node.node and node.component_data[BASE_COMPONENT_TYPE].value is not None
        )

    def subtree(self, lora_node: LoraNode) -> Iterator[UnifiedTreeNode]:
        """A second-layer node and all KV nodes below it."""
        stack = [lora_node.node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
