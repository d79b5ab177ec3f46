"""Model inputs from a row through an engine and the transferqueue into the trainer's packed batch."""

import asyncio

import pytest
import torch

from services.common.fields import ROLLOUT_FIELDS
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.rollout import RolloutSpec
from services.common.runspec.run import ModelSpec
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import PromptStore
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.sampling.group import GroupServices, RunningGroup
from services.rollout.sampling.publisher import GroupPublisher
from services.rollout.workflows.base import SingleTurn
from services.trainer.batch.packing import PackedTokens
from services.trainer.batch.step_plan import Bounds
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.model.policy import Policy
from services.trainer.steps.fields import FieldScoring
from services.trainer.transfers import QueueTransfers
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.batch import KVBatchMeta
from services.wire.data.client import DataClient
from services.wire.step_command import StepCommand
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import GroupAssignment
from tests.helpers.batches import Queue, engine_of, rank_of, spec_of
from tests.helpers.engines import running
from tests.helpers.features import HIDDEN, PLACEHOLDER, feature_model

TRAIN = "run_1/train"
MEMBERS = 4
MIB = 1 << 20
CHARACTERS = "chars:a0bcdefghijklmnopqrstu"
"""Token 3 is ``0``, the placeholder of :class:`FeatureModel`."""


def bundle(seed: int) -> dict[str, torch.Tensor]:
    """Returns 1 MiB of pixels and two feature vectors."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(2, 128, 1024, generator=generator)
    return {"features": torch.randn(2, HIDDEN, generator=generator), "pixels": pixels}


ROWS = [
    {"prompt": "b0c0d", "answer": "a", "seen": bundle(1)},
    {"prompt": "b0c0d", "answer": "a", "seen": bundle(2)},
    {"prompt": "bacad", "answer": "a", "seen": None},
]


class Length:
    """Reward that is higher for longer responses."""

    async def score(self, reward_input: RewardInput) -> Score:
        assert "seen" not in reward_input.row, "rewards are processes, to which no tensors go"
        return Score(float(len(reward_input.response)))


class NotingEngine(TorchEngine):
    """Engine that records its requests."""

    def __init__(self) -> None:
        super().__init__(feature_model(), max_running=8)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        return await super().generate(request)


class NotingPolicy(Policy):
    """Policy that records the packs that it scores."""

    def __init__(self) -> None:
        super().__init__(feature_model(), temperature=1.0)
        self.packs: list[PackedTokens] = []

    def forward(
        self, packed: PackedTokens, *, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.packs.append(packed)
        return super().forward(packed, temperature=temperature)


async def generated(engine: TorchEngine, data: DataClient) -> None:
    """Samples and publishes a group for each row."""
    columns = DataSpec(train={"source": "jsonl", "path": "rows"}, model_inputs_column="seen")  # type: ignore[arg-type]
    model = ModelSpec(path="tiny:qwen2-0.4m", tokenizer=CHARACTERS)
    tokenizer = load_tokenizer(model)
    prompts = PromptStore(columns, {"train": ROWS}, tokenizer)
    # A sampled placeholder is the last token of its response; it is not a position of features.
    spec = RolloutSpec(
        rewards=[{"name": "unused"}],  # type: ignore[arg-type, list-item]  # pydantic converts
        max_response_tokens=6,
        sampling={"stop_token_ids": [PLACEHOLDER]},  # type: ignore[arg-type]
    )
    services = GroupServices(
        engine=engine,
        tokenizer=tokenizer,
        workflow=SingleTurn(),
        reward=Length(),
        calls=CallPool(1),
    )
    async with running(engine):
        for row in range(len(ROWS)):
            assignment = GroupAssignment(
                group_id=f"g{row}",
                attempt=1,
                split="train",
                row=row,
                partition_id=TRAIN,
                members=tuple(range(MEMBERS)),
                seeds=tuple(range(MEMBERS)),
                temperatures=(1.0,) * MEMBERS,
            )
            prompt = prompts.prompt("train", row)
            samples = await RunningGroup(assignment, services, spec).sample(prompt, {})
            await GroupPublisher(data).publish(assignment, prompt, samples)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "network"])
async def test_a_rows_tensors_reach_engine_and_trainer_and_never_the_controller(
    shared_memory: bool,
) -> None:
    engine, policy = NotingEngine(), NotingPolicy()
    settings = TransferQueueSettings(capacity_bytes=64 * MIB)
    async with (
        transferqueue(settings) as address,
        TransferQueueClient.connect(address) as queue,
        DataClient.connect(address, use_shared_memory=shared_memory) as data,
    ):
        await queue.create_partition(TRAIN, required_fields=list(ROLLOUT_FIELDS))
        await generated(engine, data)
        metas: list[KVBatchMeta] = []
        async for arrival in queue.watch(TRAIN):  # as the controller receives them
            metas.append(arrival)
            if sum(meta.num_keys for meta in metas) == MEMBERS * len(ROWS):
                break
        batch = KVBatchMeta.concat(metas)
        stored_bytes = (await queue.stats()).partitions[0].stored_bytes
        transfers = QueueTransfers(data, asyncio.get_running_loop())
        scored = await asyncio.to_thread(add_proximal_logprobs, policy, transfers, batch)
        batch = await queue.get_batch(TRAIN)
        fetched = await data.get(scored, ["rollout_logprobs"])
        proximal = await data.get(batch.select(scored.keys), ["proximal_logprobs"])
        rank = rank_of(spec_of(), policy, Fetching(transfers))
        result = await asyncio.to_thread(rank.train, StepCommand(1, batch))
    model_inputs = [request.model_inputs for request in engine.requests]
    for row, bundles in enumerate([model_inputs[:4], model_inputs[4:8], model_inputs[8:]]):
        assert len(bundles) == MEMBERS
        for prompt_inputs in bundles:
            assert prompt_inputs is not None
            expected = ROWS[row]["seen"] or {}
            assert prompt_inputs.tensors.keys() == expected.keys()
            assert all(
                torch.equal(prompt_inputs.tensors[name], expected[name]) for name in expected
            )
    assert {request.context_ids for request in engine.requests[:8]} == {(4, 3, 5, 3, 6)}

    assert max(len(meta.to_bytes()) for meta in metas) < 4096 * MEMBERS
    assert len(KVBatchMeta.concat(metas).to_bytes()) < 4096 * len(ROWS)
    assert 2 * MIB < stored_bytes < 3 * MIB, "two groups have 1 MiB each, once for all members"

    for pack in policy.packs:
        digests = [placed.inputs.digest for placed in pack.inputs]
        assert len(digests) == len(set(digests)) == 2, "members share their prompt, groups do not"
        for placed in pack.inputs:
            (expected,) = (
                row["seen"]
                for row in ROWS
                if row["seen"] is not None
                and torch.equal(row["seen"]["pixels"], placed.inputs.tensors["pixels"])
            )
            assert torch.equal(placed.inputs.tensors["features"], expected["features"])
            assert pack.input_ids[placed.start : placed.start + 5].tolist() == [4, 3, 5, 3, 6]
    # Logprobs with another sample's inputs, or without inputs, differ by far more.
    torch.testing.assert_close(
        proximal["proximal_logprobs"].values, fetched["rollout_logprobs"].values, atol=1e-5, rtol=0
    )
    assert not result.skipped
    assert result.metrics["rollout_logprob_abs_diff_max"] <= 1e-5


class Fetching(Queue):
    """Queue that fetches from a transferqueue."""

    def __init__(self, transfers: QueueTransfers) -> None:
        self.fetch = transfers.fetch  # type: ignore[method-assign]


def add_proximal_logprobs(
    policy: Policy, transfers: QueueTransfers, batch: KVBatchMeta
) -> KVBatchMeta:
    """Adds the policy's logprobs to the samples, as the workers of the role logp do."""
    limits = OomLimits(Bounds(max_tokens=1000))
    engine = engine_of(policy, spec_of(), oom_limits=limits)
    scoring = FieldScoring(
        "proximal_logprobs",
        engine,
        fetch=transfers.fetch,
        add=transfers.add,
        shares_prefixes=True,
    )
    scoring.add(batch)
    return batch
