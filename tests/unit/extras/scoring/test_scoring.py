"""Tests that scoring workers compute missing logprobs under the requested weights."""

import pytest
import torch

from services.common.errors import FailedPreconditionError
from services.extras.scoring.leader import Scorer, ScoringLeader
from services.trainer.batch.step_plan import Bounds
from services.trainer.engines.base import UNSCORED
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.model.policy import freeze
from services.trainer.steps.fields import FieldScoring
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import engine_of, policy_of, queue_of, random_queue, rank_of, spec_of
from tests.helpers.shortage import limited


class Apart:
    """Scoring worker with a queue in memory that records the fields it adds."""

    def __init__(self, policy, queue, *, field="proximal_logprobs", version, max_tokens=100):
        oom_limits = self.oom_limits = OomLimits(Bounds(max_tokens))
        engine = engine_of(freeze(policy), spec_of(), oom_limits=oom_limits)
        self.added = {}
        fields = FieldScoring(
            field,
            engine,
            fetch=queue.fetch,
            add=self._add,
            shares_prefixes=True,
        )
        self.leader = ScoringLeader(Scorer(engine), fields, version=version)

    def _add(self, meta, fields):
        self.added = {
            name: dict(zip(meta.keys, rows, strict=True)) for name, rows in fields.items()
        }

    def scores(self, queue, field="proximal_logprobs"):
        return torch.cat([self.added[field][key] for key in queue.meta.keys])


def test_scores_are_the_policys_whatever_the_micro_batches():
    policy = policy_of(spec_of())
    queue = random_queue(policy)
    apart = Apart(policy, queue, version=3, max_tokens=20)
    assert apart.leader.add(queue.meta, version=3) == queue.meta.num_keys
    expected = queue.fields["rollout_logprobs"]
    lengths = [len(apart.added["proximal_logprobs"][key]) for key in queue.meta.keys]
    assert lengths == expected.lengths.tolist()
    torch.testing.assert_close(apart.scores(queue), expected.values, atol=1e-5, rtol=0)
    assert {int(row) for row in apart.added["proximal_version"].values()} == {3}


def test_what_does_not_fit_is_divided_and_has_no_score_alone():
    policy = policy_of(spec_of())
    queue = random_queue(policy)
    lengths = queue.fields["prompt_ids"].lengths + queue.fields["response_ids"].lengths
    longest = int(lengths.max())
    # The model does not compute the last token of a sequence.
    limited(policy, longest - 2, scores=True)
    apart = Apart(policy, queue, version=3, max_tokens=100)
    apart.leader.add(queue.meta, version=3)
    expected = queue.fields["rollout_logprobs"].unbind()
    for key, length, scores in zip(queue.meta.keys, lengths.tolist(), expected, strict=True):
        scores = torch.full_like(scores, UNSCORED) if length == longest else scores
        torch.testing.assert_close(apart.added["proximal_logprobs"][key], scores, atol=1e-5, rtol=0)
    # The next batch is split before it runs out of memory.
    assert apart.oom_limits.bounds.max_tokens <= 50


def test_other_weights_than_those_in_service_are_refused():
    spec = spec_of()
    queue = random_queue(policy_of(spec, seed=1))
    apart = Apart(policy_of(spec), queue, version=-1)
    with pytest.raises(FailedPreconditionError, match="needs weight version 4"):
        apart.leader.add(queue.meta, version=4)
    apart.leader.adopt(4, dict(policy_of(spec, seed=1).model.named_parameters()))
    apart.leader.add(queue.meta, version=4)
    expected = queue.fields["rollout_logprobs"].values
    torch.testing.assert_close(apart.scores(queue), expected, atol=1e-5, rtol=0)
    apart.leader.refuse()
    with pytest.raises(FailedPreconditionError):
        apart.leader.add(queue.meta, version=4)


def test_weights_of_another_model_are_refused():
    spec = spec_of()
    apart = Apart(policy_of(spec), random_queue(policy_of(spec)), version=0)
    with pytest.raises(ValueError, match="the model does not"):
        apart.leader.adopt(1, {"other": torch.zeros(1)})


def test_weights_written_in_place_serve_after_adoption_or_abort():
    spec = spec_of()
    apart = Apart(policy_of(spec), random_queue(policy_of(spec)), version=1)
    before = apart.leader.score_text([1, 2, 3])
    apart.leader.open()
    apart.leader.close()
    assert apart.leader.score_text([1, 2, 3]) == before
    live = apart.leader.open()
    for name, value in policy_of(spec, seed=1).model.named_parameters():
        live[name].copy_(value.detach())
    apart.leader.adopt(2, live)
    assert apart.leader.version == 2
    assert apart.leader.score_text([1, 2, 3]) != before
    apart.leader.open()
    apart.leader.stop()


def test_samples_that_have_the_field_are_left_alone():
    policy = policy_of(spec_of())
    queue = random_queue(policy)
    scored = queue.replaced(ref_logprobs=queue.fields["rollout_logprobs"])
    apart = Apart(policy, scored, field="ref_logprobs", version=0)
    assert apart.leader.add(scored.meta) == 0
    assert apart.added == {}


@pytest.mark.parametrize("version", [5, 4])
def test_proximal_logprobs_of_other_weights_are_recomputed(version):
    spec = spec_of(trainer={"updates_per_step": 2})
    policy = policy_of(spec)
    queue = random_queue(policy, version=5)
    count = queue.meta.num_keys
    # The values are far off, so the result shows whether they are used.
    wrong = queue.fields["rollout_logprobs"].values - 3.0
    scored = queue_of(
        {
            **queue.fields,
            "proximal_logprobs": Jagged(wrong, queue.fields["response_ids"].lengths),
            "proximal_version": Jagged.from_list(list(torch.full((count,), version))),
        },
        queue.meta.tags,
    )
    metrics = (
        rank_of(spec, policy, scored).train(StepCommand(6, scored.meta, weight_version=5)).metrics
    )
    is_used = metrics["rollout_logprob_abs_diff_max"] > 1.0
    assert is_used == (version == 5)
