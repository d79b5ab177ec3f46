"""Reward models: the loss of a pair, and the export as a sequence classifier."""

import math
from pathlib import Path

import pytest
import torch

from services.common.models.loading import SCORES_BEFORE_END, load_config
from services.common.models.tokenizer import load_tokenizer
from services.extras.export import checkpoint as export
from services.extras.reward_services.classifier import Classifier
from services.trainer.algorithm import loss
from services.trainer.batch.samples import Samples
from services.trainer.batch.segments import Segments
from services.trainer.batch.step_plan import StepPlan
from services.trainer.model.policy import Critic
from services.wire.data.jagged import Jagged
from tests.helpers.batches import engine_of, policy_of, spec_of

SPEC = spec_of(algorithm={"loss": "reward_model", "max_staleness": 0}, rollout={"group_size": 2})


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_of_pairs_is_that_of_the_formula(center: float) -> None:
    """Compares with ``-log sigmoid(r_c - r_r) + center (r_c + r_r)^2`` and its gradient."""
    lengths, rewards = [2, 1, 3, 2], [0.7, -0.4, 0.2, 1.1]
    signs = [1.0, -1.0, -1.0, 1.0]  # in the second pair, the second answer is the chosen one
    segments = Segments.from_lengths(torch.tensor(lengths))
    values = torch.full((sum(lengths),), 5.0)
    last = torch.tensor(lengths).cumsum(0) - 1
    values[last] = torch.tensor(rewards)
    values.requires_grad_()
    tokens = loss.LossTokens(
        logprobs=values,
        old_logprobs=values.detach(),
        rollout_logprobs=values.detach(),
        advantages=segments.expand(torch.tensor(signs)),
        mask=torch.ones(sum(lengths), dtype=torch.bool),
        segments=segments,
        groups=torch.tensor([4, 4, 9, 9]),
    )
    token_loss = loss.reward_model(tokens, center=center)
    counts = loss.Denominators(torch.tensor(8), torch.tensor(4), horizon=8)
    total = loss.aggregate(
        token_loss.values, tokens.mask, segments, mode="seq-mean-token-sum", denominators=counts
    )
    (gradient,) = torch.autograd.grad(total, values)
    pairs = [(0, 1), (3, 2)]
    expected = 0.0
    for chosen, rejected in pairs:
        margin = rewards[chosen] - rewards[rejected]
        summed = rewards[chosen] + rewards[rejected]
        share = 1 / (1 + math.exp(-margin))
        expected += (-math.log(share) + center * summed**2) / len(pairs)
        slopes = (share - 1 + 2 * center * summed, 1 - share + 2 * center * summed)
        for answer, slope in zip((chosen, rejected), slopes, strict=True):
            assert gradient[last[answer]].item() == pytest.approx(slope / len(pairs), abs=1e-6)
    assert total.item() == pytest.approx(expected, abs=1e-6)
    assert int(gradient.count_nonzero()) == 4
    assert token_loss.of_sequences["preference_accuracy"].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_the_exported_classifier_scores_as_the_trained_model(tmp_path: Path) -> None:
    critic = Critic(policy_of(SPEC).model)
    torch.nn.init.normal_(critic.head.weight)
    engine = engine_of(critic, SPEC)
    saved = engine.save()
    saved.write(tmp_path / "checkpoint")
    tokenizer = load_tokenizer(SPEC.model)
    config = load_config(SPEC.model, tokenizer)
    setattr(config, SCORES_BEFORE_END, "text")
    config.eos_token_id = next(iter(tokenizer.stop_ids))
    policy = policy_of(SPEC)
    policy.model.load_state_dict(critic.model.state_dict())
    export._classifier(policy.model, tmp_path / "checkpoint", config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    classifier = Classifier(str(tmp_path))
    end = next(iter(tokenizer.stop_ids))
    for prompt, response in (("ab", "cde"), ("b", "a")):
        before, answer = tokenizer.encode_prompt(prompt), [*tokenizer.encode(response), end]
        assert classifier.tokens(prompt, response) == [*before, *answer[:-1]]
        samples = Samples(
            rows=torch.zeros(1, dtype=torch.int64),
            numbers=torch.zeros(1, dtype=torch.int64),
            prompts=Jagged.from_list([torch.tensor(before)]),
            responses=Jagged.from_list([torch.tensor(answer)]),
            rewards=torch.zeros(1),
            tokens={},
        )
        value = engine.forward_logprobs(samples, StepPlan((((0,),),)))[-1].item()
        assert classifier.scores([[*before, *answer[:-1]]])[0] == pytest.approx(value, abs=1e-5)
