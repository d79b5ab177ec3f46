"""Tests of the adapter for external engines, with a scripted backend."""

import asyncio
from collections.abc import Callable, Collection, Sequence

import pytest
import torch
from torch import nn

from services.extras.external_engine.engine import ExternalEngine
from services.extras.external_engine.in_place import handle_weight_command
from services.extras.external_engine.request_segments import Segment, TokenChunk
from services.extras.external_engine.shared_tensors import open_shared
from services.rollout.engines.base import EngineCapabilities, EngineDiedError, GenerationResult
from services.rollout.engines.engine_config import ModelShape
from services.weightsync.weight_plan import TensorSpec
from tests.helpers.engines import request, running, until
from tests.helpers.placing import place_all

WEIGHTS = {"weight": torch.ones(2, 3)}


class ScriptedStream:
    """Fake stream with one token per iteration of the event loop; each token is the length of its context."""

    def __init__(self, segment: Segment, backend: "ScriptedBackend") -> None:
        self.segment = segment
        self._backend = backend
        self._num_done = 0

    async def next(self) -> TokenChunk:
        await self._backend.step.wait()
        await asyncio.sleep(0)
        if self.segment.segment_id in self._backend.cuts:
            return TokenChunk(token_ids=(), logprobs=(), finish_reason="abort")
        self._num_done += 1
        is_last = self._num_done == self.segment.max_tokens
        token = len(self.segment.context_ids) + self._num_done - 1
        return TokenChunk(
            token_ids=(token,), logprobs=(-1.0,), finish_reason="length" if is_last else None
        )

    async def close(self) -> None:
        self._backend.running.discard(self.segment.segment_id)


class ScriptedBackend:
    """Fake backend that records requests."""

    capabilities = EngineCapabilities(
        name="scripted",
        kv_policies=frozenset({"recompute"}),
        stop_texts=True,
        truncation=False,
        seeds=True,
    )
    kv_capacity_tokens = 1000
    drafts = None

    def __init__(self) -> None:
        self.parts: list[Segment] = []
        self.running: set[str] = set()
        self.cuts: set[str] = set()
        self.running_at_load: list[int] = []
        self.model = nn.Linear(3, 2, bias=False)
        self.step = asyncio.Event()
        self.step.set()

    async def serve(self, started: Callable[[], None]) -> None:
        started()
        await asyncio.Event().wait()

    async def submit(self, segment: Segment) -> ScriptedStream:
        self.parts.append(segment)
        self.running.add(segment.segment_id)
        return ScriptedStream(segment, self)

    async def abort_segments(self, segment_ids: Collection[str]) -> None:
        self.cuts |= set(segment_ids)
        self.step.set()

    async def load(self, description: str) -> None:
        if not handle_weight_command(description, self.model, rank=0, ranks=1):
            assert open_shared(description).keys() == WEIGHTS.keys()
        self.running_at_load.append(len(self.running))

    async def score(
        self, name: str, token_ids: Sequence[int], model_inputs: object = None
    ) -> tuple[float, ...]:
        return (-1.0,) * (len(token_ids) - 1)


class FreezingBackend(ScriptedBackend):
    """Fake backend that freezes running requests instead of aborting them."""

    def __init__(self) -> None:
        super().__init__()
        self.empties = True
        self.thawed: list[tuple[int, bool]] = []

    async def freeze(self) -> None:
        self.step.clear()

    async def thaw(self, version: int, *, recompute: bool) -> bool:
        self.thawed.append((version, recompute))
        self.step.set()
        return self.empties


def make_engine(backend: ScriptedBackend) -> ExternalEngine:
    specs = [TensorSpec("weight", (2, 3), "float32")]
    shape = ModelShape(specs=specs, vocab_size=1000, max_tokens=500)
    return ExternalEngine(
        backend,
        shape,
        max_running=4,
        freezer=backend if isinstance(backend, FreezingBackend) else None,
        decode=lambda ids: "".join(f"<{i}>" for i in ids),
    )


async def test_segments_of_different_adoptions_never_share_a_prefix() -> None:
    backend = ScriptedBackend()
    engine = make_engine(backend)
    async with running(engine):
        await engine.adopt_weights(3, WEIGHTS)
        task = asyncio.ensure_future(engine.generate(request("r", (1, 2), max_tokens=50)))
        await until(lambda: engine.stats().tokens_total >= 5, poll_s=0)
        backend.step.clear()  # no token is generated while the update prepares
        # The same version with other weights, as after the trainer was rewound to a checkpoint.
        update = asyncio.ensure_future(engine.adopt_weights(3, WEIGHTS))
        await until(lambda: bool(backend.cuts), poll_s=0)
        backend.step.set()
        await update
        result = await task
    assert result.token_ids == tuple(range(2, 52))
    assert result.version_runs == ((3, 50),)
    assert backend.running_at_load == [0, 0]
    first, second = backend.parts
    assert first.cache_salt != second.cache_salt
    assert second.context_ids == [1, 2, *range(2, 2 + second.draw_offset)]
    assert first.max_tokens - second.max_tokens == second.draw_offset > 0
    assert engine.stats().recomputed_tokens_total == second.draw_offset


async def test_recomputed_blocks_are_shared_unless_older_ones_remain() -> None:
    backend = FreezingBackend()
    engine = make_engine(backend)
    salts = []
    async with running(engine):
        for version, empties in ((1, True), (2, True), (3, False), (4, True)):
            backend.empties = empties
            await engine.adopt_weights(version, WEIGHTS)
            await engine.generate(request(f"r{version}", (1, 2), max_tokens=3))
            salts.append(backend.parts[-1].cache_salt)
    assert salts[0] == salts[1] != salts[2] == salts[3]


async def test_many_requests_at_once_leave_the_event_loop_to_others_in_between() -> None:
    backend = ScriptedBackend()
    engine = make_engine(backend)
    turns = [0]
    submitted_at: list[int] = []
    submit = backend.submit

    async def counted(segment: Segment) -> ScriptedStream:
        submitted_at.append(turns[0])
        return await submit(segment)

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    backend.submit = counted  # type: ignore[method-assign]
    async with running(engine):
        await engine.adopt_weights(0, WEIGHTS)
        counting = asyncio.ensure_future(count())
        names = ("a", "b", "c", "d")
        tasks = [
            asyncio.ensure_future(engine.generate(request(name, (1,), max_tokens=100)))
            for name in names
        ]
        await until(lambda: len(submitted_at) == 4, poll_s=0)
        assert len(set(submitted_at)) == 4
        await engine.abort()
        assert [(await task).finish_reason for task in tasks] == ["aborted"] * 4
        late = asyncio.ensure_future(engine.generate(request("late", (1,), max_tokens=100)))
        await asyncio.sleep(0)
        await engine.abort()  # before the request was admitted
        assert (await late).finish_reason == "aborted"
        counting.cancel()


async def test_a_paused_request_can_be_aborted_and_scored_around() -> None:
    backend = ScriptedBackend()
    engine = make_engine(backend)
    async with running(engine):
        await engine.adopt_weights(0, WEIGHTS)
        tasks = [
            asyncio.ensure_future(engine.generate(request(name, (1,), max_tokens=400)))
            for name in ("a", "b")
        ]
        await until(lambda: engine.stats().tokens_total >= 10, poll_s=0)
        await engine.pause()
        assert not backend.running
        assert await engine.score((1, 2, 3)) == (-1.0, -1.0)
        await engine.abort({"a"})
        aborted = await tasks[0]
        await engine.adopt_weights(1, WEIGHTS)
        assert not backend.running
        await engine.resume()
        other = await tasks[1]
    assert aborted.finish_reason == "aborted"
    assert len(aborted.token_ids) >= 5
    assert [version for version, _ in other.version_runs] == [0, 1]
    assert len(other.token_ids) == 400


async def test_stop_texts_cut_a_response_where_they_are_complete() -> None:
    backend = ScriptedBackend()
    engine = make_engine(backend)
    async with running(engine):
        result: GenerationResult = await engine.generate(
            request("r", (1, 2), max_tokens=50, stop_texts=("4><5",))
        )
        assert engine.stats().num_running == 0
    assert result.token_ids == (2, 3, 4, 5)
    assert result.finish_reason == "stop"


async def test_a_stop_text_that_began_before_an_interruption_ends_the_response() -> None:
    engine = make_engine(ScriptedBackend())
    async with running(engine):
        stops = {"max_tokens": 50, "stop_texts": ("1><2><3",)}
        same: GenerationResult = await engine.generate(
            request("r", (0, 1, 2), turn_tokens=2, **stops)
        )
        other: GenerationResult = await engine.generate(
            request("s", (0, 1, 2), turn_tokens=1, **stops)
        )
    assert (same.finish_reason, len(same.token_ids)) == ("stop", 1)
    assert (other.finish_reason, len(other.token_ids)) == ("length", 50)


async def test_an_engine_that_does_not_end_a_request_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck(ScriptedBackend):
        async def abort_segments(self, segment_ids: Collection[str]) -> None:
            """Does nothing."""

    monkeypatch.setattr("services.extras.external_engine.engine._ABORT_TIMEOUT_S", 0.01)
    backend = Stuck()
    backend.step.clear()
    engine = make_engine(backend)
    async with running(engine):
        task = asyncio.ensure_future(engine.generate(request("r", (1,), max_tokens=400)))
        await until(lambda: bool(backend.running), poll_s=0)
        with pytest.raises(EngineDiedError, match="1 requests"):
            await engine.adopt_weights(1, WEIGHTS)
        assert backend.running_at_load == []
        task.cancel()


class SilentBackend(ScriptedBackend):
    """Fake backend that never loads weights."""

    def __init__(self) -> None:
        super().__init__()
        self.death = asyncio.Event()

    async def serve(self, started: Callable[[], None]) -> None:
        started()
        await self.death.wait()
        raise EngineDiedError("it died")

    async def load(self, description: str) -> None:
        await asyncio.Event().wait()


async def test_an_adoption_ends_with_the_engine() -> None:
    backend = SilentBackend()
    engine = make_engine(backend)
    serving = asyncio.ensure_future(engine.run())
    adoption = asyncio.ensure_future(engine.adopt_weights(0, WEIGHTS))
    await asyncio.sleep(0.05)
    assert not adoption.done()
    backend.death.set()
    with pytest.raises(EngineDiedError, match="load weights"):
        await asyncio.wait_for(adoption, 10)
    with pytest.raises(EngineDiedError):
        await serving


async def test_an_engine_that_does_not_reply_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.extras.external_engine.engine._REPLY_TIMEOUT_S", 0.05)
    engine = make_engine(SilentBackend())
    async with running(engine):
        with pytest.raises(EngineDiedError, match="did not reply"):
            await asyncio.wait_for(engine.adopt_weights(0, WEIGHTS), 10)


async def test_unsupported_features_of_an_engine_are_rejected() -> None:
    engine = make_engine(ScriptedBackend())
    async with running(engine):
        for changes in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
            with pytest.raises(ValueError, match="scripted"):
                await engine.generate(request("r", (1,), **changes))


@pytest.mark.parametrize("backend_class", [ScriptedBackend, FreezingBackend])
async def test_nothing_is_decoded_from_the_opening_of_weights_to_their_adoption(
    backend_class: type[ScriptedBackend],
) -> None:
    backend = backend_class()
    engine = make_engine(backend)
    async with running(engine):
        await engine.adopt_weights(0, WEIGHTS)
        task = asyncio.ensure_future(engine.generate(request("r", (1,), max_tokens=50)))
        await until(lambda: engine.stats().tokens_total >= 10, poll_s=0)
        for number in (1, 2):  # the first transfer fails after its last bucket
            new = {"weight": torch.full((2, 3), float(number))}
            await place_all(engine.open_weights, new, num_sources=2)
            tokens = engine.stats().tokens_total
            late = asyncio.ensure_future(engine.generate(request(f"{number}", (1,), max_tokens=2)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.stats().tokens_total == tokens
            await engine.abort({f"{number}"})
            assert (await late).finish_reason == "aborted"
        await engine.adopt_placed(7)
        assert torch.equal(backend.model.weight.detach(), new["weight"])
        await engine.resume()
        result = await task
    assert len(result.token_ids) == 50
    assert engine.stats().weight_version == 7
    if isinstance(backend, FreezingBackend):  # the frozen request continues in its slot
        assert backend.thawed == [(0, True), (7, True)]
        assert len(backend.parts) == 1
    else:  # the request continues as a new segment
        assert [version for version, _ in result.version_runs] == [0, 7]


async def test_weights_that_were_opened_for_nothing_change_nothing() -> None:
    backend = FreezingBackend()
    engine = make_engine(backend)
    async with running(engine):
        await engine.adopt_weights(3, WEIGHTS)
        task = asyncio.ensure_future(engine.generate(request("r", (1,), max_tokens=30)))
        await until(lambda: engine.stats().tokens_total >= 10, poll_s=0)
        odd = {"bias": torch.zeros(2)}
        with pytest.raises(ValueError, match=r"weight_sync\.mode shadow"):
            await place_all(engine.open_weights, odd, num_sources=1)
        await engine.close_weights()
        result = await task
    assert result.version_runs == ((3, 30),)
