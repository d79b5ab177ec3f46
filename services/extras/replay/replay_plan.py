"""Plans a replay: reads the whole record and checks what would make the replay fail or differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.common.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from services.common.runspec.loader import draft_of
from services.common.runspec.run import RunSpec
from services.extras.replay import files
from services.extras.replay.files import StepNumbers
from services.extras.replay.recorder import code_digests, hardware, packages
from services.trainer.checkpoint import manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A checked replay."""

    folder: Path
    """Folder of the record."""
    spec: RunSpec
    """Specification of the replay."""
    changes: Sequence[str]
    """Assignments that distinguish it from the run's specification; empty for an exact replay."""
    start_step: int
    """Step that the replay continues after."""
    first: int
    """First step to report."""
    last: int
    """Last step to train."""
    threads: int
    """Threads of the recorded process."""
    device: str
    """``cpu`` or ``cuda``."""
    versions: tuple[int, ...] = ()
    """Weight versions to write to files."""
    saved: tuple[int, ...]
    """Steps to save, because the run went back to them later."""
    notes: tuple[str, ...]
    """Differences that may change results, for people to read."""


def plan_replay(
    folder: Path,
    *,
    first: int | None = None,
    last: int | None = None,
    changes: Sequence[str] = (),
    versions: Sequence[int] = (),
) -> ReplayPlan:
    """Checks a record, this machine and the checkpoint to start from.

    Args:
        folder: Folder of the record, in that of the run's checkpoints.
        first: First step to report; None for the first one that is recorded.
        last: Last step; None for the last one that is recorded.
        changes: Assignments such as ``algorithm.loss=gspo``; the replay is then an experiment.
        versions: Weight versions that are wanted; they replace ``first`` and ``last``.

    Raises:
        NotFoundError: If there is no record.
        DataLossError: If the record lacks a step, or a file is damaged.
        InvalidArgumentError: If the steps are not recorded, or a change is not possible.
        FailedPreconditionError: If this machine or its packages differ from those of the run.
        SpecError: If a change is malformed or breaks a rule.
    """
    starts = files.read_starts(folder)
    steps = files.recorded_steps(folder)
    origin = int(starts[0]["step"])
    trained = [step for step in steps if step > origin]
    if not trained:
        raise DataLossError(f"{folder} has no trained step; let the run train at least one")
    num_ranks = int(starts[0]["spec"]["trainer"]["world_size"])
    numbers: dict[int, StepNumbers] = {}
    if versions:
        numbers = _read_numbers(folder, trained, num_ranks=num_ranks)
        first, last = _steps_from(numbers, versions)
    first, last = first or trained[0], last or trained[-1]
    if not trained[0] <= first <= last <= trained[-1]:
        raise InvalidArgumentError(
            f"the record has the steps {trained[0]} to {trained[-1]}, but --from is {first} and --to is "
            f"{last}"
        )
    changed_spec = _changed(starts[0]["spec"], changes, num_ranks=num_ranks)
    if not versions:
        numbers = _read_numbers(folder, [s for s in trained if s <= last], num_ranks=num_ranks)
    targets = {
        step: int(step_numbers.metrics["rewound_to_step"])
        for step, step_numbers in numbers.items()
        if step <= last and "rewound_to_step" in step_numbers.metrics
    }
    checkpoint = _checkpoint(
        folder.parent, origin, before=min((first, *(t + 1 for t in targets.values())))
    )
    start_step = origin if checkpoint is None else checkpoint[1]
    spec = _starting_from(changed_spec, starts[0]["spec"], checkpoint)
    missing_steps = [step for step in range(start_step + 1, last + 1) if step not in numbers]
    _read_numbers(folder, missing_steps, num_ranks=num_ranks)  # raises
    starts_used = [start for start in starts if start["step"] < last]
    is_cpu = starts_used[0]["hardware"]["device"] == "cpu"
    differences = [*_machine_differences(starts_used, is_cpu=is_cpu)]
    if differences and not changes:
        raise FailedPreconditionError(
            f"a replay here would not be exact: {'; '.join(differences)}; replay on the same kind of machine "
            "with the same packages, or compare curves with --set"
        )
    return ReplayPlan(
        folder=folder,
        spec=spec,
        changes=tuple(changes),
        start_step=start_step,
        first=first,
        last=last,
        versions=tuple(versions),
        threads=int(starts_used[0]["hardware"]["threads"]),
        device="cpu" if is_cpu else "cuda",
        saved=tuple(t for step, t in targets.items() if start_step < t and step > start_step),
        notes=(*differences, *_code_differences(starts_used, spec)),
    )


def _changed(document: Mapping[str, Any], changes: Sequence[str], *, num_ranks: int) -> RunSpec:
    """Returns the specification of a run with changes.

    Raises:
        InvalidArgumentError: If a change is not possible.
        SpecError: If a change is malformed or breaks a rule.
    """
    examined = draft_of(dict(document), changes, folder=Path.cwd()).examined
    if examined.problems or examined.spec is None:
        raise InvalidArgumentError("; ".join(examined.problems))
    if examined.spec.trainer.world_size != num_ranks:
        raise InvalidArgumentError(
            f"--set trainer.world_size: the run trained with {num_ranks} processes, and another number adds "
            "numbers in another order; leave it"
        )
    return examined.spec


def _read_numbers(folder: Path, steps: Sequence[int], *, num_ranks: int) -> dict[int, StepNumbers]:
    """Reads every file of some steps, so that damage is found before anything is computed.

    Returns:
        The numbers of rank 0 by step.
    """
    return {step: files.read_step(folder, step, num_ranks=num_ranks).numbers for step in steps}


def _steps_from(numbers: Mapping[int, StepNumbers], versions: Sequence[int]) -> tuple[int, int]:
    """Returns the first and the last step that start from one of some weight versions.

    Raises:
        InvalidArgumentError: If there is a version from which no recorded step starts.
    """
    steps = {
        step_numbers.weight_version: step
        for step, step_numbers in numbers.items()
        if step_numbers.weight_version in versions
    }
    if lost_versions := sorted(set(versions) - set(steps)):
        raise InvalidArgumentError(
            f"the weight version {lost_versions[0]} was lost when the run went back to a checkpoint; choose "
            "responses of other versions"
        )
    return min(steps.values()), max(steps.values())


def _checkpoint(root: Path, origin: int, *, before: int) -> tuple[Path, int] | None:
    """Returns the newest complete checkpoint before a step; None to start as the run did."""
    for step in range(before - 1, origin, -1):
        folder = manifest.folder_of(root, step)
        if folder.is_dir():
            manifest.verify(folder)
            return folder, step
    return None


def _starting_from(
    spec: RunSpec, recorded: Mapping[str, Any], recorded_checkpoint: tuple[Path, int] | None
) -> RunSpec:
    start = (
        recorded["trainer"]["checkpoint"]["start_from"]
        if recorded_checkpoint is None
        else str(recorded_checkpoint[0])
    )
    if start is not None and recorded_checkpoint is None:
        if not Path(start).is_dir():
            raise FailedPreconditionError(
                f"the run started from the checkpoint {start}, which does not exist any more; restore it, or "
                "use --from with a step after one of the run's own checkpoints"
            )
        manifest.verify(Path(start))
    checkpoint = spec.trainer.checkpoint.model_copy(
        update={"directory": None, "start_from": start, "keep": 1_000}
    )
    trainer = spec.trainer.model_copy(update={"checkpoint": checkpoint, "profile_steps": ()})
    samples = spec.samples.model_copy(update={"groups_per_step": 0, "heldout_prompts": 0})
    return spec.model_copy(update={"trainer": trainer, "samples": samples, "record": "off"})


def _machine_differences(starts: Sequence[Mapping[str, Any]], *, is_cpu: bool) -> Iterator[str]:
    device = torch.device("cpu" if is_cpu or not torch.cuda.is_available() else "cuda")
    current = {**hardware(device), **packages()}
    current["threads"] = starts[0]["hardware"]["threads"]  # the replay uses as many
    for start in starts:
        recorded = {**start["hardware"], **start["packages"]}
        for name in sorted({*recorded, *current}):
            if recorded.get(name) != current.get(name):
                yield (
                    f"{name} was {recorded.get(name)} from step {start['step'] + 1} on, and is "
                    f"{current.get(name)} here"
                )


def _code_differences(starts: Sequence[Mapping[str, Any]], spec: RunSpec) -> Iterator[str]:
    digests_here = code_digests(spec)
    for start in starts:
        for name, digest in start["code"].items():
            if name in digests_here and digests_here[name] != digest:
                subject = "Slipstream's code" if name == "services" else name
                yield f"{subject} is not that of the run from step {start['step'] + 1} on"
