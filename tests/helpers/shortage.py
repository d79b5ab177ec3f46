"""Simulates on a CPU a device that runs out of memory."""

from typing import Any

import torch
from torch import Tensor

from services.trainer.model.policy import Critic, Policy


def limited(
    module: Policy | Critic, num_tokens: int, *, in_backward: bool = False, scores: bool = False
) -> None:
    """Makes a model run out of memory in passes over more than ``num_tokens`` tokens.

    Args:
        in_backward: The backward pass fails instead of the forward pass.
        scores: Passes without gradients fail instead of those with gradients.
    """

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    def check(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs[0].shape[1] > num_tokens and torch.is_grad_enabled() != scores:
            output.register_hook(fail) if in_backward else fail()

    model: Any = module.model
    decoder = model.get_decoder()
    decoder.layers[1].register_forward_hook(check)
