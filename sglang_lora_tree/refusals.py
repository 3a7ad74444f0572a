"""What ``--lora-tree`` serves: an allow-list of SGLang's settings, each with the reason why nothing else is.

A setting that is not named here does not touch the tree, the pool, the request path or the LoRA layers. What these settings
lead to (the pool that SGLang builds) is checked again in the scheduler process (``radix.cache_hooks.check_kv_pool``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_EXACT = "it is not shown to be exact"
_RULES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("disable_radix_cache", (False,), "adapters live in the prefix tree"),
    ("pp_size", (1,), "an adapter's slots hold all layers of the model"),
    ("dp_size", (1,), "adapters are registered in one scheduler; run one server per replica behind a router"),
    ("attn_dp_size", (1,), "ranks would hold different adapters"),
    ("enable_dp_attention", (False,), "ranks would hold different adapters"),
    ("attn_cp_size", (1,), "the pool would be split over the context"),
    ("dcp_size", (1,), "the pool would be split over the context"),
    ("moe_dp_size", (1,), "expert layers are not served"),
    ("disaggregation_mode", ("null",), "the other side would take adapter slots for KV"),
    ("encoder_only", (False,), "there is no decoder to adapt"),
    ("speculative_algorithm", (None,), f"the draft model has no adapters, and {_EXACT}"),
    ("dllm_algorithm", (None,), "diffusion models skip the LoRA path"),
    ("kv_cache_dtype", ("auto", "bf16", "bfloat16", "fp16", "float16", "float32"), "adapter rows need KV of 16 or 32 bits"),
    ("enable_unified_memory", (False,), "slots would be virtual"),
    ("enable_page_major_kv_layout", (False,), "rows would not be contiguous per layer"),
    ("enable_kv_cache_sharding", (False,), "slots would differ between ranks"),
    ("enable_hisparse", (False,), "the pool would hold only a part of each layer"),
    ("hicache_host_memory_mode", ("cache",), "adapters need a host tier that keeps them"),
    ("hicache_storage_backend", (None,), "a storage backend would take adapter rows for KV"),
    ("hicache_write_policy", ("write_through", "write_through_selective"), "an adapter's KV must not lose its host parent"),
    ("hicache_mem_layout", ("layer_first",), "adapter rows are written plane by plane"),
    ("enable_unified_cache_external_linker", (False,), "an external cache would take adapter rows for KV"),
    ("enable_memory_saver", (False,), "adapters would be copied to memory that has been given back"),
    ("prefill_only_disable_kv_cache", (False,), "adapters live in the KV pool"),
    ("enable_lmcache", (False,), "LMCache's keys do not know adapters"),
    ("enable_flexkv", (False,), "FlexKV replaces the tree"),
    ("enable_session_radix_cache", (False,), f"sessions hold nodes across requests, and {_EXACT}"),
    ("enable_streaming_session", (False,), f"sessions hold nodes across requests, and {_EXACT}"),
    ("kv_events_config", (None,), "events would name adapter rows as KV blocks"),
    ("kv_canary", ("none", None), "the canary reads every slot as KV"),
    ("enable_lora_overlap_loading", (None, False), "HiCache loads adapters"),
    ("enable_pdmux", (False,), "two batches would share the batch's tables"),
    ("enable_two_batch_overlap", (False,), "two batches would share the batch's tables"),
    ("enable_single_batch_overlap", (False,), "two streams would share the batch's tables"),
    ("enable_torch_compile", (False,), f"compiled layers bypass the LoRA wrappers, and {_EXACT}"),
    ("model_impl", ("auto", "sglang"), "other model implementations bypass the LoRA wrappers"),
    ("elastic_ep_backend", (None,), "ranks may come and go"),
    ("tokenizer_worker_num", (1,), "SGLang loads no plugins in tokenizer workers, so mixes would be ignored there"),
    ("grpc_mode", (False,), "the gRPC server bypasses the plugin"),
    ("smg_grpc_mode", (False,), "the gRPC server bypasses the plugin"),
    ("grpc_port", (None,), "the gRPC server bypasses the plugin"),
    ("cpu_offload_gb", (0,), f"offloaded layers are wrapped twice, and {_EXACT}"),
    ("offload_group_size", (-1, 0), f"offloaded layers are wrapped twice, and {_EXACT}"),
    ("enable_nvidia_megakernel", (False,), "fused layers bypass the LoRA wrappers"),
    ("enable_amd_monokernel", (False,), "fused layers bypass the LoRA wrappers"),
    ("enable_layernorm_sp", (False,), f"ranks would see different tokens, and {_EXACT}"),
    ("enable_attn_tp_input_scattered", (False,), f"ranks would see different tokens, and {_EXACT}"),
    ("enable_dense_mlp_attn_tp", (False,), f"ranks would see different tokens, and {_EXACT}"),
    ("enable_prefill_cp", (False,), "the pool would be split over the context"),
    ("enable_pd_role_switch", (False,), "the other side would take adapter slots for KV"),
    ("uno_lora_path", (None,), "it is an adapter of a draft model"),
)


def find_refusals(config: Any) -> list[str]:
    """One line for every setting of a resolved configuration that cannot be served exactly."""
    refusals = []
    for name, served, reason in _RULES:
        value = getattr(config, name, served[0])
        if value not in served:
            flag = "--" + name.replace("_", "-")
            refusals.append(f"{flag} {value}: {reason}; leave it at {' or '.join(str(choice) for choice in served)}")
    return refusals


def check_options(options: Mapping[str, Any]) -> None:
    """As :func:`check_config`, for what a user wrote: SGLang's own checks would speak of flags that he never gave."""
    check_config(SimpleNamespace(**{name: value for name, value in options.items() if value is not None}))


def check_config(config: Any) -> None:
    """Raise ValueError with every reason why this configuration cannot be served."""
    refusals = find_refusals(config)
    if refusals:
        raise ValueError("--lora-tree refuses to start:\n  " + "\n  ".join(refusals))
