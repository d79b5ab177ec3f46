"""Properties of the engine vLLM. Does not import it."""

from typing import Final

from services.common.runspec.engines import FEW_THREADS, EngineKind

CORES_FOR_TWO_PROCESSES: Final = 4
"""The trainer, the rollout and the engine's two processes can occupy one core each."""
CAPTURED_SIZES: Final = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)
"""Numbers of tokens for which vLLM captures CUDA graphs, up to twice the slots of most runs, because a step
without a graph launches each layer's kernels one by one. All runs have the same list: vLLM compiles a model
again if it differs, which takes half a minute, and a graph takes less than 0.1 s."""
MAX_IMAGE_TOKENS: Final = "slipstream_max_image_tokens"
"""Key of the model's configuration in vLLM: max tokens of one image."""

KIND: Final = EngineKind(
    adapter="services.extras.vllm.adapter:build",
    package="vllm",
    harmless_arguments=frozenset(
        {
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
            *("prefill_context_parallel_size", "decode_context_parallel_size"),
            *("enable_expert_parallel", "enable_eplb", "disable_custom_all_reduce"),
            *("max_model_len", "max_num_batched_tokens", "max_num_partial_prefills"),
            *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
            *("block_size", "cpu_offload_gb", "seed"),
            *("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill"),
            *(
                "async_scheduling",
                "disable_cascade_attn",
                "scheduling_policy",
                "attention_backend",
            ),
        }
    ),
    run_arguments={
        "model": "model.path",
        "dtype": "trainer.dtype",
        "max_num_seqs": "rollout.max_running_samples",
        "load_format": "",
        "skip_tokenizer_init": "",
        "worker_extension_cls": "",
        "logprobs_mode": "",
        "max_logprobs": "algorithm.score_centering",
        "return_sampling_mask": "rollout.sampling.top_k",
        "scheduler_cls": "",
        "limit_mm_per_prompt": "data.max_images",
        "enable_sleep_mode": "topology.placement",
        "quantization": "rollout.quantization",
        "quantization_config": "rollout.quantization",
        "kv_cache_dtype": "rollout.kv_cache_dtype",
        "speculative_config": "rollout.speculation",
    },
    # Its layerwise reload quantizes each layer again.
    quantizations={"fp8": "fp8_per_tensor", "fp8_block": "fp8_per_block"},
    cache_dtypes={"fp8": "fp8"},
    sleeps=True,
    speculation=("ngram", "suffix", "mtp", "eagle"),
    gpu_arguments=(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
    ),
    replica_argument="data_parallel_size",
    stage_argument="pipeline_parallel_size",
    heads_argument="tensor_parallel_size",
    memory_argument="gpu_memory_utilization",
    cache_argument="kv_cache_memory_bytes",
    cache_in_bytes=True,
    unplanned={"num_gpu_blocks_override": "kv_cache_memory_bytes"},
    length_argument="max_model_len",
    is_writable=True,
    reports_masks=True,
    reports_top_logprobs=True,
    environment={
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # This process has initialized the GPU driver, after which a forked child cannot use
        # its GPUs.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    },
    invariant_environment={"VLLM_BATCH_INVARIANT": "1"},
    process_modules=(
        "vllm.v1.engine.core",
        "vllm.v1.worker.gpu_worker",
        "vllm.model_executor.models.qwen2",
        "services.extras.vllm.scheduler",
        "services.extras.vllm.worker",
    ),
    environment_without={"flashinfer": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}},
    cpu_environment=FEW_THREADS
    | {
        # One child process instead of two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Otherwise the first request for logprobs compiles a C++ kernel, for a minute.
        "TORCH_COMPILE_DISABLE": "1",
    },
    cpu_arguments={
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
    },
)
