"""Real transfers of weights directly into the live parameters of each installed engine."""

import asyncio

import pytest

from services.common.errors import DataLossError
from services.rollout.engines.base import Engine
from services.rollout.weights import WeightReceiver
from services.weightsync.group import Channel
from services.weightsync.weight_plan import TensorSpec
from tests.contract.checks import PROMPT, assert_agrees, until
from tests.contract.engines import REAL_ENGINES, OpenEngine, expected_logprobs, weights
from tests.helpers.engines import begun, made, request
from tests.helpers.weight_members import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

real_engines = pytest.mark.parametrize("open_engine", REAL_ENGINES)


class NoSampler:
    """Fake sampler without groups to save."""

    def checkpoint_soon(self) -> None:
        """Does nothing."""


class Run:
    """Trainer of two ranks, and a rollout with an engine."""

    def __init__(self, engine: Engine) -> None:
        sink = WeightReceiver()
        sink.attach(engine, NoSampler(), is_partial=True)  # type: ignore[arg-type]
        specs = [TensorSpec(name, tuple(t.shape), "float32") for name, t in weights(0).items()]
        self.cluster = Cluster(2, "inplace", specs=specs, sinks=[sink])
        self.epoch = 0

    async def form(self) -> None:
        """Forms the weight group of the next epoch."""
        self.epoch += 1
        await self.cluster.form_group(self.epoch)

    async def train(self, version: int) -> None:
        """Sets the trainer's weights to those of a version."""
        for name, tensor in weights(version).items():
            self.cluster.weights[name].copy_(tensor)

    async def publish(self, version: int) -> None:
        """Sends a version; the rollout adopts it."""
        await self.train(version)
        digest = await self.cluster.send(version, self.epoch)
        await self.cluster.receivers[0].adopt(version, digest)


@real_engines
async def test_five_updates_in_place_are_exact_with_requests_running_across_them(
    open_engine: OpenEngine,
) -> None:
    async with open_engine(in_place=True) as engine:
        run = Run(engine)
        await run.form()
        await run.publish(0)
        tasks = begun(engine, [PROMPT[: 5 + seed] for seed in range(4)], max_tokens=200)
        for version in range(1, 6):
            await until(made(engine, 40))
            await run.publish(version)
            in_place = await engine.score(PROMPT)
            # A copy of all weights must give the same model bit for bit.
            await engine.adopt_weights(version, weights(version))
            assert await engine.score(PROMPT) == in_place
        results = [await task for task in tasks]
        assert engine.stats().weight_version == 5
    for seed, result in enumerate(results):
        assert len(result.token_ids) == 200
        assert_agrees(result, PROMPT[: 5 + seed])
    assert {version for result in results for version, _ in result.version_runs} == set(range(6))


@real_engines
async def test_a_damaged_transfer_leaves_the_engine_paused_until_a_whole_one(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(in_place=True) as engine:
        run = Run(engine)
        await run.form()
        await run.publish(0)
        task = asyncio.ensure_future(engine.generate(request("r", PROMPT[:20], max_tokens=200)))
        await until(made(engine, 10))
        await run.train(1)
        honest = Channel.broadcast
        channel = next(iter(run.cluster.senders[0]._epochs.group(run.epoch).channels.values()))

        def broadcast(self: Channel, tensor):
            if self is channel and tensor.numel() > 4096:
                tensor = tensor.clone()
                tensor.view(-1)[100] ^= 1
            return honest(self, tensor)

        monkeypatch.setattr(Channel, "broadcast", broadcast)
        await run.cluster.prepare(1, run.epoch)
        reports = await run.cluster.transfer(1, run.epoch)
        assert isinstance(reports[-1], DataLossError)
        monkeypatch.undo()
        tokens = engine.stats().tokens_total
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 1.0)
        assert engine.stats().tokens_total == tokens
        await run.form()
        await run.publish(1)
        result = await task
        assert [version for version, _ in result.version_runs] == [0, 1]
        assert_agrees(result, PROMPT[:20])


@real_engines
async def test_a_session_that_ends_before_its_transfer_changes_nothing(
    open_engine: OpenEngine,
) -> None:
    async with open_engine(in_place=True) as engine:
        run = Run(engine)
        await run.form()
        await run.publish(0)
        task = asyncio.ensure_future(engine.generate(request("r", PROMPT[:20], max_tokens=100)))
        await until(made(engine, 10))
        await run.cluster.prepare(1, run.epoch)
        await run.cluster.receivers[0].abort(run.epoch, "the trainer is gone")
        result = await task
        assert result.version_runs == ((0, 100),)
        assert_agrees(result, PROMPT[:20])
        scored = await engine.score(PROMPT)
        expected = expected_logprobs(0, PROMPT[:1], PROMPT[1:])
        assert max(abs(a - float(b)) for a, b in zip(scored, expected, strict=True)) < 1e-4
