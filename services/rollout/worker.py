"""Rollout worker: registers, loads the model and data, serves until the run ends."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import grpc
import torch

from services.common.errors import DeadlineExceededError, ServiceError
from services.common.fields import partition_id
from services.common.lifetime import ending_with_outages, report_ready, wait_for_shutdown
from services.common.models.families import routing_shape
from services.common.models.loading import load_config
from services.common.models.tokenizer import Tokenizer, load_chat_tokenizer, load_tokenizer
from services.common.rpc.server import serve
from services.common.runspec.engines import engine_kind
from services.common.runspec.rollout import SandboxSpec
from services.common.runspec.run import RunSpec
from services.common.runspec.weight_modes import weight_mode
from services.common.security.credentials import acting_as
from services.common.security.secrets import with_secrets
from services.common.task_group import TaskGroup, until_first, unwrapped
from services.common.telemetry.logging import configure
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.images import ImageReader
from services.rollout.data.prompts import Curriculum, PromptStore
from services.rollout.data.sources import open_sources
from services.rollout.engines.base import Engine
from services.rollout.engines.build import build_engine
from services.rollout.engines.engine_config import ImageLimits
from services.rollout.engines.external import EngineDiedError
from services.rollout.engines.imports import begin_imports
from services.rollout.engines.memory import plan_of
from services.rollout.environments.workflow import Environments
from services.rollout.failures import CallError
from services.rollout.frozen_weights import FrozenWeights
from services.rollout.monitor import freeze_startup_objects, monitor
from services.rollout.openai.agent import Agent
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
from services.rollout.server import RolloutServicer
from services.rollout.settings import RolloutSettings
from services.rollout.weights import WeightReceiver
from services.rollout.workflows.base import Workflow, load_workflow
from services.rollout.workflows.multi_turn import MultiTurn
from services.weightsync.member import WeightMember
from services.weightsync.server import serve_member
from services.wire.controller import GroupFailure, WorkerSession
from services.wire.data.client import DataClient
from services.wire.transferqueue.client import TransferQueueClient
from slipstream.rollout.v1 import rollout_pb2_grpc

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1


async def run(settings: RolloutSettings) -> None:
    """Serves one run until the controller orders the end or a signal arrives."""
    device = _device(settings)
    servicer = RolloutServicer()
    # The server stops first, so that late callers get "unavailable" rather than closed components.
    async with AsyncExitStack() as stack, AsyncExitStack() as serving:
        receiver = WeightReceiver(
            on_refused=lambda reason: session.report(state="loaded", activity=reason),
            # Until these weights are checked, the controller must not count this rollout as ready with the
            # previous version.
            on_adopted=lambda: session.report(state="loaded"),
        )
        member = WeightMember(
            sink=receiver,
            device=device,
            peers=_peers(device),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            on_ready=lambda version: session.report(
                state="ready", activity="", weight_version=version
            ),
        )

        def register(server: grpc.aio.Server) -> None:
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
            serve_member(member, server)

        port = await serving.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="rollout", port=port)
        )
        session.report(state="loading", activity="importing the engine, opening the data")
        engine, sampler, publisher = await _load(stack, session, settings, device)
        session.report(activity="starting the engine")
        tasks = await stack.enter_async_context(TaskGroup())
        # Reads the frozen weights while the engine starts, but after the engine's model was created: both
        # create models under torch's process-wide default dtype.
        reading = tasks.create_task(asyncio.to_thread(_frozen, session.spec, device))
        background = [
            tasks.create_task(engine.run()),
            tasks.create_task(
                monitor(
                    session,
                    engine,
                    sampler,
                    publish_wait_s=lambda: publisher.oldest_pending_s,
                )
            ),
        ]
        await engine.wait_ready()
        frozen = await reading
        freeze_startup_objects()
        servicer.attach(sampler)
        receiver.attach(
            engine, sampler, is_partial=session.spec.rollout.partial_rollout, frozen=frozen
        )
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        if session.spec.has_engine:
            session.report(state="loaded", activity="")
        else:  # the run has no engine that waits for weights
            session.report(state="ready", activity="", weight_version=0)
        await _serve_until_stopped(session, sampler, drain_timeout_s=settings.drain_timeout_s)
        for task in background:
            task.cancel()


async def _load(
    stack: AsyncExitStack, session: WorkerSession, settings: RolloutSettings, device: torch.device
) -> tuple[Engine, GroupSampler, GroupPublisher]:
    """Loads the model, data and rewards that the run's specification names."""
    spec: RunSpec = with_secrets(session.spec, settings.secrets_directory)
    kind = engine_kind(spec.rollout.engine)
    imports = partial(
        begin_imports,
        kind,
        is_cpu=device.type == "cpu",
        is_invariant=spec.rollout.reproducible == "batch_invariant",
    )
    importing = asyncio.ensure_future(asyncio.to_thread(imports))
    tokenizer = await asyncio.to_thread(load_chat_tokenizer, spec, time=session.run_create_time)
    if spec.data.chat_template:
        # Imports the template engine now, in a thread. Errors are reported later, with each prompt.
        with suppress(ValueError):
            hello = {"role": "user", "content": "Hello"}
            await asyncio.to_thread(tokenizer.render_chat, [hello])
    sources = await asyncio.to_thread(open_sources, spec.data, needs_answers=spec.needs_answers)
    pool = await stack.enter_async_context(CallPool(spec.rollout.reward_concurrency))
    calls = await stack.enter_async_context(CallPool(spec.rollout.reward_concurrency))
    reach = AddressPolicy(settings.reward_hosts)
    await importing
    if settings.gpus_free_file is not None:
        session.report(activity="waiting until the trainer has loaded and sleeps")
        await _wait_for(settings.gpus_free_file, timeout_s=spec.limits.start_timeout_s)
    session.report(activity="building the engine, starting reward processes")
    # Reward processes start and import their code while the engine reads its model.
    with unwrapped():
        async with TaskGroup() as loading:
            building = loading.create_task(
                asyncio.to_thread(
                    build_engine,
                    spec.rollout,
                    spec.model,
                    tokenizer,
                    dtype=getattr(torch, spec.trainer.dtype),
                    device=device,
                    plan=partial(plan_of, spec, roles=settings.gpu_neighbours),
                    is_written_in_place=spec.sends_adapters
                    or weight_mode(spec.weight_sync.mode).is_in_place,
                    sleeps=spec.is_colocated(settings.worker_id),
                    images=ImageLimits(
                        max_images=spec.data.max_images,
                        max_tokens=max(
                            spec.data.max_prompt_tokens, spec.rollout.max_response_tokens
                        ),
                    )
                    if spec.model.images
                    else None,
                )
            )
            scorer = await stack.enter_async_context(ScorerOfSets.open(spec, pool, reach))
    engine = building.result()
    images = None
    if spec.model.images:
        if not engine.capabilities.model_inputs:
            raise ValueError(
                f"model.images is true, but rollout.engine {engine.capabilities.name!r} takes token ids "
                "only; set it to false, or use the engine 'torch' or 'vllm'"
            )
        images = await asyncio.to_thread(
            ImageReader,
            spec.model,
            spec.data,
            tokenizer,
            allowance=settings.allowance,
            reach=reach,
        )
    if spec.data.model_inputs_column is not None and not engine.capabilities.model_inputs:
        raise ValueError(
            f"data.model_inputs_column is {spec.data.model_inputs_column!r}, but rollout.engine "
            f"{engine.capabilities.name!r} takes token ids only; leave it out, or use the engine 'torch'"
        )
    address, put_timeout_s = session.transferqueue_address, spec.transferqueue.put_timeout_s
    # This rollout keeps finished samples for longer than the controller waits for them: the controller then
    # gives their group to another rollout.
    data = await stack.enter_async_context(
        DataClient.connect(address, put_timeout_s=put_timeout_s, outage_timeout_s=put_timeout_s)
    )
    session.report_outages(data.outage)
    metadata = await stack.enter_async_context(TransferQueueClient.connect(address))
    replays = spec.rollout.routing_replay != "off"
    routing = routing_shape(load_config(spec.model, tokenizer).to_dict()) if replays else None
    prompts = PromptStore(
        spec.data,
        sources,
        tokenizer,
        num_demonstrations=spec.algorithm.num_demonstrations,
        answers_heldout=bool(spec.rollout.rewards),
        images=images,
        teacher_column=None if spec.teacher is None else spec.teacher.prompt_column,
    )
    num_heldout = sum(map(prompts.num_rows, spec.data.heldout_sets))
    sample_recorder = (
        SampleRecorder(data, spec, tokenizer, num_heldout) if spec.samples.is_on else None
    )
    teacher = None
    if spec.teacher_fields:
        teacher = Teacher(spec, tokenizer, max_tokens=engine.max_tokens, reach=reach)
        stack.push_async_callback(teacher.close)
    publisher = GroupPublisher(
        data,
        routing,
        has_token_rewards=spec.has_token_rewards,
        columns=spec.reward_columns,
        has_masks=spec.rollout.sampling.is_truncated,
        sees_turns=spec.model.images and spec.rollout.workflow != "single_turn",
        teacher=teacher,
        sample_recorder=sample_recorder,
    )
    asked = spec.data.curriculum
    has_function = asked is not None and asked.function is not None
    curriculum = Curriculum(asked, calls) if asked is not None and has_function else None
    sampler = GroupSampler(
        prompts,
        GroupServices(
            engine=engine,
            tokenizer=tokenizer,
            workflow=await _open_workflow(stack, spec, settings, reach, tokenizer, calls),
            reward=scorer,
            comparison=scorer.comparison,
            calls=calls,
            images=images,
            sandboxes=await _open_sandboxes(stack, spec.rollout.sandbox, settings),
            curriculum=curriculum,
        ),
        spec.rollout,
        publisher=publisher,
        cache=TransferQueueCache(
            partition_id(settings.run_id, "partial"), data=data, metadata=metadata
        ),
        report_failures=partial(_report_failures, session),
    )
    return engine, await stack.enter_async_context(sampler), publisher


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


def _frozen(spec: RunSpec, device: torch.device) -> FrozenWeights | None:
    """Reads the base weights that LoRA adapters are merged into, if only adapters are published."""
    lora = spec.trainer.lora
    if lora is None or not (spec.sends_adapters and engine_kind(spec.rollout.engine).has_model):
        return None
    return FrozenWeights(
        spec.model,
        load_tokenizer(spec.model),
        dtype=getattr(torch, spec.trainer.dtype),
        device=device,
        base_dtype=lora.base_dtype,
    )


async def _open_sandboxes(
    stack: AsyncExitStack, spec: SandboxSpec | None, settings: RolloutSettings
) -> SandboxService | None:
    """Starts the service of the episodes' sandboxes, if the run has them, until the stack is closed."""
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
    return await stack.enter_async_context(
        service.serving(settings.sandbox_bind, host=settings.advertise_host)
    )


async def _open_workflow(
    stack: AsyncExitStack,
    spec: RunSpec,
    settings: RolloutSettings,
    reach: AddressPolicy,
    tokenizer: Tokenizer,
    calls: CallPool,
) -> Workflow:
    """Loads the workflow and starts the servers that it needs, until the stack is closed."""
    workflow = load_workflow(spec.rollout)
    if isinstance(workflow, MultiTurn):
        workflow.check(tokenizer if spec.data.chat_template else None)
        try:
            await workflow.describe_tools(calls, functions=spec.data.chat_template)
        except CallError as error:
            raise ValueError(f"rollout.workflow_arguments: {error.message}") from error
    if isinstance(workflow, Agent):
        serving = workflow.serving(
            settings.agent_bind,
            host=settings.advertise_host,
            temperature=spec.rollout.sampling.temperature,
            reach=reach,
        )
        await stack.enter_async_context(serving)
    if isinstance(workflow, Environments):
        await stack.enter_async_context(workflow.serving(reach))
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


async def _serve_until_stopped(
    session: WorkerSession, sampler: GroupSampler, *, drain_timeout_s: float
) -> None:
    """Serves until the controller orders the end or a signal arrives.

    After a signal, a run with partial rollout caches its unfinished groups first.
    """
    ordered, _ = await until_first(session.stopped(), wait_for_shutdown())
    sampler.refuse()
    if ordered.cancelled():
        session.report(state="draining", activity="ending")
        if session.spec.rollout.partial_rollout:
            await _store_unfinished(sampler, drain_timeout_s)
    sampler.cancel_all()


async def _store_unfinished(sampler: GroupSampler, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await sampler.interrupt()
    except (TimeoutError, ServiceError) as error:
        logger.warning("storing unfinished groups failed", extra={"why": repr(error)})


def _device(settings: RolloutSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def _peers(device: torch.device) -> list[torch.device]:
    """Returns the engine's GPUs after the first one; a rollout process sees only its engine's GPUs."""
    if device.type == "cpu":
        return []
    return [torch.device("cuda", index) for index in range(1, torch.cuda.device_count())]


async def _run_measured(settings: RolloutSettings) -> None:
    async with settings.serving_metrics():
        await run(settings)


def serve_rollout(settings: RolloutSettings) -> None:
    """Runs the worker until its run ends."""
    configure(
        level=settings.log_level,
        log_format=settings.log_format,
        service="rollout",
        worker=settings.worker_id,
    )
    with (
        ending_with_outages(),
        acting_as(settings.identity()),
        settings.tracing("rollout", run=settings.run_id, worker=settings.worker_id),
    ):
        try:
            with unwrapped(EngineDiedError):
                asyncio.run(_run_measured(settings))
        except EngineDiedError as error:
            # Exits without a traceback, so that the last lines of the log, which the run reports, are the
            # engine's.
            sys.exit(f"{error}")
