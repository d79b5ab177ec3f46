"""Images of an environment's observations through an engine and the transferqueue into the trainer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.common.fields import ROLLOUT_FIELDS, TURN_INPUTS
from services.common.models.loading import load_model
from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.rollout import RolloutSpec
from services.common.security.confinement import CodePolicy
from services.extras.environments.workflow import Environments
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.images import ImageReader
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.failures import GroupError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.sampling.group import GroupServices, RunningGroup
from services.rollout.sampling.progress_cache import (
    GroupProgress,
    decode_progress,
    encode_progress,
)
from services.rollout.sampling.publisher import GroupPublisher
from services.rollout.sampling.sample import Sample
from services.rollout.workflows.base import WorkflowResources
from services.rollout.workflows.turns import concat_inputs, divided, observed, token_ids
from services.trainer.batch.step_plan import Bounds
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.model.policy import Policy
from services.trainer.steps.fields import FieldScoring
from services.trainer.transfers import QueueTransfers
from services.transferqueue.__main__ import transferqueue
from services.transferqueue.settings import TransferQueueSettings
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.workers import GroupAssignment
from tests.helpers.batches import engine_of, spec_of
from tests.helpers.engines import running
from tests.helpers.vision import KINDS, PATCH, model_spec, plain_logprobs, saved_model

TRAIN = "run_1/train"
MEMBERS = 4
GALLERY = """
import random
from PIL import Image

class Gallery:
    def __init__(self, picture=None):
        self.picture = picture

    def reset(self, task, *, seed):
        self.rng, self.steps = random.Random(seed), 0
        return {"messages": [self.look("012")]}

    def look(self, text):
        size = self.rng.randrange(8, 25), self.rng.randrange(8, 25)
        color = tuple(self.rng.randrange(256) for _ in range(3))
        image = Image.new("RGB", size, color) if self.picture is None else self.picture
        parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        return {"role": "user", "content": parts}

    def step(self, message):
        self.steps += 1
        self.rng.seed(message["content"])
        looks = [self.look("3"), self.look("45")] if self.steps == 1 else [self.look("6")]
        if self.steps == 2:
            looks = "7"
        return {"messages": looks, "done": self.steps == 4, "reward": 1.0}
"""


class ConstantScorer:
    async def score(self, reward_input: RewardInput) -> Score:
        return Score(1.0)


class Noting(TorchEngine):
    """Engine that records its requests."""

    requests: list[GenerationRequest]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        return await super().generate(request)


class Rollout:
    """Model, tokenizer and environment of a rollout that runs groups."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.whole = saved_model(kind, folder)
        Qwen2VLImageProcessorPil(
            patch_size=PATCH, size={"shortest_edge": 64, "longest_edge": 64 * 64}
        ).save_pretrained(folder)
        self.model = model_spec(folder)
        self.tokenizer: Tokenizer = load_tokenizer(self.model)
        self.file = folder / "gallery.py"
        self.file.write_text(GALLERY)

    def policy(self) -> Any:
        return load_model(self.model, self.tokenizer, dtype=torch.float32, device="cpu")

    @asynccontextmanager
    async def tools(
        self, engine: Any, arguments: dict[str, Any] | None = None
    ) -> AsyncIterator[GroupServices]:
        data = DataSpec(train={"source": "environment", "path": "train"})  # type: ignore[arg-type]
        reader = ImageReader(
            self.model, data, self.tokenizer, allowance=CodePolicy(), reach=AddressPolicy()
        )
        workflow = Environments(
            environment=f"{self.file}:Gallery", chat=False, max_turn_tokens=5, arguments=arguments
        )
        async with (
            workflow.serving(WorkflowResources(calls=CallPool(1), reach=AddressPolicy())),
            CallPool(1) as calls,
        ):
            yield GroupServices(
                engine=engine,
                tokenizer=self.tokenizer,
                workflow=workflow,
                reward=ConstantScorer(),
                calls=calls,
                images=reader,
            )


SPEC = RolloutSpec(rewards=[{"name": "environment"}], max_response_tokens=100)  # type: ignore[arg-type, list-item]
PROMPT = Prompt(token_ids=(), text="", answer=None, row={"index": 3}, data_source="test")


def assignment_of(group: int) -> GroupAssignment:
    return GroupAssignment(
        group_id=f"g{group}",
        attempt=1,
        split="train",
        row=group,
        partition_id=TRAIN,
        members=tuple(range(MEMBERS)),
        seeds=tuple(range(10 * group, 10 * group + MEMBERS)),
        temperatures=(1.0,) * MEMBERS,
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_images_of_observations_train_as_they_were_sampled(kind: str, tmp_path: Path) -> None:
    rollout = Rollout(tmp_path, kind)
    engine = Noting(rollout.policy(), max_running=8)
    engine.requests = []
    async with (
        transferqueue(TransferQueueSettings(capacity_bytes=64 << 20)) as address,
        TransferQueueClient.connect(address) as queue,
        DataClient.connect(address) as data,
        rollout.tools(engine) as tools,
        running(engine),
    ):
        await queue.create_partition(TRAIN, required_fields=list(ROLLOUT_FIELDS))
        groups = []
        for group in range(2):
            samples = await RunningGroup(assignment_of(group), tools, SPEC).sample(PROMPT, {})
            publisher = GroupPublisher(data, sees_turns=True)
            await publisher.publish(assignment_of(group), PROMPT, samples)
            groups.append(samples)
        batch = await queue.get_batch(TRAIN)
        assert len(batch.to_bytes()) < 4096 * len(groups), "no pixels"
        assert TURN_INPUTS in batch.field_names
        transfers = QueueTransfers(data, asyncio.get_running_loop())
        policy = Policy(rollout.policy(), temperature=1.0)
        scoring = FieldScoring(
            "proximal_logprobs",
            engine_of(policy, spec_of(), oom_limits=OomLimits(Bounds(max_tokens=1000))),
            fetch=transfers.fetch,
            add=transfers.add,
            shares_prefixes=True,
        )
        await asyncio.to_thread(scoring.add, batch)
        batch = await queue.get_batch(TRAIN)
        scored = await data.get(batch, ["proximal_logprobs", "response_mask"])
    rows = zip(scored["proximal_logprobs"].unbind(), scored["response_mask"].unbind(), strict=True)
    by_key = dict(zip(batch.keys, rows, strict=True))
    num_images = []
    for group, samples in enumerate(groups):
        for sample in samples:
            logprobs, mask = by_key[f"g{group}.{sample.member}"]
            expected, count = plain(rollout.whole, sample)
            num_images.append(count)
            torch.testing.assert_close(logprobs[mask], expected[mask], atol=1e-5, rtol=0)
            sampled = torch.tensor([request for turn in sample.turns for request in turn.logprobs])
            torch.testing.assert_close(sampled[mask], expected[mask], atol=1e-5, rtol=0)
            assert len(sample.pictures) == count
    assert set(num_images) == {4}, "one of the reset, two of the first step, one of the third"
    assert all(request.model_inputs for request in engine.requests)


def plain(whole: Any, sample: Sample) -> tuple[torch.Tensor, int]:
    """Returns the logprobs of the whole model's forward pass, and the number of images."""
    prompt = observed(sample.prompt_ids, model_inputs=sample.prompt_inputs)
    (turns,) = divided((prompt, *sample.turns))
    inputs = concat_inputs(turn.model_inputs for turn in turns)
    assert inputs is not None
    logprobs = plain_logprobs(whole, sample.prompt_ids, token_ids(sample.turns), inputs)
    return logprobs.detach(), len(inputs.tensors["image_places"])


class Cutting(Noting):
    """Engine that interrupts the group at the request after the first ``after`` ones."""

    group: RunningGroup
    after: int

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if len(self.requests) == self.after:
            asyncio.get_running_loop().call_later(0.01, self._interrupt)
        return await super().generate(request)

    def _interrupt(self) -> None:
        requests = self.group.interrupt()
        self.task = asyncio.ensure_future(self.abort(set(requests)))


def cached(progress: GroupProgress) -> GroupProgress:
    """Returns progress as another replica reads it from the transferqueue."""
    return {
        m: decode_progress(encode_progress(progress_of_member))
        for m, progress_of_member in progress.items()
    }


@pytest.mark.parametrize("after", [2, 6, 10, 14])
async def test_an_interrupted_episode_continues_on_another_replica_as_if_it_had_not_been(
    after: int, tmp_path: Path
) -> None:
    rollout = Rollout(tmp_path, "qwen2_5_vl")
    engines: Sequence[Noting] = [
        Noting(rollout.policy(), max_running=8),
        Cutting(rollout.policy(), max_running=8),
        Noting(rollout.policy(), max_running=8),
    ]
    samples, progress = list[list[Sample]](), dict[int, Any]()
    for engine in engines:
        engine.requests = []
        async with rollout.tools(engine) as tools, running(engine):
            group = RunningGroup(assignment_of(0), tools, SPEC)
            if isinstance(engine, Cutting):
                engine.group, engine.after = group, after
            samples.append(await group.sample(PROMPT, progress if engine is engines[2] else {}))
            if isinstance(engine, Cutting):
                assert group.is_cut
                progress = dict(cached(group.progress({})))
    whole, nothing, resumed = samples
    assert not nothing
    for sample, resumed_sample in zip(whole, resumed, strict=True):
        assert token_ids(sample.turns) == token_ids(resumed_sample.turns)
        assert sample.prompt_inputs == resumed_sample.prompt_inputs
        assert sample.turn_inputs == resumed_sample.turn_inputs
        assert sample.pictures == resumed_sample.pictures
    requests = len(engines[1].requests) + len(engines[2].requests)
    assert requests <= len(engines[0].requests) + MEMBERS, "recorded replies are not sampled again"


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        ("data:image/png;base64,AAAA", "image_invalid"),
        ("/etc/passwd", "image_forbidden"),
        ("http://127.0.0.1:9/x.png", "image_forbidden"),
        ("", "an image must have"),
    ],
)
async def test_a_bad_image_of_an_environment_fails_the_sample_with_its_reason(
    picture: str, reason: str, tmp_path: Path
) -> None:
    rollout = Rollout(tmp_path, "qwen2_5_vl")
    engine = TorchEngine(rollout.policy(), max_running=8)
    async with rollout.tools(engine, {"picture": picture}) as tools, running(engine):
        with pytest.raises(GroupError) as caught:
            async with asyncio.timeout(60):
                await RunningGroup(assignment_of(0), tools, SPEC).sample(PROMPT, {})
    expected = "workflow_invalid_image" if reason.startswith("image_") else "workflow_invalid_value"
    assert caught.value.reason == expected
    assert reason in caught.value.message
