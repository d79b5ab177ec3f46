"""Episodes of an agent, one after the other in each slot: the product's sampler over an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.rollout.driven import make_config
from bench.rollout.parts import MODEL, random_weights, tokenizer
from services.common.models.loading import load_config
from services.common.runspec.data import DataSpec
from services.common.runspec.rollout import RolloutSpec
from services.common.runspec.run import LimitsSpec
from services.extras.agents.agent import Agent
from services.extras.agents.endpoint import Endpoint
from services.extras.fake_engine.engine import FakeEngine, LongTail
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt, PromptStore
from services.rollout.engines.base import Engine, GenerationRequest, GenerationResult
from services.rollout.engines.build import make_engine
from services.rollout.monitor import monitor
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.progress_cache import TransferQueueCache
from services.rollout.sampling.sample import (
    Sample,
    prompt_fields,
    sample_fields,
    sample_tags,
)
from services.rollout.sampling.sampler import Failure, GroupSampler
from services.wire.batch import KVBatchMeta
from services.wire.workers import GroupAssignment

TOKEN_S = 0.002
_CONTEXT_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load on a rollout."""

    episodes: int
    """Concurrent episodes."""
    turns: int = 8
    """Turns of each episode."""
    sleep_s: tuple[float, float] = (1.0, 30.0)
    """Min and max seconds of a tool."""
    median_tokens: float = 200.0
    """Median tokens of a reply, with the fake engine."""
    protocol: str = "chat"
    """Protocol of the agents; see :mod:`bench.rollout.tool_agent`."""
    engine: str = "fake"
    """The engine; engines other than the fake one have a tiny model with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn; times are seconds of the event loop's clock."""

    sent: float
    """Time of the agent's request."""
    begun: float
    """Time of the request to the engine."""
    received: float
    """Time of the agent's response."""
    engine_s: float
    """Seconds of the engine. For the fake one, the time without any obstacle; for others, from the
    request until the response."""
    is_first: bool
    """True for the first turn of an episode."""

    @property
    def overhead_s(self) -> float:
        """Returns the time of the turn beyond the engine's."""
        return self.received - self.sent - self.engine_s


@dataclass(slots=True)
class Handled:
    """A request to the endpoint, timed in the endpoint's process."""

    begin: float
    """Time at which the endpoint received it, in seconds of ``time.perf_counter``."""
    end: float = 0.0
    """Time at which it had sent the answer."""
    engine_s: float = 0.0
    """Seconds from the request to the engine until its result."""

    @property
    def handling_s(self) -> float:
        """Returns the time of the request in the endpoint's process without the engine's."""
        return self.end - self.begin - self.engine_s


_handled: ContextVar[Handled | None] = ContextVar("handled", default=None)


class TimedEndpoint(Endpoint):
    """The endpoint, with the times of its requests in :attr:`handled`."""

    handled: ClassVar[list[Handled]] = []

    def app(self) -> ASGIApp:
        inner = super().app()

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            handled = Handled(time.perf_counter())
            _handled.set(handled)  # the engine's request is in a task with this context
            await inner(scope, receive, send)
            handled.end = time.perf_counter()
            self.handled.append(handled)

        return timed


class Watched:
    """An engine that records the times of requests and responses.

    Attributes:
        spans: Begin and end of each turn, by group.
        num_asked: Number of turns.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.spans: dict[str, list[list[float]]] = {}
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Decodes one request."""
        self.num_asked += 1
        now = asyncio.get_running_loop().time
        span = [now()]
        self.spans.setdefault(request.request_id.partition(".")[0], []).append(span)
        handled = _handled.get()
        begin = time.perf_counter()
        try:
            return await self._engine.generate(request)
        finally:
            span.append(now())
            if handled is not None:
                handled.engine_s += time.perf_counter() - begin


def _engine(load: Load) -> Engine:
    if load.engine == "fake":
        return FakeEngine(
            max_running=load.episodes,
            step_seconds=lambda _: TOKEN_S,
            lengths=LongTail(median=load.median_tokens, sigma=0.5),
            vocab_size=tokenizer().vocab_size,
            stop_token=tokenizer().eos_id,
        )
    config = load_config(MODEL, tokenizer())
    config.max_position_embeddings = _CONTEXT_TOKENS
    engine_config = make_config(
        config, dtype=torch.float32, max_running=load.episodes, decode=tokenizer().decode
    )
    return make_engine(load.engine, engine_config)


class _Rows:
    """An unlimited number of rows, each with its number."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        load = self._load
        return {
            "number": index,
            "turns": load.turns,
            "sleep": load.sleep_s,
            "protocol": load.protocol,
            "prompt": f"{index}?",
        }


class _Queue:
    """Accepts tensors and stores none."""

    async def put(self, *arguments: Any, **more: Any) -> KVBatchMeta | None:
        return None

    async def release(self, *arguments: Any) -> None: ...


class _Session:
    """Accepts reports and sends none."""

    spec = SimpleNamespace(limits=LimitsSpec())

    def report(self, **facts: Any) -> None: ...


class Episodes:
    """Keeps a fixed number of episodes running.

    Attributes:
        engine: Engine that samples the episodes.
        asked: Turns of the ended episodes.
        failed: Reasons of failed episodes.
        num_ended: Number of ended episodes.
    """

    def __init__(self, load: Load) -> None:
        self.engine = Watched(_engine(load))
        self.turns: list[Turn] = []
        self.failed: list[str] = []
        self.num_ended = 0
        self._load = load
        self._next = 0
        self._sampler: GroupSampler | None = None

    @asynccontextmanager
    async def running(self, workflow: Agent) -> AsyncIterator[None]:
        """Runs episodes until the block ends."""
        spec = RolloutSpec(
            group_size=1,
            max_running_samples=self._load.episodes,
            max_response_tokens=100_000,
            partial_rollout=True,
            rewards=[{"name": "environment"}],
        )
        data = DataSpec(train={"source": "jsonl", "path": "rows"}, answer_column=None)
        async with CallPool(1) as calls, asyncio.TaskGroup() as tasks:
            decoding = tasks.create_task(self.engine.run())
            if self._load.engine != "fake":
                await self.engine.wait_ready()
                await self.engine.adopt_weights(0, random_weights())
            queue: Any = _Queue()
            engine: Any = self.engine
            services = GroupServices(
                engine=engine,
                tokenizer=tokenizer(),
                workflow=workflow,
                reward=self,
                calls=calls,
            )
            async with GroupSampler(
                PromptStore(data, {"train": _Rows(self._load)}, tokenizer()),
                services,
                spec,
                publisher=self,
                cache=TransferQueueCache("run/partial", data=queue, metadata=queue),
                report_failures=self.report,
            ) as self._sampler:
                self._begin(self._load.episodes)
                watching = tasks.create_task(self._watch(self._sampler))
                yield
                watching.cancel()
            decoding.cancel()

    async def _watch(self, sampler: GroupSampler) -> None:
        """Processes gauges, stalls and stored progress as often as a rollout does."""
        session: Any = _Session()
        engine: Any = self.engine
        await monitor(session, engine, sampler, publish_wait_s=lambda: 0.0)

    async def score(self, reward_input: RewardInput) -> Score:
        """Records the agent's measurements."""
        earned: Any = reward_input.earned
        spans = self.engine.spans.pop(f"g{reward_input.row['number']}")
        is_fake = self._load.engine == "fake"
        self.turns += [
            Turn(
                sent=sent,
                begun=spans[number][0],
                received=received,
                # The first token of a request that arrives between two steps takes less than one
                # step.
                engine_s=(tokens - 1) * TOKEN_S if is_fake else spans[number][1] - spans[number][0],
                is_first=number == 0,
            )
            for number, (sent, received, tokens) in enumerate(earned["turns"])
        ]
        return Score(0.0)

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        """Makes the data that would be stored; another episode replaces the one that ended."""
        prompt_fields(samples)
        sample_fields(samples)
        sample_tags(samples, prompt, group_id=assignment.group_id, attempt=assignment.attempt)
        self.num_ended += len(samples)
        self._begin(1)

    async def report(self, failures: Sequence[Failure]) -> None:
        """Records failures, of which there should be none."""
        self.failed += [f"{error.reason}: {error.message}" for _, error in failures]
        self._begin(len(failures))

    def _begin(self, num_episodes: int) -> None:
        assert self._sampler is not None
        numbers = range(self._next, self._next + num_episodes)
        self._next += num_episodes
        self._sampler.start([_assignment(number) for number in numbers])


def _assignment(number: int) -> GroupAssignment:
    return GroupAssignment(
        group_id=f"g{number}",
        attempt=1,
        split="train",
        row=number,
        partition_id="run/train",
        members=(0,),
        seeds=(number,),
        temperatures=(1.0,),
    )


def milliseconds(seconds: Sequence[float]) -> Mapping[str, float]:
    """Returns the distribution of values in milliseconds."""
    ordered = sorted(seconds)
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {
        name: round(1e3 * ordered[int(last * quantile)], 2) for name, quantile in quantiles.items()
    }
