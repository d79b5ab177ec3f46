"""Properties of the engine SGLang. Does not import it."""

from typing import Final

from services.common.runspec.engines import FEW_THREADS, EngineKind

KIND: Final = EngineKind(
    adapter="services.extras.sglang.adapter:build",
    package="sglang",
    harmless_arguments=frozenset(
        {
            *("tp_size", "pp_size", "dp_size", "ep_size", "enable_dp_attention"),
            *(
                "context_length",
                "max_total_tokens",
                "max_prefill_tokens",
                "chunked_prefill_size",
            ),
            *(
                "mem_fraction_static",
                "cpu_offload_gb",
                "page_size",
            ),
            *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
            *(
                "sampling_backend",
                "schedule_policy",
                "schedule_conservativeness",
                "random_seed",
            ),
            *("disable_cuda_graph", "cuda_graph_max_bs", "disable_radix_cache"),
            *("disable_overlap_schedule", "enable_mixed_chunk", "disable_custom_all_reduce"),
        }
    ),
    run_arguments={
        "model_path": "model.path",
        "dtype": "trainer.dtype",
        "device": "",
        "max_running_requests": "rollout.max_running_samples",
        "load_format": "",
        "skip_tokenizer_init": "",
        "custom_weight_loader": "",
        "enable_memory_saver": "topology.placement",
        "quantization": "rollout.quantization",
        "kv_cache_dtype": "rollout.kv_cache_dtype",
        "sampling_mask_max_tokens": "rollout.sampling.top_k",
    },
    cache_dtypes={"fp8": "fp8_e4m3"},
    why_unquantized="its quantized parameters do not accept new weights",
    sleeps=True,
    reports_masks=True,
    reports_masks_on_cpu=True,
    reports_top_logprobs=True,
    gpu_arguments=("tp_size", "pp_size", "dp_size"),
    shared_gpu_arguments={"dp_size": "enable_dp_attention"},
    replica_argument="dp_size",
    stage_argument="pp_size",
    heads_argument="tp_size",
    memory_argument="mem_fraction_static",
    memory_excludes_working=True,
    cache_argument="max_total_tokens",
    length_argument="context_length",
    is_writable=True,
    # Its deterministic mode is an argument, which the adapter sets.
    invariant_environment={},
    cpu_environment=FEW_THREADS | {"SGLANG_USE_CPU_ENGINE": "1"},
    cpu_arguments={
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 32768,
        # Other processes use this memory too; max_total_tokens bounds what the engine takes.
        "mem_fraction_static": 0.3,
    },
)
