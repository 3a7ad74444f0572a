"""Our nodes have what SGLang's have, and our comparisons give what its keys give."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_lora_tree.radix.plain_node_hooks import PlainNode, child_key, common_prefix
from sglang_lora_tree.radix.policies import Usage


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_common_prefix_is_match_at(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 4]))
    length = data.draw(st.sampled_from([1, 7, 4095, 4096, 4097, 20_000])) // page_size * page_size or page_size
    offset = data.draw(st.integers(0, 3)) * page_size
    edge = array("q", range(length))
    whole = array("q", [-1] * offset) + edge[: data.draw(st.integers(1, length))] + array("q", [-2] * 5)
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=2)):
        whole[position] = -3
    limit = data.draw(st.sampled_from([None, max(offset + page_size, len(whole) - 3)]))
    left, right = RadixKey(edge), RadixKey(whole, limit=limit)
    assert common_prefix(left, right, offset, page_size) == left.match_at(right, offset, page_size)


def test_a_node_has_what_sglang_nodes_have() -> None:
    """Another version of SGLang may give its nodes more; then ours must have it too."""
    theirs, ours = UnifiedTreeNode((ComponentType.FULL,)), PlainNode((ComponentType.FULL,), 0, Usage(0.0, 0))
    assert vars(ours).keys() == vars(theirs).keys() | {"usage"}
    for name in vars(theirs).keys() - {"id", "last_access_time", "creation_time", "component_data", "lru_prev", "lru_next"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.component_data == theirs.component_data[:1]


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("namespace", [None, "x"])
@pytest.mark.parametrize("page_size", [1, 2])
def test_child_key_is_child_key_at(page_size: int, namespace: str | None, salt: str | None) -> None:
    key = RadixKey(array("q", [5, 6, 7, 8]), namespace, cache_salt=salt)
    assert child_key(key, 2, page_size) == key.child_key_at(2, page_size)
