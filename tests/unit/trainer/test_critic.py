"""Tests that a critic in separate processes learns the same as a critic inside the trainer."""

from pathlib import Path

import pytest
import torch

from services.common.errors import FailedPreconditionError
from services.trainer.batch.step_plan import Bounds
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.collectives import Ranks
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.model.policy import Critic
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.rank import Rank
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.fields import FieldScoring
from services.trainer.steps.step import CriticStepRunner
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand
from tests.helpers.batches import Queue, engine_of, policy_of, random_queue, rank_of, spec_of

GAE = {"advantage": "gae", "gae_lambda": 0.9}


class Apart:
    """Critic worker with a queue in memory, to whose samples it adds values."""

    def __init__(self, queue: Queue, root: Path) -> None:
        spec = spec_of(algorithm=GAE, trainer={"updates_per_step": 2})
        self.queue = queue
        limits = OomLimits(Bounds(50))
        self.engine = engine_of(Critic(policy_of(spec).model), spec, oom_limits=limits)
        runner = CriticStepRunner(CriticRunner(self.engine, spec=spec), spec=spec)
        self.rank = Rank(
            runner,
            fetch=lambda meta, fields: self.queue.fetch(meta, fields),
            spec=spec,
            checkpointer=Checkpointer(runner.trained(), root=root, keep=2, ranks=Ranks()),
        )
        self.values = FieldScoring(
            "values",
            self.engine,
            fetch=queue.fetch,
            add=self._add,
            shares_prefixes=True,
        )

    def _add(self, meta: object, fields: dict[str, list[torch.Tensor]]) -> None:
        self.queue = self.queue.replaced(values=Jagged.from_list(fields["values"]))

    def train(self, step: int) -> dict[str, float]:
        """Computes values and then trains the step, as in a run."""
        self.values.add(self.queue.meta)
        return self.rank.train(StepCommand(step, self.queue.meta)).metrics

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.engine.module.parameters()])


@pytest.fixture
def queue() -> Queue:
    return random_queue(policy_of(spec_of()))


def test_a_critic_apart_learns_what_one_inside_the_trainer_does(
    queue: Queue, tmp_path: Path
) -> None:
    spec = spec_of(algorithm=GAE, trainer={"updates_per_step": 2})
    inside = rank_of(spec, policy_of(spec), queue)
    apart = Apart(queue, tmp_path)
    for step in (1, 2, 3):
        expected = inside.train(StepCommand(step, queue.meta)).metrics["value_loss"]
        assert apart.train(step)["value_loss"] == pytest.approx(expected, rel=1e-5)
    critic = inside.runner.trained()["critic"].module
    weights = torch.cat([parameter.detach().flatten() for parameter in critic.parameters()])
    torch.testing.assert_close(apart.weights(), weights)


def test_a_critic_resumes_exactly_from_its_checkpoint(queue: Queue, tmp_path: Path) -> None:
    unbroken = Apart(queue, tmp_path)
    unbroken.train(1)
    unbroken.rank.checkpointer.write(unbroken.rank.snapshot(1))
    unbroken.train(2)
    resumed = Apart(queue, tmp_path)
    assert resumed.rank.restore() == 1
    resumed.train(2)
    torch.testing.assert_close(resumed.weights(), unbroken.weights())


async def test_a_critic_that_missed_steps_trains_the_next_one_and_each_once(
    queue: Queue, tmp_path: Path
) -> None:
    apart = Apart(queue, tmp_path)
    apart.values.add(queue.meta)
    leader = Leader(may_miss_steps=True)
    leader.attach(apart.rank, CommandGroup(1), values=apart.values, step=2)
    first = await leader.train_step(StepCommand(7, apart.queue.meta, weight_version=6))
    assert await leader.train_step(StepCommand(7, apart.queue.meta, weight_version=6)) is first
    # The run was rewound and repeats the step with another weight version.
    assert await leader.train_step(StepCommand(7, apart.queue.meta, weight_version=9)) is not first
    strict = Leader()
    strict.attach(apart.rank, CommandGroup(1))
    with pytest.raises(FailedPreconditionError, match="train step 1 next"):
        await strict.train_step(StepCommand(7, apart.queue.meta, weight_version=6))
