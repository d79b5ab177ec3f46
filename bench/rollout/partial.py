"""Partial rollout against waiting for the slowest, on a long-tailed workload in virtual time.

Usage: python -m bench.rollout.partial [--steps 60] [--max-staleness 4] [--out FILE.json]

Real: group sampler, staleness gate, ledger and batch choice. Simulated: engines (one token per running
request and step, log-normal lengths), trainer (a fixed time per step), weight sync (instantaneous).
Both runs have the same workload, staleness bound and number of trained groups. They differ in one thing:
when new weights arrive, ``partial`` goes on with running responses, ``wait`` finishes them first.
"""

import argparse
import asyncio
import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.rollout.parts import NoCache
from bench.rollout.report import report_to
from services.common.spec.data import DataSpec
from services.common.spec.rollout import RolloutSpec
from services.controller.rules.ledger import Group, Ledger
from services.controller.rules.replay import choose_batch
from services.controller.rules.staleness import StalenessGate
from services.rollout.calls.pool import CallPool
from services.rollout.client import GroupAssignment
from services.rollout.engines.fake import FakeEngine, LongTail
from services.rollout.engines.virtual_time import VirtualTimeLoop
from services.rollout.group import Tools
from services.rollout.prompts import Prompt, PromptBook
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.samples import Sample
from services.rollout.sampling import Failure, GroupSampler
from services.rollout.workflows.single_turn import SingleTurn


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One simulated run."""

    is_partial: bool
    steps: int
    max_staleness: int
    replicas: int = 4
    places: int = 64
    groups_per_step: int = 32
    group_size: int = 8
    max_tokens: int = 8192
    lengths: LongTail = field(default_factory=lambda: LongTail(median=500.0, sigma=1.0))
    token_seconds: float = 0.02
    train_seconds: float = 15.0


class _Tokenizer:
    """Enough of a tokenizer for an engine without a model."""

    eos_id, pad_id, vocab_size = 1, 0, 256

    def encode(self, text: str) -> list[int]:
        return [2] * len(text)

    def decode(self, ids: Sequence[int]) -> str:
        return ""


class _Reward:
    async def score(self, given: RewardInput) -> Score:
        return Score(0.0)


class Simulation:
    """Controller, trainer and rollouts of one run."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.gate = StalenessGate(
            max_staleness=setting.max_staleness, groups_per_step=setting.groups_per_step
        )
        self.ledger = Ledger(max_attempts=1)
        self.samples: dict[str, list[Sample]] = {}
        self.version = 0
        self.published = [0] * setting.replicas
        self.engines: list[FakeEngine] = []
        self.samplers: list[GroupSampler] = []
        self.load = [0] * setting.replicas
        self.owner: dict[str, int] = {}
        self.changed = asyncio.Event()
        self.trained_lengths: list[int] = []
        self.staleness: list[int] = []
        self.num_mixed = 0

    async def publish(self, assignment: GroupAssignment, _: Prompt, samples: list[Sample]) -> None:
        """Take a finished group."""
        group = self.ledger.get(assignment.group_id)
        assert group is not None
        oldest = min(min(sample.sampled_versions) for sample in samples)
        self.ledger.complete(group, oldest_version=oldest)
        self.samples[assignment.group_id] = samples
        self.load[self.owner.pop(assignment.group_id)] -= 1
        self.supply()
        self.changed.set()

    async def fail(self, failures: Sequence[Failure]) -> None:
        """No group may fail here."""
        raise AssertionError(failures)

    def supply(self) -> None:
        """Hand out groups while the staleness gate and the places have room."""
        setting = self.setting
        per_replica = 2 * setting.places // setting.group_size
        room = self.gate.capacity(
            published=min(self.published),
            num_admitted=self.ledger.num_admitted,
            num_running=len(self.ledger.running()),
            max_running=per_replica * setting.replicas,
        )
        starts: dict[int, list[GroupAssignment]] = defaultdict(list)
        for _ in range(room):
            replica = min(range(setting.replicas), key=self.load.__getitem__)
            row = self.ledger.num_issued
            group = self.ledger.issue(row, position=row + 1)
            self.ledger.lease(group, str(replica), version=self.published[replica], now=0.0)
            self.ledger.confirm(group)
            self.load[replica] += 1
            self.owner[group.group_id] = replica
            starts[replica].append(self._assignment(group))
        for replica, assignments in starts.items():
            self.samplers[replica].start(assignments)

    def _assignment(self, group: Group) -> GroupAssignment:
        size = self.setting.group_size
        return GroupAssignment(
            group_id=group.group_id,
            attempt=1,
            split="train",
            row=0,
            partition_id="run/train",
            members=tuple(range(size)),
            seeds=tuple(group.sequence * size + member for member in range(size)),
            temperatures=(1.0,) * size,
        )

    async def train(self) -> None:
        """Train all steps: choose, learn, publish."""
        for _ in range(self.setting.steps):
            batch = await self._next_batch()
            self.ledger.train(batch)
            for group in batch:
                self.staleness.append(self.version - group.oldest_version)
                for sample in self.samples.pop(group.group_id):
                    self.trained_lengths.append(len(sample.response_ids))
                    self.num_mixed += len(sample.sampled_versions) > 1
            await asyncio.sleep(self.setting.train_seconds)
            self.ledger.consume(batch)
            self.version += 1
            async with asyncio.TaskGroup() as tasks:
                for replica in range(self.setting.replicas):
                    tasks.create_task(self._adopt(replica, self.version))

    async def _next_batch(self) -> tuple[Group, ...]:
        while True:
            self.changed.clear()
            choice = choose_batch(
                self._ready(),
                self.ledger.running(),
                gate=self.gate,
                trainer_version=self.version,
                wait_for_due=True,
                keep_stale=False,
            )
            assert not choice.stale, "a group became stale before it was trained"
            if choice.batch:
                return choice.batch
            await self.changed.wait()

    def _ready(self) -> list[Group]:
        return [group for name in self.samples if (group := self.ledger.get(name)) is not None]

    async def _adopt(self, replica: int, version: int) -> None:
        engine = self.engines[replica]
        if not self.setting.is_partial:
            await engine.pause(drain=True)
        await engine.adopt_weights(version, {})
        await engine.resume()
        self.published[replica] = version
        self.supply()

    async def run(self) -> dict[str, Any]:
        """Simulate and report."""
        setting = self.setting
        spec = RolloutSpec(
            group_size=setting.group_size,
            max_response_tokens=setting.max_tokens,
            max_segments=1000,
            rewards=[{"name": "none"}],  # type: ignore[arg-type]  # pydantic converts
        )
        tokenizer: Any = _Tokenizer()
        data = DataSpec(train={"source": "jsonl", "path": "rows"}, answer_column=None)  # type: ignore[arg-type]
        prompts = PromptBook(data, {"train": [{"prompt": "x"}]}, tokenizer)
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            decoding = []
            for _ in range(setting.replicas):
                engine = FakeEngine(
                    max_running=setting.places,
                    step_seconds=lambda _: setting.token_seconds,
                    lengths=setting.lengths,
                )
                await engine.adopt_weights(0, {})
                decoding.append(tasks.create_task(engine.run()))
                tools = Tools(
                    engine=engine,
                    tokenizer=tokenizer,
                    workflow=SingleTurn(),
                    reward=_Reward(),
                    calls=CallPool(1),
                )
                sampler = GroupSampler(
                    prompts,
                    tools,
                    spec,
                    publisher=self,
                    cache=NoCache(),
                    report_failures=self.fail,
                )
                self.engines.append(engine)
                self.samplers.append(await stack.enter_async_context(sampler))
            self.supply()
            await self.train()
            report = self._report()
            for task in decoding:
                task.cancel()
        return report

    def _report(self) -> dict[str, Any]:
        setting, seconds = self.setting, asyncio.get_running_loop().time()
        tokens = sum(engine.stats().tokens_total for engine in self.engines)
        idle = sum(engine.stats().idle_seconds for engine in self.engines)
        places = setting.replicas * setting.places
        count = len(self.trained_lengths)
        drawn = [min(setting.lengths.length(seed), setting.max_tokens) for seed in range(count)]
        return {
            "groups_trained": setting.steps * setting.groups_per_step,
            "hours": round(seconds / 3600, 3),
            "groups_per_hour": round(setting.steps * setting.groups_per_step / seconds * 3600),
            "engine_idle": round(idle / (setting.replicas * seconds), 3),
            "place_use": round(tokens * setting.token_seconds / (places * seconds), 3),
            "staleness_max": max(self.staleness),
            "staleness_mean": round(sum(self.staleness) / len(self.staleness), 2),
            "trained_late": sum(value > setting.max_staleness for value in self.staleness),
            "lost": self.ledger.num_issued
            - len(self.staleness)
            - len(self.ledger.running())
            - len(self._ready()),
            "samples_of_several_versions": round(self.num_mixed / count, 3),
            "mean_length_trained": round(sum(self.trained_lengths) / count),
            "mean_length_drawn": round(sum(drawn) / count),
            "ks_p_value": round(ks_p_value(self.trained_lengths, drawn), 3),
        }


def ks_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov test, asymptotic p-value."""
    a, b = sorted(first), sorted(second)
    distance = max(
        abs(bisect.bisect_right(a, x) / len(a) - bisect.bisect_right(b, x) / len(b)) for x in a + b
    )
    size = len(a) * len(b) / (len(a) + len(b))
    root = (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * distance
    if root < 0.2:
        return 1.0
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * root) ** 2) for k in range(1, 101)]
    return max(0.0, min(1.0, 2 * sum(terms)))


def simulate(setting: Setting) -> dict[str, Any]:
    """Run one setting in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(Simulation(setting).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--train-seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/rollout-partial.json"))
    arguments = parser.parse_args()
    results = {
        name: simulate(
            Setting(
                is_partial=name == "partial",
                steps=arguments.steps,
                max_staleness=arguments.max_staleness,
                train_seconds=arguments.train_seconds,
            )
        )
        for name in ("partial", "wait")
    }
    results["speedup"] = round(  # type: ignore[assignment]
        results["partial"]["groups_per_hour"] / results["wait"]["groups_per_hour"], 2
    )
    report_to(arguments.out, results)


if __name__ == "__main__":
    main()
