"""Forward passes without gradients, divided until they fit into memory."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from services.trainer.batch.packing import PackedTokens
from services.trainer.batch.plan import StepPlan, bounds_of, num_tokens
from services.trainer.batch.samples import Samples, idle_samples, pack_samples
from services.trainer.engines.base import UNSCORED, OomLimitError
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.engines.fsdp.parallel import free_gathered

logger = logging.getLogger(__name__)


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
        part = samples.select(micro) if micro else idle_samples()
        try:
            scores = forward(pack_samples(part, device, shares_prefixes=shares_prefixes))
            if result.ndim < scores.ndim:
                result = result.new_full((len(result), *scores.shape[1:]), UNSCORED)
            if micro:
                result[samples.places(micro)] = scores.cpu()
            continue
        except torch.OutOfMemoryError as error:
            cause = str(error).partition("\n")[0]
        # Here the error is out of scope, and so are the tensors that its frames held.
        _forget_pass(module, device)
        size = f"{num_tokens(part):,} tokens in {len(micro)} sequence(s) to score"
        bounds = bounds_of(part, shares=shares_prefixes)
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
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):
        root: Any = module
        root.reset_iter_state()
        free_gathered(module)
