"""Every start option of SGLang's, decided: an allow-list.

An option is served with any value (``SERVED``), with some values (``RULES``, of what SGLang makes of all options together),
or only left at its default (``UNSERVED``, of what the user wrote). One that is in none of the tables is refused too; a test
fails when SGLang gains one. ``ENVIRONMENT`` has the variables that do what an option would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_SHOWN = "it is not shown to be exact"
_BYPASS = "requests would bypass the plugin, and the base model would answer them"
_QUANTIZED = f"base weights in 16 or 32 bits are served, with others {NOT_SHOWN}; take a model that is not quantized"
_ATTENTION = (
    None, "triton", "torch_native", "flex_attention", "flashinfer", "fa3", "fa4", "trtllm_mha", "aiter", "intel_amx",
)  # fmt: skip
_NOT_PLAIN_ATTENTION = "it is not plain attention over all of a request's slots"

RULES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("disable_radix_cache", (False,), "adapters live in the prefix tree"),
    ("device", (None, "cuda", "cpu"), f"other devices have pools of their own, and {NOT_SHOWN}"),
    ("use_ray", (False,), "Ray starts schedulers and a server of its own, without the plugin"),
    ("enable_http2", (False,), f"another HTTP server runs then, and {NOT_SHOWN}; put a proxy in front"),
    ("nnodes", (1,), f"adapters are read from the files of one machine, and {NOT_SHOWN}"),
    ("pp_size", (1,), "an adapter's slots hold all layers of the model"),
    ("dp_size", (1,), "adapters are registered in one scheduler; run one server per replica behind a router"),
    ("attn_dp_size", (1,), "ranks would hold different adapters"),
    ("enable_dp_attention", (False,), "ranks would hold different adapters"),
    ("attn_cp_size", (1,), "the pool would be split over the context"),
    ("dcp_size", (1,), "the pool would be split over the context"),
    ("moe_dp_size", (1,), "expert layers are not served"),
    ("disaggregation_mode", ("null",), "the other side would take adapter slots for KV"),
    ("encoder_only", (False,), "there is no decoder to adapt"),
    ("speculative_algorithm", (None,), f"the draft model has no adapters, and {NOT_SHOWN}"),
    ("dllm_algorithm", (None,), "diffusion models skip the LoRA path"),
    ("dtype", ("auto", "half", "float16", "bfloat16", "float", "float32"), _QUANTIZED),
    ("quantization", (None, "unquant"), _QUANTIZED),
    (
        "load_format",
        ("auto", "safetensors", "pt", "npcache", "dummy", "mistral", "fastsafetensors", "instanttensor", "runai_streamer"),
        f"other formats quantize weights or name layers their own way, and {NOT_SHOWN}",
    ),
    ("kv_cache_dtype", ("auto", "bf16", "bfloat16", "fp16", "float16", "float32"), "adapter rows need KV of 16 or 32 bits"),
    ("attention_backend", _ATTENTION, _NOT_PLAIN_ATTENTION),
    ("decode_attention_backend", _ATTENTION, _NOT_PLAIN_ATTENTION),
    ("prefill_attention_backend", _ATTENTION, _NOT_PLAIN_ATTENTION),
    ("sampling_backend", (None, "flashinfer", "pytorch"), "others are for tests or for other devices"),
    ("enable_unified_memory", (False,), "slots would be virtual"),
    ("enable_page_major_kv_layout", (False,), "rows would not be contiguous per layer"),
    ("enable_kv_cache_sharding", (False,), "slots would differ between ranks"),
    ("enable_hisparse", (False,), "the pool would hold only a part of each layer"),
    ("hicache_host_memory_mode", ("cache",), "adapters need a host tier that keeps them"),
    ("hicache_storage_backend", (None,), "a storage backend would take adapter rows for KV"),
    ("hicache_write_policy", ("write_through", "write_through_selective"), "an adapter's KV must not lose its host parent"),
    ("hicache_mem_layout", ("layer_first",), "adapter rows are written plane by plane"),
    ("hicache_io_backend", ("kernel", "direct"), f"others are for other devices, and {NOT_SHOWN}"),
    ("enable_unified_cache_external_linker", (False,), "an external cache would take adapter rows for KV"),
    ("enable_memory_saver", (False,), "adapters would be copied to memory that has been given back"),
    ("prefill_only_disable_kv_cache", (False,), "adapters live in the KV pool"),
    ("enable_lmcache", (False,), "LMCache's keys do not know adapters"),
    ("enable_flexkv", (False,), "FlexKV replaces the tree"),
    ("enable_session_radix_cache", (False,), f"sessions hold nodes across requests, and {NOT_SHOWN}"),
    ("enable_streaming_session", (False,), f"sessions hold nodes across requests, and {NOT_SHOWN}"),
    ("kv_events_config", (None,), "events would name adapter rows as KV blocks"),
    ("kv_canary", ("none", None), "the canary reads every slot as KV"),
    ("enable_lora_overlap_loading", (None, False), "HiCache loads adapters"),
    ("enable_pdmux", (False,), "two batches would share the batch's tables"),
    ("enable_two_batch_overlap", (False,), "two batches would share the batch's tables"),
    ("enable_single_batch_overlap", (False,), "two streams would share the batch's tables"),
    ("enable_mixed_chunk", (False,), f"prompts and decoding would share a batch, and {NOT_SHOWN}"),
    ("enable_torch_compile", (False,), f"compiled layers bypass the LoRA wrappers, and {NOT_SHOWN}"),
    ("cuda_graph_backend_decode", (None, "full", "disabled"), NOT_SHOWN),
    ("cuda_graph_backend_prefill", (None, "breakable", "disabled"), NOT_SHOWN),
    ("model_impl", ("auto", "sglang"), "other model implementations bypass the LoRA wrappers"),
    ("elastic_ep_backend", (None,), "ranks may come and go"),
    ("tokenizer_worker_num", (1,), "SGLang loads no plugins in tokenizer workers, so mixes would be ignored there"),
    ("grpc_mode", (False,), "the gRPC server bypasses the plugin"),
    ("smg_grpc_mode", (False,), "the gRPC server bypasses the plugin"),
    ("grpc_port", (None,), "the gRPC server bypasses the plugin"),
    ("cpu_offload_gb", (0,), f"offloaded layers are wrapped twice, and {NOT_SHOWN}"),
    ("offload_group_size", (-1, 0), f"offloaded layers are wrapped twice, and {NOT_SHOWN}"),
    ("enable_nvidia_megakernel", (False,), "fused layers bypass the LoRA wrappers"),
    ("enable_amd_monokernel", (False,), "fused layers bypass the LoRA wrappers"),
    ("enable_layernorm_sp", (False,), f"ranks would see different tokens, and {NOT_SHOWN}"),
    ("enable_attn_tp_input_scattered", (False,), f"ranks would see different tokens, and {NOT_SHOWN}"),
    ("enable_dense_mlp_attn_tp", (False,), f"ranks would see different tokens, and {NOT_SHOWN}"),
    ("enable_prefill_cp", (False,), "the pool would be split over the context"),
    ("enable_pd_role_switch", (False,), "the other side would take adapter slots for KV"),
    ("uno_lora_path", (None,), "it is an adapter of a draft model"),
)
"""Options of which some values are served: name, these values (the default first), why no others."""

_ON = ("1", "true", "yes", "y")
ENVIRONMENT: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    ("SGLANG_RUST_SERVER", _ON, f"the Rust server answers in place of SGLang's own in Python: {_BYPASS}"),
    ("SGLANG_TEST_SCRIPTED_RUNTIME", _ON, "a script takes the place of the scheduler's loop"),
    ("SGLANG_USE_MLX", _ON, "MLX has a model and a pool of its own"),
    ("SGLANG_EXTERNAL_MODEL_PACKAGE", None, "the package's models are not known to have the layers that adapters change"),
    ("SGLANG_USE_HND_KVCACHE", _ON, "a slot's rows would not be contiguous"),
    ("SGLANG_AITER_KV_CACHE_LAYOUT", ("vectorized_5d",), "a slot's rows would not be contiguous"),
    ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", _ON, "the pool would get another size after the graphs that read it were captured"),
    ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", None, f"the pool would lie in memory for KV transfers, and {NOT_SHOWN}"),
    ("SGLANG_HICACHE_HOST_MEM_BACKEND", None, f"the host pool would be another, and {NOT_SHOWN}"),
    ("SGLANG_RADIX_FORCE_MISS", _ON, f"requests would lose their place in the tree, and {NOT_SHOWN}"),
    ("SGLANG_EXPERIMENTAL_LORA_OPTI", _ON, "SGLang's own fast LoRA path would stand beside ours"),
    ("SGLANG_ENABLE_COLOCATED_BATCH_GEN", _ON, f"requests and plans would reach the scheduler at other times, and {NOT_SHOWN}"),
    ("DUMPER_ENABLE", _ON, "a linear layer's output is finished by the layer after it: what is dumped would lack adapters"),
    ("DUMPER_GRAFTER_ENABLE", _ON, "other tensors would take the place of the model's"),
    ("DUMPER_SOURCE_PATCHER_CONFIG", None, "it changes SGLang's source"),
    ("SGLANG_CPU_QUANTIZATION", _ON, _QUANTIZED),
    ("SGLANG_INT4_WEIGHT", _ON, _QUANTIZED),
)
"""Environment variables that replace what the plugin builds on: name, the values that do (None: any), why not."""

_UNSERVED: dict[str, str] = {
    "it belongs to speculative decoding, which is refused": """
        speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format speculative_num_steps
        speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_dsa_topk_backend speculative_draft_kv_cache_dtype
        speculative_draft_window_size speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
        _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive
        speculative_adaptive_config decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        decoupled_spec_role spec_trace_dir speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size speculative_boundary_reduction
        speculative_use_block_verification speculative_draft_sink_size decrypted_draft_config_file
        enable_draft_weights_cpu_backup enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids""",
    "models with experts are not served": """
        dwdp_size ep_size moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend
        flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config moe_dense_tp_size
        enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode ep_join_rank_offset
        elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion enable_fused_moe_sum_all_reduce
        enable_shared_experts_attn_tp shared_experts_tp_size flashinfer_a2a_dispatch_type enable_paged_experts
        paged_experts_num_resident enable_megamoe_for_layernorm_sp enable_return_routed_experts
        experts_shared_outer_loras lora_use_virtual_experts kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token""",
    "models with state-space or linear-attention layers are not served": """
        max_mamba_cache_size mamba_backend mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_full_memory_ratio mamba_radix_cache_strategy uses_mamba_radix_cache
        mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm
        linear_replayssm_cache_len enable_linear_replayssm_spec enable_cp_tp_group_sharing enable_scattered_sconv""",
    "models with latent, sparse or sliding-window attention are not served": """
        dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        dsa_triton_union enable_dsa_fused_indexer enable_dsa_cache_layer_split enable_deepseek_v4_fp4_indexer
        dsv4_attn_backend qsa_indexer_dtype enable_return_indexer_topk flashinfer_mla_disable_ragged
        disable_chunked_prefix_cache c128_page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
        swa_prefix_tails disable_hybrid_swa_memory enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
        cuda_graph_prefill_max_context enable_linker_mla_dedup hisparse_config""",
    "models that take images, video or sound are not served": """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend disable_fast_image_processor
        mm_feature_transport enable_precise_embedding_interpolation language_only language_model_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder asr_max_buffer_seconds asr_max_concurrent_sessions""",
    "models of other kinds are not served": """
        is_embedding enable_mis dllm_algorithm_config dllm_fdfo ple_offload_embedding ple_offload_backend ple_offload_dir
        mlx_enable_sampling""",
    _QUANTIZED: """
        quantization_param_path modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
        modelopt_export_path quantize_and_serve rl_quant_profile fp8_gemm_runner_backend fp4_gemm_runner_backend
        prefill_kv_cache_dequant_dtype""",
    "it is for a server that shares its work with others, which is refused": """
        node_rank pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking load_balance_method
        dcp_comm_backend dcp_replicate_q_proj cp_strategy enable_cp_decode_attn_tp
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all disable_attn_tp_gather
        enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms disaggregation_transfer_backend disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts disaggregation_enable_kv_checksum
        disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy pdmux_config_path
        sm_group_num tbo_token_distribution_threshold""",
    "it belongs to a cache beside the tree, which is refused": """
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts unified_cache_external_linker_backend
        unified_cache_external_linker_config lmcache_config_file flexkv_config_file""",
    "it belongs to the gRPC server, which bypasses the plugin": """
        grpc_worker_threads sidecar sidecar_args grpc_response_timeout_secs smg_http_sidecar_port""",
    "it belongs to several tokenizer workers, which are refused": "enable_http_worker_reuseport",
    "weights must be those that the server started with, read from the model's folder": """
        custom_weight_loader startup_weight_load_mode remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout
        enable_weights_cpu_backup offload_num_in_group offload_prefetch_step offload_mode decrypted_config_file""",
    "layers are wrapped, and their output is finished by the layer after them": """
        forward_hooks debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        msprobe_dump_config enable_fused_qk_norm_rope enable_torch_compile_debug_mode torch_compile_max_bs""",
    f"sums over ranks would be done by a fused layer or in fewer bits, and {NOT_SHOWN}": """
        boundary_reduction enable_quant_communications enable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_nccl_nvls enable_symm_mem enable_mscclpp enable_torch_symm_mem""",
    "the tree is not shown to be right with it": "strip_thinking_cache kv_canary_real_data kv_canary_sweep_interval",
    "the queue brings adapters in before it admits, and is not shown to be right with it": """
        min_free_slots_delay scheduler_recv_interval gated_launch_port""",
    "say it by --cuda-graph-backend-*, --cuda-graph-max-bs-* and --cuda-graph-bs-* instead": "cuda_graph_config",
    f"our kernels have not run beside its operators, and {NOT_SHOWN}": """
        enable_deterministic_inference rl_on_policy_target enable_lean_attention debug_cuda_graph""",
    "adapters leave as --radix-eviction-policy and retention_policy say": "lora_eviction_policy",
    "it belongs to another LoRA backend": "max_lora_chunk_size",
}

_SERVED: dict[str, str] = {
    "set by --lora-tree": """
        enable_lora lora_backend radix_cache_backend enable_hierarchical_cache max_lora_rank lora_target_modules""",
    "adapters": "lora_paths max_loaded_loras max_loras_per_batch lora_strict_loading lora_drain_wait_threshold",
    "the model, and how its files are read": """
        model_path model_loader_extra_config trust_remote_code context_length revision model_config_parser
        json_model_override_args download_dir model_checksum delete_ckpt_after_loading weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        engine_info_bootstrap_port weight_version""",
    "the tokenizer": """
        tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init detokenizer_worker_num
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode""",
    "the HTTP server and what it answers": """
        host port fastapi_root_path skip_server_warmup warmups http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh
        api_key admin_api_key served_model_name chat_template trust_request_chat_template hf_chat_template_name
        completion_template file_storage_path enable_cache_report return_input_ids return_output_ids reasoning_parser
        default_chat_template_kwargs enable_strict_thinking tool_call_parser tool_server allow_auto_truncate
        stream_interval batch_notify_size stream_response_default_include_usage incremental_streaming_output
        enable_response_store""",
    "from logits to tokens, after the model": """
        sampling_defaults preferred_sampling_params enable_custom_logit_processor enable_fp32_lm_head
        enable_return_hidden_states return_hidden_states_mode sampling_mask_max_tokens grammar_backend
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        disable_outlines_disk_cache random_seed enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all""",
    "how much memory the pools get": """
        mem_fraction_static max_total_tokens page_size hicache_ratio hicache_size hicache_host_memory_fraction""",
    "who is admitted when, and what leaves": """
        max_running_requests max_queued_requests chunked_prefill_size max_prefill_tokens prefill_max_requests
        prefill_decode_interval prefill_decode_interval_min_bs schedule_policy schedule_conservativeness
        enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled
        schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
        num_continuous_decode_steps disable_overlap_schedule radix_eviction_policy radix_eviction_policy_config
        _radix_eviction_policy_explicitly_set""",
    "devices and processes of one machine": """
        tp_size base_gpu_id gpu_id_step nccl_port dist_timeout dist_init_addr enable_p2p_check numa_node gc_threshold
        watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler disable_custom_all_reduce pre_warm_nccl
        enforce_disable_flashinfer_allreduce_fusion""",
    "kernels and graphs of the base model": """
        enable_tf32_matmul bf16_gemm_backend triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size disable_flashinfer_autotune flashinfer_autotune_skip_ops
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc enable_layerwise_nvtx_marker""",
    "logs, metrics and traces": """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
        enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
        bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs
        decode_log_interval enable_request_time_stats_logging load_publish_endpoint enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint
        otlp_service_name export_metrics_to_file export_metrics_to_file_dir stat_loggers""",
}


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: group for group, names in groups.items() for name in names.split()}


UNSERVED = _by_name(_UNSERVED)
"""Options that must be left at their defaults: name -> why."""
SERVED = frozenset(_by_name(_SERVED))
"""Options of which every value is served."""
