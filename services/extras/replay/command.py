"""Commands on recorded runs: ``replay`` repeats the training, ``diff`` compares two runs."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.api import Api
from services.cli.api_calls import (
    DEFAULT_STATE,
    AsJson,
    RunId,
    StateDirectory,
    call_api,
    find_run,
    of_run,
)
from services.cli.commands.spec import Overrides
from services.cli.controller_address import Url
from services.cli.output import console, errors, fail, print_line, write
from services.common.errors import InvalidArgumentError, NotFoundError, ServiceError
from services.common.runspec.loader import SpecError, canonical_json, parse_spec
from services.common.runspec.trainer import checkpoint_root
from services.common.stores import fetch, is_url, join_url
from services.controller.schemas import RunView

if TYPE_CHECKING:  # they import torch
    from services.extras.replay.regenerate import Regeneration
    from services.extras.replay.replay_plan import ReplayPlan

_CURVES = ("loss", "grad_norm", "entropy", "kl_ref", "kl_rollout", "clip_fraction", "ratio_mean")
"""Metrics that an experiment compares; those that a run does not have are left out."""
_DIFFERS, _FAILED = 1, 2


def record_folder(run: RunView, state_directory: Path) -> Path:
    """Returns the folder of a run's record; with the store's files if this host lacks a step of it.

    Raises:
        ServiceError: If the record in the store cannot be read.
    """
    from services.extras.replay.files import FOLDER, has_all_steps, joined_record  # imports torch

    directory = run.spec["trainer"]["checkpoint"]["directory"]
    folder = checkpoint_root(directory, state_directory / run.id) / FOLDER
    if not is_url(directory) or has_all_steps(folder, run.step):
        return folder
    try:
        stored_record = fetch(join_url(directory, FOLDER), "record", report=_print_progress)
    except NotFoundError:  # nothing was uploaded yet
        return folder
    return joined_record(stored_record, folder)


def _print_progress(line: str) -> None:
    if line:
        print_line(errors, line)


def replay(
    run_id: RunId,
    first: Annotated[
        int | None,
        typer.Option("--from", help="First step to compare. Default: the first one.", min=1),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", help="Last step. Default: the last recorded one.", min=1)
    ] = None,
    overrides: Overrides = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            help="Regenerate the responses of STEP/GROUP, or of all groups of STEP. May be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    state_directory: StateDirectory = DEFAULT_STATE,
) -> None:
    """Repeat the training of a recorded run bit by bit, or with other settings and compare curves."""
    run = of_run(url, run_id, Api.get, state_directory=state_directory)
    from services.extras.replay.regenerate import wanted_responses
    from services.extras.replay.replay_plan import plan_replay

    regeneration = None
    try:
        folder = record_folder(run, state_directory)
        if sample:
            if overrides or first or last:
                raise InvalidArgumentError(
                    "--sample cannot be combined with --set, --from and --to"
                )
            regeneration = wanted_responses(folder, parse_spec(run.spec), sample)
        plan = plan_replay(
            folder,
            first=first,
            last=last,
            changes=overrides or (),
            versions=regeneration.versions if regeneration else (),
        )
    except (ServiceError, SpecError) as error:
        fail(str(error))
        raise typer.Exit(_FAILED) from None
    for note in plan.notes:
        print_line(errors, f"note: {note}")
    start = f"checkpoint of step {plan.start_step}" if plan.start_step else "initial weights"
    print_line(errors, f"replaying {run.name} from the {start} to step {plan.last}")
    if regeneration is None:
        raise typer.Exit(_show(plan, as_json=as_json))
    regeneration.device = plan.device
    raise typer.Exit(_regenerate(plan, regeneration, as_json=as_json))


def _regenerate(plan: "ReplayPlan", regeneration: "Regeneration", *, as_json: bool) -> int:
    """Replays the trainer up to the versions that sampled some responses, and samples these again."""
    for step in replayed(plan):
        if "version" in step:
            regeneration.decode(step["version"], Path(step["file"]))
        elif step["tensors"]:
            fail(why(step, is_start=step["step"] == plan.start_step))
            return _DIFFERS
    differing = 0
    for response in regeneration.responses:
        differing += bool(response.difference)
        if as_json:
            write(json.dumps({"key": response.key, "difference": response.difference}))
        else:
            tokens = f"all {response.num_done} tokens are equal"
            write(f"{response.key}: {response.difference or tokens}")
    total = len(regeneration.responses)
    print_line(errors, f"{total - differing} of {total} responses are equal")
    return _DIFFERS if differing else 0


def _show(plan: "ReplayPlan", *, as_json: bool) -> int:
    """Replays a plan and shows each step; returns the exit code."""
    divergent_step, count = None, 0
    for step in replayed(plan):
        is_start = step["step"] == plan.start_step
        if step["tensors"] and divergent_step is None:
            divergent_step = step
        if as_json:
            write(json.dumps(step))
        elif plan.changes and not is_start and step["step"] >= plan.first:
            write(_curves(step))
        elif not plan.changes and not step["tensors"] and not is_start:
            write(f"step {step['step']}: version {step['step']} is equal")
        if step["tensors"] and not plan.changes:
            fail(why(step, is_start=is_start))
            return _DIFFERS
        count += not is_start
    if plan.changes:
        where = (
            "does not part" if divergent_step is None else f"parts at step {divergent_step['step']}"
        )
        text = f"with {', '.join(plan.changes)} the training {where}"
    else:
        text = f"{count} steps replayed; all versions are equal bit by bit"
    print_line(errors, text)
    return 0


def replayed(plan: "ReplayPlan") -> Iterator[dict[str, Any]]:
    """Runs the processes of a replay; yields each ``ReplayedStep`` and ``WrittenVersion`` as JSON.

    Raises:
        typer.Exit: If a process fails; its message was shown.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-replay-") as folder:
        file = Path(folder) / "plan.json"
        document = {**asdict(plan), "spec": canonical_json(plan.spec), "folder": str(plan.folder)}
        file.write_text(json.dumps(document), encoding="utf-8")
        ranks = plan.spec.trainer.world_size
        module = ["-m", "services.extras.replay.training", str(file)]
        if ranks > 1:
            module = [
                *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
                *module,
            ]
        command = [sys.executable, *module]
        # torchrun warns unless OMP_NUM_THREADS is set.
        environment = {**os.environ, "OMP_NUM_THREADS": str(plan.threads)}
        process = subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            if process.wait() != 0:
                fail(
                    f"the replay ended with exit code {process.returncode}; see the messages above"
                )
                raise typer.Exit(_FAILED)
        finally:
            process.terminate()
            process.wait()


def why(step: Mapping[str, Any], *, is_start: bool = False) -> str:
    """Returns how a replayed step differs from its record, with the cause if the record shows it."""
    tensor, rank = next(iter(step["tensors"].items()))
    where = f"{len(step['tensors'])} tensors differ, first {tensor} (rows of rank {rank})"
    if is_start:
        return f"the weights to start from differ from those of the run: {where}"
    causes = []
    metrics, recorded = step["metrics"], step["recorded"]
    if step["max_tokens"][0] != step["max_tokens"][1] or recorded.get("divided_micro_batches"):
        causes.append(
            "the run divided micro-batches because of memory, and other divisions add in another order"
        )
    if names := step["nondeterministic"]:
        causes.append(f"torch has no deterministic {', '.join(names)}")
    if metrics.get("loss") != recorded.get("loss"):
        causes.append(f"the loss is {metrics.get('loss')}, but was {recorded.get('loss')}")
    elif metrics.get("grad_norm") != recorded.get("grad_norm"):
        causes.append("the loss is equal, but the gradients differ")
    else:
        causes.append("loss and gradient norm are equal; single gradients or the optimizer differ")
    return f"step {step['step']} differs: {where}; {'; '.join(causes)}"


def _curves(step: Mapping[str, Any]) -> str:
    metrics, recorded = step["metrics"], step["recorded"]
    pairs = [
        f"{name} {metrics[name]:.6g} ({recorded[name]:.6g})"
        for name in _CURVES
        if name in metrics and name in recorded
    ]
    return f"step {step['step']}: {', '.join(pairs)}"


def diff(
    run_id: RunId,
    other_run: RunId,
    url: Url = None,
    state_directory: StateDirectory = DEFAULT_STATE,
) -> None:
    """Show the first step at which two recorded runs part, and why."""

    async def work(api: Api) -> list[RunView]:
        return [await api.get(await find_run(api, text)) for text in (run_id, other_run)]

    first, two = call_api(url, work, state_directory=state_directory)
    from services.extras.replay.comparing import compare_records

    try:
        difference, keys = compare_records(
            record_folder(first, state_directory), record_folder(two, state_directory)
        )
    except ServiceError as error:
        fail(str(error))
        raise typer.Exit(_FAILED) from None
    for key, values in keys.items():
        console.print(f"{key}: {values[0]} and {values[1]}", highlight=False, soft_wrap=True)
    prefix = "" if difference.cause == "none" else f"step {difference.step}, {difference.cause}: "
    console.print(f"{prefix}{difference.text}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if difference.cause == "none" else _DIFFERS)
