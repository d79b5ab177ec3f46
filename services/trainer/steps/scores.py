"""One number for each response token of a rank's samples, without gradients."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from services.trainer.batch.packing import PackedTokens
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.model.parallel import free_gathered


@torch.no_grad()
def score_tokens(
    module: nn.Module,
    forward: Callable[[PackedTokens], Tensor],
    samples: Samples,
    plan: StepPlan,
    *,
    device: torch.device,
    shares_prefixes: bool,
) -> Tensor:
    """``[R]`` float32 on the CPU. Every rank calls it, also one without samples.

    Args:
        module: A policy or critic, sharded or not.
        forward: Its pass over a micro-batch, ``[R]``.
        samples: This rank's.
        plan: Their micro-batches.
        device: Of the module.
        shares_prefixes: Whether tokens that samples have in common are computed once.
    """
    result = torch.zeros(len(samples.responses.values))
    for micro in (micro for work in plan.updates for micro in work):
        part = samples.select(micro) if micro else idle_samples()
        scores = forward(pack_samples(part, device, shares_prefixes=shares_prefixes))
        if micro:
            result[samples.places(micro)] = scores.cpu()
    free_gathered(module)
    return result
