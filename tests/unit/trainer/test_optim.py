"""The optimizer: which parameters its weight decay applies to."""

import pytest
import torch
from torch import nn

from services.common.runspec.trainer import OptimizerSpec
from services.trainer.engines.fsdp.optim import build_optimizer


class Layer(nn.Module):
    """One parameter of each kind that models have."""

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
    kept = {name for name, value in layer.named_parameters() if bool((value == 1.0).all())}
    assert decayed == {"embed_tokens.weight", "q_proj.weight", "experts.gate_up_proj"}
    assert kept == {
        *("q_proj.bias", "norm.weight", "norm.bias", "q_norm.weight"),
        *("sinks", "experts.gate_up_proj_bias", "frozen"),
    }
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in layer.parameters() if p.requires_grad
    }
