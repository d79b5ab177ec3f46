"""Tests that activation checkpointing and offloading leave results bit-identical."""

import weakref
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from services.common.models.loading import build_model
from services.common.runspec.trainer import LoraSpec, TrainerSpec
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp.activations import set_up_activations
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters
from services.trainer.engines.fsdp.parallel import RankTopology, distribute
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU
from tests.helpers.mixtures import tiny_config

OPTIONS: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": True},
    {"activation_checkpointing": 2},
    {"activation_checkpointing": "selective"},
    {"activation_offloading": True},
    {"activation_checkpointing": True, "activation_offloading": True},
    {"activation_checkpointing": "selective", "activation_offloading": True},
)


def packs() -> list[PackedTokens]:
    generator = torch.Generator().manual_seed(0)

    def tokens(*lengths: int) -> list[Tensor]:
        return [torch.randint(3, 61, (length,), generator=generator) for length in lengths]

    (common,) = tokens(9)
    prompts = [*tokens(3, 5, 1), common, common, common]
    rows = Jagged.from_list(prompts), Jagged.from_list(tokens(40, 4, 1, 7, 2, 13))
    return [pack(*rows, device=CPU, shares_prefixes=shares) for shares in (False, True)]


def policy(family: str, options: dict[str, Any]) -> Policy:
    config = tiny_config(family, num_hidden_layers=3, sliding_window=6)
    spec = TrainerSpec(steps=1, prompts_per_step=1, **options)
    model_policy = Policy(
        build_model(config, dtype=torch.float32, device=CPU, seed=1), temperature=1.0
    )
    if spec.lora is not None:
        add_adapters(model_policy.model, spec.lora)
        begin_adapters(model_policy, seed=0)
    distribute(model_policy, spec, RankTopology(device=CPU, data=Ranks()))
    return model_policy


def trained(module: Policy) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Returns scores and gradients of two packs, and the max bytes that autograd held outside of hooks."""
    scores, most = [], 0
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    for packed in packs():
        bytes_by_address: dict[int, int] = {}

        def note(tensor: Tensor, bytes_by_address: dict[int, int] = bytes_by_address) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                bytes_by_address[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs, entropy = module(packed)
        most = max(most, sum(bytes_by_address.values()))
        (logprobs * torch.linspace(-1.0, 1.0, len(logprobs)) + entropy).sum().backward()
        scores += [logprobs.detach(), entropy.detach()]
    named = module.named_parameters()
    return scores, {name: leaf.grad for name, leaf in named if leaf.grad is not None}, most


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_a_recomputed_layer_keeps_nothing_after_its_backward_pass(family: str) -> None:
    module = policy(family, {"activation_checkpointing": True})
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        alive.append(sum(storage() is not None for storage in storages))
        storages.extend(weakref.ref(tensor.untyped_storage()) for tensor in (*inputs, output))

    for name, projection in module.named_modules():
        if name.endswith("self_attn.o_proj"):
            projection.register_forward_hook(note)
    for packed in packs():
        storages.clear()
        alive.clear()
        module(packed)[0].sum().backward()
        assert len(alive) == 6, "three layers compute twice"
        assert not any(storage() is not None for storage in storages), "after all passes"
        assert not any(alive[3:]), "while an earlier layer is recomputed"


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen2", None), ("gemma2", None), ("qwen3_moe", None), ("qwen2", LoraSpec(rank=2))],
)
def test_scores_and_gradients_are_those_of_layers_that_keep_all(
    family: str, lora: LoraSpec | None
) -> None:
    expected, gradients, most = trained(policy(family, {"lora": lora}))
    for options in OPTIONS:
        actual, actual_gradients, peak_bytes = trained(policy(family, {"lora": lora, **options}))
        assert all(map(torch.equal, actual, expected)), options
        assert actual_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(actual_gradients[name], gradient), (options, name)
        assert peak_bytes < 0.75 * most, options


def test_a_pass_without_gradients_leaves_nothing_behind() -> None:
    module = policy("qwen2", {"activation_offloading": True})
    (packed, _) = packs()
    with torch.no_grad():
        before, _ = module(packed)
    after, _ = module(packed)
    assert torch.equal(before, after)


def test_a_pass_may_be_given_up_before_its_gradients_are_taken() -> None:
    module = policy("qwen2", {"activation_offloading": True})
    expected, *_ = trained(policy("qwen2", {}))
    for packed in packs():
        module(packed)
    actual, *_ = trained(module)
    assert all(map(torch.equal, actual, expected))


class _Layer(nn.Module):
    """Layer whose two halves share storage and which saves one tensor twice for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(16, 64)
        self.down = nn.Linear(32, 16)

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.fused(states).chunk(2, -1)
        product: Tensor = states + self.down(nn.functional.silu(gate) * up)
        return product


def layers(device: torch.device = CPU, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    stack = nn.ModuleList(_Layer() for _ in range(4)).to(device)
    set_up_activations(
        stack, TrainerSpec(steps=1, prompts_per_step=1, **options), device=device, is_seen=True
    )
    return stack


def gradients(stack: nn.ModuleList, *, num_tokens: int = 5) -> list[Tensor]:
    states = torch.linspace(-1.0, 1.0, num_tokens * 16).view(num_tokens, 16)
    for layer in stack:
        states = layer(states)
    return list(torch.autograd.grad(states.square().sum(), list(stack.parameters())))


def test_tensors_that_share_memory_share_it_again() -> None:
    expected = gradients(layers())
    assert all(map(torch.equal, gradients(layers(activation_offloading=True)), expected))


@pytest.mark.nightly  # compilation takes long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiled_layers_give_the_same_gradients(options: dict[str, Any]) -> None:
    stack = layers(compile=True, **options)
    for num_tokens in (5, 9):
        expected = gradients(layers(), num_tokens=num_tokens)
        for actual, expected_gradient in zip(
            gradients(stack, num_tokens=num_tokens), expected, strict=True
        ):
            assert (actual - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()


@pytest.mark.parametrize("value", ["some", -1, 1.5])
def test_what_is_no_way_of_keeping_activations_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="activation_checkpointing"):
        TrainerSpec(steps=1, prompts_per_step=1, activation_checkpointing=value)
