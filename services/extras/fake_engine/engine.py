"""Engine without a model, with deterministic tokens, lengths and times, for simulations and chaos tests.

On a :class:`~services.extras.fake_engine.virtual_time.VirtualTimeLoop` its times are virtual.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Protocol

from services.rollout.engines.base import (
    EngineCapabilities,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    VersionRun,
    append_version,
    check_request,
    check_scorable,
    check_supported,
)
from services.rollout.engines.engine_config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from services.weightsync.weight_plan import TensorSpec
    from services.wire.data.model_inputs import ModelInputs


class Lengths(Protocol):
    """Distribution of response lengths."""

    def length(self, seed: int) -> int:
        """Returns the length in tokens of the sample with this seed; the same on every replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTail:
    """Log-normal response lengths: most are short, a few are very long."""

    median: float = 200.0
    """Median length in tokens."""
    sigma: float = 1.0
    """Standard deviation of the logarithm; with 1.0, one response in a hundred is ten times the median."""

    def length(self, seed: int) -> int:
        log_length = Random(seed).gauss(math.log(self.median), self.sigma)  # noqa: S311 -- a simulation
        return max(1, round(math.exp(log_length)))


def build(config: EngineConfig) -> "FakeEngine":
    """Builds the engine with the lengths and the speed from its arguments."""
    token_seconds = config.arguments.get("token_seconds", 0.01)
    return FakeEngine(
        max_running=config.max_running,
        step_seconds=lambda _: token_seconds,
        lengths=LongTail(
            median=config.arguments.get("median_tokens", 200.0),
            sigma=config.arguments.get("sigma", 1.0),
        ),
        stop_token=config.stop_token,
        vocab_size=config.vocab_size,
    )


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    length: int
    """Total length of the response in tokens."""
    is_cut_by_limit: bool
    num_counted: int = 0
    """Engine steps already counted in ``version_runs`` or completed before admission."""
    version_runs: list[VersionRun] = field(default_factory=list)
    future: asyncio.Future[GenerationResult] = field(default_factory=asyncio.Future)


class FakeEngine:
    """Produces one token per step for each running request.

    Token ``i`` of a sample depends on its seed and ``i``; its log probability is ``-1 - version /
    1000``, which reveals tokens with a wrong version.

    Args:
        max_running: Max number of requests decoded at once.
        step_seconds: Maps the number of running requests to the seconds of one step.
        vocab_size: Exclusive upper bound of token ids.
    """

    capabilities = EngineCapabilities(
        name="fake",
        kv_policies=frozenset({"recompute", "keep"}),
        stop_texts=False,
        truncation=False,
        seeds=True,
        model_inputs=True,
    )

    max_tokens = 1 << 20

    def __init__(
        self,
        *,
        max_running: int,
        step_seconds: Callable[[int], float] = lambda _: 0.01,
        lengths: Lengths | None = None,
        vocab_size: int = 256,
        stop_token: int = 1,
    ) -> None:
        self._max_running = max_running
        self._step_seconds = step_seconds
        self._lengths: Lengths = lengths or LongTail()
        self._vocab_size = vocab_size
        self._stop_token = stop_token
        self._waiting: list[tuple[float, int, _Row]] = []
        self._num_arrived = 0
        self._running: dict[str, _Row] = {}
        self._num_steps = self._num_admitted = 0
        # (number of the last step, order of admission, row), soonest first; aborted rows are
        # skipped.
        self._ends: list[tuple[int, int, _Row]] = []
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._may_step = self._may_admit = True
        self._is_asleep = self._is_blank = False
        self._weight_version = -1
        self._tokens_total = 0
        self._idle_seconds = 0.0
        self._since: float | None = None

    async def run(self) -> None:
        """Produces tokens until cancelled."""
        while True:
            self._advance()
            self._admit()
            self._changed.clear()
            timer = self._wake_at_next_end()
            await self._changed.wait()
            if timer is not None:
                timer.cancel()

    async def wait_ready(self) -> None:
        """Returns at once: nothing has to start."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        check_request(request, vocab_size=self._vocab_size, max_model_tokens=self.max_tokens)
        check_supported(request, self.capabilities)
        num_left = max(1, self._lengths.length(request.seed) - request.draw_offset)
        row = _Row(request, min(num_left, request.max_tokens), num_left > request.max_tokens)
        oldest = request.oldest_version
        priority = math.inf if oldest is None else oldest
        self._num_arrived += 1
        heapq.heappush(self._waiting, (priority, self._num_arrived, row))
        self._changed.set()
        try:
            return await row.future
        finally:
            if row.future.cancelled():
                await self.abort({request.request_id})

    async def score(
        self, token_ids: Sequence[int], model_inputs: "ModelInputs | None" = None
    ) -> tuple[float, ...]:
        """Returns the live version's constant log probability for every token."""
        check_scorable(token_ids, vocab_size=self._vocab_size, max_model_tokens=self.max_tokens)
        return (-1 - self._weight_version / 1000,) * (len(token_ids) - 1)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Ends requests; their results keep the tokens so far."""
        self._advance()
        for _, _, row in self._waiting:
            if request_ids is None or row.request.request_id in request_ids:
                self._end(row, "aborted")
        self._waiting = [item for item in self._waiting if not item[2].future.done()]
        heapq.heapify(self._waiting)
        for name in [*self._running]:
            if request_ids is None or name in request_ids:
                self._end(self._running[name], "aborted")
        self._changed.set()

    async def peek(self) -> dict[str, GenerationResult]:
        """Returns the tokens so far of each running request."""
        self._advance()
        self._count()
        return {name: self._result(row, "aborted") for name, row in self._running.items()}

    async def pause(self, *, drain: bool = False) -> None:
        """Stops producing tokens."""
        self._may_admit = False
        if drain and self._running:
            self._drained.clear()
            await self._drained.wait()
        self._advance()
        self._may_step = False
        self._changed.set()

    async def sleep(self) -> None:
        """Stops producing tokens until weights are adopted."""
        await self.pause()
        self._is_asleep = self._is_blank = True

    async def wake(self) -> None:
        """Allows weights to be adopted."""
        self._is_asleep = False

    async def resume(self) -> None:
        """Resumes, unless the engine has no weights."""
        if self._is_blank:
            return
        self._may_admit = self._may_step = True
        self._changed.set()

    def weight_specs(self) -> "list[TensorSpec]":
        """Returns an empty list: the engine has no weights."""
        return []

    async def adopt_weights(self, version: int, tensors: "Mapping[str, Tensor]") -> float:
        """Attributes further tokens to a version; takes no time."""
        assert not self._is_asleep, "a sleeping engine has no memory for weights; wake it first"
        self._advance()
        self._count()
        self._weight_version, self._is_blank = version, False
        return 0.0

    def stats(self) -> EngineStats:
        self._advance()
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            tokens_total=self._tokens_total,
            kv_used_fraction=len(self._running) / self._max_running,
            idle_seconds=self._idle_seconds,
            weight_version=self._weight_version,
            is_asleep=self._is_blank,
        )

    def _advance(self) -> None:
        """Counts the steps completed by now, even if the event loop is late."""
        now = asyncio.get_running_loop().time()
        since = now if self._since is None else self._since
        while self._running and self._may_step:
            step_s, until_end = self._step_seconds(len(self._running)), self._steps_to_next_end()
            num_due = int((now - since) / step_s + 1e-6)
            num_steps = min(num_due, until_end)
            self._step(num_steps)
            self._since = since = since + num_steps * step_s
            if num_due <= until_end:
                return
        self._idle_seconds += now - since
        self._since = now

    def _steps_to_next_end(self) -> int:
        while self._running.get(self._ends[0][2].request.request_id) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._num_steps

    def _wake_at_next_end(self) -> asyncio.TimerHandle | None:
        if not self._running or not self._may_step:
            return None
        step_s = self._step_seconds(len(self._running))
        end = (self._since or 0.0) + self._steps_to_next_end() * step_s
        return asyncio.get_running_loop().call_at(end, self._changed.set)

    def _admit(self) -> None:
        while self._may_admit and self._waiting and len(self._running) < self._max_running:
            _, _, row = heapq.heappop(self._waiting)
            self._running[row.request.request_id] = row
            self._num_admitted += 1
            row.num_counted = self._num_steps
            end = self._num_steps + row.length
            heapq.heappush(self._ends, (end, self._num_admitted, row))

    def _step(self, num_steps: int) -> None:
        assert not (num_steps and self._is_blank), "an engine without weights cannot decode"
        self._tokens_total += num_steps * len(self._running)
        self._num_steps += num_steps
        while self._running and self._steps_to_next_end() == 0:
            row = self._ends[0][2]
            self._end(row, "length" if row.is_cut_by_limit else "stop")

    def _count(self) -> None:
        """Attributes the steps since the last call to the live version, for each running request."""
        for row in self._running.values():
            append_version(
                row.version_runs, self._weight_version, self._num_steps - row.num_counted
            )
            row.num_counted = self._num_steps

    def _end(self, row: _Row, reason: FinishReason) -> None:
        if self._running.pop(row.request.request_id, None) is row:
            append_version(
                row.version_runs, self._weight_version, self._num_steps - row.num_counted
            )
        if not self._running:
            self._drained.set()
        if not row.future.done():
            row.future.set_result(self._result(row, reason))

    def _result(self, row: _Row, reason: FinishReason) -> GenerationResult:
        first = row.request.draw_offset
        base_token = self._stop_token + 1 + row.request.seed * 31
        num_tokens = sum(count for _, count in row.version_runs)
        token_range = range(base_token + first, base_token + first + num_tokens)
        tokens = [token % self._vocab_size for token in token_range]
        if reason == "stop":
            tokens[-1] = self._stop_token
        logprobs: tuple[float, ...] = ()
        for version, count in row.version_runs:
            logprobs += (-1 - version / 1000,) * count
        return GenerationResult(
            token_ids=tuple(tokens),
            logprobs=logprobs,
            version_runs=tuple(row.version_runs),
            finish_reason=reason,
        )
