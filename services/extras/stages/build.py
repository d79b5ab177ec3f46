"""Loads the models of a process: its pipeline stage, sharded over the processes of the stage."""

from typing import cast

import torch
from transformers import PreTrainedModel

from services.common.runspec.run import RunSpec
from services.extras.stages.engine import StagesEngine
from services.extras.stages.layout import Stage, build_stage
from services.extras.stages.modules import StagedCritic, StagedPolicy
from services.trainer.engines.base import EngineArgs, ModelRole, TrainEngine
from services.trainer.engines.fsdp import build as fsdp
from services.trainer.engines.fsdp.oom import load_oom_limits
from services.trainer.model.policy import Critic, Policy, freeze


def build(args: EngineArgs) -> dict[ModelRole, TrainEngine]:
    """Loads the models. Blocks. All ranks must call it.

    Raises:
        ValueError: If a model does not load, cannot be divided, or does not fit into memory.
    """
    if args.spec.trainer.pipeline_parallel == 1:
        return fsdp.build(args)
    settings = args.settings
    topology, stage = build_stage(
        args.spec.trainer,
        device=args.device,
        rank=settings.rank,
        world_size=settings.world_size,
    )
    spec = fsdp.fitted_to_gpu(args.spec, settings, device=topology.device)
    oom_limits = load_oom_limits(settings, spec.trainer, ranks=topology.data)
    engines: dict[ModelRole, TrainEngine] = {}
    for role in args.roles:
        source = spec.of_reference if role == "reference" else spec
        loader = fsdp.Loader(source, settings, topology, args.progress)
        engines[role] = StagesEngine(
            _stage_of(role, loader, spec, stage),
            spec=spec,
            topology=topology,
            oom_limits=oom_limits,
        )
    return engines


def _stage_of(
    role: ModelRole, loader: fsdp.Loader, spec: RunSpec, stage: Stage
) -> StagedPolicy | StagedCritic:
    """Loads this process's stage of the model of a role."""
    dtype = getattr(torch, spec.trainer.dtype)

    def make_policy(model: PreTrainedModel) -> Policy:
        policy = StagedPolicy(
            model,
            stage,
            temperature=spec.rollout.sampling.temperature,
            routing_replay="off" if role == "reference" else spec.rollout.routing_replay,
        )
        policy.dtype = dtype
        return freeze(policy) if role == "reference" else policy

    def make_critic(model: PreTrainedModel) -> Critic:
        critic = StagedCritic(model, stage)
        critic.dtype = dtype
        return critic

    if role == "critic" or (role == "policy" and spec.algorithm.loss_kind.trains_values):
        return cast("StagedCritic", loader.load(make_critic))
    return cast("StagedPolicy", loader.load(make_policy))
