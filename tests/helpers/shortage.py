"""Simulates a device without enough memory on a CPU."""

from typing import Any

import torch
from torch import Tensor

from services.trainer.model.policy import Critic, Policy


def limited(
    module: Policy | Critic, num_tokens: int, *, in_backward: bool = False, scores: bool = False
) -> None:
    """Makes later passes over more tokens fail inside the model, with gradients or without."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    def check(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs[0].shape[1] > num_tokens and torch.is_grad_enabled() != scores:
            output.register_hook(fail) if in_backward else fail()

    model: Any = module.model
    decoder = model.get_decoder()
    decoder.layers[1].register_forward_hook(check)
