"""Activation memory: what layers keep of a forward pass for the backward pass.

kept         compiled layers keep the tensors that the compiler chose, other layers all that autograd saves
recomputed   a layer keeps its input, or matrix products and attention as well, and recomputes the rest
offloaded    kept tensors are in host memory while other layers compute (an extra)

A layer's ``forward`` is replaced instead of wrapping the layer, so that parameters keep their names.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from services.common.doors import References
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch import flash
from services.trainer.engines.fsdp.casting import casts_weights
from services.trainer.model import quantized  # noqa: F401 -- registers its operations

_Forward = Callable[..., Any]
_ops: Final[Any] = torch.ops
_COSTLY: Final = frozenset(
    {
        _ops.aten.mm.default,
        _ops.aten.addmm.default,
        _ops.aten._grouped_mm.default,  # noqa: SLF001 -- torch has no other name for it
        *(
            getattr(_ops.aten, f"_scaled_dot_product_{kernel}").default
            for kernel in (
                "flash_attention",
                "flash_attention_for_cpu",
                "efficient_attention",
                "cudnn_attention",
            )
        ),
        varlen._varlen_attn._opoverload,  # noqa: SLF001
        flash.FORWARD,
        _ops.slipstream.quantized_linear.default,
    }
)
"""Operations that ``selective`` never recomputes."""
_MOST_KINDS: Final = 64
"""Max compilations of a layer: by kind of layer, with and without gradients and shared prefixes."""
_FUSES_ALL_SIZES: Final = "triton.mix_order_reduction_non_strict_mode"
"""Option of torch's compiler, new in 2.11. By default, it fuses the sums of a norm's gradients only for many
tokens, and so compiles a layer for three ranges of sizes (``MixOrderReduction.can_fuse`` in
``torch/_inductor/scheduler.py``)."""
ACTIVATION_OFFLOADING: Final = References("activation_offloading")
"""Class with a method ``wrap``, which moves kept tensors of a device during passes of other layers."""


def set_up_activations(
    layers: nn.ModuleList, spec: TrainerSpec, *, device: torch.device, is_seen: bool = False
) -> None:
    """Sets up activation checkpointing, offloading and compilation of a decoder's layers, in place.

    Args:
        layers: The layers, after all other parallelism and before FSDP2.
        spec: ``compile``, ``activation_checkpointing`` and ``activation_offloading``.
        is_seen: True if the compiler traces whole layers. It then chooses what ``selective`` keeps;
            otherwise attention is kept, between compiled parts.
    """
    # If "auto" was not resolved for a GPU's size, keep everything.
    recompute = spec.activation_checkpointing
    if recompute == "auto":
        recompute = False
    loads = ACTIVATION_OFFLOADING.load
    host = loads("host")(device) if spec.activation_offloading else None
    for number, layer in enumerate(layers):
        forward: _Forward = layer.forward
        if recompute == "selective":
            selects = partial(checkpoint, use_reentrant=False, context_fn=_keep_costly)
            if not spec.compile:
                forward = partial(selects, forward)
            elif is_seen:
                forward = compiled(partial(selects, forward))
            else:
                forward = partial(selects, compiled(forward))
        else:
            if spec.compile:
                forward = compiled(forward)
            if spec.casts_by_layer:
                forward = casts_weights(layer, forward, getattr(torch, spec.dtype))
            if recompute and number % recompute == 0:
                forward = partial(checkpoint, forward, use_reentrant=False)
        layer.forward = forward if host is None else host.wrap(layer, forward)


def compiled(forward: _Forward) -> _Forward:
    """Compiles the ``forward`` of a layer or norm for any number of tokens."""
    is_offered = _FUSES_ALL_SIZES in torch._inductor.list_options()  # noqa: SLF001
    options: Any = {_FUSES_ALL_SIZES: True} if is_offered else {}
    arguments: Any = {"dynamic": True, "options": options}
    # Beyond its limit of compilations, torch runs a layer uncompiled, slower and in more memory than planned.
    # From torch 2.13 on, the module's setting is local to a thread, and ``compile`` has an argument instead.
    if "recompile_limit" in signature(torch.compile).parameters:
        arguments["recompile_limit"] = _MOST_KINDS
    else:
        torch._dynamo.config.recompile_limit = _MOST_KINDS  # noqa: SLF001
    compiled_forward: _Forward = torch.compile(forward, **arguments)
    return compiled_forward


def _keep_costly() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_costly = operation in _COSTLY
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE
