"""A worker of the role logp or ref_logp: load, register, score until the controller orders the end.

ref_logp  holds the frozen base model and scores groups as they finish (scoring.reference)
logp      holds the published weights and scores the batches that it is asked for (scoring.server)
"""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, cast

import grpc
import torch
from torch import nn

from services.common.grpc_server import serve
from services.common.lifetime import announce
from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.spec.run import RunSpec
from services.common.weightsync.member import WeightMember
from services.common.weightsync.server import WeightSyncServicer
from services.controller.client import WorkerSession
from services.trainer.ending import until_stopped
from services.trainer.model.policy import Policy
from services.trainer.model.warm_start import load_base_model
from services.trainer.ranks.build import device_of
from services.trainer.scoring.reference import ReferenceScoring
from services.trainer.scoring.scorer import Scorer
from services.trainer.scoring.server import ScoringServicer
from services.trainer.settings import TrainerSettings
from services.transferqueue.client import TransferQueueClient
from services.transferqueue.dataclient import DataClient
from slipstream.trainer.v1 import scoring_pb2_grpc
from slipstream.weightsync.v1 import weightsync_pb2_grpc

_REFERENCE_VERSION = 0


async def serve_logp(settings: TrainerSettings) -> None:
    """Serve one run in the role logp."""
    async with AsyncExitStack() as stack:
        servicer = ScoringServicer(
            settings.run_id,
            on_refused=lambda reason: session.report(state="loaded", activity=reason),
        )
        member = WeightMember(
            sink=servicer,
            device=device_of(settings),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            on_ready=lambda version: session.report(
                state="ready", activity="", weight_version=version
            ),
        )

        def register(server: grpc.aio.Server) -> None:
            scoring_pb2_grpc.add_ScoringServiceServicer_to_server(servicer, server)
            weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                WeightSyncServicer(member), server
            )

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(WorkerSession(settings, role="logp", port=port))
        session.report(state="loading", activity="loading the model")
        scorer = await asyncio.to_thread(_subscriber, session.spec, settings)
        servicer.attach(scorer, await stack.enter_async_context(_data_client(session)))
        announce(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="loaded", activity="")
        await until_stopped(session)


async def serve_ref_logp(settings: TrainerSettings) -> None:
    """Serve one run in the role ref_logp."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve(settings.bind, lambda server: None))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="ref_logp", port=port)
        )
        session.report(state="loading", activity="loading the reference")
        address = session.transferqueue_address
        scoring = ReferenceScoring(
            session.spec,
            settings.run_id,
            scorer=await asyncio.to_thread(_reference, session.spec, settings),
            queue=await stack.enter_async_context(TransferQueueClient.connect(address)),
            data=await stack.enter_async_context(_data_client(session)),
        )
        announce(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="ready", activity="", weight_version=_REFERENCE_VERSION)
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(scoring.run())
            await until_stopped(session)
            work.cancel()


def _data_client(session: WorkerSession) -> AbstractAsyncContextManager[DataClient]:
    put_timeout_s = session.spec.transferqueue.put_timeout_s
    return DataClient.connect(session.transferqueue_address, put_timeout_s=put_timeout_s)


def _subscriber(spec: RunSpec, settings: TrainerSettings) -> Scorer:
    """A model of the right shape; its weights come over the weight plane before it may score."""
    config = load_config(spec.model, load_tokenizer(spec.model))
    dtype = getattr(torch, spec.trainer.dtype)
    model: Any = build_model(config, dtype=dtype, device=device_of(settings))
    return _scorer(model, spec, version=-1)


def _reference(spec: RunSpec, settings: TrainerSettings) -> Scorer:
    """The frozen base model, in the dtype that the trainer computes in."""
    model = load_base_model(
        spec.model,
        load_tokenizer(spec.model),
        seed=spec.seed,
        device=device_of(settings),
        cache=settings.model_cache.expanduser(),
        progress=lambda step, steps: None,
    )
    # Parameters only: rotary frequencies stay in float32, as in the trainer.
    for parameter in cast("nn.Module", model).parameters():
        parameter.data = parameter.data.to(getattr(torch, spec.trainer.dtype))
    return _scorer(model, spec, version=_REFERENCE_VERSION)


def _scorer(model: Any, spec: RunSpec, *, version: int) -> Scorer:
    policy = Policy(model, temperature=spec.rollout.sampling.temperature)
    return Scorer(policy, max_tokens=spec.trainer.tokens_per_micro_batch, version=version)
