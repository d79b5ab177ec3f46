"""Training engine on FSDP2: packs without padding, sharded over processes.

One process computes its micro-batches one after the other; several exchange weights and gradients. Sizes that
exceed memory are divided (``oom.py``).
"""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from services.common.memory.trainer import Stays
from services.common.runspec.formulas import DistillArguments
from services.common.runspec.run import RunSpec
from services.trainer.batch.packing import PackedTokens, Work
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.batch.step_plan import Bounds, StepPlan, bounds_of, num_tokens
from services.trainer.collectives import Ranks
from services.trainer.engines.base import (
    UNSCORED,
    LossT,
    Micros,
    ModelFacts,
    OomLimitError,
    OptimizerStep,
    Passes,
    PendingSave,
    UpdateLoss,
    WeightLayout,
)
from services.trainer.engines.fsdp import optim
from services.trainer.engines.fsdp.checkpoint import ModelCheckpoint
from services.trainer.engines.fsdp.compiling import compile_first_layers, parts_of
from services.trainer.engines.fsdp.host_copy import OffloadedState
from services.trainer.engines.fsdp.oom import OomLimits, OomRetry, catch_oom, unrecorded_limits
from services.trainer.engines.fsdp.parallel import RankTopology, begin_micro_batch, free_gathered
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.flops import active_weights
from services.trainer.model.policy import Critic, Policy, trainable

logger = logging.getLogger(__name__)

# Engines of a process compile one after the other: their ranks run collectives in the same order.
_COMPILER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")


class FsdpEngine:
    """Implements :class:`~services.trainer.engines.base.TrainEngine`.

    Args:
        module: The policy or critic, distributed over the processes. A frozen one only scores.
        oom_limits: Micro-batch sizes that are known to exceed memory; shared by the engines of a process.
        stays: State that has room on the device while other processes use it.
        compiles_asleep: True to compile layers during the first sleep, while the state is on the device.
    """

    def __init__(
        self,
        module: Policy | Critic,
        *,
        spec: RunSpec,
        topology: RankTopology,
        oom_limits: OomLimits | None = None,
        contents: Stays = "nothing",
        compiles_asleep: bool = False,
    ) -> None:
        self.module = module
        self.ranks = topology.data
        self.device = topology.device
        self.model = ModelFacts(module.model.config, active_weights(module, module.model.config))
        self.oom_limits = oom_limits or unrecorded_limits(spec.trainer)
        self._spec = spec
        self._fitting = OomRetry(module, spec, device=self.device, oom_limits=self.oom_limits)
        self._parameters = trainable(module)
        self._has_gradients = False
        self._compiles_asleep = compiles_asleep
        self._compiled: Future[None] | None = None
        self._balancer = self._export = None
        optimizers = []
        if self._parameters:
            in_host = spec.trainer.cpu_offload == "optimizer"
            self.optimizer = optim.build_optimizer(module, spec.trainer.optimizer, in_host=in_host)
            optimizers.append(self.optimizer)
        self._state = OffloadedState([module], optimizers, device=self.device, contents=contents)
        if self._parameters:
            self._checkpoint = ModelCheckpoint(
                module,
                self.optimizer,
                topology=topology,
                read=self._state.read,
                # A preset's frozen weights may differ if another machine builds them again.
                saves_frozen=spec.model.is_tiny,
            )
        if self._parameters and isinstance(module, Policy):
            self._balancer = Balancer(module, spec, self.ranks)
        if self._parameters and (
            isinstance(module, Policy) or spec.algorithm.loss_kind.trains_values
        ):
            self._export = WeightExport(
                module,
                dtype=getattr(torch, spec.trainer.dtype),
                ranks=topology.sharding,
                senders=spec.weight_sync.senders,
                sends_adapters=spec.sends_adapters,
            )

    @property
    def bounds(self) -> Bounds:
        return self.oom_limits.bounds

    @property
    def weights(self) -> WeightLayout:
        """Layout of the exported weights. Only a policy or reward model that trains has one."""
        export = self._exported()
        return WeightLayout(export.weight_specs(), export.sends_rows, export.gathers_rows)

    def forward_logprobs(
        self,
        samples: Samples,
        plan: StepPlan,
        *,
        temperature: float | None = None,
        teaches: DistillArguments | None = None,
    ) -> Tensor:
        """Scores samples without gradients: logprobs of a policy, values of a critic."""
        arguments = {"temperature": temperature, "teaches": teaches}
        options = {name: value for name, value in arguments.items() if value is not None}
        return score_tokens(
            self.module,
            lambda packed: parts_of(self.module(packed, **options))[0],
            samples,
            plan,
            device=self.device,
            shares_prefixes=self._spec.shares_prefixes,
            oom_limits=self.oom_limits,
        )

    def forward_backward(
        self,
        samples: Samples,
        micros: Micros,
        make_loss: Callable[[Micros], LossT],
        *,
        may_repeat: bool = True,
        loss_scale: float = 1.0,
    ) -> Passes[LossT]:
        """Adds the gradients of micro-batches; divides and repeats them if they exceed memory."""
        self._fitting.begin()
        attempt = partial(self._attempt, samples, make_loss, loss_scale)
        passes, _ = self._fitting.run_with_retry(attempt, samples, micros, once=not may_repeat)
        passes.left_out = frozenset(self._fitting.left_out)
        passes.num_divided = self._fitting.num_divided
        self._has_gradients = True
        return passes

    def _attempt(
        self,
        samples: Samples,
        make_loss: Callable[[Micros], LossT],
        loss_scale: float,
        micros: Micros,
    ) -> Passes[LossT]:
        loss_of = make_loss(micros)
        passes = Passes(loss_of, micros, torch.zeros((), device=self.device), Work())
        if self._balancer is not None and not self._has_gradients:
            self._balancer.begin_update()
        for number, micro in enumerate(micros):
            is_last = number + 1 == len(micros)
            begin_micro_batch(self.module, is_last=is_last, spec=self._spec.trainer)
            batch = samples.select(micro) if micro else idle_samples()
            with catch_oom(number):
                packed = pack_samples(
                    batch, self.device, shares_prefixes=self._spec.shares_prefixes
                )
                loss = loss_of(batch, *parts_of(self.module(packed)))
                if self._balancer is not None:
                    loss += self._balancer.loss(batch, loss_of)
                # Data parallelism averages gradients over ranks, but the loss is a sum over them.
                (loss * (self.ranks.size * loss_scale)).backward()
            passes.loss += loss.detach()
            passes.work += packed.work
        return passes

    def optimizer_step(
        self, learning_rate: float | None, *, scale: Tensor | None = None
    ) -> OptimizerStep:
        """Clips the accumulated gradients, updates the weights with them, and drops them."""
        self._has_gradients = False
        if learning_rate is None:
            self.optimizer.zero_grad(set_to_none=True)
            return OptimizerStep(math.nan, moved=False)
        if scale is not None:
            optim.scale_gradients(self._parameters, scale.to(self.device))
        norm = self._gradient_norm()
        grad_norm = norm.item()
        is_updated = learning_rate > 0 and math.isfinite(grad_norm)
        if is_updated:
            optim.set_learning_rate(self.optimizer, learning_rate)
            optim.clip_gradients(self._parameters, norm, self._spec.trainer.optimizer.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        counts = None if self._balancer is None else self._balancer.updated(is_updated=is_updated)
        return OptimizerStep(grad_norm, moved=is_updated, expert_counts=counts)

    def _gradient_norm(self) -> Tensor:
        """Returns the float32 norm of the gradients over all ranks, the same on every rank."""
        return optim.gradient_norm(self._parameters)

    def export_weights(self, *, rows: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of the policy, or the rows that this rank holds of them."""
        export = self._exported()
        return export.weight_rows() if rows else export.weight_tensors()

    def save(self) -> PendingSave:
        """Copies weights and optimizer state to host memory, also while the engine sleeps."""
        return self._checkpoint.save()

    def load(self, folder: Path, *, num_updates: int) -> None:
        """Loads weights and optimizer state in place."""
        self._checkpoint.load(folder, num_updates=num_updates)

    def sleep(self) -> None:
        """Moves the state that does not stay to host memory; the first time, begins to compile layers."""
        self._state.offload()
        if self._compiles_asleep and self._compiled is None:
            self._compiled = _COMPILER.submit(self._compile)

    def wake(self) -> None:
        """Moves the state back to the device."""
        if self._compiled is not None:
            self._compiled.result()
        self._state.reload()

    def _compile(self) -> None:
        try:
            compile_first_layers(self.module, self._spec, device=self.device)
        except torch.OutOfMemoryError as error:
            if self._spec.trainer.world_size > 1:
                raise  # other ranks wait for this one
            # The rollout engines took more memory than planned, so the first step compiles.
            logger.warning("not compiled ahead", extra={"error": str(error)})
        self._state.release()

    def _exported(self) -> WeightExport:
        assert self._export is not None, "only the policy's weights are published"
        return self._export


class Balancer:
    """Measures and balances the expert load of a policy's routers; does nothing for a dense model."""

    def __init__(self, policy: Policy, spec: RunSpec, ranks: Ranks) -> None:
        self._routing = policy.routing
        self._spec = spec.trainer.balancing
        # Ranks that compute packs together each count their own tokens.
        self._ranks = ranks.everyone or ranks
        self._tensor_parallel = spec.trainer.tensor_parallel
        self._compares = spec.rollout.routing_replay != "off"
        config: Mapping[str, Any] = policy.model.config.to_dict()
        self._coefficient = self._spec.coefficient or config.get("router_aux_loss_coef") or 0.0
        self._update: Tensor | None = None

    def begin_update(self) -> None:
        """Clears the counts before an update's first micro-batch, also if the update is repeated."""
        self._update = None

    def loss(self, samples: Samples, loss_of: UpdateLoss) -> Tensor | float:
        """Returns a micro-batch's share of the balancing loss, after its forward pass.

        Args:
            loss_of: Weighs the micro-batch and receives the metrics.
        """
        if self._routing is None:
            return 0.0
        counts = self._routing.counts()
        self._update = counts if self._update is None else self._update + counts
        if self._compares:
            nothing = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
            differs, num_compared = self._routing.differences() or nothing
            loss_of.tally.mean("routing_differs", differs.float(), num_compared)
        if self._spec.kind != "loss":
            return 0.0
        loss = self._routing.balance_loss()
        trained = samples.tokens["loss_mask"]
        value = loss.detach().expand(len(trained))
        loss_of.tally.mean("balance_loss", value, trained.to(loss.device))
        return self._coefficient * loss * loss_of.weight(samples).to(loss.device)

    def updated(self, *, is_updated: bool) -> Tensor | None:
        """Moves the routers' biases; returns the counts of an update. All ranks must call it.

        Args:
            is_updated: True if the update changed weights.

        Returns:
            ``[layers, experts]`` tokens that chose each expert, over all ranks; None for a dense model.
        """
        if self._routing is None or self._update is None:
            return None
        # Tensor-parallel ranks count the same tokens.
        counts, self._update = self._ranks.sum(self._update) // self._tensor_parallel, None
        if self._spec.kind == "bias" and is_updated:
            self._routing.move_biases(counts, self._spec.bias_rate)
        return counts


@torch.no_grad()
def score_tokens(
    module: nn.Module,
    forward: Callable[[PackedTokens], Tensor],
    samples: Samples,
    plan: StepPlan,
    *,
    device: torch.device,
    shares_prefixes: bool,
    oom_limits: OomLimits,
) -> Tensor:
    """Scores a rank's samples; returns ``[R, ...]`` float32 on the CPU.

    Tokens of a sequence that does not fit into memory are :data:`UNSCORED`. All ranks must call it,
    including those without samples.

    Args:
        forward: Forward pass of the module over a micro-batch; returns ``[R, ...]``.
        shares_prefixes: True if tokens that samples have in common are computed once.
        oom_limits: Micro-batch sizes that are known to exceed memory.

    Raises:
        OomLimitError: If a micro-batch does not fit and the ranks cannot repeat the pass.
    """
    result = torch.full((len(samples.responses.values),), UNSCORED)
    pending = [micro for work in plan.updates for micro in work]
    while pending:
        micro = pending.pop(0)
        micro_batch = samples.select(micro) if micro else idle_samples()
        try:
            scores = forward(pack_samples(micro_batch, device, shares_prefixes=shares_prefixes))
            if result.ndim < scores.ndim:
                result = result.new_full((len(result), *scores.shape[1:]), UNSCORED)
            if micro:
                result[samples.places(micro)] = scores.cpu()
            continue
        except torch.OutOfMemoryError as error:
            cause = str(error).partition("\n")[0]
        # Here the error is out of scope, and so are the tensors that its frames held.
        _forget_pass(module, device)
        size = f"{num_tokens(micro_batch):,} tokens in {len(micro)} sequence(s) to score"
        bounds = bounds_of(micro_batch, shares=shares_prefixes)
        if micro:
            oom_limits.record_and_raise(bounds, size, cause)
        if not oom_limits.is_alone or not micro:
            raise OomLimitError(size, cause)
        logger.warning("micro-batch exceeded memory", extra={"size": size, "cause": cause})
        if len(micro) > 1:
            oom_limits.lower(bounds)
            pending[:0] = micro[: len(micro) // 2], micro[len(micro) // 2 :]
    free_gathered(module)
    return result


def _forget_pass(module: nn.Module, device: torch.device) -> None:
    """Frees the memory of a failed forward pass."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):
        root: Any = module
        root.reset_iter_state()
        free_gathered(module)
