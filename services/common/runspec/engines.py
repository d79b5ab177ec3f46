"""Properties of the rollout engines that are needed before an engine starts. Imports no engine.

A new engine needs an adapter and an entry in ``ENGINES``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal

from services.common.runspec.base import look_up

InvariantEngine = Literal["torch", "vllm"]
"""Engines whose operators the trainer can compute with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine that a run can name."""

    adapter: str
    """Reference ``module:function`` of a function that takes an ``EngineConfig`` and returns
    an ``Engine``."""
    package: str | None = None
    """Package that must be installed where the engine runs."""
    arguments: frozenset[str] | None = None
    """Names of the engine's arguments; None if only its package knows them."""
    harmless_arguments: frozenset[str] = frozenset()
    """Arguments that load and start nothing, which every user may set; others require an admin."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Arguments that follow from the run, each with the key to set instead."""
    gpu_arguments: Sequence[str] = ()
    """Arguments whose product is the number of GPUs of one rollout."""
    shared_gpu_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments among ``gpu_arguments`` that need no GPUs if another argument is set, with the name
    of that one."""
    replica_argument: str = ""
    """The one of ``gpu_arguments`` for data parallelism: each part holds all weights."""
    stage_argument: str = ""
    """The one of ``gpu_arguments`` for pipeline parallelism: each part holds some layers."""
    heads_argument: str | None = None
    """The one of ``gpu_arguments`` for tensor parallelism: each part holds some heads of each
    layer."""
    memory_argument: str | None = None
    """Argument with the fraction of a GPU's memory that the engine takes."""
    memory_excludes_working: bool = False
    """True if that fraction covers weights and KV cache only, and is relative to the memory that is
    free when the engine starts."""
    cache_argument: str | None = None
    """Argument that bounds the KV cache."""
    cache_in_bytes: bool = False
    """True if ``cache_argument`` is in bytes per GPU, False if it is in tokens."""
    unplanned: Mapping[str, str] = field(default_factory=dict)
    """Arguments that take GPU memory which the memory plan does not count, each with the one to set
    instead."""
    length_argument: str | None = None
    """Argument with the max tokens of a prompt and its response together."""
    quantizations: Mapping[str, str | None] = field(default_factory=dict)
    """Values of ``rollout.quantization``, each with that of the engine's argument ``quantization``; None if
    it has no such argument."""
    cache_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Values of ``rollout.kv_cache_dtype``, each with that of the engine's argument ``kv_cache_dtype``."""
    quantizes_on_cpu: bool = False
    """True if the engine supports ``quantizations`` on a CPU."""
    why_unquantized: str = ""
    """Reason why the engine has no ``quantizations``, for people."""
    has_model: bool = True
    """True if the engine loads a model and takes GPU memory."""
    most_running: int = 1024
    """Upper bound of the default of ``rollout.max_running_samples``."""
    is_writable: bool = False
    """True if the engine can receive weights into its live weights (``weight_sync.mode: inplace``)."""
    reports_masks: bool = False
    """True if the engine reports which tokens could be drawn under ``top_p`` and ``top_k``."""
    sleeps: bool = False
    """True if the engine can release its GPU memory temporarily (``topology.placement:
    colocated``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the engine reads on import; those that are already set are kept."""
    process_modules: Sequence[str] = ()
    """Modules that the engine's own process imports on a GPU; importing them uses no GPU."""
    speculation: Sequence[str] = ()
    """Supported values of ``rollout.speculation.method``."""
    speculates_on_cpu: bool = False
    """True if the engine supports ``speculation`` on a CPU."""
    speculates_with_seeds: bool = False
    """True if the same seed draws the same tokens with speculation too."""
    invariant_environment: Mapping[str, str] | None = None
    """Environment variables to set for ``rollout.reproducible: batch_invariant``; None if the engine
    does not support it."""
    environment_without: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables to set if a package is not installed, by package."""
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set on a CPU only."""
    cpu_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the engine needs on a CPU."""

    def num_gpus(self, arguments: Mapping[str, Any]) -> int:
        """Returns the GPUs of one rollout with these arguments.

        Raises:
            ValueError: If a size is not a positive integer.
        """
        sizes = {name: _size(name, arguments) for name in self.gpu_arguments}
        for name, other in self.shared_gpu_arguments.items():
            if arguments.get(other):
                sizes[name] = 1
        return prod(sizes.values())

    def missing_bounds(self, arguments: Mapping[str, Any]) -> list[str]:
        names = (self.memory_argument, self.cache_argument)
        return [name for name in names if name is not None and name not in arguments]

    def check(self, arguments: Mapping[str, Any], *, most_tokens: int) -> None:
        """Checks arguments against the engine and the run.

        Args:
            most_tokens: Max tokens of a prompt and its response together.

        Raises:
            ValueError: If an argument is unknown or contradicts the run. The message names the
                argument, and the key or value that is right.
        """
        unknown = sorted(set(arguments) - self.arguments) if self.arguments is not None else []
        if unknown:
            raise ValueError(
                f"rollout.engine_arguments has {unknown}, but this engine accepts only "
                f"{sorted(self.arguments or ())}; remove the others"
            )
        for name in arguments:
            if name in self.given:
                raise ValueError(
                    f"rollout.engine_arguments.{name} is set by the run; remove it"
                    + (f", and set {self.given[name]}" if self.given[name] else "")
                )
        self.num_gpus(arguments)
        limit = arguments.get(self.length_argument) if self.length_argument else None
        if limit is not None and self.arguments is not None and type(limit) is not int:
            raise ValueError(
                f"rollout.engine_arguments.{self.length_argument} must be an integer (a number of tokens), "
                f"got {limit!r}"
            )
        if isinstance(limit, int) and limit < most_tokens:
            raise ValueError(
                f"rollout.engine_arguments.{self.length_argument} is {limit}, but a prompt and its response "
                f"may have {most_tokens} tokens (data.max_prompt_tokens plus rollout.max_response_tokens); "
                "raise or remove it"
            )


def _size(name: str, arguments: Mapping[str, Any]) -> int:
    size = arguments.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"rollout.engine_arguments.{name} must be an integer >= 1 (a number of GPUs), got {size!r}"
        )
    return size


# Threads of the engine's processes and of torch would compete for the cores.
_FEW_THREADS: Final = {"OMP_NUM_THREADS": "1"}

ENGINES: Final[Mapping[str, EngineKind]] = {
    "torch": EngineKind(
        adapter="services.rollout.engines.torch.engine:build",
        arguments=frozenset({"max_kv_tokens"}),
        harmless_arguments=frozenset({"max_kv_tokens"}),
        cache_argument="max_kv_tokens",
        length_argument="max_kv_tokens",
        most_running=256,
        is_writable=True,
        reports_masks=True,
        sleeps=True,
        quantizations={"fp8": None, "fp8_block": None},
        quantizes_on_cpu=True,
        speculation=("ngram",),
        speculates_on_cpu=True,
        speculates_with_seeds=True,
        invariant_environment={},
    ),
    "vllm": EngineKind(
        adapter="services.rollout.engines.vllm.adapter:build",
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
        given={
            "model": "model.path",
            "dtype": "trainer.dtype",
            "max_num_seqs": "rollout.max_running_samples",
            "load_format": "",
            "skip_tokenizer_init": "",
            "worker_extension_cls": "",
            "logprobs_mode": "",
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
            "services.rollout.engines.vllm.scheduler",
            "services.rollout.engines.vllm.worker",
        ),
        environment_without={"flashinfer": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}},
        cpu_environment=_FEW_THREADS
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
    ),
    "sglang": EngineKind(
        adapter="services.rollout.engines.sglang.adapter:build",
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
        given={
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
        },
        cache_dtypes={"fp8": "fp8_e4m3"},
        why_unquantized="its quantized parameters do not accept new weights",
        sleeps=True,
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
        cpu_environment=_FEW_THREADS | {"SGLANG_USE_CPU_ENGINE": "1"},
        cpu_arguments={
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": 32768,
            # Other processes use this memory too; max_total_tokens bounds what the engine takes.
            "mem_fraction_static": 0.3,
        },
    ),
    "fake": EngineKind(
        adapter="services.rollout.engines.fake:build",
        arguments=frozenset({"token_seconds", "median_tokens", "sigma"}),
        harmless_arguments=frozenset({"token_seconds", "median_tokens", "sigma"}),
        has_model=False,
        sleeps=True,
    ),
    "none": EngineKind(
        adapter="services.rollout.engines.fake:build_none", arguments=frozenset(), has_model=False
    ),
}
"""The engines by the value of ``rollout.engine``."""


def engine_kind(name: str) -> EngineKind:
    """Returns the engine with a name.

    Raises:
        ValueError: If the name is unknown.
    """
    return look_up(ENGINES, name, key="rollout.engine")
