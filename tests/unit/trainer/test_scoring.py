"""Workers beside the trainer give its logprobs, under the weights that are meant and only where they lack."""

import pytest
import torch

from services.common.errors import FailedPreconditionError
from services.common.jagged import Jagged
from services.trainer.scoring.fields import add_logprobs
from services.trainer.scoring.scorer import Scorer
from tests.unit.trainer.batches import policy_of, queue_of, random_queue, rank_of, spec_of


class Data:
    """Takes the transferqueue's place."""

    def __init__(self, queue):
        self.queue = queue
        self.added = {}

    async def get(self, meta, fields):
        return self.queue.fetch(meta, fields)

    async def add_fields(self, meta, fields):
        self.added = {
            name: dict(zip(meta.keys, rows, strict=True)) for name, rows in fields.items()
        }


def test_scores_are_the_policys_whatever_the_micro_batches():
    spec = spec_of()
    policy = policy_of(spec)
    queue = random_queue(policy)
    scorer = Scorer(policy, max_tokens=20, version=3)
    rows = scorer.score(queue.fields["prompt_ids"], queue.fields["response_ids"], version=3)
    expected = queue.fields["rollout_logprobs"]
    assert [len(row) for row in rows] == expected.lengths.tolist()
    torch.testing.assert_close(torch.cat(rows), expected.values, atol=1e-5, rtol=0)


def test_other_weights_than_those_in_service_are_refused():
    spec = spec_of()
    queue = random_queue(policy_of(spec, seed=1))
    scorer = Scorer(policy_of(spec), max_tokens=100, version=-1)
    prompts, responses = queue.fields["prompt_ids"], queue.fields["response_ids"]
    with pytest.raises(FailedPreconditionError, match="weights 4 are asked for"):
        scorer.score(prompts, responses, version=4)
    scorer.adopt(4, dict(policy_of(spec, seed=1).model.named_parameters()))
    rows = scorer.score(prompts, responses, version=4)
    expected = queue.fields["rollout_logprobs"].values
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-5, rtol=0)
    scorer.refuse()
    with pytest.raises(FailedPreconditionError):
        scorer.score(prompts, responses, version=4)


def test_weights_of_another_model_are_refused():
    spec = spec_of()
    scorer = Scorer(policy_of(spec), max_tokens=100, version=0)
    with pytest.raises(ValueError, match="the model does not"):
        scorer.adopt(1, {"other": torch.zeros(1)})


async def test_samples_that_have_the_field_are_left_alone():
    policy = policy_of(spec_of())
    queue = random_queue(policy)
    scorer = Scorer(policy, max_tokens=100, version=2)
    data = Data(queue)
    count = await add_logprobs(queue.meta, "proximal_logprobs", scorer=scorer, data=data, version=2)
    assert count == queue.meta.num_keys == len(data.added["proximal_logprobs"])
    assert {int(row) for row in data.added["proximal_version"].values()} == {2}
    scored = queue.replaced(ref_logprobs=queue.fields["rollout_logprobs"])
    assert await add_logprobs(scored.meta, "ref_logprobs", scorer=scorer, data=data) == 0


@pytest.mark.parametrize("version", [5, 4])
def test_proximal_logprobs_of_other_weights_are_computed_anew(version):
    spec = spec_of(trainer={"updates_per_step": 2})
    policy = policy_of(spec)
    queue = random_queue(policy, version=5)
    count = queue.meta.num_keys
    # Far from the truth, so that it shows whether they are used.
    wrong = queue.fields["rollout_logprobs"].values - 3.0
    scored = queue_of(
        {
            **queue.fields,
            "proximal_logprobs": Jagged(wrong, queue.fields["response_ids"].lengths),
            "proximal_version": Jagged.from_dense(torch.full((count,), version)),
        },
        queue.meta.tags,
    )
    metrics = rank_of(spec, policy, scored).train(6, scored.meta, weight_version=5).metrics
    is_used = metrics["rollout_logprob_abs_diff_max"] > 1.0
    assert is_used == (version == 5)
