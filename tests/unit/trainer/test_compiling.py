"""Compilation before the first step: the layers that run for each pack, and exceptions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from services.common.models.loading import build_model
from services.common.runspec.trainer import TrainerSpec
from services.trainer.engines.fsdp.compiling import (
    compile_ahead,
    compile_first_layers,
    num_compiled,
)
from services.trainer.model.policy import Policy
from services.trainer.ranks.rank import canary_of
from tests.helpers.batches import spec_of


@pytest.mark.parametrize(
    ("kinds", "count"),
    [("a", 1), ("aaaaaa", 2), ("aaabaaab", 8), ("ababab", 4), ("baaaaa", 3), ("aaaaab", 6)],
)
def test_each_kind_of_layer_is_compiled_twice_if_it_occurs_twice(kinds: str, count: int) -> None:
    assert num_compiled(kinds) == count


def _counted(calls: list[int]) -> Policy:
    """Returns a policy with one layer per element of ``calls`` that counts the calls of each layer."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=len(calls),
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    policy = Policy(build_model(config, dtype=torch.float32, device="cpu", seed=0), temperature=1.0)

    def count(number: int) -> None:
        calls[number] += 1

    for number, layer in enumerate(policy.model.get_decoder().layers):
        layer.register_forward_hook(lambda *_, number=number: count(number))
    return policy


def test_the_first_pack_runs_all_layers_and_later_ones_two() -> None:
    calls = [0] * 5
    policy = _counted(calls)
    layers = policy.model.get_decoder().layers
    spec = TrainerSpec(steps=1, prompts_per_step=1, tokens_per_micro_batch=64, share_prefixes=False)
    compile_ahead(policy, spec, device=torch.device("cpu"))
    # Packs of 64, 32 and 16 tokens, each without and with gradients.
    assert calls == [6, 6, 2, 2, 2]
    assert policy.model.get_decoder().layers is layers
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize(("kl", "passes"), [(0.0, 2), (0.1, 3)])
def test_a_sleeping_trainer_runs_two_layers_for_the_largest_pack(kl: float, passes: int) -> None:
    calls = [0] * 5
    policy = _counted(calls)
    # A penalty in the reward needs logprobs, from a pass without gradients.
    spec = spec_of(
        algorithm={"kl": {"coefficient": kl, "placement": "reward"}},
        trainer={"tokens_per_micro_batch": 64},
    )
    compile_first_layers(policy, spec, device=torch.device("cpu"))
    # All layers run once with a few tokens first, so that FSDP registers them.
    assert calls == [passes, passes, 1, 1, 1]
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_canary_compiles_nothing() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    forward = torch.compile(lambda tokens: -tokens.float(), backend=backend)
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(vocab_size=240)),
        forward_logprobs=lambda samples, *_, **__: forward(samples.responses.values),
    )
    assert canary_of(engine).logprobs[:2] == (-10.0, -20.0)
    assert not compiled
    forward(torch.ones(2))
    assert len(compiled) == 1
