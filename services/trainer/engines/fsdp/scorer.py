"""Forward passes without gradients: logprobs and values of samples, and weights that can be replaced."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from services.common.models.loading import stored_tensors
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.batch.plan import StepPlan, bounds_of, num_tokens
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.engines.fsdp.oom import OomLimitError, OomLimits
from services.trainer.engines.fsdp.parallel import free_gathered
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged

logger = logging.getLogger(__name__)

UNSCORED: Final = torch.finfo(torch.float32).max
"""Score of each token of a sequence that did not fit into memory."""
_SCORED = ("proximal_logprobs", "ref_logprobs", "values")


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
    """Scores a rank's samples; returns ``[R]`` float32 on the CPU.

    Tokens of a sequence that does not fit into memory are :data:`UNSCORED`. All ranks must call it,
    including those without samples.

    Args:
        module: A policy or critic, sharded or not.
        forward: Forward pass of the module over a micro-batch; returns ``[R]``.
        samples: This rank's samples.
        plan: Micro-batches of the samples.
        device: Device of the module.
        shares_prefixes: True if tokens that samples have in common are computed once.
        oom_limits: Micro-batch sizes that are known to exceed memory.

    Raises:
        OomLimitError: If a micro-batch does not fit and the ranks cannot repeat the pass.
    """
    result = torch.full((len(samples.responses.values),), UNSCORED)
    pending = [micro for work in plan.updates for micro in work]
    while pending:
        micro = pending.pop(0)
        part = samples.select(micro) if micro else idle_samples()
        try:
            scores = forward(pack_samples(part, device, shares_prefixes=shares_prefixes))
            if micro:
                result[samples.places(micro)] = scores.cpu()
            continue
        except torch.OutOfMemoryError as error:
            why = str(error).partition("\n")[0]
        # Here the error is out of scope, and so are the tensors that its frames held.
        _forget_pass(module, device)
        told = f"{num_tokens(part):,} tokens in {len(micro)} sequence(s), which are scored,"
        bounds = bounds_of(part, shares=shares_prefixes)
        if micro:
            oom_limits.give_up(bounds, told, why)
        if not oom_limits.is_alone or not micro:
            raise OomLimitError(told, why)
        logger.warning("micro-batch outgrew memory", extra={"holds": told, "why": why})
        if len(micro) > 1:
            oom_limits.learn(bounds)
            pending[:0] = micro[: len(micro) // 2], micro[len(micro) // 2 :]
    free_gathered(module)
    return result


def without_unscored(samples: Samples, plan: StepPlan) -> tuple[Samples, StepPlan]:
    """Leaves out of a step the sequences that its plan excludes or that some model could not score."""
    columns = [samples.tokens[name] for name in _SCORED if name in samples.tokens]
    left_out = torch.zeros(len(samples.rows), dtype=torch.bool)
    left_out[list(plan.left_out)] = True
    for column in columns:
        left_out |= samples.segments.count(column == UNSCORED) > 0
    if not left_out.any():
        return samples, plan
    if samples.groups is not None:
        # Members of a group that are compared with each other train all together or not at all.
        left_out = torch.isin(samples.groups, samples.groups[left_out])
    gone = samples.segments.spread(left_out)
    # Equal logprobs and values mean no penalty; the reward still counts in its group.
    wiped = {
        name: torch.where(gone, 0.0, samples.tokens[name])
        for name in _SCORED
        if name in samples.tokens
    }
    samples = samples.with_tokens(**wiped, loss_mask=samples.tokens["loss_mask"] & ~gone)
    return samples, plan.without(left_out.nonzero().flatten().tolist())


def _forget_pass(module: nn.Module, device: torch.device) -> None:
    """Frees the memory of a failed forward pass."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):
        root: Any = module
        root.reset_iter_state()
        free_gathered(module)


class Scorer:
    """Scores without gradients. All ranks must make the same calls in the same order, one at a time.

    Args:
        policy: Frozen policy on its device, sharded or not.
        device: Device of the policy.
        shares_prefixes: True if tokens that samples have in common are computed once.
        oom_limits: Micro-batch sizes that are known to exceed memory.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        device: torch.device,
        shares_prefixes: bool,
        oom_limits: OomLimits,
    ) -> None:
        self._policy = policy
        self._device = device
        self._shares_prefixes = shares_prefixes
        self._oom_limits = oom_limits

    def logprobs(self, samples: Samples, plan: StepPlan) -> Tensor:
        """Returns ``[R]`` float32 logprobs of this rank's response tokens, on the CPU."""
        return score_tokens(
            self._policy,
            lambda packed: self._policy(packed)[0],
            samples,
            plan,
            device=self._device,
            shares_prefixes=self._shares_prefixes,
            oom_limits=self._oom_limits,
        )

    @torch.no_grad()
    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the logprob of each token except the first, at temperature 1."""
        text = torch.tensor(token_ids, dtype=torch.int64)
        packed = pack(
            Jagged.from_list([text[:1]]), Jagged.from_list([text[1:]]), device=self._device
        )
        logprobs, _ = self._policy(packed, temperature=1.0)
        free_gathered(self._policy)
        return [float(value) for value in logprobs]

    def live(self) -> dict[str, Tensor]:
        """Returns the live weights by name for writing in place; this rank's rows if they are sharded."""
        return {name: value.detach() for name, value in stored_tensors(self._policy.model).items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks that tensors have the names of this model's weights.

        Raises:
            ValueError: If names are missing or unknown.
        """
        names = self.live().keys()
        if names != tensors.keys():
            raise ValueError(
                f"the weights lack {sorted(names - tensors.keys())[:3]} and have "
                f"{sorted(tensors.keys() - names)[:3]} that the model does not"
            )

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Replaces the weights. If they are sharded, each rank receives its rows, one tensor after the other.

        Args:
            tensors: Whole, checked tensors on rank 0; None on the other ranks.
        """
        for name, live in self.live().items():
            if isinstance(live, DTensor):
                whole = torch.empty(live.shape, dtype=live.dtype, device=self._device)
                if tensors is not None:
                    whole.copy_(tensors[name])
                live.copy_(distribute_tensor(whole, live.device_mesh, live.placements))
            else:
                assert tensors is not None, "weights that are not sharded have one rank"
                live.copy_(tensors[name])
