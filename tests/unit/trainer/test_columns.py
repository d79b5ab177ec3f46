"""Tests of the table of columns, and of columns that a user's loss or advantage declares."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.callables import load_callable
from services.common.fields import FIELDS
from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.rollout import RewardSpec
from services.common.runspec.run import RunSpec
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling.sample import Sample, sample_fields
from services.rollout.workflows.turns import Turn
from services.trainer.batch import columns
from services.trainer.batch.samples import IncompleteBatchError, empty_samples, idle_samples
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import Queue, policy_of, random_queue, rank_of, spec_of
from tests.helpers.columns import rows_of
from tests.helpers.pages import example


def second(file: Path, **loss_arguments: Any) -> RunSpec:
    """Returns a run with the loss and the reward of the recipe."""
    reward = {"name": f"{file}:second_logprobs", "per": "token", "column": "second_logprobs"}
    return spec_of(
        algorithm={"loss": f"{file}:ppo_near_both", "loss_arguments": loss_arguments},
        rollout={"rewards": [{"name": "exact_match"}, reward]},
    )


def queue_with(values: torch.Tensor, queue: Queue) -> Queue:
    lengths = queue.fields["rollout_logprobs"].lengths
    return queue.replaced(second_logprobs=Jagged(values, lengths))


def trained(spec: RunSpec, queue: Queue) -> Mapping[str, float]:
    return (
        rank_of(spec, policy_of(spec, scale=1.5), queue).train(StepCommand(1, queue.meta)).metrics
    )


def test_a_penalty_to_a_second_reference_is_one_file_of_the_users(tmp_path: Path) -> None:
    file = example("adding.md", "second.py", tmp_path)
    spec = second(file, coefficient=0.05)
    queue = random_queue(policy_of(spec, seed=1, scale=1.5))
    near = queue.fields["rollout_logprobs"].values - 0.5
    metrics = trained(spec, queue_with(near, queue))
    none = trained(second(file, coefficient=0.0), queue_with(near, queue))
    assert metrics["kl_second"] == pytest.approx(none["kl_second"])
    assert metrics["kl_second"] > 0
    expected = none["loss"] + 0.05 * metrics["kl_second"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["grad_norm"] != pytest.approx(none["grad_norm"], rel=1e-3)


def test_the_recipes_reward_scores_sampled_tokens_under_the_second_model(tmp_path: Path) -> None:
    file = example("adding.md", "second.py", tmp_path)
    model = policy_of(spec_of()).model
    model.save_pretrained(tmp_path / "model")
    messages = [
        {"role": "user", "token_ids": [1, 2, 3]},
        {"role": "assistant", "token_ids": [4, 5]},
        {"role": "tool", "token_ids": [6]},
        {"role": "assistant", "token_ids": [7]},
    ]
    function = load_callable(f"{file}:second_logprobs")
    logprobs = function(
        "", "", None, {}, episode={"messages": messages}, path=str(tmp_path / "model")
    )
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        scores = model(torch.arange(1, 8)[None]).logits[0].log_softmax(-1)
    expected = [float(scores[position - 1, position + 1]) for position in (3, 4, 6)]
    assert logprobs == pytest.approx(expected, abs=1e-5)


class Pool:
    """Fake pool that answers with the values of each reward."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    async def call(self, reference: str, *_: Any, **__: Any) -> Any:
        return self._values[reference]


async def test_a_column_travels_and_is_no_part_of_the_reward() -> None:
    specs = [
        RewardSpec(name="mine:score"),
        RewardSpec(name="mine:per_token", per="token"),
        RewardSpec(name="mine:other", per="token", column="other", weight=7.0),
    ]
    values = {"mine:score": 1.0, "mine:per_token": [0.5, 0.0], "mine:other": [-3.0, -4.0]}
    reward_input = RewardInput(prompt="", response="", answer=None, row={}, turn_lengths=(2,))
    score = await Scorer(specs, Pool(values)).score(reward_input)  # type: ignore[arg-type]
    assert score == Score(
        1.5, {"score": 1.0, "per_token": 0.5}, (0.5, 0.0), {"other": (-3.0, -4.0)}
    )
    turn = Turn(
        token_ids=(4, 5), logprobs=(-1.0, -2.0), version_runs=((0, 2),), finish_reason="stop"
    )
    sample = Sample(
        member=0,
        prompt_ids=(1,),
        turns=(turn,),
        score=score,
        finish_reason="stop",
        is_greedy=False,
        columns=dict(score.columns),
    )
    fields = sample_fields([sample, sample], columns=("other", "missing"))
    assert rows_of(fields["other"])[1].tolist() == [-3.0, -4.0]
    assert rows_of(fields["missing"])[0].tolist() == [0.0, 0.0]


def test_an_advantage_gets_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from services.trainer.batch.columns import uses_columns\n"
        "@uses_columns('second_logprobs', 'staleness')\n"
        "def mine(batch):\n"
        "    assert batch.columns['staleness'].shape == batch.rewards.shape\n"
        "    return batch.columns['second_logprobs'].double()\n"
    )
    spec = second(example("adding.md", "second.py", tmp_path), coefficient=0.0)
    spec = spec.model_copy(
        update={"algorithm": spec.algorithm.model_copy(update={"advantage": f"{file}:mine"})}
    )
    queue = random_queue(policy_of(spec))
    values = torch.full_like(queue.fields["rollout_logprobs"].values, -2.5)
    assert trained(spec, queue_with(values, queue))["advantage_abs_mean"] == pytest.approx(2.5)


def test_columns_that_nothing_fills_are_refused(tmp_path: Path) -> None:
    file = example("adding.md", "second.py", tmp_path)
    spec = spec_of(
        algorithm={"loss": f"{file}:ppo_near_both", "loss_arguments": {"coefficient": 0}}
    )
    policy = policy_of(spec)
    with pytest.raises(ValueError, match=r"algorithm\.loss .*second_logprobs.*rollout\.rewards"):
        rank_of(spec, policy, random_queue(policy))
    filled = second(file, coefficient=0.1)
    queue = random_queue(policy)
    with pytest.raises(IncompleteBatchError, match="second_logprobs"):
        rank_of(filled, policy, queue).train(StepCommand(1, queue.meta))


def test_a_value_that_is_not_finite_skips_the_step(tmp_path: Path) -> None:
    spec = second(example("adding.md", "second.py", tmp_path), coefficient=0.1)
    queue = random_queue(policy_of(spec))
    values = torch.zeros_like(queue.fields["rollout_logprobs"].values)
    values[queue.fields["response_mask"].values.bool().nonzero()[0]] = torch.nan
    assert trained(spec, queue_with(values, queue))["nonfinite_inputs"] == 1


@pytest.mark.parametrize(
    "reward", [{"column": "ref_logprobs", "per": "token"}, {"column": "mine", "per": "response"}]
)
def test_a_column_needs_a_free_name_and_numbers_per_token(reward: dict[str, Any]) -> None:
    document = spec_of().model_dump(mode="json", exclude_unset=True)
    document["rollout"]["rewards"] = [{"name": "mine.py:mine", **reward}]
    with pytest.raises(SpecError, match=r"rollout\.rewards\.0\.column"):
        parse_spec(document)


def test_every_field_per_response_token_is_a_column() -> None:
    numbers = {f.name: f for f in FIELDS if f.shape.startswith("[R") and f.dtype == "float32"}
    assert set(columns.FETCHED) == set(numbers)
    for name, field in numbers.items():
        assert columns.COLUMNS[name].writer == field.producer
    empty = empty_samples([field.name for field in FIELDS] + ["mine"])
    assert {*columns.FETCHED, "mine"} <= empty.tokens.keys()
    idle = idle_samples()
    assert all(len(column) == 1 for column in idle.tokens.values())
    assert idle.tokens["loss_mask"].dtype == torch.bool
