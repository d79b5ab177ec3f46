"""Tests of batch scoring: each kind of worker adds its fields, and one worker of a kind scores a sample."""

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from services.controller.run import scorers
from services.controller.run.scorers import BatchScoring, CriticClient
from services.wire.step_command import StepCommand
from services.wire.workers import TrainedStep
from tests.helpers.packages import install_role


@dataclass(frozen=True)
class Batch:
    """Fake metadata of a batch, with the number of tokens of each sample."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...] = ()
    partition_id: str = "run_a/train"

    @property
    def keys(self):
        return [f"g.{row}" for row in range(len(self.tokens))]

    @property
    def num_keys(self):
        return len(self.tokens)

    def column(self, name):
        return SimpleNamespace(lengths=[0] * len(self.tokens) if "prompt" in name else self.tokens)

    def select(self, rows):
        return Batch(tuple(self.tokens[row] for row in rows), tuple(rows))


class Queue:
    """Fake transferqueue that returns the stored batch."""

    async def get_batch(self, partition_id, keys):
        return "stored"


@pytest.fixture
async def scoring(monkeypatch):
    """Yields a function that opens batch scoring with workers of given roles, and calls by worker."""
    calls: dict[str, tuple[int, ...]] = {}

    @asynccontextmanager
    async def channel(address, peer, *, run_id):
        yield address

    class Client:
        def __init__(self, address):
            self.address = address

        async def score_batch(self, batch, *, weight_version, timeout_s):
            calls[self.address] = batch.rows

    monkeypatch.setattr(scorers, "open_channel", channel)
    monkeypatch.setattr(scorers, "ScoringClient", Client)
    async with AsyncExitStack() as stack:

        async def opened(*workers: tuple[str, str]):
            batch_scoring = BatchScoring(Queue(), "run_a")
            pairs = [SimpleNamespace(role=role, address=address) for role, address in workers]
            await batch_scoring.open(stack, pairs)
            return batch_scoring, calls

        yield opened


async def add(scorers, batch, *, is_trained=False):
    return await scorers.add_fields(batch, weight_version=3, is_trained=is_trained, timeout_s=1.0)


async def test_workers_of_a_kind_share_the_tokens_and_kinds_get_all_samples(scoring):
    scorers, calls = await scoring(("logp", "l0"), ("logp", "l1"), ("critic", "c0"))
    assert scorers.needs_weights
    assert await add(scorers, Batch((9, 1, 5, 4))) == "stored"
    assert sorted(calls["l0"] + calls["l1"]) == [0, 1, 2, 3]
    assert {calls["l0"], calls["l1"]} == {(0, 1), (2, 3)}
    assert calls["c0"] == (0, 1, 2, 3)


async def test_a_trained_batch_is_not_scored_under_later_weights(scoring):
    scorers, calls = await scoring(("logp", "l0"), ("critic", "c0"))
    await add(scorers, Batch((1, 2)), is_trained=True)
    assert calls.keys() == {"c0"}


async def test_without_workers_that_score_batches_nothing_is_asked(scoring):
    scorers, calls = await scoring(("ref_logp", "r0"))
    batch = Batch((1, 2))
    assert await add(scorers, batch) is batch
    assert not scorers.needs_weights
    assert not calls


async def test_a_kind_that_is_added_is_asked_too(scoring, tmp_path, monkeypatch):
    install_role(tmp_path, monkeypatch, "prm", tasks=("prm",), scores="batches")
    scorers, calls = await scoring(("prm", "p0"))
    await add(scorers, Batch((1,)))
    assert calls == {"p0": (0,)}


async def test_metrics_tell_that_the_critic_returned_to_a_checkpoint(monkeypatch):
    trained = TrainedStep(
        step=5, metrics={"value_loss": 1.0, "loss": 2.0, "rewound_to_step": 3.0}, skipped=True
    )

    @asynccontextmanager
    async def channel(address, peer, *, run_id):
        yield address

    class Trainer:
        """Fake client of a critic that returned to the checkpoint of step 3."""

        def __init__(self, address):
            self.address = address

        async def train_step(self, command, *, timeout_s):
            return trained

    monkeypatch.setattr(scorers, "open_channel", channel)
    monkeypatch.setattr(scorers, "TrainerClient", Trainer)
    async with AsyncExitStack() as stack:
        critic = CriticClient("run_a")
        await critic.open(stack, [SimpleNamespace(role="critic", address="c0")])
        metrics = await critic.train(StepCommand(5, Batch((1,))), timeout_s=1.0)
    assert metrics == {"value_loss": 1.0, "critic_rewound_to_step": 3.0, "critic_skipped": 1.0}
