"""A worker of the role logp or ref_logp: loads, registers and scores until the controller stops it.

ref_logp  holds the frozen base model and scores groups as they finish, in parallel with generation and
          training. It leases samples from the transferqueue, which delivers a dead worker's samples again.
          The controller sees a group only after the field is stored.
logp      holds the published weights and scores the batches that the controller sends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from services.common.fields import partition_id
from services.common.lifetime import report_ready
from services.common.models.tokenizer import check_teacher
from services.common.rpc.server import serve
from services.common.runspec.run import RunSpec
from services.common.task_group import TaskGroup, in_thread
from services.extras.scoring.leader import Scorer, ScoringLeader, follow
from services.extras.scoring.memory import scoring_spec
from services.trainer import metrics
from services.trainer.collectives import Ranks
from services.trainer.engines.base import Progress
from services.trainer.engines.fsdp.build import Loader
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.oom import load_oom_limits
from services.trainer.engines.fsdp.parallel import RankTopology, build_topology
from services.trainer.model.policy import Policy, computes_as, freeze
from services.trainer.model.quantized import quantize_base
from services.trainer.ranks.build import device_of
from services.trainer.ranks.command_group import CommandGroup
from services.trainer.ranks.start import FollowerStart, load, until_stopped
from services.trainer.settings import TrainerSettings
from services.trainer.steps.fields import FieldScoring
from services.trainer.transfers import QueueTransfers, of_vocabulary
from services.weightsync.endpoints import Place
from services.weightsync.member import WeightMember
from services.weightsync.modes.placing import live_placer
from services.weightsync.server import serve_member
from services.weightsync.weight_plan import WeightPlan
from services.wire.batch import KVBatchMeta
from services.wire.controller import WorkerSession
from services.wire.transferqueue.client import TransferQueueClient
from services.wire.transferqueue.types import AcquireRequest
from slipstream.trainer.v1 import scoring_pb2 as pb
from slipstream.trainer.v1 import scoring_pb2_grpc

_REFERENCE_VERSION = 0


async def serve_logp(settings: TrainerSettings) -> None:
    command_group = CommandGroup(settings.world_size, host=settings.advertise_host)
    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())
        servicer = ScoringServicer(
            settings.run_id,
            on_refused=lambda reason: session.report(state="loaded", activity=reason),
        )
        member = WeightMember(
            sink=servicer,
            # No single GPU has room for a sharded model, so weights are received in host memory first.
            device=device_of(settings) if settings.world_size == 1 else torch.device("cpu"),
            host=settings.advertise_host,
            rendezvous=lambda scope: session.rendezvous(scope),
            on_ready=lambda version: session.report(
                state="ready", activity="", weight_version=version
            ),
        )

        def register(server: grpc.aio.Server) -> None:
            scoring_pb2_grpc.add_ScoringServiceServicer_to_server(servicer, server)
            serve_member(member, server)

        port = await stack.enter_async_context(serve(settings.bind, register))
        session = await stack.enter_async_context(WorkerSession(settings, role="logp", port=port))
        scoring = await load(stack, session, command_group, settings, build_policy)
        leader = ScoringLeader(
            scoring.scorer, scoring.fields, command_group=command_group, version=-1
        )
        servicer.attach(leader)
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="loaded", activity="")
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        await until_stopped(session, command_group)


async def follow_logp(start: FollowerStart) -> None:
    """Executes the commands of rank 0 in the role logp."""
    scoring = await start.build(build_policy)
    await asyncio.to_thread(follow, start.command_group, scoring.scorer, scoring.fields)


async def serve_ref_logp(settings: TrainerSettings) -> None:
    command_group = CommandGroup(settings.world_size, host=settings.advertise_host)
    async with AsyncExitStack() as stack:
        stack.enter_context(command_group.listening())
        port = await stack.enter_async_context(serve(settings.bind, lambda server: None))
        session = await stack.enter_async_context(
            WorkerSession(settings, role="ref_logp", port=port)
        )
        reference = await load(stack, session, command_group, settings, build_reference)
        leader = ScoringLeader(
            reference.scorer,
            reference.fields,
            command_group=command_group,
            version=_REFERENCE_VERSION,
        )
        address = session.transferqueue_address
        scoring = ReferenceScoring(
            session.spec,
            settings.run_id,
            leader=leader,
            queue=await stack.enter_async_context(TransferQueueClient.connect(address)),
        )
        report_ready(settings.ready_file, {"grpc": f"{settings.advertise_host}:{port}"})
        session.report(state="ready", activity="", weight_version=_REFERENCE_VERSION)
        stack.push_async_callback(asyncio.to_thread, leader.stop)
        async with TaskGroup() as tasks:
            work = tasks.create_task(scoring.run())
            await until_stopped(session, command_group)
            work.cancel()


async def follow_ref_logp(start: FollowerStart) -> None:
    """Executes the commands of rank 0 in the role ref_logp."""
    scoring = await start.build(build_reference)
    await asyncio.to_thread(follow, start.command_group, scoring.scorer, scoring.fields)


_Context = grpc.aio.ServicerContext[Any, Any]


class ScoringServicer(scoring_pb2_grpc.ScoringServiceServicer):
    """Implements the gRPC ``ScoringService`` and receives published weights.

    Raises ``UnavailableError`` until :meth:`attach`.

    Args:
        on_refused: Called with the reason if this worker stops scoring until it receives other weights.
    """

    def __init__(self, run_id: str, on_refused: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._on_refused = on_refused
        self._leader: ScoringLeader | None = None
        self._live: Mapping[str, Tensor] = {}

    def attach(self, leader: ScoringLeader) -> None:
        """Starts to answer calls."""
        self._leader = leader

    async def ScoreBatch(
        self, request: pb.ScoreBatchRequest, context: _Context
    ) -> pb.ScoreBatchResponse:
        """Adds proximal logprobs to samples."""
        leader = self._attached()
        meta = KVBatchMeta.from_proto(request.batch)
        start = time.perf_counter()
        await asyncio.to_thread(leader.add, meta, version=request.weight_version)
        spent_s = time.perf_counter() - start
        metrics.STEP_SECONDS.labels(self._run_id, "old_logprob").observe(spent_s)
        return pb.ScoreBatchResponse(duration_s=spent_s)

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Adopts a version; returns the seconds in which nothing was scored."""
        leader = self._attached()
        try:
            return await in_thread(partial(leader.adopt, version, tensors))
        except ValueError as error:
            raise InvalidArgumentError(str(error), version=version) from error

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Returns the logprob of each token except the first, under the live weights at temperature 1."""
        leader = self._attached()
        return await asyncio.to_thread(leader.score_text, token_ids)

    async def refuse_weights(self, reason: str) -> None:
        """Stops scoring until other weights are adopted, because the live ones differ from the trainer's."""
        leader = self._attached()
        await asyncio.to_thread(leader.refuse)
        self._on_refused(reason)

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Blocks scoring, and returns a function that writes received tensors into the live weights."""
        leader = self._attached()
        self._live = await asyncio.to_thread(leader.open)
        return live_placer(plan, self._live)

    async def adopt_placed(self, version: int) -> float:
        """Adopts the weights that were written in place."""
        return await self.adopt_weights(version, self._live)

    async def close_weights(self) -> None:
        """Resumes scoring with the live weights, if nothing was written into them."""
        leader = self._attached()
        leader.close()

    def _attached(self) -> ScoringLeader:
        if self._leader is None:
            raise UnavailableError("this worker is still loading its model; retry later")
        return self._leader


logger = logging.getLogger(__name__)

_WAIT_S = 60.0
# Delay before a retry if the transferqueue restarts or does not hold the run yet.
_RETRY_S = 0.5
# After this time, the samples of a dead worker go to another one. If a live worker takes longer, its work
# may be done twice, which changes nothing.
_LEASE_S = 15.0
_CONSUMER = "ref_logp"


class ReferenceScoring:
    """Scores groups until it is cancelled.

    Args:
        run_id: The run's id, which also names the partition of its samples.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        *,
        leader: ScoringLeader,
        queue: TransferQueueClient,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._leader = leader
        self._queue = queue

    async def run(self) -> None:
        """Leases and scores groups forever."""
        while True:
            try:
                leases = await self._lease()
                await self._score(leases)
            except (UnavailableError, DeadlineExceededError, NotFoundError) as error:
                logger.warning("scoring failed; retrying", extra={"reason": str(error)})
                await asyncio.sleep(_RETRY_S)

    async def _lease(self) -> list[KVBatchMeta]:
        """Leases one group, and further available ones up to the tokens of one forward pass of all ranks."""
        topology = self._spec.topology
        num_packs = topology.scoring_ranks // topology.scoring.tensor_parallel
        max_tokens = self._spec.trainer.tokens_per_micro_batch * num_packs
        waited_from = time.perf_counter()
        leases: list[KVBatchMeta] = []
        tokens, wait_s = 0, _WAIT_S
        while tokens < max_tokens:
            try:
                meta = await self._queue.acquire(self._request(wait_s))
            except DeadlineExceededError:
                break
            leases.append(meta)
            tokens += sum(sum(meta.column(name).lengths) for name in ("prompt_ids", "response_ids"))
            wait_s = 0.0
        waited_s = time.perf_counter() - waited_from
        metrics.IDLE_SECONDS.labels(self._run_id, "no_data").inc(waited_s)
        return leases

    def _request(self, wait_s: float) -> AcquireRequest:
        return AcquireRequest(
            partition_id=partition_id(self._run_id, "train"),
            consumer=_CONSUMER,
            fields=("prompt_ids", "response_ids"),
            num_keys=self._spec.samples_per_group,
            group_size=self._spec.samples_per_group,
            lease_s=_LEASE_S,
            wait_s=wait_s,
        )

    async def _score(self, leases: list[KVBatchMeta]) -> None:
        if not leases:
            return
        start = time.perf_counter()
        batch = KVBatchMeta.concat(leases)
        try:
            await asyncio.to_thread(self._leader.add, batch)
        except NotFoundError as error:
            # One group was released meanwhile; score the others one by one.
            logger.info("samples were released", extra={"reason": str(error)})
            if len(leases) > 1:
                for meta in leases:
                    await self._score([meta])
            return
        for meta in leases:
            await self._acknowledge(meta)
        metrics.STEP_SECONDS.labels(self._run_id, "ref_logprob").observe(
            time.perf_counter() - start
        )

    async def _acknowledge(self, meta: KVBatchMeta) -> None:
        try:
            await self._queue.ack(meta)
        except FailedPreconditionError as error:
            logger.info("lease expired; the samples are scored", extra={"reason": str(error)})


@dataclass(frozen=True, slots=True)
class LoadedScorer:
    """A loaded rank of a scoring worker."""

    scorer: Scorer
    fields: FieldScoring


def _build(
    spec: RunSpec,
    settings: TrainerSettings,
    *,
    transfers: QueueTransfers,
    progress: Progress,
    is_reference: bool,
) -> LoadedScorer:
    """Builds the model of a scoring worker. Blocks; runs in a thread. All ranks must call it.

    Args:
        is_reference: True to load the frozen base model of the role ref_logp, in the dtype that the trainer
            computes in. False to build the policy of the role logp without weights: it must adopt published
            ones before it scores.

    Raises:
        ValueError: If the model does not load, or the number of processes differs from the run's.
    """
    if is_reference:
        check_teacher(spec)
        spec = spec.of_reference
    spec = scoring_spec(spec)
    topology = _topology(spec, settings)
    loader = Loader(spec, settings, topology, progress)

    def make(model: PreTrainedModel) -> Policy:
        # Engines chose experts under the policy; the reference chooses its own.
        replay = "off" if is_reference else spec.rollout.routing_replay
        temperature = spec.rollout.sampling.temperature
        is_policy = not is_reference or spec.teacher is None
        policy = Policy(
            model,
            temperature=temperature,
            routing_replay=replay,
            engine=computes_as(spec, model.config) if is_policy else None,
        )
        policy, lora = freeze(policy), spec.trainer.lora
        if is_reference and is_policy and lora is not None and lora.base_dtype is not None:
            # The rounded weights are the policy's base.
            dtype = getattr(torch, spec.trainer.dtype)
            quantize_base(policy.model, lora.base_dtype, dtype=dtype)
        return policy

    policy = loader.load(make) if is_reference else loader.shape(make)
    oom_limits = load_oom_limits(settings, spec.trainer, ranks=topology.data)
    engine = FsdpEngine(policy, spec=spec, topology=topology, oom_limits=oom_limits)
    fields = FieldScoring(
        "ref_logprobs" if is_reference else "proximal_logprobs",
        engine,
        fetch=of_vocabulary(transfers.fetch, engine.model.config.vocab_size),
        add=transfers.add,
        shares_prefixes=spec.shares_prefixes,
    )
    return LoadedScorer(Scorer(engine), fields)


build_policy = partial(_build, is_reference=False)
build_reference = partial(_build, is_reference=True)


def _topology(spec: RunSpec, settings: TrainerSettings) -> RankTopology:
    device, world_size = device_of(settings), settings.world_size
    if world_size == spec.trainer.world_size == 1 and not spec.trainer.offloads_weights:
        # Nothing is sharded, and the weights already have the right dtype.
        return RankTopology(device=device, data=Ranks())
    return build_topology(spec.trainer, device=device, rank=settings.rank, world_size=world_size)
