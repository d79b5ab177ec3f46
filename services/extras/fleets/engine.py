"""Engines ``vllm-server`` and ``sglang-server``: separate servers, used through the engine protocol."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from torch import Tensor

from services.common.task_group import TaskGroup, unwrapped
from services.extras.external_engine.engine import ExternalEngine, SegmentStream
from services.extras.external_engine.request_segments import Segment, TokenChunk
from services.extras.fleets.client import (
    SCORE_TIMEOUT_S,
    AnyWeights,
    FleetServer,
    ServerRefusedError,
)
from services.extras.fleets.direct.relay import GroupRelay
from services.extras.fleets.direct.weights import DirectVersion, DirectWeights
from services.extras.fleets.fleet import Fleet, NoServerError
from services.extras.fleets.stream import FleetStream
from services.extras.fleets.weights import FleetWeights, adapter_weights
from services.rollout.calls.outside import AddressPolicy, delays
from services.rollout.engines.base import (
    DraftTotals,
    EngineCapabilities,
    EngineDiedError,
    check_tensors,
)
from services.rollout.engines.engine_config import EngineConfig
from services.weightsync.canary import canary_tolerance
from services.weightsync.endpoints import Place
from services.weightsync.weight_plan import WeightPlan
from services.wire.data.model_inputs import ModelInputs

logger = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.1
_MAX_ATTEMPTS: Final = 3
"""Failures of one request, without a token between them, after which the engine ends."""
_MAX_FAILED: Final = 4096


class FleetBackend:
    """Sends segments to the servers of a fleet.

    Args:
        config: Its arguments are ``addresses`` and, if the servers have one, ``token``.
        kind: Makes a server from its address and the options of ``FleetServer``.
        capabilities: Features of the servers.
    """

    def __init__(
        self,
        config: EngineConfig,
        kind: Callable[..., FleetServer],
        capabilities: EngineCapabilities,
    ) -> None:
        self.capabilities = capabilities
        self.adds_adapters = config.adds_adapters
        if "addresses" not in config.arguments:
            raise ValueError(
                f"rollout.engine_arguments.fleet is {config.arguments.get('fleet')!r}, which only the API of "
                "a controller with fleets resolves; submit the run there, or set addresses"
            )
        reach = config.reach or AddressPolicy()
        # A restarted process of the same worker takes its servers over at once.
        owner = config.worker or secrets.token_hex(8)
        token = str(config.arguments.get("token", ""))
        addresses = [str(address).rstrip("/") for address in config.arguments["addresses"]]
        self.fleet = Fleet(
            addresses,
            make=lambda address: kind(
                address, owner=owner, reach=reach, token=token, draws_by_seed=capabilities.seeds
            ),
            allowed_hosts={
                *(host.lower() for host in reach.inner_hosts),
                *((urlsplit(address).hostname or "").lower() for address in addresses),
            },
            check=lambda server: server.check_fit(config),
            tolerance=canary_tolerance([config.dtype_name]),
            report=config.report,
            on_lost=self._cut_streams,
        )
        # The receiver of weight_sync.mode servers is made without an engine; a process has one.
        GroupRelay.fleet = self.fleet
        self._streams: dict[str, FleetStream] = {}
        self._failures: dict[str, dict[str, list[str]]] = {}
        """Reasons by server, of each request that failed and has received no token since."""

    @property
    def drafts(self) -> DraftTotals | None:
        return None

    @property
    def kv_capacity_tokens(self) -> int:
        return max(1, sum(server.kv_capacity_tokens for server in self.fleet.attached))

    async def serve(self, on_start: Callable[[], None]) -> None:
        """Attaches to the servers and keeps them on the newest weights until cancelled."""
        try:
            with unwrapped():
                async with TaskGroup() as tasks:
                    tasks.create_task(self.fleet.run())
                    await self.fleet.wait_attached()
                    on_start()
        except ServerRefusedError as error:
            raise EngineDiedError(f"no server can serve this run: {error}") from error
        finally:
            for stream in self._streams.values():
                stream.cut()
            await self.fleet.close()

    async def submit(self, segment: Segment) -> SegmentStream:
        """Begins a segment under the fleet's version; it waits for a server by itself."""
        if segment.max_tokens < 1:  # it was cut between its last token and the reason of its end
            return _Ended()
        request = segment.request
        prefix = hash(request.context_ids[: len(request.context_ids) - request.draw_offset])
        stream = FleetStream(
            segment,
            lambda: self.fleet.lease(prefix, self._failures.get(request.request_id, {})),
            self.fleet.lose,
            lambda server, reason: self._fail(request.request_id, server, reason),
            self.fleet.slow_down,
            lambda server: self._note_tokens(request.request_id, server),
        )
        self._streams[segment.segment_id] = stream
        return _OwnedStream(self._streams, stream)

    def _note_tokens(self, request_id: str, server: FleetServer) -> None:
        self._failures.pop(request_id, None)
        self.fleet.sent_tokens(server)

    def _fail(self, request_id: str, server: FleetServer, reason: str) -> None:
        """Counts a failure in a request, which goes to another server then if there is one.

        Raises:
            EngineDiedError: If all attempts of the request have failed.
        """
        reasons = self._failures.setdefault(request_id, {}).setdefault(server.address, [])
        reasons.append(reason)
        logger.warning("a server failed in a request", extra={"why": reason})
        self.fleet.recheck(server)
        failures = self._failures[request_id]
        if sum(map(len, failures.values())) >= _MAX_ATTEMPTS:
            del self._failures[request_id]
            first = next(iter(failures.values()))[0]
            raise EngineDiedError(
                f"a request failed {_MAX_ATTEMPTS} times in turn; the first time: {first}"
            )
        while len(self._failures) > _MAX_FAILED:
            del self._failures[next(iter(self._failures))]

    def _cut_streams(self, server: FleetServer) -> None:
        """Ends the segments on a server; a frozen one would never end them."""
        for stream in self._streams.values():
            if stream.server is server:
                stream.cut()

    async def abort_segments(self, segment_ids: Collection[str]) -> None:
        for segment_id in segment_ids:
            if (stream := self._streams.get(segment_id)) is not None:
                stream.cut()

    def crossing_segments(self, weights: AnyWeights) -> Collection[str]:
        """Returns the segments that go on when the servers which have received a version load it."""
        return {
            name
            for name, stream in self._streams.items()
            if stream.crosses_updates
            and stream.server is not None
            and stream.server.received is weights
        }

    async def load(self, description: str) -> None:
        """Is not used: a fleet receives weights by :meth:`FleetEngine.adopt_weights`."""
        raise NotImplementedError("a fleet of servers has no memory in common with its rollout")

    async def score(
        self, name: str, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        if model_inputs is not None and model_inputs.tensors:
            raise ValueError(f"{self.capabilities.name} scores texts without images only")
        return await self.fleet.score(token_ids)

    async def sleep(self) -> None:
        """Does nothing: the servers' memory is not this run's."""

    async def wake(self) -> None:
        """Does nothing."""


class _Ended:
    """Stream of a segment without tokens."""

    async def next(self) -> TokenChunk:
        return TokenChunk(token_ids=(), logprobs=(), finish_reason="length")

    async def close(self) -> None:
        """Does nothing."""


class _OwnedStream:
    """A stream that its backend forgets when it is closed."""

    def __init__(self, streams: dict[str, FleetStream], stream: FleetStream) -> None:
        self._streams = streams
        self._stream = stream
        self.next = stream.next

    async def close(self) -> None:
        self._streams.pop(self._stream.segment_id, None)
        await self._stream.close()


class FleetEngine(ExternalEngine):
    """External engine whose weights travel to servers while these serve the version before."""

    backend: FleetBackend

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Sends weights to all servers, then puts them into service.

        Running responses of servers that can do it go on under the new weights; others are cut. Returns at
        once if no server is there: the first one that comes gets the weights, and requests wait.
        """
        await self._started.wait()
        weights: AnyWeights
        if isinstance(tensors, DirectVersion):
            weights = tensors.weights
            weights.mark_holders()
        elif self.backend.adds_adapters:
            weights = await asyncio.to_thread(adapter_weights, version, tensors)
        else:
            specs = self.weight_specs()
            check_tensors({spec.name: spec.shape for spec in specs}, tensors)
            weights = await asyncio.to_thread(FleetWeights, version, specs, tensors)
        fleet = self.backend.fleet
        if not isinstance(weights, DirectWeights):
            await fleet.upload(weights)
        async with self._gate.closed():
            crossing = self.backend.crossing_segments(weights)
            cut_requests, running = [], [*self._running.values()]
            for progress in running:
                if progress.segment_id in crossing:
                    self._recomputed_tokens_total += progress.num_sampled
                else:
                    cut_requests.append(progress)
            await self._cut(cut_requests)
            loading = fleet.switch(weights)
            await self._resume_segments(version)
        return await fleet.wait_loaded(weights, loading)

    async def score(
        self, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        """Scores a text as other engines do, but lets adoptions pass while no server is there."""
        await self._started.wait()
        for wait_s in delays(_FIRST_RETRY_S, SCORE_TIMEOUT_S):
            await self.backend.fleet.wait_serving()
            try:
                return await super().score(token_ids, model_inputs)
            except NoServerError:
                # Each server that failed receives all weights again.
                await asyncio.sleep(wait_s)
        raise AssertionError("delays end")

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Refuses: the weights of servers cannot be written by another process.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"rollout.engine {self.capabilities.name} does not expose its live weights; use "
            "weight_sync.mode cpu_async"
        )
