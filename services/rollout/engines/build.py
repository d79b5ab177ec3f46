"""Builds the generation engine that a run specifies."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from transformers import PretrainedConfig

from services.common.callables import load_callable
from services.common.host import missing_compiler
from services.common.memory.rollout import MemoryPlan, engine_share, needed_bytes
from services.common.models.loading import check_free_memory
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.engines import engine_kind
from services.common.runspec.rollout import RolloutSpec
from services.common.runspec.run import ModelSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.engines.base import Engine, split_stop_texts
from services.rollout.engines.engine_config import EngineConfig, ImageLimits
from services.rollout.engines.imports import prepare_environment

logger = logging.getLogger(__name__)


class MemoryPlanner(Protocol):
    """Plans the memory of an engine's GPU."""

    def __call__(self, config: PretrainedConfig, *, gpu_bytes: int) -> MemoryPlan:
        """Returns the plan. Raises ValueError if the engine does not fit."""


def build_engine(  # noqa: PLR0913 -- what a run says about its engine
    spec: RolloutSpec,
    model: ModelSpec,
    config: PretrainedConfig,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
    plan: MemoryPlanner | None = None,
    is_written_in_place: bool = False,
    adds_adapters: bool = False,
    sleeps: bool = False,
    images: ImageLimits | None = None,
    top_logprobs: int = 0,
    reach: AddressPolicy | None = None,
    worker: str = "",
    report: Callable[[str, str], None] | None = None,
) -> Engine:
    """Builds the engine with random weights; weight sync delivers the real ones.

    Args:
        config: Configuration of the model.
        plan: Plans the GPU's memory; None for an engine that receives no weights and has the GPU to itself.
        is_written_in_place: True if weights are received directly into the live weights.
        adds_adapters: True if only adapters arrive, which the engine adds to its own base weights.
        sleeps: True if the engine must release its GPU memory from time to time.
        images: Limits of images; None if prompts have none.
        top_logprobs: Max number of most likely tokens that a request asks for.
        reach: Addresses that an engine elsewhere may have.
        worker: Run and worker, as an engine elsewhere names its user.
        report: Receives events of the engine.

    Raises:
        ValueError: If the engine is not installed, or lacks a feature that the run needs.
    """
    if device.type == "cuda" and (problem := missing_compiler()):
        raise ValueError(problem)
    arguments = dict(spec.engine_arguments)
    if device.type == "cuda" and plan is not None and engine_kind(spec.engine).has_model:
        memory = plan(config, gpu_bytes=torch.cuda.get_device_properties(device).total_memory)
        logger.info("memory planned", extra={"table": memory.table()})
        arguments |= engine_share(memory, engine_kind(spec.engine), arguments)
        if not memory.other_workers:
            check_free_memory(needed_bytes(memory, engine_kind(spec.engine), arguments), device)
        sleeps = sleeps and not memory.stays_awake
    speculation = spec.speculation
    if speculation is not None and speculation.method == "mtp" and speculation.model is None:
        speculation = speculation.model_copy(update={"model": model.path})
    engine_config = EngineConfig(
        config=config,
        dtype=dtype,
        device=device,
        max_running=spec.max_running_samples,
        kv_policy=spec.kv_policy,
        is_reproducible=bool(spec.reproducible),
        is_invariant=spec.reproducible == "batch_invariant",
        arguments=arguments,
        decode=tokenizer.decode,
        returns_experts=spec.routing_replay != "off",
        returns_masks=spec.sampling.is_truncated,
        top_logprobs=top_logprobs,
        is_written_in_place=is_written_in_place,
        adds_adapters=adds_adapters,
        sleeps=sleeps,
        quantization=spec.quantization,
        unquantized_layers=spec.unquantized_layers,
        kv_cache_dtype=spec.kv_cache_dtype,
        images=images,
        vocab_size=tokenizer.vocab_size,
        stop_token=tokenizer.eos_id,
        speculation=speculation,
        reach=reach,
        worker=worker,
        **({} if report is None else {"report": report}),
    )
    engine = make_engine(spec.engine, engine_config)
    _check_supported(spec, engine, tokenizer)
    return engine


def make_engine(name: str, config: EngineConfig) -> Engine:
    """Builds an engine without starting it; on a CPU, with the settings that it needs there.

    Raises:
        ValueError: If the engine is unknown or not installed, refuses its arguments, or cannot be
            batch-invariant, quantized or speculating on the device.
    """
    kind, is_cpu = engine_kind(name), config.device.type == "cpu"
    for problem in kind.machine_problems(
        name,
        config,
        is_cpu=is_cpu,
        is_invariant=config.is_invariant,
        truncates=config.returns_masks,
    ):
        raise ValueError(problem)
    prepare_environment(kind, is_cpu=is_cpu, is_invariant=config.is_invariant)
    if is_cpu:
        config = replace(config, arguments={**kind.cpu_arguments, **config.arguments})
    engine: Engine = load_callable(kind.adapter)(config)
    return engine


def _check_supported(spec: RolloutSpec, engine: Engine, tokenizer: Tokenizer) -> None:
    can = engine.capabilities
    try:
        stop_texts, _ = split_stop_texts(spec.sampling.stop, tokenizer)
    except ValueError as error:
        raise ValueError(f"rollout.sampling.stop: {error}") from error
    if spec.kv_policy not in can.kv_policies:
        raise ValueError(
            f"rollout.kv_policy is {spec.kv_policy!r}, but engine {can.name!r} supports "
            f"{sorted(can.kv_policies)}"
        )
    if spec.routing_replay != "off" and not can.routed_experts:
        raise ValueError(
            f"rollout.routing_replay is {spec.routing_replay!r}, but engine {can.name!r} as installed "
            "does not report chosen experts; set it to 'off', or use the engine 'torch'"
        )
    if stop_texts and not can.stop_texts:
        raise ValueError(
            f"rollout.sampling.stop is set, but engine {can.name!r} supports stop tokens only"
        )
