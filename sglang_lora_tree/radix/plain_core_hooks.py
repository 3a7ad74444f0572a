"""SGLang's python tree core for a plain KV pool alone: the same tree and the same answers, in less time.

Replaces methods of ``sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore``, whose general form serves several
components a node (sliding window, Mamba): with one component the validators, partitions and per-component loops fall away
(``plain_node_hooks`` and ``plain_component_hooks`` have the nodes and the component). What it gives is in
docs/tree-benchmark.md. In short:

* walks compare tokens in place, instead of cutting the rest of the key and of the slots off at every node;
* victims come from an ordered index (``LeafIndex``) instead of a heap built over every leaf at each call, and one call takes
  all the victims that are needed (``drive_device_eviction``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import (
    CacheAction,
    ComponentAction,
    FreeDeviceKV,
    UpdatePendingBackupOnNodeSplit,
)
from sglang.srt.mem_cache.unified_cache.components import (
    BASE_COMPONENT_TYPE,
    ComponentType,
    EvictLayer,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode, _InsertPhase
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceLeafResult
from sglang.srt.mem_cache.utils import get_eviction_strategy, split_node_hash_value

from sglang_lora_tree.radix.eval import EvalParameters
from sglang_lora_tree.radix.leaf_index import CandidateIndex, ClassIndex, LeafIndex
from sglang_lora_tree.radix.plain_node_hooks import PlainNode, child_key, common_prefix
from sglang_lora_tree.radix.policies import RetentionPolicy, RetentionState, Stock, Usage

_ALL, _DEVICE = EvictLayer.ALL, EvictLayer.DEVICE  # looking a flag up by its class is slow
_ROOT_PATH_STEP = 0.00001  # a node is a little older than the one below it, as in SGLang's own walk


class PlainTreeCore(UnifiedTreeCore):
    """See the module's docstring; answers are SGLang's, call for call (tests/radix/test_plain_core_hooks.py)."""

    root_node: UnifiedTreeNode

    def __init__(self, params: Any, components: dict[ComponentType, Any]) -> None:
        assert tuple(components) == (BASE_COMPONENT_TYPE,), f"a plain KV pool has one component, got {tuple(components)}"
        assert not params.enable_session_radix_cache, "--enable-session-radix-cache needs SGLang's own core"
        name = params.eviction_policy.lower()
        self.policy: RetentionPolicy = Stock(get_eviction_strategy(name, params.eviction_policy_config))
        self.retention = RetentionState()
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self._make_indices()

    # ---- Retention ----

    def set_policy(self, policy: RetentionPolicy, state: RetentionState) -> None:
        """Change the order in which leaves leave; before the first request (nodes' usage starts with it)."""
        self.policy, self.retention = policy, state
        self._make_indices()

    def set_eval_parameters(self, parameters: EvalParameters | None, now: float | None = None) -> None:
        """Apply a plan; None: there is no plan any more. At one point of the loop, the same on every rank.

        Args:
            now: seconds, of the clock that the ranks share; None: when the plan was made.
        """
        self.retention.set_parameters(parameters, now)
        if self.policy.on_parameters(parameters):
            self.evictable_device_leaves.file_all()
            self.evictable_host_leaves.file_all()

    def touch(self, node: UnifiedTreeNode) -> None:
        """Somebody will look for a node without a walk to it."""
        state = self.retention
        node.usage.touch(state.seconds, state.window)
        node.usage.last_look = state.requests
        self._touch_node(node)

    def note_use(self, node: UnifiedTreeNode) -> None:
        """A request uses a node: once per request and node."""
        usage, state = node.usage, self.retention
        if state.parameters is not None:
            usage.touch(state.seconds, state.window)
        usage.visits += 1.0
        usage.uses += 1
        self.policy.on_use(node)
        usage.last_request = usage.last_look = state.requests
        self._note_change(node)

    def _make_indices(self) -> None:
        self.evictable_device_leaves = self._make_index()
        self.evictable_host_leaves = self._make_index()

    def _make_index(self) -> LeafIndex | ClassIndex:
        policy = self.policy

        def make_order() -> LeafIndex:
            if policy.candidates:
                return CandidateIndex(self._eviction_priority, self._refined_value, policy.candidates, policy.moment)
            return LeafIndex(self._eviction_priority)

        if policy.classes:
            return ClassIndex(make_order, self._eviction_class, self._class_value, policy.moment)
        return make_order()

    # ---- Match ----

    def _match_prefix_helper(self, key: RadixKey, params: MatchPrefixParams) -> MatchResult:
        page_size, total = self.page_size, len(key)
        node = best = device = self.root_node
        offset = device_length = host_length = resident_length = 0
        action = None
        while offset < total:
            child = node.children.get(child_key(key, offset, page_size))
            if child is None:
                break
            data = child.component_data[BASE_COMPONENT_TYPE]
            if data.value is None and data.host_value is None:
                break  # neither tier has it: nothing below can be used
            edge = child.key
            matched = common_prefix(edge, key, offset, page_size)
            is_split = matched < (len(edge.token_ids) if edge.limit is None else len(edge))
            if is_split:
                child, action = self._split_node(edge, child, matched)
                data = child.component_data[BASE_COMPONENT_TYPE]
            node = child
            offset += matched
            if data.value is not None:
                resident_length += matched
                best = device = node
                device_length, host_length = resident_length, 0
            elif self.enable_hicache:
                best = node
                host_length += matched
            if is_split:
                break

        # The path counts as used, each node a little before the one below it.
        now = float(get_and_increase_time_counter())
        retention = self.retention
        parameters, seconds, requests = retention.parameters, retention.seconds, retention.requests
        above: UnifiedTreeNode | None = best
        while above is not None:
            above.last_access_time = now
            usage = above.usage
            usage.last_look = requests
            if parameters is not None:
                usage.touch(seconds, parameters.visit_window)
            now -= _ROOT_PATH_STEP
            above = above.parent
        # Of a path, only these can be leaves.
        self.evictable_device_leaves.refresh(device)
        self.evictable_host_leaves.refresh(best)

        return MatchResult(
            device_prefix_len=device_length,
            last_device_node=device.id,
            last_host_node=(best if self.enable_hicache else device).id,
            best_match_node=best.id,
            last_visited_node_id=None if node is self.root_node else node.id,
            host_hit_length=host_length,
            full_kv_hit_length=offset,
            cache_actions=[] if action is None else [action],
        )

    # ---- Insert ----

    def begin_insert(self, params: InsertParams) -> Any:
        self.retention.requests += params.inserted_len == 0  # else it is the same request, further on
        return super().begin_insert(params)

    def _insert_walk_step(self, state: Any) -> None:
        """Walk down to where the key leaves the tree, or to a backup that has to be carried out first.

        ``state.key`` and ``state.value`` stay whole until the walk is over.
        """
        key, value, params, total = state.key, state.value, state.params, len(state.key)
        page_size, priority = self.page_size, state.priority
        offset = state.total_prefix_length
        duplicates = max(offset, params.prev_prefix_len)  # where a run of tokens that the tree has begins: one free for all
        while offset < total:
            node = state.node.children.get(child_key(key, offset, page_size))
            if node is None:
                break
            self._touch_node(node)
            edge = node.key
            matched = common_prefix(edge, key, offset, page_size)
            if matched < (len(edge.token_ids) if edge.limit is None else len(edge)):
                node, action = self._split_node(edge, node, matched)
                if action is not None:
                    state.pending_actions.append(action)
            if node.priority < priority:
                node.priority = priority
            end = offset + matched
            if node.component_data[BASE_COMPONENT_TYPE].value is None:
                self._free_duplicates(state, duplicates, offset)
                self._unevict_node_on_insert(node, value[offset:end], session_id=params.session_id)
                state.result.record_adopted_range(BASE_COMPONENT_TYPE, offset, end)
                duplicates = max(end, params.prev_prefix_len)
            offset = state.total_prefix_length = end
            state.node = node
            # Nodes this request already inserted were counted back then.
            if end > params.inserted_len and self._inc_hit_count_and_check(node):
                self._free_duplicates(state, duplicates, end)
                state.pending_actions.append(self._build_backup_kv_action(node))
                return
        self._free_duplicates(state, duplicates, offset)
        if offset:
            state.key, state.value = key[offset:], value[offset:]
        state.phase = _InsertPhase.COMMIT

    @staticmethod
    def _free_duplicates(state: Any, start: int, end: int) -> None:
        if start < end:
            state.pending_actions.append(FreeDeviceKV([state.value[start:end]]))

    def _split_node(self, key: RadixKey, child: UnifiedTreeNode, split_len: int) -> tuple[UnifiedTreeNode, Any]:
        """Put a node with the first ``split_len`` tokens above ``child``; what either tier has of them is divided too."""
        assert key is child.key, "an edge is split by its own key"
        parent = child.parent
        upper = self._new_node(priority=child.priority)
        upper.children = {child_key(key, split_len, self.page_size): child}
        upper.parent = parent
        upper.key, child.key = key[:split_len], key[split_len:]
        upper.hit_count = child.hit_count
        upper.creation_time = child.creation_time
        upper.load_back_pending_id = child.load_back_pending_id
        upper.usage = child.usage.copy()
        if self.tlru_bookkeeping:
            upper._tlru_cached_prefix_len = parent._tlru_cached_prefix_len + split_len
            upper._tlru_history_len = child._tlru_history_len
        if child.hash_value is not None:
            upper.hash_value, child.hash_value = split_node_hash_value(child.hash_value, split_len, self.page_size)
        self.components[0].redistribute_on_node_split(new_parent=upper, child=child)
        child.parent = upper
        parent.children[child_key(key, 0, self.page_size)] = upper

        action = None
        ack_id = child.write_through_pending_id
        if ack_id is not None:
            upper.write_through_pending_id = ack_id
            action = UpdatePendingBackupOnNodeSplit(
                ack_id=ack_id, old_node_id=child.id, new_node_id=upper.id, new_child_node_id=child.id
            )
        child.last_access_time = float(get_and_increase_time_counter())
        if child.component_data[BASE_COMPONENT_TYPE].host_value is not None:
            self._update_duplicate_tracking(upper)
        # Both tiers have of the upper part what they have of the child: it is no leaf of either, and the child stays what it was.
        self._note_change(child)  # newer, and shorter
        return upper, action

    def _touch_node(self, node: UnifiedTreeNode) -> None:
        node.last_access_time = float(get_and_increase_time_counter())
        self._note_change(node)

    def _note_change(self, node: UnifiedTreeNode) -> None:
        """File a leaf anew at once: left until it comes up, thousands would, one after the other, for a single victim."""
        self.evictable_device_leaves.refresh(node)
        if not node.children:
            self.evictable_host_leaves.refresh(node)

    def _new_node(self, priority: int = 0) -> UnifiedTreeNode:
        node = PlainNode(self.component_types, priority, Usage(self.retention.seconds, self.retention.requests))
        self._register_node(node)
        return node

    def _inc_hit_count_and_check(self, node: UnifiedTreeNode) -> bool:
        is_backup_due = super()._inc_hit_count_and_check(node)
        self.note_use(node)  # the hit is counted: the leaf is filed by what it is worth now
        return is_backup_due

    # ---- Leaves ----

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        if self._is_device_leaf(node):
            self.evictable_device_leaves.add(node)
            self.evictable_host_leaves.discard(node)
            return
        self.evictable_device_leaves.discard(node)
        if self._is_host_leaf(node):
            self.evictable_host_leaves.add(node)
        else:
            self.evictable_host_leaves.discard(node)

    def _note_child_left(self, parent: UnifiedTreeNode) -> None:
        """A child has left the GPU or the tree: its parent may be a leaf now, but for another child on the GPU."""
        for child in reversed(parent.children.values()):  # newest first, as in _is_device_leaf
            if child.component_data[BASE_COMPONENT_TYPE].value is not None:
                return
        self._update_evictable_leaf_sets(parent)

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        removed = node.parent.children.pop(child_key(node.key, 0, self.page_size))
        assert removed is node, f"node {node.id} is not its parent's child"
        if self.full_host_duplicates:
            self.full_host_duplicates.pop(node.id, None)
        self._unregister_node(node)
        self.policy.on_remove(node)
        self.evictable_device_leaves.discard(node)
        self.evictable_host_leaves.discard(node)

    def drive_device_eviction(self, num_tokens: int, victims: Iterator[UnifiedTreeNode] | None = None) -> EvictDeviceLeafResult:
        """Evict leaves from the GPU, the lowest first, as ``drive_host_eviction`` does in host memory: all in one call.

        Args:
            victims: to take in this order, each a leaf when its turn comes, instead of the lowest.
        """
        result = EvictDeviceLeafResult()
        tracker, leaves = result.tracker, self.evictable_device_leaves
        self._begin_tracking_unbacked_tokens()
        try:
            while tracker[BASE_COMPONENT_TYPE] < num_tokens:
                node = leaves.pop_lowest() if victims is None else next(victims, None)
                if node is None:
                    break
                backed_up = node.component_data[BASE_COMPONENT_TYPE].host_value is not None
                evict = self._demote if backed_up else self._delete_unbacked_device_leaf
                evict(node, tracker, result.device_frees, result.host_frees, cache_actions=result.cache_actions)
        finally:
            result.unbacked_tokens = self._finish_tracking_unbacked_tokens()
        return result

    def _delete_unbacked_device_leaf(
        self,
        node: UnifiedTreeNode,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Any],
    ) -> None:
        if self.kv_events.enabled:
            self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        freed, _ = self.components[0].evict_component(node, device_frees, host_frees, cache_actions, _ALL)
        tracker[BASE_COMPONENT_TYPE] += freed
        if self._is_tracking_unbacked_tokens:
            self._tracked_unbacked_tokens += freed
        self._remove_leaf_from_parent(node)
        parent = node.parent
        self._note_child_left(parent)
        if not parent.children and parent.component_data[BASE_COMPONENT_TYPE].value is None:
            self._iteratively_delete_tombstone_leaf(
                node, tracker, device_frees=device_frees, host_frees=host_frees, cache_actions=cache_actions
            )

    def _demote(
        self,
        node: UnifiedTreeNode,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[CacheAction | ComponentAction],
    ) -> None:
        data = node.component_data[BASE_COMPONENT_TYPE]
        assert data.value is not None and data.host_value is not None, f"node {node.id} is not on both tiers"
        freed, _ = self.components[0].evict_component(node, device_frees, host_frees, cache_actions, _DEVICE)
        tracker[BASE_COMPONENT_TYPE] += freed
        data.value = None
        self._update_evictable_leaf_sets(node)
        if self.kv_events.enabled:
            self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        self._note_child_left(node.parent)

    def _evict_host_leaf(
        self,
        node: UnifiedTreeNode,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Any],
    ) -> None:
        if self.kv_events.enabled:
            self.kv_events.record_remove(node, medium=StorageMedium.CPU)
        data = node.component_data[BASE_COMPONENT_TYPE]  # on the host alone: there is nothing else to free or to count
        slots, data.host_value = data.host_value, None
        host_frees[BASE_COMPONENT_TYPE].append(slots)
        tracker[BASE_COMPONENT_TYPE] += slots.numel()
        self._remove_leaf_from_parent(node)
        parent = node.parent
        if parent.children:
            return
        data = parent.component_data[BASE_COMPONENT_TYPE]
        if data.value is None and data.host_value is None:
            self._iteratively_delete_tombstone_leaf(
                node, tracker, device_frees=device_frees, host_frees=host_frees, cache_actions=cache_actions
            )
        else:
            self._update_evictable_leaf_sets(parent)

    def _eviction_priority(self, node: UnifiedTreeNode) -> Any:
        """What the index sorts by: lower leaves first."""
        return self.policy.static_key(node)

    def _exact_value(self, node: UnifiedTreeNode) -> float:
        """What a leaf is worth."""
        return self.policy.exact(node)

    def _refined_value(self, node: UnifiedTreeNode, key: Any) -> float:
        """What decides among the lowest (of a class)."""
        return self.policy.refine(node, key)

    def _eviction_class(self, node: UnifiedTreeNode) -> Any:
        """Which of the policy's classes a leaf is in."""
        return self.policy.class_of(node)

    def _class_value(self, known: Any, lowest: UnifiedTreeNode) -> float:
        return self.policy.value(known, lowest)

    def _is_device_leaf(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[BASE_COMPONENT_TYPE]
        if data.value is None or data.lock_ref > 0 or node is self.root_node:
            return False
        # Newest first: the oldest of many children are those that have left the GPU already.
        for child in reversed(node.children.values()):
            if child.component_data[BASE_COMPONENT_TYPE].value is not None:
                return False
        return True

    def _is_host_leaf(self, node: UnifiedTreeNode) -> bool:
        if node.children:
            return False
        data = node.component_data[BASE_COMPONENT_TYPE]
        return (
            data.value is None
            and data.host_value is not None
            and data.host_lock_ref == 0
            and data.lock_ref == 0
            and node is not self.root_node
        )
