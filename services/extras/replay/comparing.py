"""Finds the first step at which two recorded runs differ, and the cause."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from services.common.fields import group_of
from services.common.runspec.keys import flat
from services.extras.replay import files
from services.extras.replay.files import RecordedStep

Cause = Literal[
    "none", "initial weights", "batch", "order", "seed", "version", "tokens", "logprobs", "reward",
    "masks", "fields", "schedule", "weights", "length",
]  # fmt: skip
_FIELD_CAUSES: Mapping[str, Cause] = {
    "prompt_ids": "batch",
    "version_runs": "version",
    "response_ids": "tokens",
    "rollout_logprobs": "logprobs",
    "rewards": "reward",
    "token_rewards": "reward",
    "response_mask": "masks",
}
"""Fields in the order in which a cause precedes its consequences."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs."""

    step: int
    """First step at which the runs differ; the last common step if they do not."""
    cause: Cause
    text: str
    """Description for people."""


def compare_records(first: Path, second: Path) -> tuple[Difference, dict[str, tuple[Any, Any]]]:
    """Compares two records step by step.

    Returns:
        The first difference, and the keys of the specification that differ, with both values.

    Raises:
        NotFoundError: If one of the folders has no record.
        DataLossError: If a file is damaged.
    """
    starts = [files.read_starts(folder)[0] for folder in (first, second)]
    specs = [dict(flat(start["spec"])) for start in starts]
    keys = {
        key: (specs[0].get(key), specs[1].get(key))
        for key in dict.fromkeys([*specs[0], *specs[1]])
        if specs[0].get(key) != specs[1].get(key) and key != "name"
    }
    ranks = [int(start["spec"]["trainer"]["world_size"]) for start in starts]
    steps = [files.recorded_steps(folder) for folder in (first, second)]
    last = 0
    for step in sorted(set(steps[0]) & set(steps[1])):
        pair = [
            files.read_step(folder, step, num_ranks=count)
            for folder, count in zip((first, second), ranks, strict=True)
        ]
        for difference in _differences(pair[0], pair[1]):
            return difference, keys
        last = step
    if steps[0][-1:] != steps[1][-1:]:
        text = f"the runs are equal up to step {last}, where one of them ends"
        return Difference(last, "length", text), keys
    return Difference(last, "none", f"all {last} steps are equal"), keys


def _differences(first: RecordedStep, second: RecordedStep) -> Iterator[Difference]:
    """Yields the differences of a step, causes before their consequences."""
    step = first.numbers.step
    if first.ranks[0].metas and second.ranks[0].metas:
        yield from _batch_differences(first, second)
    weights = [
        {name: digest for rank in record.ranks for name, digest in rank.numbers.weights.items()}
        for record in (first, second)
    ]
    if len(first.ranks) != len(second.ranks):
        return  # other ranks hold other rows
    if differing := [name for name in weights[0] if weights[0][name] != weights[1].get(name)]:
        if not first.ranks[0].metas:
            yield Difference(
                step, "initial weights", f"the weights to start from differ, first {differing[0]}"
            )
            return
        numbers = ", ".join(_metric_differences(first.numbers.metrics, second.numbers.metrics))
        yield Difference(
            step,
            "weights",
            f"the batches are equal, but the trained weights differ, first {differing[0]}"
            + (f"; metrics: {numbers}" if numbers else ""),
        )


def _batch_differences(first: RecordedStep, second: RecordedStep) -> Iterator[Difference]:
    step, keys = first.numbers.step, (first.meta.keys, second.meta.keys)
    if set(keys[0]) != set(keys[1]):
        only = [sorted(set(map(group_of, set(a) - set(b)))) for a, b in (keys, keys[::-1])]
        text = f"only the first run trains the groups {only[0]}, only the second {only[1]}"
        yield Difference(step, "batch", text)
        return
    if keys[0] != keys[1]:
        index = next(i for i, pair in enumerate(zip(*keys, strict=True)) if pair[0] != pair[1])
        text = f"both train the same samples in another order: {keys[0][index]}, {keys[1][index]} first"
        yield Difference(step, "order", text)
    numbers = first.numbers, second.numbers
    if numbers[0].weight_version != numbers[1].weight_version:
        versions = [side.weight_version for side in numbers]
        text = f"the step starts from version {versions[0]} and from version {versions[1]}"
        yield Difference(step, "version", text)
    seeds = [
        dict(zip(s.meta.keys, s.meta.tags.get("seed", ()), strict=False)) for s in (first, second)
    ]
    if wrong := [key for key in keys[0] if seeds[0].get(key) != seeds[1].get(key)]:
        text = (
            f"sample {wrong[0]} was sampled with another seed: {[s.get(wrong[0]) for s in seeds]}"
        )
        yield Difference(step, "seed", text)
    yield from _field_differences(first, second)
    if numbers[0].num_steps != numbers[1].num_steps:
        counts = [side.num_steps for side in numbers]
        text = f"the learning rate is scheduled over {counts[0]} and over {counts[1]} steps"
        yield Difference(step, "schedule", text)


def _field_differences(first_step: RecordedStep, second_step: RecordedStep) -> Iterator[Difference]:
    step = first_step.numbers.step
    names = [{n for rank in side.ranks for n in rank.columns} for side in (first_step, second_step)]
    for name in sorted(names[0] | names[1], key=lambda n: ([*_FIELD_CAUSES, n].index(n), n)):
        cause = _FIELD_CAUSES.get(name, "fields")
        if name not in names[0] or name not in names[1]:
            yield Difference(step, cause, f"only one of the runs uses the field {name}")
            continue
        values = [
            step_.fetch(first_step.meta, (name,))[name].unbind()
            for step_ in (first_step, second_step)
        ]
        for key, first, second in zip(first_step.meta.keys, *values, strict=True):
            if not _are_equal(first, second):
                yield Difference(
                    step, cause, f"{name} of sample {key}: {_described(first, second)}"
                )
                break


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Returns True for the same bits: NaN equals itself."""
    is_alike = first.shape == second.shape and first.dtype == second.dtype
    return is_alike and bool(torch.equal(_bits(first), _bits(second)))


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _described(first: Tensor, second: Tensor) -> str:
    if first.dim() == 0 or second.dim() == 0:
        return f"{first.item()} and {second.item()}"
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).unsqueeze(-1).flatten(1).any(1).nonzero()
    if len(differs) == 0:
        return f"{len(first)} and {len(second)} entries"
    index = int(differs[0])
    return f"{first[index].tolist()} and {second[index].tolist()} at place {index}"


def _metric_differences(first: Mapping[str, float], second: Mapping[str, float]) -> Iterator[str]:
    for name in _FIRST_METRICS:
        if name in first and name in second and first[name] != second[name]:
            yield f"{name} {first[name]:.9g} and {second[name]:.9g}"


_FIRST_METRICS: Sequence[str] = ("loss", "grad_norm", "learning_rate", "entropy")
