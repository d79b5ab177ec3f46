"""Training engine with pipeline stages, each sharded by FSDP2 and tensor parallelism.

The last stage computes logprobs and the loss. The other stages get the logprobs of each micro-batch and
compute the same loss without gradients, so that metrics, records and decisions are the same on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from services.common.models.families import is_mixture
from services.common.models.stages import bubble
from services.common.runspec.formulas import DistillArguments
from services.common.runspec.run import RunSpec
from services.extras.stages.modules import StagedCritic, StagedPolicy
from services.extras.stages.passes import Columns, StagePasses
from services.extras.stages.weights import StageExport
from services.trainer.batch.packing import PackedTokens, Work
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.batch.step_plan import StepPlan, bounds_of, num_tokens
from services.trainer.collectives import local_part
from services.trainer.engines.base import (
    UNSCORED,
    LossT,
    Micros,
    ModelFacts,
    OomLimitError,
    OptimizerStep,
    Passes,
)
from services.trainer.engines.fsdp import optim
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.engines.fsdp.parallel import RankTopology, free_gathered


class StagesEngine(FsdpEngine):
    """Implements :class:`~services.trainer.engines.base.TrainEngine`.

    Args:
        module: This process's stage of the policy or critic, distributed over the processes of the stage.
        oom_limits: Micro-batch sizes that are known to exceed memory; shared by the engines of a process.
    """

    module: StagedPolicy | StagedCritic

    def __init__(
        self,
        module: StagedPolicy | StagedCritic,
        *,
        spec: RunSpec,
        topology: RankTopology,
        oom_limits: OomLimits | None = None,
    ) -> None:
        super().__init__(module, spec=spec, topology=topology, oom_limits=oom_limits)
        self.model = ModelFacts(module.model.config, module.whole.active_weights)
        dtype = getattr(torch, spec.trainer.dtype)
        self._passes = StagePasses(module, device=self.device, dtype=dtype)
        if self._export is not None:
            self._export = StageExport(module, dtype=dtype, topology=topology)
        self._tied = self._tied_weights()
        self._sharding = topology.sharding
        self._is_mixture = is_mixture(module.model.config.to_dict())
        self._expert_counts: Tensor | None = None

    def forward_logprobs(
        self,
        samples: Samples,
        plan: StepPlan,
        *,
        temperature: float | None = None,
        teaches: DistillArguments | None = None,
    ) -> Tensor:
        """Scores samples without gradients: logprobs of a policy, values of a critic."""
        assert teaches is None, "a run with a teacher's distributions is refused"
        options = {} if temperature is None else {"temperature": temperature}
        result = torch.full((len(samples.responses.values),), UNSCORED)
        micros = [micro for work in plan.updates for micro in work]
        packs = self._packs(samples, micros)[1]
        try:
            columns = self._passes.score(packs, **options)
        except torch.OutOfMemoryError as error:
            cause = str(error).partition("\n")[0]
        else:
            free_gathered(self.module)
            for micro, (scores, *_) in zip(micros, columns, strict=True):
                if micro:
                    result[samples.places(micro)] = scores.cpu()
            return result
        micro = micros[self._passes.newest]
        micro_batch = samples.select(micro) if micro else idle_samples()
        size = f"{num_tokens(micro_batch):,} tokens in {len(micro)} sequence(s) to score"
        if micro:
            bounds = bounds_of(micro_batch, shares=self._spec.shares_prefixes)
            self.oom_limits.record_and_raise(bounds, size, cause)
        raise OomLimitError(size, cause)

    def _packs(
        self, samples: Samples, micros: Micros | list[tuple[int, ...]]
    ) -> tuple[list[Samples], list[PackedTokens]]:
        """Returns the samples and the pack of each micro-batch."""
        micro_batches = [samples.select(micro) if micro else idle_samples() for micro in micros]
        pack = partial(pack_samples, device=self.device, shares_prefixes=self._spec.shares_prefixes)
        return micro_batches, [
            self.module.with_own_experts(pack(micro_batch)) for micro_batch in micro_batches
        ]

    def _attempt(
        self,
        samples: Samples,
        make_loss: Callable[[Micros], LossT],
        loss_scale: float,
        micros: Micros,
    ) -> Passes[LossT]:
        loss_of = make_loss(micros)
        passes = Passes(loss_of, micros, torch.zeros((), device=self.device), Work())
        micro_batches, packs = self._packs(samples, micros)

        def trained(number: int, columns: Columns) -> Tensor:
            loss = loss_of(micro_batches[number], *columns)
            passes.loss += loss.detach()
            # Data parallelism averages gradients over ranks, but the loss is a sum over them.
            return loss * (self.ranks.size * loss_scale)

        columns = self._passes.train(packs, trained)
        self._count(self.module.expert_counts)
        if self._spec.rollout.routing_replay != "off" and self._is_mixture:
            differs, num_compared = self._differences(packs)
            loss_of.tally.mean("routing_differs", differs.float(), num_compared)
        idle = torch.tensor(bubble(self.module.stage.count, len(packs)))
        loss_of.tally.mean("pipeline_bubble", idle, torch.tensor(True))
        if not self.module.stage.is_last:
            with torch.no_grad():
                for number, scores in enumerate(columns):
                    trained(number, scores)
        for packed in packs:
            passes.work += packed.work
        return passes

    def _differences(self, packs: Sequence[PackedTokens]) -> tuple[Tensor, Tensor]:
        """Returns the tokens that any layer routed otherwise, and those with known experts: ``[T]`` bool."""
        flags = []
        for number, packed in enumerate(packs):
            nothing = torch.zeros(len(packed.input_ids), dtype=torch.bool, device=self.device)
            flags.append(torch.stack(self.module.differs.get(number, (nothing, nothing))))
        all_flags = torch.cat(flags, 1).to(torch.uint8)
        distributed.all_reduce(all_flags, distributed.ReduceOp.MAX, group=self.module.stage.group)
        differs, is_replayed = all_flags.bool().unbind()
        return differs, is_replayed

    def _count(self, counts: Tensor | None) -> None:
        total = self._expert_counts
        self._expert_counts = counts if total is None or counts is None else total + counts

    def optimizer_step(
        self, learning_rate: float | None, *, scale: Tensor | None = None
    ) -> OptimizerStep:
        """Clips the accumulated gradients, updates the weights with them, and drops them."""
        counts, self._expert_counts = self._expert_counts, None
        step = super().optimizer_step(learning_rate, scale=scale)
        if learning_rate is None or not self._is_mixture:
            return step
        if counts is not None:
            counts = self._sharding.sum(counts)
        stages: list[Any] = [None] * self.module.stage.count
        distributed.all_gather_object(
            stages, None if counts is None else counts.cpu(), group=self.module.stage.group
        )
        return replace(
            step,
            expert_counts=torch.cat(
                [stage_counts for stage_counts in stages if stage_counts is not None]
            ),
        )

    def _gradient_norm(self) -> Tensor:
        """Returns the norm over all stages; adds the gradients of a weight that two stages hold first."""
        stage = self.module.stage
        parameters = self._parameters
        if self._tied is not None:
            weight, group = self._tied
            gradient: Any = weight.grad
            distributed.all_reduce(local_part(gradient), group=group)
            if stage.is_last:
                parameters = [parameter for parameter in parameters if parameter is not weight]
        square = optim.gradient_norm(parameters).square().to(self.device)
        distributed.all_reduce(square, group=stage.group)
        return square.sqrt()

    def _tied_weights(self) -> tuple[Tensor, distributed.ProcessGroup] | None:
        """Returns the embedding that is also the head, and the two processes that hold this rank's rows.

        All ranks must call it. None for a stage without it, and for a model with two separate matrices.
        """
        stage, whole_model = self.module.stage, self.module.whole
        has_head = isinstance(self.module, StagedPolicy)
        if not (self._parameters and whole_model.is_tied and has_head and stage.count > 1):
            return None
        stage_ranks = distributed.get_process_group_ranks(stage.group)
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, (stage_ranks[0], stage_ranks[-1]))
        group = None
        for ends in sorted(set(everyone)):
            new_group = distributed.new_group(list(ends))
            group = new_group if ends == (stage_ranks[0], stage_ranks[-1]) else group
        if group is None or not (stage.is_first or stage.is_last):
            return None
        model: Any = self.module.model
        return model.get_input_embeddings().weight, group
