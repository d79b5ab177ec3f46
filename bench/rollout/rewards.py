"""Effects of failing rewards on groups: their advantages, scores and time.

Usage: python -m bench.rollout.rewards [--groups 200] [--out FILE.json]

Real: the torch engine on a tiny model, group samplers, scorers and their processes. There is no run
around them.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.report import report_to
from bench.rollout.faulty import earned
from bench.rollout.parts import NoCache, group_assignment, number_prompts, tiny_engine, tokenizer
from services.common.runspec.rollout import RolloutSpec
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling.group import GroupServices
from services.rollout.sampling.sampler import Failure, GroupSampler
from services.rollout.sampling.samples import Sample
from services.rollout.workflows.base import SingleTurn
from services.wire.workers import GroupAssignment

GROUP_SIZE = 8
DEADLINE_S = 3.0


class Outcome:
    """Finished groups; no group may fail permanently."""

    def __init__(self) -> None:
        self.groups: list[list[Sample]] = []
        self.failed: dict[str, int] = {}
        self.changed = asyncio.Event()

    async def publish(self, _: GroupAssignment, __: Prompt, samples: list[Sample]) -> None:
        self.groups.append(samples)
        self.changed.set()

    async def report(self, failures: Sequence[Failure]) -> None:
        for _, error in failures:
            self.failed[error.reason] = self.failed.get(error.reason, 0) + 1
        self.changed.set()


async def sample_groups(
    num_groups: int, reward: Mapping[str, Any], policy: str
) -> tuple[Outcome, float]:
    """Samples groups with a reward; returns them and the elapsed seconds."""
    spec = RolloutSpec(
        group_size=GROUP_SIZE,
        max_response_tokens=12,
        on_reward_failure=policy,  # type: ignore[arg-type]
        max_attempts=8,
        rewards=[{"bounds": (0, 1), "timeout_s": DEADLINE_S, **reward}],  # type: ignore[arg-type]
    )
    engine, outcome = tiny_engine(max_running=256), Outcome()
    async with (
        CallPool(4) as pool,
        Scorer.open(
            spec.rewards, pool, AddressPolicy(), concurrency=spec.reward_concurrency
        ) as scorer,
        asyncio.TaskGroup() as tasks,
    ):
        await asyncio.gather(*[scorer.check() for _ in range(4)])
        tools = GroupServices(
            engine=engine, tokenizer=tokenizer(), workflow=SingleTurn(), reward=scorer, calls=pool
        )
        decoding = tasks.create_task(engine.run())
        async with GroupSampler(
            number_prompts(),
            tools,
            spec,
            publisher=outcome,
            cache=NoCache(),
            report_failures=outcome.report,
        ) as sampler:
            began = time.monotonic()
            sampler.start([group_assignment(index, size=GROUP_SIZE) for index in range(num_groups)])
            while len(outcome.groups) + sum(outcome.failed.values()) < num_groups:
                await outcome.changed.wait()
                outcome.changed.clear()
            seconds = time.monotonic() - began
        decoding.cancel()
    return outcome, seconds


def report(outcome: Outcome) -> dict[str, Any]:
    """Returns the advantages of the samples that count, and the number of scores that were not earned."""
    text = tokenizer().decode
    scored = [[s for s in group if s.finish_reason != "failed"] for group in outcome.groups]
    wrong = [s for group in scored for s in group if s.score.value != earned(text(s.response_ids))]
    advantages = [
        advantages_of([s.score.value for s in group]) for group in scored if len(group) > 1
    ]
    means = [statistics.fmean(group) for group in advantages]
    sizes = [statistics.fmean(map(abs, group)) for group in advantages]
    rewards = [statistics.fmean(s.score.value for s in group) for group in scored if group]
    return {
        "groups": len(outcome.groups),
        "failed_groups": outcome.failed,
        "masked_samples": sum(len(g) for g in outcome.groups) - sum(map(len, scored)),
        "scores_not_earned": len(wrong),
        "scores_of_zero": sum(s.score.value == 0 for group in scored for s in group),
        "mean_advantage": with_error(means),
        "mean_abs_advantage": with_error(sizes),
        "mean_reward": with_error(rewards),
    }


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """Returns GRPO's advantages."""
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (spread + 1e-6) for reward in rewards]


def with_error(values: Sequence[float]) -> dict[str, float]:
    """Returns the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(statistics.fmean(values), 5), "error": round(error, 5)}


def z_score(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Returns the difference in standard errors."""
    error = math.hypot(one["error"], other["error"])
    return round((one["mean"] - other["mean"]) / error, 2) if error > 0 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("bench/results/rollout-rewards.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, rate, policy in (
        ("none", 0.0, "mask"),
        ("mask", 0.2, "mask"),
        ("regenerate", 0.2, "regenerate"),
    ):
        reward = {"name": "bench.rollout.faulty:failing", "arguments": {"rate": rate}}
        outcome, _ = asyncio.run(sample_groups(arguments.groups, reward, policy))
        results[name] = report(outcome)
    for name in ("mask", "regenerate"):
        results[name]["z_scores"] = {
            key: z_score(results[name][key], results["none"][key])
            for key in ("mean_advantage", "mean_reward")
        }
    with tempfile.TemporaryDirectory() as folder:
        seconds = {}
        for name in ("awake", "asleep"):
            once = Path(folder) / "once"
            if name == "awake":
                once.touch()
            reward = {"name": "bench.rollout.faulty:sleeping", "arguments": {"once": str(once)}}
            _, seconds[name] = asyncio.run(sample_groups(16, reward, "regenerate"))
            once.unlink(missing_ok=True)
    results["sleeping_reward"] = {
        "deadline_s": DEADLINE_S,
        "seconds": round(seconds["asleep"], 2),
        "seconds_without": round(seconds["awake"], 2),
        "delay_s": round(seconds["asleep"] - seconds["awake"], 2),
    }
    report_to(arguments.out, results)


if __name__ == "__main__":
    main()
