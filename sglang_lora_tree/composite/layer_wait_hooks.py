"""A prefill begins while its adapters come in: before each model layer it waits for the rows that this layer reads.

Hook: ``sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward`` (BEFORE). Attention is where SGLang's prefill
graphs are cut, so it runs in Python with graphs and without; there the pass waits for what the next layer reads, and for what
the first layer reads before it begins. (SGLang's own waits, for history KV, stand where an attention backend reads the pool,
and some do not where a prompt has no history.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.cache_controller import LayerDoneCounter
from sglang.srt.plugins.hook_registry import HookType

from sglang_lora_tree.composite import backend_hooks
from sglang_lora_tree.radix.layout import AdapterLayout


@dataclass(frozen=True)
class LayerWait:
    """What a forward pass waits for.

    Attributes:
        counter: SGLang's events of the copy that the pass has started, one for each pool layer.
        pool_layers: int (layers,): by model layer, the highest pool layer of which it reads rows that come in.
    """

    counter: LayerDoneCounter
    pool_layers: np.ndarray

    @classmethod
    def of(cls, counter: LayerDoneCounter, coming: Iterable[AdapterLayout]) -> LayerWait | None:
        """For the adapters that come in with a batch; None if there are none."""
        layers = [layout.last_pool_layer for layout in coming]
        return cls(counter, np.maximum.reduce(layers)) if layers else None

    def wait(self, layer: int) -> None:
        """Nothing that the current stream is given from now on begins before the rows of a model layer are there."""
        if layer < len(self.pool_layers) and self.pool_layers[layer] >= 0:
            self.counter.wait_until(int(self.pool_layers[layer]))


def is_hooked(attention: AttentionBackend) -> bool:
    """Whether every prefill of an attention backend passes the hook."""
    prefill = getattr(attention, "prefill_backend", attention)  # of SGLang's HybridAttnBackend, which calls its parts
    return type(prefill).forward is AttentionBackend.forward


def wait_for_next_layer(attention: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``AttentionBackend.forward``."""
    backend = backend_hooks.current()
    if backend is not None and backend.layer_wait is not None:
        backend.layer_wait.wait(layer.layer_id + 1)


HOOKS: list[tuple[str, Callable[..., Any], HookType]] = [
    ("sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward", wait_for_next_layer, HookType.BEFORE)
]
