"""A stage compiles its layers alone: the compiler's passes need no other stage and leave nothing behind."""

import pytest
import torch
from torch import Tensor

from services.common.models.loading import build_model
from services.common.runspec.trainer import TrainerSpec
from services.extras.stages.layout import Stage
from services.extras.stages.modules import StagedCritic, StagedPolicy
from services.trainer.engines.fsdp.compiling import compile_ahead
from tests.helpers.mixtures import tiny_config

TRAINER = TrainerSpec(steps=1, prompts_per_step=1, tokens_per_micro_batch=32)
LAYERS = 5


def staged(kind: type[StagedPolicy | StagedCritic], index: int) -> StagedPolicy | StagedCritic:
    """Returns one of two stages of a random model."""
    config = tiny_config("qwen3", num_hidden_layers=LAYERS)
    model = build_model(config, dtype=torch.float32, device="cpu", seed=0)
    stage = Stage(index, 2, range(index, index + 1), group=None)
    if kind is StagedPolicy:
        return StagedPolicy(model, stage, temperature=1.0)
    return StagedCritic(model, stage)


@pytest.mark.parametrize("kind", [StagedPolicy, StagedCritic])
@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_runs_its_own_layers_with_and_without_gradients(
    kind: type[StagedPolicy | StagedCritic], index: int
) -> None:
    module = staged(kind, index)
    decoder = module.model.get_decoder()
    layers_run: set[int] = set()
    gradients: set[tuple[bool, bool]] = set()

    def note(number: int, states: Tensor) -> None:
        layers_run.add(number)
        gradients.add((torch.is_grad_enabled(), states.requires_grad))

    for number, layer in enumerate(decoder.layers):
        if any(True for _ in layer.parameters()):
            layer.register_forward_hook(
                lambda _, inputs, __, number=number: note(number, inputs[0])
            )
    weights = {name: value.clone() for name, value in module.named_parameters()}
    compile_ahead(module, TRAINER, device=torch.device("cpu"))
    assert layers_run == set(module.whole.layers(2)[index])
    # Gradients pass the first layer of every stage, whose states come from the stage before.
    assert gradients == {(True, True), (False, False)}
    assert len(decoder.layers) == LAYERS
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in module.named_parameters())
