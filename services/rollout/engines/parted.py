"""An engine of another project behind our protocol.

Such an engine keeps a queue of its own, and its random streams and caches know nothing of weight versions. So
a request is decoded in parts, each under one version: before weights change, what runs is cut, its tokens are
kept, and the next part goes on from them. Every part salts its blocks of the prefix cache with its version.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from torch import Tensor

from services.common.weightsync.plan import TensorSpec
from services.rollout.engines.base import (
    EngineCapabilities,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    check_request,
    check_scorable,
    check_supported,
    check_tensors,
)
from services.rollout.engines.gate import Gate
from services.rollout.engines.model_shape import ModelShape
from services.rollout.engines.places import Places
from services.rollout.engines.request_parts import Chunk, Part, Progress
from services.rollout.engines.shared_tensors import shared
from services.rollout.engines.stop_texts import Decode

_CUT_TIMEOUT_S = 60.0
"""A cut part ends at the next step; an engine that takes this long makes no steps any more."""


class EngineDiedError(RuntimeError):
    """The engine's process is gone or does not answer; only a restart helps."""


class PartStream(Protocol):
    """The tokens of one part."""

    async def next(self) -> Chunk:
        """Return what came since; a chunk with a finish reason is the last. Raises EngineDiedError."""
        ...

    async def close(self) -> None:
        """Take no more; a part that still runs is ended."""
        ...


class Backend(Protocol):
    """What the adapter needs of an engine."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that its KV cache holds, once it has started."""
        ...

    async def serve(self, started: Callable[[], None]) -> None:
        """Start, call ``started``, and serve until cancelled. Raises EngineDiedError."""
        ...

    async def submit(self, part: Part) -> PartStream:
        """Hand over a part; from then on :meth:`cut` reaches it."""
        ...

    async def cut(self, part_ids: Collection[str]) -> None:
        """End parts soon, with reason ``abort``; unknown ones are ignored."""
        ...

    async def load(self, description: str) -> None:
        """Replace all weights by those that are shared under a description, while no part runs."""
        ...

    async def score(self, name: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of every token but the first; reads no cached prefix."""
        ...


class PartedEngine:
    """The engine protocol over a backend."""

    def __init__(
        self,
        backend: Backend,
        model: ModelShape,
        *,
        max_running: int,
        decode: Decode | None = None,
    ) -> None:
        """Wrap a backend; :meth:`run` starts it.

        Args:
            backend: The engine.
            model: The model that it decodes.
            max_running: Most requests decoded at once.
            decode: Token ids to text; needed for stop texts.
        """
        self.capabilities = backend.capabilities
        self._backend = backend
        self._model = model
        self._decode = decode
        self._started = asyncio.Event()
        self._places = Places(max_running)
        self._gate = Gate()
        self._running: dict[str, Progress] = {}
        self._weight_version = -1
        self._num_adoptions = 0
        self._num_scored = 0
        self._tokens_total = 0
        self._prompt_tokens_total = 0
        self._cached_tokens_total = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._started_at = time.monotonic()

    async def run(self) -> None:
        """Start the engine and serve until cancelled.

        Raises:
            EngineDiedError: If it died.
        """
        await self._backend.serve(self._started.set)

    async def wait_ready(self) -> None:
        """Return when the engine is up."""
        await self._started.wait()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Decode one request."""
        check_request(
            request, vocab_size=self._model.vocab_size, max_model_tokens=self._model.max_tokens
        )
        check_supported(request, self.capabilities)
        if request.stop_texts and self._decode is None:
            raise ValueError("stop texts need a tokenizer, but this engine was built without one")
        await self._started.wait()
        progress = Progress(request, self._decode)
        async with self._places.take(request) as is_admitted:
            if not is_admitted:
                return progress.result("aborted")
            self._note_busy()
            self._running[request.request_id] = progress
            try:
                return await self._generate(progress)
            finally:
                del self._running[request.request_id]
                progress.ended.set()
                self._note_idle()

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of given tokens, as the engine reports them for a prompt."""
        check_scorable(
            token_ids, vocab_size=self._model.vocab_size, max_model_tokens=self._model.max_tokens
        )
        await self._started.wait()
        self._num_scored += 1
        # A pause does not hold this back, and an adoption waits for it.
        async with self._gate.closed():
            return await self._backend.score(f"score {self._num_scored}", token_ids)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests; their results keep the tokens so far."""
        self._places.turn_away(request_ids)
        ended = [
            progress
            for name, progress in self._running.items()
            if request_ids is None or name in request_ids
        ]
        for progress in ended:
            progress.is_aborted = True
        async with self._gate.closed():
            await self._cut(ended)
        await self._gate.reconsider()
        await asyncio.gather(*[progress.ended.wait() for progress in ended])

    async def peek(self) -> dict[str, GenerationResult]:
        """What the running requests have so far."""
        return {name: progress.result("aborted") for name, progress in self._running.items()}

    async def pause(self, *, drain: bool = False) -> None:
        """Cut what runs, and decode nothing; with ``drain``, finish the running requests first."""
        self._places.close()
        if drain:
            await self._places.emptied()
        self._gate.hold()
        async with self._gate.closed():
            await self._cut(self._running.values())

    async def resume(self) -> None:
        """Go on after a pause."""
        self._places.open()
        await self._gate.release()

    def weight_specs(self) -> list[TensorSpec]:
        """Parameters by checkpoint name, tied ones once."""
        return list(self._model.specs)

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Load new weights; what runs is cut, kept, and goes on under them."""
        check_tensors({spec.name: spec.shape for spec in self._model.specs}, tensors)
        await self._started.wait()
        with ExitStack() as stack:
            description = await asyncio.to_thread(stack.enter_context, shared(tensors))
            async with self._gate.closed():
                started_at = time.monotonic()
                await self._cut(self._running.values())
                await self._backend.load(description)
                self._weight_version = version
                self._num_adoptions += 1
                return time.monotonic() - started_at

    def stats(self) -> EngineStats:
        """Gauges. Prefixes that requests share count in each of them."""
        busy = self._busy_seconds
        if self._running:
            busy += time.monotonic() - self._busy_since
        held = sum(progress.num_tokens for progress in self._running.values())
        capacity = self._backend.kv_capacity_tokens if self._started.is_set() else 1
        return EngineStats(
            num_running=len(self._places.running),
            num_waiting=self._places.num_waiting,
            tokens_total=self._tokens_total,
            kv_used_fraction=min(held / capacity, 1.0),
            idle_seconds=time.monotonic() - self._started_at - busy,
            weight_version=self._weight_version,
            prompt_tokens_total=self._prompt_tokens_total,
            cached_tokens_total=self._cached_tokens_total,
        )

    async def _generate(self, progress: Progress) -> GenerationResult:
        """Decode a request in one or more parts, each under one weight version."""
        while True:
            stream: PartStream | None = None
            try:
                async with self._gate.passage(give_up=lambda: progress.is_aborted):
                    if progress.is_aborted:
                        return progress.result("aborted")
                    version = self._weight_version
                    # A version may come again with other weights, after a trainer went back.
                    part = progress.next_part(f"{version}.{self._num_adoptions}")
                    stream = await self._backend.submit(part)
                reason = await self._collect(stream, progress, version)
            finally:
                if stream is not None:
                    await stream.close()
                progress.end_part()
            if reason != "abort":
                return progress.result("stop" if reason == "stop" else "length")

    async def _collect(self, stream: PartStream, progress: Progress, version: int) -> str:
        """Take in tokens until the part ends; returns the engine's reason."""
        self._prompt_tokens_total += progress.num_tokens
        while True:
            chunk = await stream.next()
            self._tokens_total += len(chunk.token_ids)
            self._cached_tokens_total += chunk.cached_tokens
            if progress.extend(chunk, version):
                return "stop"
            if chunk.finish_reason is not None:
                return chunk.finish_reason

    async def _cut(self, running: Iterable[Progress]) -> None:
        """End the parts of requests and wait until they have ended."""
        parts = [progress for progress in running if progress.part_id is not None]
        await self._backend.cut([progress.part_id for progress in parts if progress.part_id])
        try:
            async with asyncio.timeout(_CUT_TIMEOUT_S):
                await asyncio.gather(*[progress.part_over.wait() for progress in parts])
        except TimeoutError as error:
            raise EngineDiedError(
                f"the engine did not end {len(parts)} requests within {_CUT_TIMEOUT_S:.0f} s"
            ) from error

    def _note_busy(self) -> None:
        if not self._running:
            self._busy_since = time.monotonic()

    def _note_idle(self) -> None:
        if not self._running:
            self._busy_seconds += time.monotonic() - self._busy_since
