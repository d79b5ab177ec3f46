"""Weights in the dtype of a pass on a rank that is alone, without the buffers of FSDP2.

FSDP2 casts a layer's weights into one buffer, gathers them in a second and divides them into a third; its
gradients pass two more. Here a layer casts its float32 weights when it computes or recomputes, and its
gradients are added to those of the weights when its backward pass ends. The results are the same bits.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_Forward = Callable[..., Any]


def casts_weights(
    module: nn.Module, forward: _Forward, dtype: torch.dtype, *, without: Iterable[nn.Module] = ()
) -> _Forward:
    """Returns ``forward`` of a module with its parameters and inputs in ``dtype``.

    The casts live as long as the pass needs them: the caller recomputes a layer for its backward pass.

    Args:
        forward: Reads the parameters from the module.
        without: Submodules whose parameters stay as they are.
    """
    other_modules = {inner for submodule in without for inner in submodule.modules()}
    slots = [
        (owner._parameters, name)  # noqa: SLF001 -- the attribute would refuse what is no parameter
        for owner in module.modules()
        if owner not in other_modules
        for name, parameter in owner._parameters.items()  # noqa: SLF001
        if parameter is not None
    ]

    def cast_input(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_cast else value

    def computed(*args: Any, **kwargs: Any) -> Any:
        # Looked up in each pass, because loading replaces parameters.
        parameters: list[Any] = [holder[name] for holder, name in slots]
        unlike = [*{id(p): p for p in parameters if p.dtype != dtype}.values()]
        casts = dict(zip(map(id, unlike), _Casts.apply(dtype, *unlike), strict=True))  # type: ignore[no-untyped-call]
        for (holder, name), parameter in zip(slots, parameters, strict=True):
            holder[name] = casts.get(id(parameter), parameter)
        try:
            return forward(*tree_map(cast_input, args), **tree_map(cast_input, kwargs))
        finally:
            for (holder, name), parameter in zip(slots, parameters, strict=True):
                holder[name] = parameter

    return computed


class _Casts(torch.autograd.Function):
    """Casts parameters; adds the gradients of the casts to those of the parameters, in their own dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        # One copy each: on an H200 it reads and writes 4.5 TB/s, and a copy of all at once 1.9.
        casts = [torch.empty_like(p, dtype=dtype).copy_(p) for p in parameters]
        frozen = [c for c, p in zip(casts, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        for parameter, gradient in zip(ctx.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad += gradient
        return None, *[None] * len(gradients)
