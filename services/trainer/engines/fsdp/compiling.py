"""Compiles the model before the first step, for every size that a micro-batch may have.

Layers are compiled for any number of tokens, but the compiler selects other kernels for few tokens than for
many, for example for the sums in a normalization's gradient, and guards its choice. The first step of each
kind would wait for a compilation. So each kind is run here, while the engines start.
"""

from collections.abc import Iterator

import torch

from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.engines.fsdp.parallel import begin_micro_batch, free_gathered
from services.trainer.model.policy import Critic, Policy
from services.wire.data.jagged import Jagged

_LEAST_TOKENS = 16


def compile_ahead(module: Policy | Critic, spec: TrainerSpec, *, device: torch.device) -> None:
    """Runs a policy or critic on packs of all sizes, without and with gradients. All ranks must call it.

    Args:
        module: Policy or critic, sharded or not; its parameters do not change.
    """
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    for packed in _packs(spec, device):
        with torch.no_grad():
            module(packed)
        free_gathered(module)
        if is_trained:
            begin_micro_batch(module, is_last=True, spec=spec)
            scores = module(packed)
            # The gradients of squares have the same layout as those of a loss.
            torch.stack([part.square().sum() for part in parts_of(scores)]).sum().backward()
            module.zero_grad(set_to_none=True)


def parts_of(scores: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a policy or a critic as a tuple."""
    return scores if isinstance(scores, tuple) else (scores,)


def _packs(spec: TrainerSpec, device: torch.device) -> Iterator[PackedTokens]:
    """Yields packs of a micro-batch's tokens, of half as many, and so on; also with shared prompts.

    Sizes within a pack differ, because the compiler would use one symbol for equal sizes.
    """
    tokens = spec.tokens_per_micro_batch * spec.context_parallel
    while tokens >= _LEAST_TOKENS:
        yield _pack(tokens, device, shares_prefixes=False)
        if spec.share_prefixes:
            yield _pack(tokens, device, shares_prefixes=True)
        tokens //= 2


def _pack(tokens: int, device: torch.device, *, shares_prefixes: bool) -> PackedTokens:
    prompt = tokens // 3 if shares_prefixes else 1
    rest = tokens - (prompt if shares_prefixes else 3 * prompt)
    lengths = [rest // 2 + 1, rest - rest // 2 - 3, 2]
    prompts = [torch.zeros(prompt, dtype=torch.int32)] * len(lengths)
    responses = [
        torch.full((length,), first, dtype=torch.int32) for first, length in enumerate(lengths)
    ]
    return pack(
        Jagged.from_list(prompts),
        Jagged.from_list(responses),
        device=device,
        shares_prefixes=shares_prefixes,
    )
