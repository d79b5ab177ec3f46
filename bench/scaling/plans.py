"""Splits of GPUs that ``slipstream plan`` recommends, from rates that a run on two GPUs measured."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.scaling.cells import Cell
from bench.scaling.models import ScaledModel
from bench.whole_run import REPOSITORY, WholeRun
from services.common.runspec.loader import load_spec
from services.extras.planner.inputs import rates_of, setting_of

_GPU_MEMORY = "141GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """A cell with its predicted step time."""

    cell: Cell
    predicted_step_s: float


def measured_rates(
    run: WholeRun, model: ScaledModel, spec: Path, settings: Sequence[str]
) -> dict[str, Any]:
    """Returns the rates of a run as ``slipstream plan --rates`` reads them."""
    # ``rates_of`` needs a histogram, which is replaced by the distribution that the model's lengths have.
    rates = asdict(rates_of(run.steps, {1: 1}, setting=setting_of(load_spec(spec, settings))))
    return {**rates, "lengths": model.lengths()}


def planned_splits(
    spec: Path,
    settings: Sequence[str],
    cell: Cell,
    *,
    folder: Path,
    rates: Mapping[str, Any] | None,
) -> list[PlannedSplit]:
    """Returns the recommended split of a cell's GPUs at its staleness bound, and its neighbours.

    The recommended one comes first; the neighbours have the next smaller and the next larger trainer.

    Args:
        cell: The cell, whose split is replaced.
        folder: Folder for a file with the rates.
        rates: Measured rates; None for the planner's assumptions.

    Raises:
        SystemExit: If the planner finds no split, with its output.
    """
    options = ["--gpus", str(cell.gpus), "--gpu-memory", _GPU_MEMORY, "--json"]
    options += ["--max-staleness", str(cell.lag)]
    if rates is not None:
        path = folder / f"rates-{cell.model}.json"
        path.write_text(json.dumps(rates))
        options += ["--rates", str(path)]
    overrides = [option for setting in settings for option in ("--set", setting)]
    command = [sys.executable, "-m", "services.cli.main", "plan", str(spec), *options, *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    splits = _best_by_trainer_size(json.loads(done.stdout)["splits"], cell)
    if not splits:
        raise SystemExit(f"{' '.join(command)} has no disaggregated split at lag {cell.lag}")
    sizes = sorted(splits)
    best = min(sizes, key=lambda size: splits[size].predicted_step_s)
    index = sizes.index(best)
    return [
        splits[best],
        *(splits[size] for size in sizes[max(0, index - 1) : index + 2] if size != best),
    ]


def _best_by_trainer_size(
    splits: Sequence[Mapping[str, Any]], cell: Cell
) -> dict[int, PlannedSplit]:
    """Returns the fastest prediction of each number of trainer GPUs that leaves no GPU unused."""
    fastest: dict[int, PlannedSplit] = {}
    for split in splits:
        keys = split["keys"]
        size, replicas = keys["trainer.world_size"], keys["rollout.replicas"]
        if (
            keys["topology.placement"] != cell.placement
            or keys["algorithm.max_staleness"] != cell.lag
        ):
            continue
        if not cell.shares and size + replicas * cell.engine_gpus != cell.gpus:
            continue
        planned = PlannedSplit(
            cell=replace(cell, trainer_gpus=size, slots=keys["rollout.max_running_samples"]),
            predicted_step_s=split["step_s"],
        )
        if size not in fastest or planned.predicted_step_s < fastest[size].predicted_step_s:
            fastest[size] = planned
    return fastest
