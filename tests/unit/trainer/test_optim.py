"""Optimizers: weight decay, Muon, and 8-bit moments."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from services.common.memory.trainer import trainer_memory
from services.common.runspec.loader import SpecError
from services.common.runspec.trainer import OptimizerSpec
from services.extras.optimizers import eight_bit
from services.extras.optimizers.eight_bit import levels_of_moments
from services.extras.optimizers.kinds import block_of_moments, moment_bytes
from services.trainer.engines.fsdp.optim import build_optimizer
from tests.helpers.mixtures import tiny_config
from tests.helpers.optimizers import (
    EIGHT_BITS,
    MUON,
    Matrices,
    random_gradients,
    updated,
    whole_model,
)
from tests.helpers.packages import install_from
from tests.helpers.pages import example
from tests.helpers.specs import spec_with


class Layer(nn.Module):
    """Layer with one parameter of each kind that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 3)
        self.q_proj = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.q_norm = nn.RMSNorm(3)
        self.sinks = nn.Parameter(torch.ones(2))
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(torch.ones(2, 3, 3)),
                "gate_up_proj_bias": nn.Parameter(torch.ones(2, 3)),
            }
        )
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)


@pytest.mark.parametrize("in_host", [False, True])
def test_weight_decay_applies_to_matrices_and_not_to_norms_and_biases(in_host: bool) -> None:
    layer = Layer()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
    spec = OptimizerSpec(learning_rate=0.5, weight_decay=0.1)
    optimizer = build_optimizer(layer, spec, in_host=in_host)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, value in layer.named_parameters() if bool((value < 1.0).all())}
    unchanged = {name for name, value in layer.named_parameters() if bool((value == 1.0).all())}
    assert decayed == {"embed_tokens.weight", "q_proj.weight", "experts.gate_up_proj"}
    assert unchanged == {
        *("q_proj.bias", "norm.weight", "norm.bias", "q_norm.weight"),
        *("sinks", "experts.gate_up_proj_bias", "frozen"),
    }
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in layer.parameters() if p.requires_grad
    }


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest() -> None:
    weights, expected = updated(whole_model(), whole_model()), whole_model()
    matrices = {f"model.layers.{index}.weight" for index in range(2)}
    muon = torch.optim.Muon(
        [expected.get_parameter(name) for name in sorted(matrices)],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        for name, gradient in random_gradients(expected, step).items():
            expected.get_parameter(name).grad = gradient
        muon.step()
    rest = deepcopy(whole_model())
    adamw = build_optimizer(rest, MUON.model_copy(update={"kind": "adamw"}))
    for step in range(3):
        for name, gradient in random_gradients(rest, step).items():
            rest.get_parameter(name).grad = gradient
        adamw.step()
    for name, value in weights.items():
        plain = (expected if name in matrices else rest).get_parameter(name)
        torch.testing.assert_close(value, plain.detach(), atol=1e-6, rtol=0, msg=name)


def test_moments_in_8_bits_have_the_values_of_the_dynamic_type() -> None:
    """The levels are those of torchao 0.18 and bitsandbytes 0.50 (``create_dynamic_map``)."""
    signed, unsigned = (levels_of_moments(is_signed=is_signed) for is_signed in (True, False))
    assert len(signed) == len(unsigned) == 256
    expected = torch.tensor([-0.99296875, -0.97890625, -0.96484375])
    torch.testing.assert_close(signed[:3], expected, atol=1e-7, rtol=0)
    expected = torch.tensor([0.0, 3.25e-7, 7.75e-7, 2.125e-6])
    torch.testing.assert_close(unsigned[:4], expected, atol=1e-12, rtol=1e-6)
    assert (signed == 0).nonzero().tolist() == [[127]]
    assert signed[-1] == unsigned[-1] == 1.0


def test_adamw_with_moments_in_8_bits_is_near_adamw() -> None:
    plain = EIGHT_BITS.model_copy(update={"kind": "adamw"})
    exact = updated(Matrices(), Matrices(), plain, steps=10)
    start = dict(Matrices().named_parameters())
    for name, value in updated(Matrices(), Matrices(), EIGHT_BITS, steps=10).items():
        moved = (exact[name] - start[name]).norm()
        error = (value - exact[name]).norm() / moved
        assert error < (0.03 if block_of_moments(tuple(value.shape)) else 1e-6), name


def test_matrices_have_one_byte_a_moment_and_a_scale_a_block() -> None:
    optimizer = build_optimizer(Matrices(), EIGHT_BITS)
    shapes = {name: tuple(parameter.shape) for name, parameter in Matrices().named_parameters()}
    used = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    assert used == moment_bytes(shapes)
    assert block_of_moments((33, 512)) == 256
    assert block_of_moments((47, 192)) == 192
    assert block_of_moments((5_000, 16)) is None
    assert block_of_moments((512,)) is None


@pytest.mark.parametrize("part_bytes", [8, 40_000, 1 << 27])
def test_parts_of_moments_update_as_one(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    expected = updated(Matrices(), Matrices(), EIGHT_BITS)
    monkeypatch.setattr(eight_bit, "_PART_VALUES", part_bytes // 8)
    for name, value in updated(Matrices(), Matrices(), EIGHT_BITS).items():
        torch.testing.assert_close(value, expected[name], atol=0, rtol=0, msg=name)


def test_the_optimizer_of_the_page_trains_and_its_memory_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("descent.py", "descent_kind.py"):
        example("adding.md", name, tmp_path)
    install_from(example("adding.md", "descent.toml", tmp_path), monkeypatch)
    optimizer_keys = {"kind": "momentum", "learning_rate": 0.5, "momentum": 0.25}
    spec = spec_with(trainer={"optimizer": optimizer_keys})
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, spec.trainer.optimizer)
    for _ in range(2):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert torch.allclose(before - layer.weight, torch.full((2, 3), 0.5 + 0.5 * 1.25))

    config = tiny_config("qwen2")
    plans = {
        kind: trainer_memory(
            spec_with(trainer={"optimizer": {"kind": kind}}), config, gpu_bytes=10**10
        )
        for kind in ("momentum", "adamw")
    }
    assert plans["momentum"].parts["optimizer"] == plans["adamw"].parts["optimizer"] / 2

    for key, value in (("tensor_parallel", 2), ("cpu_offload", "optimizer"), ("lora", {"rank": 1})):
        trainer = {"optimizer": optimizer_keys, "world_size": 2, "dtype": "bfloat16", key: value}
        with pytest.raises(SpecError, match=f"'momentum'.*trainer.{key}"):
            spec_with(trainer=trainer)
