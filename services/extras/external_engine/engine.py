"""Engine protocol on top of an external engine such as vLLM or SGLang.

An external engine has its own request queue, and its random streams and caches ignore weight versions.
While weights change, a backend that can freeze is paused between two steps, and its running requests then
continue where they were. With any other backend, running requests are cut: their tokens are kept, and a new
segment of the request continues from them. Segments share prefix-cache blocks only with segments of the same
salt. The salt changes with the weights if the cache keeps blocks of older weights. If the cache was emptied,
the salt stays, and later segments can reuse blocks that were recomputed for a running one.
"""

import asyncio
import heapq
import logging
import math
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor

from services.common.telemetry.metrics import Phases
from services.extras.external_engine.in_place import Placements, place_in_workers
from services.extras.external_engine.request_segments import RequestProgress, Segment, TokenChunk
from services.extras.external_engine.shared_tensors import shared
from services.rollout import metrics
from services.rollout.engines.base import (
    Decode,
    DraftTotals,
    EngineCapabilities,
    EngineDiedError,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    check_inputs,
    check_request,
    check_scorable,
    check_supported,
    check_tensors,
)
from services.rollout.engines.engine_config import EngineConfig, ModelShape, model_shape
from services.weightsync.endpoints import Place
from services.weightsync.weight_plan import TensorSpec, WeightPlan
from services.wire.data.model_inputs import ModelInputs


class FirstToken:
    """Records the time from an adoption to the first token under the new weights."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Starts the clock: new weights are in service."""
        self._since = time.monotonic()

    def record(self) -> None:
        if self._since is None:
            return
        after_s, self._since = time.monotonic() - self._since, None
        metrics.FIRST_TOKEN_SECONDS.observe(after_s)
        logger.debug("first token of a weight version", extra={"after_ms": round(1e3 * after_s, 1)})


class SegmentStream(Protocol):
    """Token stream of one segment."""

    async def next(self) -> TokenChunk:
        """Waits for the next chunk; a chunk with a finish reason is the last.

        Raises:
            EngineDiedError: If the engine died.
        """

    async def close(self) -> None:
        """Closes the stream and ends the segment if it still runs."""


class Backend(Protocol):
    """Operations that an external engine must provide."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Features of the engine."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Capacity of the KV cache in tokens, available after the start."""

    @property
    def drafts(self) -> DraftTotals | None:
        """Proposals since the start; None without speculation."""

    async def serve(self, on_start: Callable[[], None]) -> None:
        """Starts the engine, calls ``on_start``, and serves until cancelled.

        Raises:
            EngineDiedError: If the engine died.
        """

    async def submit(self, segment: Segment) -> SegmentStream:
        """Submits a segment; from then on, :meth:`abort_segments` can end it."""

    async def abort_segments(self, segment_ids: Collection[str]) -> None:
        """Ends segments soon, with reason ``abort``; ignores unknown ids."""

    async def load(self, description: str) -> None:
        """Passes a description to every worker; called only while no segment produces tokens.

        Args:
            description: Describes shared tensors that replace all weights, or a command of ``in_place``.
        """

    async def score(
        self, name: str, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        """Computes the log probability of every token but the first, without cached prefixes."""

    async def sleep(self) -> None:
        """Releases the KV cache and the weights' memory.

        Called only while no segment exists; none is submitted before new weights.
        """

    async def wake(self) -> None:
        """Reclaims the memory."""


class PausableBackend(Protocol):
    """Backend that can keep requests running across a weight change."""

    async def freeze(self) -> None:
        """Stops between two steps; segments keep their slots, tokens and cache."""

    async def thaw(self, version: int, *, recompute: bool) -> bool:
        """Continues; chunks attribute all tokens sampled from now on to ``version``.

        Args:
            version: Version of the weights loaded in the meantime.
            recompute: True to recompute caches under the new weights.

        Returns:
            True if the cache no longer contains anything computed with older weights.
        """


class BusyTime:
    """Accumulates busy and idle time from its creation on."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """Marks the engine as idle."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    @property
    def idle_seconds(self) -> float:
        now = time.monotonic()
        busy = self._seconds + (0.0 if self._since is None else now - self._since)
        return now - self._started_at - busy


@dataclass(slots=True, order=True)
class _WaitingRequest:
    priority: float
    arrival: int
    request_id: str = field(compare=False)
    admitted: asyncio.Future[bool] = field(compare=False)


class Slots:
    """Bounds the running requests of an engine whose own queue cannot be reordered.

    Admits requests with the oldest weight version first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._is_open = True
        self._num_arrived = 0
        self._waiting: list[_WaitingRequest] = []
        self._running: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def running(self) -> Collection[str]:
        """Ids of requests that hold a slot."""
        return frozenset(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def acquire(self, request: GenerationRequest) -> AsyncIterator[bool]:
        """Waits for a slot and holds it while the block runs.

        Yields:
            True if the request was admitted, False if it was turned away while it waited.

        Raises:
            ValueError: If a request with this id already runs or waits.
        """
        request_id = request.request_id
        if request_id in self._running or any(w.request_id == request_id for w in self._waiting):
            raise ValueError(f"request {request_id!r} is already being decoded")
        oldest = request.oldest_version
        self._num_arrived += 1
        waiting = _WaitingRequest(
            math.inf if oldest is None else oldest,
            self._num_arrived,
            request_id,
            asyncio.get_running_loop().create_future(),
        )
        heapq.heappush(self._waiting, waiting)
        self._admit()
        try:
            yield await waiting.admitted
        finally:
            self._running.discard(request_id)
            self.reject_waiting({request_id})
            if not self._running:
                self._empty.set()
            self._admit()

    def reject_waiting(self, request_ids: Collection[str] | None) -> None:
        """Ends the wait of requests (None: all) without giving them a slot."""
        still_waiting: list[_WaitingRequest] = []
        for waiting in self._waiting:
            if request_ids is not None and waiting.request_id not in request_ids:
                still_waiting.append(waiting)
            elif not waiting.admitted.done():
                waiting.admitted.set_result(False)
        self._waiting = still_waiting
        heapq.heapify(still_waiting)

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._admit()

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def _admit(self) -> None:
        while self._is_open and self._waiting and len(self._running) < self._size:
            waiting = heapq.heappop(self._waiting)
            if waiting.admitted.done():
                continue  # Its caller was cancelled and has not run since.
            self._running.add(waiting.request_id)
            self._empty.clear()
            waiting.admitted.set_result(True)


class Gate:
    """Lets many tasks pass at once; a task that closes the gate waits for them and excludes new ones.

    The gate can also be held shut for a longer time, during which tasks can still close it.
    """

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_closed = False
        self._is_held = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def enter(self, *, give_up: Callable[[], bool]) -> AsyncIterator[None]:
        """Waits while the gate is shut; the gate cannot be closed while the block runs.

        Args:
            give_up: Checked while the gate is shut; if it returns True, the task enters anyway and must find
                out the reason itself.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: give_up() or not (self._is_closed or self._is_held)
            )
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            await self._notify()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Closes the gate while the block runs, after all tasks inside have left."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            try:
                await self._changed.wait_for(lambda: self._num_inside == 0)
            except asyncio.CancelledError:
                self._is_closed = False
                raise
        try:
            yield
        finally:
            self._is_closed = False
            await self._notify()

    def keep_shut(self) -> None:
        """Holds the gate shut until :meth:`release`."""
        self._is_held = True

    async def release(self) -> None:
        """Ends a hold and lets waiting tasks pass."""
        self._is_held = False
        await self._notify()

    async def recheck_waiting(self) -> None:
        """Makes every waiting task check its ``give_up`` condition again."""
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


logger = logging.getLogger(__name__)

T = TypeVar("T")

_ABORT_TIMEOUT_S = 60.0
"""Time-out of a cut: a cut segment ends at the next step, so an engine that takes longer has stopped."""

_REPLY_TIMEOUT_S = 300.0
"""Time-out of any other operation; the longest one copies all weights of a large model."""


class ExternalEngine:
    """Implements the engine protocol with a backend.

    Attributes:
        backend: The external engine.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelShape,
        *,
        max_running: int,
        kv_policy: str = "recompute",
        freezer: PausableBackend | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Wraps a backend; :meth:`run` starts it.

        Args:
            model: Tensors and limits of the decoded model.
            max_running: Max number of requests decoded at once.
            kv_policy: ``recompute`` if an adoption recomputes the KV prefix of running requests.
            freezer: The backend, if it can freeze.
            decode: Converts token ids to text; needed for stop texts.
        """
        self.capabilities = backend.capabilities
        self.backend = backend
        self._freezer = freezer
        self._is_asleep = self._is_blank = False
        self._recompute = kv_policy == "recompute"
        self._model = model
        self._decode = decode
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self._places = Slots(max_running)
        self._gate = Gate()
        self._arrivals = asyncio.Lock()
        self._running: dict[str, RequestProgress] = {}
        self._weight_version = -1
        self._num_caches = 0
        self._num_scored = 0
        self._tokens_total = 0
        self._prompt_tokens_total = 0
        self._cached_tokens_total = 0
        self._recomputed_tokens_total = 0
        self._busy = BusyTime()
        self._placements: Placements | None = None

    @classmethod
    def ordered(
        cls,
        backend: Backend,
        config: EngineConfig,
        *,
        length_argument: str,
        freezer: PausableBackend | None = None,
    ) -> Self:
        """Wraps a backend according to an engine configuration.

        Args:
            length_argument: The external engine's argument for the max length of context and response.
            freezer: The backend, if it can freeze.
        """
        return cls(
            backend,
            model_shape(
                config.config, config.dtype, max_tokens=config.arguments.get(length_argument)
            ),
            max_running=config.max_running,
            kv_policy=config.kv_policy,
            freezer=freezer,
            decode=config.decode,
        )

    @property
    def max_tokens(self) -> int:
        return self._model.max_tokens

    async def run(self) -> None:
        """Starts the engine and serves until cancelled.

        Raises:
            EngineDiedError: If the engine died.
        """
        try:
            await self.backend.serve(self._started.set)
        finally:
            self._ended.set()

    async def wait_ready(self) -> None:
        await self._started.wait()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        check_request(
            request, vocab_size=self._model.vocab_size, max_model_tokens=self._model.max_tokens
        )
        check_supported(request, self.capabilities)
        if request.stop_texts and self._decode is None:
            raise ValueError("stop texts need a tokenizer, but this engine has none")
        await self._started.wait()
        progress = RequestProgress(request, self._decode)
        async with self._places.acquire(request) as is_admitted:
            if not is_admitted:
                return progress.result("aborted")
            self._busy.begin()
            self._running[request.request_id] = progress
            try:
                # Many requests arrive at once, and each occupies the engine's front end for a
                # fraction of a millisecond. Yield between two of them, so that the event loop can
                # run other tasks, such as a weight session that is about to begin.
                async with self._arrivals:
                    await asyncio.sleep(0)
                return await self._generate(progress)
            finally:
                del self._running[request.request_id]
                progress.ended.set()
                if not self._running:
                    self._busy.end()

    async def score(
        self, token_ids: Sequence[int], model_inputs: ModelInputs | None = None
    ) -> tuple[float, ...]:
        """Returns log probabilities of given tokens, as the engine reports them for a prompt."""
        check_inputs(model_inputs, self.capabilities)
        check_scorable(
            token_ids, vocab_size=self._model.vocab_size, max_model_tokens=self._model.max_tokens
        )
        await self._started.wait()
        self._num_scored += 1
        # A pause does not delay scoring, and an adoption waits until scoring has ended.
        async with self._gate.closed():
            return await self._reply(
                "score a prompt",
                self.backend.score(f"score {self._num_scored}", token_ids, model_inputs),
            )

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Ends requests; their results keep the tokens so far."""
        self._places.reject_waiting(request_ids)
        aborted = [
            progress
            for name, progress in self._running.items()
            if request_ids is None or name in request_ids
        ]
        for progress in aborted:
            progress.is_aborted = True
        async with self._gate.closed():
            await self._cut(aborted)
        await self._gate.recheck_waiting()
        await asyncio.gather(*[progress.ended.wait() for progress in aborted])

    async def peek(self) -> dict[str, GenerationResult]:
        """Returns the tokens so far of each running request."""
        return {name: progress.result("aborted") for name, progress in self._running.items()}

    async def pause(self, *, drain: bool = False) -> None:
        """Cuts running requests and decodes nothing; with ``drain``, finishes the running requests first."""
        self._places.close()
        if drain:
            await self._places.wait_until_empty()
        self._gate.keep_shut()
        async with self._gate.closed():
            await self._cut(self._running.values())

    async def resume(self) -> None:
        """Resumes after a pause, unless the engine has no weights."""
        if self._is_blank:
            return
        self._places.open()
        await self._gate.release()

    async def sleep(self) -> None:
        """Cuts running requests and makes the engine release its memory."""
        await self._started.wait()
        await self.pause()
        async with self._gate.closed():
            if not self._is_asleep:
                self._busy.end()
                self._is_asleep = self._is_blank = True
                await self._reply("release its memory", self.backend.sleep())

    async def wake(self) -> None:
        """Makes the engine reclaim its memory."""
        async with self._gate.closed():
            if self._is_asleep:
                await self._reply("take its memory back", self.backend.wake())
                self._is_asleep = False

    def weight_specs(self) -> list[TensorSpec]:
        """Lists the parameters by checkpoint name, tied ones once."""
        return list(self._model.specs)

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Loads new weights; running requests continue under them."""
        check_tensors({spec.name: spec.shape for spec in self._model.specs}, tensors)
        await self._started.wait()
        with ExitStack() as stack:
            phases = Phases(metrics.ADOPT_PHASE_SECONDS)
            description = await asyncio.to_thread(stack.enter_context, shared(tensors))
            phases.end_phase("share")
            async with self._gate.closed():
                phases.end_phase("gate")
                started_at = time.monotonic()
                await self._pause_segments()
                phases.end_phase("freeze")
                await self._load(description)
                phases.end_phase("copy")
                await self._resume_segments(version)
                phases.end_phase("thaw")
                stall_s = time.monotonic() - started_at
        logger.debug("weights adopted", extra={"version": version, **phases.milliseconds()})
        return stall_s

    async def open_weights(self, plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        """Stops running requests and lets the engine's workers place received buckets."""
        await self._started.wait()
        self._gate.keep_shut()
        async with self._gate.closed():
            await self._pause_segments()
            self._placements = await place_in_workers(plan, slots, self._load)
            return self._placements.place

    async def adopt_placed(self, version: int) -> None:
        """Continues under the placed weights."""
        placements, self._placements = self._placements, None
        async with self._gate.closed():
            if placements is not None:
                await placements.finish()
            await self._resume_segments(version)

    async def close_weights(self) -> None:
        """Continues under the old weights."""
        self._placements = None
        await self.adopt_placed(self._weight_version)
        await self.resume()

    async def _load(self, description: str) -> None:
        await self._reply("load weights", self.backend.load(description))

    async def _reply(self, operation: str, call: Coroutine[Any, Any, T]) -> T:
        """Waits for the engine's reply to an operation.

        Raises:
            EngineDiedError: If the engine ends first, or does not reply in time.
        """
        task, end = asyncio.ensure_future(call), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait(
                {task, end}, timeout=_REPLY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            reason = "died" if end.done() else f"did not reply within {_REPLY_TIMEOUT_S:.0f} s"
            raise EngineDiedError(f"the engine {reason} when asked to {operation}")
        finally:
            task.cancel()
            end.cancel()

    async def _pause_segments(self) -> None:
        """Freezes running requests, or cuts them if the backend cannot freeze."""
        assert not self._is_asleep, "a sleeping engine has no memory for weights; wake it first"
        if self._freezer is None:
            await self._cut(self._running.values())
        else:
            await self._reply("pause", self._freezer.freeze())

    async def _resume_segments(self, version: int) -> None:
        """Lets running requests continue under weights of the given version."""
        self._weight_version = version
        self._is_blank = is_emptied = False
        if self._running:
            self._busy.begin()
        if self._freezer is not None:
            is_emptied = await self._reply(
                "resume", self._freezer.thaw(version, recompute=self._recompute)
            )
            if self._recompute:
                running = [
                    request for request in self._running.values() if request.segment_id is not None
                ]
                self._recomputed_tokens_total += sum(request.num_sampled for request in running)
        self._num_caches += not is_emptied

    def stats(self) -> EngineStats:
        """Returns gauges. KV usage counts a prefix that several requests share once for each request."""
        held_tokens = sum(progress.num_tokens for progress in self._running.values())
        capacity = self.backend.kv_capacity_tokens if self._started.is_set() else 1
        return EngineStats(
            num_running=len(self._places.running),
            num_waiting=self._places.num_waiting,
            tokens_total=self._tokens_total,
            kv_used_fraction=min(held_tokens / capacity, 1.0),
            idle_seconds=self._busy.idle_seconds,
            weight_version=self._weight_version,
            prompt_tokens_total=self._prompt_tokens_total,
            cached_tokens_total=self._cached_tokens_total,
            recomputed_tokens_total=self._recomputed_tokens_total,
            drafts=self.backend.drafts,
            is_asleep=self._is_blank,
        )

    async def _generate(self, progress: RequestProgress) -> GenerationResult:
        """Decodes a request in one or more segments."""
        while True:
            stream: SegmentStream | None = None
            try:
                async with self._gate.enter(give_up=lambda: progress.is_aborted):
                    if progress.is_aborted:
                        return progress.result("aborted")
                    assert not self._is_blank, "an engine without weights cannot decode"
                    version = self._weight_version
                    segment = progress.next_segment(str(self._num_caches))
                    stream = await self.backend.submit(segment)
                reason = await self._collect(stream, progress, version)
            finally:
                if stream is not None:
                    await stream.close()
                progress.end_segment()
            if reason != "abort":
                return progress.result("stop" if reason == "stop" else "length")

    async def _collect(self, stream: SegmentStream, progress: RequestProgress, version: int) -> str:
        """Adds tokens to the request until the segment ends; returns the engine's finish reason."""
        num_tokens, num_sampled = progress.num_tokens, progress.num_sampled
        self._prompt_tokens_total += num_tokens
        while True:
            chunk = await stream.next()
            # Cached tokens are the start of the context, and sampled tokens are its end.
            self._recomputed_tokens_total += min(
                num_sampled, max(num_tokens - chunk.cached_tokens, 0)
            )
            num_sampled = 0
            self._tokens_total += len(chunk.token_ids)
            self._cached_tokens_total += chunk.cached_tokens
            if progress.extend(chunk, version):
                return "stop"
            if chunk.finish_reason is not None:
                return chunk.finish_reason

    async def _cut(self, running: Iterable[RequestProgress]) -> None:
        """Ends the current segments of requests and waits until they have ended."""
        cut_requests = [progress for progress in running if progress.segment_id is not None]
        await self.backend.abort_segments(
            [progress.segment_id for progress in cut_requests if progress.segment_id]
        )
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await asyncio.gather(*[progress.segment_ended.wait() for progress in cut_requests])
        except TimeoutError as error:
            raise EngineDiedError(
                f"the engine did not abort {len(cut_requests)} requests within {_ABORT_TIMEOUT_S:.0f} s"
            ) from error
