"""Routers of mixtures in training: routing replay, load balancing, and reported metrics."""

import random
from typing import Any

import pytest
import torch
from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func

from services.common.models.experts import RouterWatch
from services.common.models.families import FAMILIES, RoutingShape, routing_shape
from services.common.models.loading import build_model
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.model.policy import Policy
from services.trainer.steps.report import imbalance
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, policy_of, random_queue, rank_of, spec_of
from tests.helpers.mixtures import tiny_config
from tests.helpers.tries import random_trie

_MIXTURES = [name for name, family in FAMILIES.items() if family.routing is not None]


def _policy(family: str, *, seed: int = 1, routing_replay: str = "off", **shape: Any) -> Policy:
    config = tiny_config(family, **{"num_hidden_layers": 3, **shape})
    model = build_model(config, dtype=torch.float32, device=CPU, seed=seed)
    return Policy(model, temperature=1.0, routing_replay=routing_replay)


def _packed(experts: Jagged | None = None) -> PackedTokens:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        Jagged.from_list([torch.randint(3, 61, (n,), generator=generator) for n in sizes])
        for sizes in ((3, 5), (8, 4))
    )
    return pack(prompts, responses, device=CPU, experts=experts)


def _shape(policy: Policy) -> RoutingShape:
    shape = routing_shape(policy.model.config.to_dict())
    assert shape is not None
    return shape


def _choices(policy: Policy) -> Jagged:
    """Returns the experts that a policy chooses for the tokens of the pack, in an engine's format."""
    watch = RouterWatch(policy.model)
    policy(_packed())
    dtype = getattr(torch, _shape(policy).dtype)
    return Jagged(watch.chosen().to(dtype), torch.tensor([10, 8]))


@pytest.mark.parametrize("family", _MIXTURES)
def test_replaying_a_policys_own_choice_changes_nothing(family: str) -> None:
    own_policy = _policy(family)
    expected, _ = own_policy(_packed())
    expected.sum().backward()
    replaying = _policy(family, routing_replay="replay")
    reported = _choices(_policy(family))
    assert reported.values.shape[1:] == _shape(own_policy).tail
    # The order of a token's experts has no effect.
    actual, _ = replaying(_packed(Jagged(reported.values.flip(2), reported.lengths)))
    actual.sum().backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in replaying.named_parameters()}
    for name, parameter in own_policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)
    differs, is_known = replaying.routing.differences()
    assert is_known.all() and not differs.any()


@pytest.mark.parametrize("family", _MIXTURES)
def test_a_replayed_choice_is_that_of_the_engine_and_trains_the_router(family: str) -> None:
    engine, policy = _policy(family, seed=1), _policy(family, seed=2, routing_replay="replay")
    reported = _choices(engine)
    _, num_layers, num_chosen = reported.values.shape
    missing = _shape(policy).missing
    reported.values[3:5] = missing
    logprobs, _ = policy(_packed(reported))
    chosen = torch.stack([policy.routing._chosen[layer] for layer in range(num_layers)], 1)
    is_known = (reported.values != missing).all(2).all(1)
    assert torch.equal(chosen[is_known], reported.values[is_known].long())
    assert chosen.shape == (18, num_layers, num_chosen)
    assert (chosen >= 0).all() and (chosen < 8).all()
    differs, are_known = policy.routing.differences()
    assert torch.equal(are_known, is_known)
    assert differs.any() and not differs[~is_known].any()
    logprobs.sum().backward()
    for router in policy.routing._routers:
        assert router.weight.grad.norm() > 0


def test_compared_choices_are_not_taken() -> None:
    policy = _policy("qwen3_moe", seed=2, routing_replay="compare")
    expected, _ = _policy("qwen3_moe", seed=2)(_packed())
    actual, _ = policy(_packed(_choices(_policy("qwen3_moe"))))
    assert torch.equal(actual, expected)
    assert policy.routing.differences()[0].any()


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_the_balancing_loss_is_that_of_the_models_own_training(family: str) -> None:
    policy = _policy(family)
    policy(_packed())
    logits = tuple(policy.routing._logits[layer] for layer in sorted(policy.routing._logits))
    expected = load_balancing_loss_func(logits, 8, 3)
    torch.testing.assert_close(policy.routing.balance_loss(), expected)


def test_biases_make_experts_likelier_that_were_chosen_less() -> None:
    policy = _policy("deepseek_v3")
    counts = torch.tensor([[9, 1, 5, 5, 5, 5, 5, 5]]).expand(2, 8)
    policy.routing.move_biases(counts, 0.25)
    for router in policy.routing._routers:
        assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]


def test_choices_of_tokens_that_sequences_share_count_for_each_of_them() -> None:
    for seed in range(5):
        policy = _policy("glm4_moe")
        prompts, responses = random_trie(random.Random(seed), vocabulary=61)
        counts = []
        for shares in (False, True):
            packed = pack(prompts, responses, device=CPU, shares_prefixes=shares)
            policy(packed)
            counts.append(policy.routing.counts())
        assert packed.uses is not None
        assert torch.equal(*counts)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_shared_only_where_their_experts_are_the_same_too(seed: int) -> None:
    rng = random.Random(seed)
    prompts, responses = random_trie(rng, vocabulary=61)
    policy = _policy("qwen3_moe", routing_replay="replay").double()
    _, *tail = (0, *_shape(policy).tail)
    lengths = (prompts.lengths + responses.lengths - 1).tolist()
    generator = torch.Generator().manual_seed(seed)
    whole = torch.stack([torch.randperm(8, generator=generator)[: tail[1]] for _ in range(999)])
    reported = [
        whole[: length * tail[0]].view(length, *tail).to(torch.uint8).clone() for length in lengths
    ]
    for rows in reported:
        if len(rows) > 2 and rng.random() < 0.5:
            index = rng.randrange(len(rows))
            rows[index] = rows[index].flip(0)  # only this sequence has other experts
    experts = Jagged.from_list(reported)
    passes = []
    for shares in (False, True):
        policy.zero_grad()
        packed = pack(prompts, responses, device=CPU, shares_prefixes=shares, experts=experts)
        logprobs, entropies = policy(packed)
        logprobs.sum().backward()
        gradient = policy.model.get_input_embeddings().weight.grad.clone()
        passes.append((logprobs, entropies, gradient))
    assert packed.uses is not None, "something is shared"
    torch.testing.assert_close(*passes, rtol=1e-5, atol=1e-5)


def test_imbalance_is_the_most_over_the_mean() -> None:
    assert imbalance(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]])) == (2.5, 4.0)


@pytest.mark.parametrize("kind", ["none", "loss"])
def test_a_step_replays_and_reports(kind: str, tmp_path: Any) -> None:
    spec = spec_of(
        model={"path": "tiny:qwen3_moe-0.7m"},
        trainer={"balancing": {"kind": kind, "coefficient": 0.1}, "tokens_per_micro_batch": 64},
        rollout={"routing_replay": "replay"},
    )
    queue = random_queue(policy_of(spec))
    prompts, responses = queue.fields["prompt_ids"], queue.fields["response_ids"]
    lengths = prompts.lengths + responses.lengths - 1
    experts = torch.randint(0, 8, (int(lengths.sum()), 2, 1)).to(torch.uint8)
    reported = Jagged(torch.cat([experts, (experts + 1) % 8], 2), lengths)
    reported.values[::3] = 255
    rank = rank_of(spec, policy_of(spec), queue.replaced(routed_experts=reported), root=tmp_path)
    result = rank.train(StepCommand(1, queue.replaced(routed_experts=reported).meta))
    assert not result.skipped
    assert result.metrics["routing_differs"] > 0.5
    assert 1 <= result.metrics["expert_load_max"] <= result.metrics["expert_load_worst"] <= 8
    assert ("balance_loss" in result.metrics) == (kind == "loss")
