"""Compiles the model before the first step, for every size that a micro-batch may have.

Layers are compiled for any number of tokens, but code with and without gradients, and with and without
shared prompts, differs, and the compiler may select other kernels for few tokens than for many. The first
step of each kind would wait for a compilation. So each kind is run here, while the engines start.

Layers share their compiled code. The first pack therefore runs the whole model, and later packs run only its
first layers: the other layers would compile nothing and take most of the time.

If rollouts take turns with the trainer on the same GPUs, their engines start while the trainer sleeps. If
there is memory for it, the trainer then compiles its first layers for one pack; all else is compiled when it
first occurs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import TrainerSpec
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.engines.fsdp.parallel import begin_micro_batch, free_gathered
from services.trainer.model.policy import Critic, Policy
from services.wire.data.jagged import Jagged

_LEAST_TOKENS = 16
# Two, because code that is compiled for one layer alone may contain the number of that layer.
_LAYERS_PER_KIND = 2


def compile_ahead(module: Policy | Critic, spec: TrainerSpec, *, device: torch.device) -> None:
    """Runs a policy or critic on packs of all sizes, without and with gradients. All ranks must call it.

    Args:
        module: Policy or critic, sharded or not; its parameters do not change.
    """
    for number, packed in enumerate(_packs(spec, device)):
        # FSDP finds its layers in its first forward pass.
        with _first_layers(module) if number else nullcontext():
            _score(module, packed)
            _train(module, packed, spec)
    if device.type == "cuda":
        # Kernels that the compiler tried had buffers that no step needs again.
        torch.cuda.empty_cache()


def compile_first_layers(module: Policy | Critic, spec: RunSpec, *, device: torch.device) -> None:
    """Compiles a policy or critic for full micro-batches, in little memory. All ranks must call it.

    Args:
        module: Policy or critic, sharded or not; its parameters do not change.
    """
    trainer, shares_prefixes = spec.trainer, spec.shares_prefixes
    # FSDP finds its layers in its first forward pass.
    with torch.compiler.set_stance("force_eager"):
        _score(module, _pack(_LEAST_TOKENS, device, shares_prefixes=shares_prefixes))
    packed = _pack(_most_tokens(trainer), device, shares_prefixes=shares_prefixes)
    with _first_layers(module):
        _train(module, packed, trainer)
        if spec.needs_proximal or not _is_trained(module):
            _score(module, packed)


def _score(module: Policy | Critic, packed: PackedTokens) -> None:
    with torch.no_grad():
        module(packed)
    free_gathered(module)


def _train(module: Policy | Critic, packed: PackedTokens, spec: TrainerSpec) -> None:
    if not _is_trained(module):
        return
    begin_micro_batch(module, is_last=True, spec=spec)
    scores = module(packed)
    # The gradients of squares have the same layout as those of a loss.
    torch.stack([columns.square().sum() for columns in parts_of(scores)]).sum().backward()
    module.zero_grad(set_to_none=True)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextmanager
def _first_layers(module: nn.Module) -> Iterator[None]:
    """Removes layers from a policy or critic until the block ends, but leaves two of each kind."""
    decoder: Any = module.get_submodule("model").get_decoder()  # type: ignore[operator]
    layers = decoder.layers
    decoder.layers = nn.ModuleList(layers[: num_compiled([_kind(layer) for layer in layers])])
    try:
        yield
    finally:
        decoder.layers = layers


def num_compiled(kinds: Sequence[object]) -> int:
    """Returns how many leading layers contain each kind twice, or once if the model has one layer of it."""
    rest = Counter({kind: min(count, _LAYERS_PER_KIND) for kind, count in Counter(kinds).items()})
    for number, kind in enumerate(kinds):
        if not +rest:
            return number
        rest[kind] -= 1
    return len(kinds)


def _kind(layer: nn.Module) -> object:
    """Returns a key for layers with the same code: their modules, attention and checkpointing are equal."""
    modules = tuple(type(module) for module in layer.modules())
    return modules, getattr(layer, "attention_type", None), type(layer.forward)


def parts_of(scores: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a policy or a critic as a tuple."""
    return scores if isinstance(scores, tuple) else (scores,)


def _packs(spec: TrainerSpec, device: torch.device) -> Iterator[PackedTokens]:
    """Yields packs of a micro-batch's tokens, of half as many, and so on; also with shared prompts.

    Sizes within a pack differ, because the compiler would use one symbol for equal sizes.
    """
    tokens = _most_tokens(spec)
    while tokens >= _LEAST_TOKENS:
        yield _pack(tokens, device, shares_prefixes=False)
        if spec.share_prefixes:
            yield _pack(tokens, device, shares_prefixes=True)
        tokens //= 2


def _most_tokens(spec: TrainerSpec) -> int:
    """Returns the tokens of a full micro-batch."""
    return spec.tokens_per_micro_batch * spec.context_parallel


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
