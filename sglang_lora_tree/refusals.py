"""What ``--lora-tree`` serves: an allow-list of SGLang's settings, each with the reason why nothing else is, and of what a
running server may be asked to do beside answering.

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


_OTHER_WEIGHTS = (
    "adapters were checked against the base weights that the server started with, and history KV of every adapter and mix was "
    "computed with them; start another server with the other weights"
)
_WEIGHTS_SENT = f"layers have other names inside the LoRA wrappers, and {_EXACT}; read the weights from their folder"
_MEMORY = "adapters live in the memory that would be given back; stop the server instead"
_EXPERTS = "models with experts are not served; leave it out"
OPERATIONS: dict[str, str | None] = {
    "generate_request": None,
    "score_prompts": None,
    "score_request": None,
    "load_lora_adapter": None,
    "load_lora_adapter_from_tensors": None,
    "unload_lora_adapter": None,
    "open_session": None,
    "close_session": None,
    "flush_cache": None,
    "pause_generation": None,
    "continue_generation": None,
    "get_internal_state": None,
    "set_internal_state": None,  # nothing that it can set touches the tree
    "get_loads": None,
    "get_weights_by_name": None,
    "get_hicache_l3_cache_layout": None,
    "check_weights": None,  # but see WEIGHT_CHECKS
    "update_weight_version": None,  # a label that answers carry
    "start_profile": None,
    "stop_profile": None,
    "slow_down": None,
    "freeze_gc": None,
    "dumper_control": None,
    "handle_loop": None,
    "sigterm_watchdog": None,
    # There is no storage backend; detaching or clearing none does nothing.
    "attach_hicache_storage": "a storage backend would take adapter rows for KV; run without one",
    "detach_hicache_storage": None,
    "clear_hicache_storage": None,
    # SGLang refuses these itself, without ngram speculation.
    "add_external_corpus": None,
    "remove_external_corpus": None,
    "list_external_corpora": None,
    "update_weights_from_disk": _OTHER_WEIGHTS,
    "update_weights_from_distributed": _OTHER_WEIGHTS,
    "update_weights_from_ipc": _OTHER_WEIGHTS,
    "update_weights_from_tensor": _OTHER_WEIGHTS,
    "begin_weight_update": _OTHER_WEIGHTS,
    "end_weight_update": _OTHER_WEIGHTS,
    "init_weights_update_group": _OTHER_WEIGHTS,
    "destroy_weights_update_group": _OTHER_WEIGHTS,
    "init_weights_send_group_for_remote_instance": _WEIGHTS_SENT,
    "send_weights_to_remote_instance": _WEIGHTS_SENT,
    "release_memory_occupation": _MEMORY,
    "resume_memory_occupation": "none has been given back: " + _MEMORY,
    "start_expert_distribution_record": _EXPERTS,
    "stop_expert_distribution_record": _EXPERTS,
    "dump_expert_distribution_record": _EXPERTS,
    "scale_elastic_ep": _EXPERTS,
    "pd_role_switch": "the other side would take adapter slots for KV; start a server of the other role without --lora-tree",
}
"""What a running server may be asked for (methods of SGLang's TokenizerManager): None, or why it is refused, with the cure."""

WEIGHT_CHECKS = ("checksum", "snapshot", "compare")
"""The actions of ``check_weights`` that change nothing."""


class OperationError(ValueError):
    """A running server is asked for what cannot be right with ``--lora-tree``."""


def check_operation(operation: str) -> None:
    """Raise OperationError if a running server must not do this."""
    reason = OPERATIONS[operation]
    if reason is not None:
        raise OperationError(f"{operation} is refused with --lora-tree: {reason}")


def check_weights_action(action: str) -> None:
    """Raise OperationError if ``check_weights`` would change the weights that it checks."""
    if action not in WEIGHT_CHECKS:
        raise OperationError(
            f"check_weights {action!r} is refused with --lora-tree: want {', '.join(WEIGHT_CHECKS)}; {_OTHER_WEIGHTS}"
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
