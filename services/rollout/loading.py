"""Loads a rollout: tokenizer, data, engine, rewards, publisher and sampler.

Waits overlap: the engine's package is imported while the data is opened, and reward processes start while the
engine reads its model.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from services.common.errors import DeadlineExceededError
from services.common.fields import partition_id
from services.common.local_copies import with_local_copies
from services.common.memory.rollout import MemoryPlan, plan_of
from services.common.models.families import routing_shape
from services.common.models.loading import load_config
from services.common.models.tokenizer import Tokenizer, load_chat_tokenizer
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.weight_modes import weight_mode
from services.common.security.secrets import with_secrets
from services.common.task_group import TaskGroup, unwrapped
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.images import ImageReader
from services.rollout.data.prompts import Curriculum, PromptStore
from services.rollout.data.sources import open_sources
from services.rollout.engines.base import Engine
from services.rollout.engines.build import build_engine
from services.rollout.engines.engine_config import ImageLimits
from services.rollout.engines.imports import begin_imports
from services.rollout.rewards.scorer import ScorerOfSets
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.progress_cache import TransferQueueCache
from services.rollout.sampling.publisher import GroupPublisher
from services.rollout.sampling.sample_recorder import SampleRecorder
from services.rollout.sampling.sampler import Failure, GroupSampler
from services.rollout.sampling.teacher import Teacher
from services.rollout.sandbox.base import SandboxHosts
from services.rollout.sandbox.pool import SandboxPool
from services.rollout.sandbox.service import SandboxService
from services.rollout.settings import RolloutSettings
from services.rollout.workflows.base import (
    ServingWorkflow,
    Workflow,
    WorkflowResources,
    load_workflow,
)
from services.wire.controller import GroupFailure, WorkerSession
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient

_LOOK_EVERY_S = 0.1


class RolloutLoader:
    """Loads the model, data and rewards that a run's specification names.

    Args:
        stack: Closes what was opened, in reverse order.
    """

    def __init__(
        self,
        stack: AsyncExitStack,
        session: WorkerSession,
        settings: RolloutSettings,
        device: torch.device,
    ) -> None:
        self._stack = stack
        self._session = session
        self._settings = settings
        self._device = device
        self._loop = asyncio.get_running_loop()
        self.spec = with_secrets(session.spec, settings.secrets_directory)
        """The run's specification with secrets and, once loaded, with paths of this host."""
        self.config: PretrainedConfig
        """Configuration of the model, once loaded."""
        self.memory: MemoryPlan | None = None
        """Memory plan of the engine's GPU, once loaded; None without a GPU."""
        self._reach = AddressPolicy(settings.reward_hosts)

    async def load(self) -> tuple[Engine, GroupSampler, GroupPublisher]:
        """Returns the engine, which has yet to start, the sampler and its publisher.

        Raises:
            ValueError: If something that the specification names cannot be loaded.
            DeadlineExceededError: If the trainer, which shares the GPUs, does not load in time.
        """
        session = self._session
        spec = self.spec = await asyncio.to_thread(self._on_this_host)
        importing = asyncio.ensure_future(asyncio.to_thread(self._import_engine))
        tokenizer = await self._open_tokenizer()
        sources = await asyncio.to_thread(open_sources, spec.data, needs_answers=spec.needs_answers)
        rewards = await self._stack.enter_async_context(CallPool(spec.rollout.reward_concurrency))
        calls = await self._stack.enter_async_context(CallPool(spec.rollout.reward_concurrency))
        await importing
        if self._settings.gpus_free_file is not None:
            session.report(activity="waiting until the trainer has loaded and sleeps")
            await _wait_for(self._settings.gpus_free_file, timeout_s=spec.limits.start_timeout_s)
        session.report(activity="building the engine, starting reward processes")
        engine, scorer = await self._open_engine(tokenizer, rewards)
        images = await self._open_images(engine, tokenizer)
        data, metadata = await self._connect()
        prompts = PromptStore(
            spec.data,
            sources,
            tokenizer,
            num_demonstrations=spec.algorithm.num_demonstrations,
            answers_heldout=bool(spec.rollout.rewards),
            images=images,
            teacher_column=None if spec.teacher is None else spec.teacher.prompt_column,
        )
        publisher = await self._open_publisher(data, tokenizer, prompts, engine)
        sampler = GroupSampler(
            prompts,
            GroupServices(
                engine=engine,
                tokenizer=tokenizer,
                workflow=await self._open_workflow(tokenizer, calls),
                reward=scorer,
                comparison=scorer.comparison,
                calls=calls,
                images=images,
                sandboxes=await self._open_sandboxes(),
                curriculum=self._curriculum(calls),
                top_logprobs=spec.algorithm.score_centering or 0,
            ),
            spec.rollout,
            publisher=publisher,
            cache=TransferQueueCache(
                partition_id(self._settings.run_id, "partial"), data=data, metadata=metadata
            ),
            report_failures=partial(_report_failures, session),
        )
        return engine, await self._stack.enter_async_context(sampler), publisher

    def _on_this_host(self) -> RunSpec:
        """Returns the specification with local copies of models and data in object stores.

        Blocks. The weights of the policy arrive from the trainer, unless adapters are merged here.
        """
        spec = self.spec

        def report(line: str) -> None:
            self._loop.call_soon_threadsafe(lambda: self._session.report(activity=line))

        return with_local_copies(
            spec,
            cache=self._settings.object_cache,
            has_weights=(spec.sends_adapters and not spec.adds_adapters)
            or spec.rollout.speculation is not None,
            report=report,
        )

    def _import_engine(self) -> None:
        begin_imports(
            engine_kind(self.spec.rollout.engine),
            is_cpu=self._device.type == "cpu",
            is_invariant=self.spec.rollout.reproducible == "batch_invariant",
        )

    async def _open_tokenizer(self) -> Tokenizer:
        tokenizer = await asyncio.to_thread(
            load_chat_tokenizer, self.spec, time=self._session.run_create_time
        )
        if self.spec.data.chat_template:
            # Imports the template engine now, in a thread. Errors are reported later, with each prompt.
            with suppress(ValueError):
                hello = {"role": "user", "content": "Hello"}
                await asyncio.to_thread(tokenizer.render_chat, [hello])
        return tokenizer

    async def _open_engine(
        self, tokenizer: Tokenizer, rewards: CallPool
    ) -> tuple[Engine, ScorerOfSets]:
        """Builds the engine while the reward processes start."""
        with unwrapped():
            async with TaskGroup() as loading:
                building = loading.create_task(asyncio.to_thread(self._build_engine, tokenizer))
                scorer = await self._stack.enter_async_context(
                    ScorerOfSets.open(self.spec, rewards, self._reach)
                )
        return building.result(), scorer

    def _build_engine(self, tokenizer: Tokenizer) -> Engine:
        spec = self.spec
        self.config = load_config(spec.model, tokenizer)
        max_tokens = max(spec.data.max_prompt_tokens, spec.rollout.max_response_tokens)
        images = ImageLimits(max_images=spec.data.max_images, max_tokens=max_tokens)
        return build_engine(
            spec.rollout,
            spec.model,
            self.config,
            tokenizer,
            dtype=getattr(torch, spec.trainer.dtype),
            device=self._device,
            plan=self._plan,
            is_written_in_place=spec.sends_adapters
            or weight_mode(spec.weight_sync.mode).is_in_place,
            adds_adapters=spec.adds_adapters,
            sleeps=spec.is_colocated(self._settings.worker_id),
            images=images if spec.model.images else None,
            top_logprobs=spec.algorithm.score_centering or 0,
            reach=self._reach,
            worker=f"{self._settings.run_id}/{self._settings.worker_id}",
            report=self._session.report_event,
        )

    def _plan(self, config: PretrainedConfig, *, gpu_bytes: int) -> MemoryPlan:
        roles = self._settings.gpu_neighbours
        self.memory = plan_of(self.spec, config, gpu_bytes=gpu_bytes, roles=roles)
        return self.memory

    async def _open_images(self, engine: Engine, tokenizer: Tokenizer) -> ImageReader | None:
        """Opens the reader of images, if the model has them.

        Raises:
            ValueError: If the engine takes token ids only.
        """
        spec, capabilities = self.spec, engine.capabilities
        if spec.model.images and not capabilities.model_inputs:
            raise ValueError(
                f"model.images is true, but rollout.engine {capabilities.name!r} takes token ids "
                "only; set it to false, or use the engine 'torch' or 'vllm'"
            )
        if spec.data.model_inputs_column is not None and not capabilities.model_inputs:
            raise ValueError(
                f"data.model_inputs_column is {spec.data.model_inputs_column!r}, but rollout.engine "
                f"{capabilities.name!r} takes token ids only; leave it out, or use the engine 'torch'"
            )
        if not spec.model.images:
            return None
        return await asyncio.to_thread(
            ImageReader,
            spec.model,
            spec.data,
            tokenizer,
            allowance=self._settings.allowance,
            reach=self._reach,
        )

    async def _connect(self) -> tuple[DataClient, TransferQueueClient]:
        address = self._session.transferqueue_address
        put_timeout_s = self.spec.transferqueue.put_timeout_s
        # This rollout keeps finished samples for longer than the controller waits for them: the controller
        # then gives their group to another rollout.
        data = await self._stack.enter_async_context(
            DataClient.connect(address, put_timeout_s=put_timeout_s, outage_timeout_s=put_timeout_s)
        )
        self._session.report_outages(data.outage)
        metadata = await self._stack.enter_async_context(TransferQueueClient.connect(address))
        return data, metadata

    async def _open_publisher(
        self, data: DataClient, tokenizer: Tokenizer, prompts: PromptStore, engine: Engine
    ) -> GroupPublisher:
        spec = self.spec
        replays = spec.rollout.routing_replay != "off"
        routing = routing_shape(load_config(spec.model, tokenizer).to_dict()) if replays else None
        num_heldout = sum(map(prompts.num_rows, spec.data.heldout_sets))
        sample_recorder = (
            SampleRecorder(data, spec, tokenizer, num_heldout) if spec.samples.is_on else None
        )
        teacher = None
        if spec.teacher_fields:
            teacher = Teacher(spec, tokenizer, max_tokens=engine.max_tokens, reach=self._reach)
            self._stack.push_async_callback(teacher.close)
        return GroupPublisher(
            data,
            routing,
            has_token_rewards=spec.has_token_rewards,
            columns=spec.reward_columns,
            has_masks=spec.rollout.sampling.is_truncated,
            num_top=spec.algorithm.score_centering or 0,
            sees_turns=spec.model.images and spec.rollout.workflow != "single_turn",
            teacher=teacher,
            sample_recorder=sample_recorder,
        )

    def _curriculum(self, calls: CallPool) -> Curriculum | None:
        curriculum = self.spec.data.curriculum
        if curriculum is None or curriculum.function is None:
            return None
        return Curriculum(curriculum, calls)

    async def _open_sandboxes(self) -> SandboxService | None:
        """Starts the service of the episodes' sandboxes, if the run has them."""
        spec, settings = self.spec.rollout.sandbox, self._settings
        if spec is None:
            return None
        hosts = SandboxHosts(
            domain=settings.sandbox_domain,
            namespace=settings.sandbox_namespace,
            runtime_class=settings.sandbox_runtime_class,
            url=settings.kubernetes_url,
            credentials=settings.kubernetes_credentials,
        )
        service = SandboxService(SandboxPool(spec, hosts=hosts))
        return await self._stack.enter_async_context(
            service.serving(settings.sandbox_bind, host=settings.advertise_host)
        )

    async def _open_workflow(self, tokenizer: Tokenizer, calls: CallPool) -> Workflow:
        """Loads the workflow and starts the servers that it needs."""
        spec, settings = self.spec, self._settings
        workflow = load_workflow(spec.rollout)
        if isinstance(workflow, ServingWorkflow):
            resources = WorkflowResources(
                calls=calls,
                reach=self._reach,
                tokenizer=tokenizer if spec.data.chat_template else None,
                temperature=spec.rollout.sampling.temperature,
                bind=settings.agent_bind,
                host=settings.advertise_host,
            )
            await self._stack.enter_async_context(workflow.serving(resources))
        return workflow


async def _report_failures(session: WorkerSession, failures: Sequence[Failure]) -> None:
    """Reports groups that ended without samples to the controller."""
    await session.report_failures(
        [
            GroupFailure(
                group_id=assignment.group_id,
                attempt=assignment.attempt,
                reason=error.reason,
                message=error.message,
                retryable=error.retryable,
                num_unfinished=error.num_unfinished,
                num_tokens=error.num_tokens,
            )
            for assignment, error in failures
        ]
    )


async def _wait_for(file: Path, *, timeout_s: float) -> None:
    """Waits until a file exists. Raises DeadlineExceededError."""
    try:
        async with asyncio.timeout(timeout_s):
            while not file.exists():  # noqa: ASYNC110, ASYNC240 -- another process writes it
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        raise DeadlineExceededError(
            f"the trainer, which shares this rollout's GPUs, did not load within {timeout_s:.0f} s; see "
            "its log, or raise limits.start_timeout_s"
        ) from error
