"""Tests of episodes with several conversations, which are one sample and several sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.fields import ROUTED_EXPERTS
from services.common.models.families import RoutingShape
from services.rollout.rewards.base import Score
from services.rollout.sampling.sample import Sample, prompt_fields, sample_fields
from services.rollout.workflows.turns import Turn, flattened, observed, token_ids
from services.trainer.batch.samples import BatchFacts, build_samples, sequences_of
from services.trainer.collectives import Ranks
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.fields import FieldScoring
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import engine_of, policy_of, rank_of, spec_of
from tests.helpers.columns import rows_of
from tests.helpers.episodes import branched_episodes


def test_each_conversation_is_a_sequence_of_its_sample() -> None:
    queue, episodes = branched_episodes(policy_of(spec_of()))
    sequences = sequences_of(queue.fields)
    whole = [
        (*prompt.tolist(), *response.tolist())
        for prompt, response in zip(
            sequences.prompts.unbind(), sequences.responses.unbind(), strict=True
        )
    ]
    assert whole == [
        token_ids(conversation) for conversations in episodes for conversation in conversations
    ]
    owners = [row for row, conversations in enumerate(episodes) for _ in conversations]
    assert sequences.samples.tolist() == owners
    assert sequences.numbers.tolist() == [
        n for conversation in episodes for n in range(len(conversation))
    ]


def test_a_shared_prefix_trains_once_and_observations_never() -> None:
    queue, episodes = branched_episodes(policy_of(spec_of()))
    facts = BatchFacts.from_meta(queue.meta)
    samples = build_samples(
        queue.fields, range(len(episodes)), facts, spec=spec_of().algorithm, weight_version=0
    )
    turns = {id(turn): turn for episode in episodes for conv in episode for turn in conv}.values()
    assert int(samples.tokens["loss_mask"].sum()) == sum(
        len(turn.token_ids) for turn in turns if turn.is_sampled
    )
    assert set(samples.tokens["token_versions"].tolist()) == {-1, 0}


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp_baseline", "opo"])
def test_advantages_are_those_of_whole_episodes(advantage: str) -> None:
    """A sample counts once in its group, and all its sequences get the same advantage."""
    spec = spec_of(algorithm={"advantage": advantage}).algorithm
    queue, episodes = branched_episodes(policy_of(spec_of()))

    def credit(fields: dict[str, Jagged]) -> Any:
        samples = build_samples(
            fields,
            range(len(episodes)),
            BatchFacts.from_meta(queue.meta),
            spec=spec,
            weight_version=0,
        )
        assign = CreditAssigner(spec, Ranks(), max_response_tokens=1000)
        return samples, assign(samples, BatchFacts.from_meta(queue.meta), kl_coefficient=0.0)

    runs = queue.fields["version_runs"].values.clone()
    runs[:, 0].clamp_(min=-1)
    samples, divided = credit(queue.fields)
    as_one, whole = credit(
        {**queue.fields, "version_runs": Jagged(runs, queue.fields["version_runs"].lengths)}
    )
    sampled = divided.advantages[samples.tokens["response_mask"]]
    assert torch.equal(sampled, whole.advantages[as_one.tokens["response_mask"]])
    heads = divided.shaped_scores[samples.is_first]
    assert torch.equal(heads, queue.fields["rewards"].values)


def test_scores_of_sequences_become_scores_of_samples() -> None:
    queue, _ = branched_episodes(policy_of(spec_of()))
    added: dict[str, list[torch.Tensor]] = {}
    engine: Any = engine_of(policy_of(spec_of()), spec_of())
    engine.forward_logprobs = lambda samples, _: samples.responses.values.float()
    scoring = FieldScoring(
        "ref_logprobs",
        engine,
        fetch=queue.fetch,
        add=lambda _, fields: added.update(fields),
        shares_prefixes=True,
    )
    scoring.add(queue.meta)
    sequences = sequences_of(queue.fields)
    expected = torch.where(sequences.is_response, queue.fields["response_ids"].values.float(), 0.0)
    assert torch.equal(torch.cat(added["ref_logprobs"]), expected)
    assert [len(row) for row in added["ref_logprobs"]] == queue.fields[
        "response_ids"
    ].lengths.tolist()


def test_experts_and_masks_follow_their_tokens_into_each_sequence() -> None:
    shape = RoutingShape(layers=(0,), num_chosen=2, num_experts=8)

    def turn(ids: tuple[int, ...], first: int, count: int) -> Turn:
        experts = np.arange(first, first + count, dtype=np.uint8)[:, None, None].repeat(2, 2)
        return Turn(
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            version_runs=((0, len(ids)),),
            finish_reason="stop",
            routed_experts=experts,
            sampling_mask=np.array(
                [~token if n == 0 else token + n for token in ids for n in (0, 1)]
            ),
        )

    several_turns = (observed((5, 6)), turn((7, 8), 10, 3))
    other = (observed((9,)), turn((3, 4, 5), 20, 3))
    prompt, *turns = flattened([several_turns, other])
    sample = Sample(
        member=0,
        prompt_ids=prompt.token_ids,
        turns=tuple(turns),
        score=Score(0.0),
        finish_reason="stop",
        is_greedy=False,
    )
    fields = sample_fields([sample], shape, has_masks=True)
    rows = {**fields, "prompt_ids": prompt_fields([sample])}
    sequences = sequences_of({name: Jagged.from_list(rows_of(row)) for name, row in rows.items()})
    assert ROUTED_EXPERTS in rows
    assert sequences.experts is not None
    expert_rows = [row[:, 0, 0].tolist() for row in sequences.experts.unbind()]
    assert expert_rows == [[10, 11, 12], [20, 21, 22]]
    assert sequences.masks is not None
    masks = [row.tolist() for row in sequences.masks.unbind()]
    assert masks == [[~7, 8, ~8, 9], [~3, 4, ~4, 5, ~5, 6]]


def test_a_step_counts_samples_and_sequences(tmp_path: Path) -> None:
    spec = spec_of(rollout={"group_size": 3}, trainer={"prompts_per_step": 3})
    policy = policy_of(spec)
    queue, episodes = branched_episodes(policy)
    metrics = rank_of(spec, policy, queue, root=tmp_path).train(StepCommand(1, queue.meta)).metrics
    assert metrics["samples"] == len(episodes)
    assert metrics["sequences_mean"] == 2.0
    assert metrics["reward_mean"] == pytest.approx(float(queue.fields["rewards"].values.mean()))
    assert metrics["shared_token_fraction"] > 0
    # One rank computes all tokens, in one micro-batch.
    computed = metrics["rank_tokens_max"]
    assert 0 < computed < metrics["tokens"]
    assert metrics["rank_tokens_min"] == computed
    assert metrics["rank_tokens_ratio"] == 1.0
    assert metrics["pack_fill"] == pytest.approx(computed / spec.trainer.tokens_per_micro_batch)


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp", "gae"])
def test_what_tokens_earned_is_credited_to_them_where_the_advantage_goes_by_tokens(
    advantage: str,
) -> None:
    """Compares with the recursion by hand; group estimators use only the sum of the token rewards."""
    spec = spec_of(algorithm={"advantage": advantage, "gamma": 0.9}).algorithm
    queue, _ = branched_episodes(policy_of(spec_of()), num_groups=2)
    mask = queue.fields["response_mask"]
    earned = torch.where(mask.values, torch.arange(len(mask.values)) % 5 / 4.0, 0.0)
    sums = Jagged(earned, mask.lengths).unbind()
    rewards = torch.stack([row.sum() for row in sums]) + queue.fields["rewards"].values
    fields = {
        **queue.fields,
        "token_rewards": Jagged(earned, mask.lengths),
        "rewards": Jagged.from_list(list(rewards)),
        "values": Jagged(torch.zeros(len(mask.values)), mask.lengths),
    }
    facts = BatchFacts.from_meta(queue.meta)
    samples = build_samples(fields, range(len(rewards)), facts, spec=spec, weight_version=0)
    assign = CreditAssigner(spec, Ranks(), max_response_tokens=1000)
    batches: list[Any] = []
    estimate = assign._estimate
    assign._estimate = lambda batch: batches.append(batch) or estimate(batch)  # type: ignore[func-returns-value]
    assign(samples, facts, kl_coefficient=0.0)
    (batch,) = batches
    assert torch.allclose(batch.scores, rewards.double())
    token_rewards = samples.tokens["token_rewards"].double()
    outcome = samples.segments.expand(
        queue.fields["rewards"].values.double()[samples.rows]
    ) * samples.segments.last(samples.tokens["response_mask"])
    assert torch.allclose(batch.rewards, token_rewards + outcome, atol=1e-6)
