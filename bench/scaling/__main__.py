"""Measures speed by the number of GPUs: ``python -m bench.scaling [PART...] [--gpus N...] [--smoke]``.

Parts, each of which adds to ``bench/results/scaling.json``:

- ``grid``: whole runs of 1.3 B, 8 B and 30 B (3 B active) parameters on 1, 2, 4 and 8 GPUs at lag 0, 1 and 4,
  with the split that ``slipstream plan`` recommends; at the largest lag also with the two splits next to it.
  The rates of the plan are measured by the model's run on its smallest number of GPUs that is at least 2.
- ``arms``: four GPUs that train and four that generate, synchronously and one step off, against all eight in
  turns (verl #2231).
- ``weights``: transfers from 1, 2 and 4 trainer ranks to 1, 3 and 7 replicas beside one raw broadcast.
- ``kills``: a trainer rank, a replica and the transferqueue are killed in the largest run.

A batch has ``prompts_per_step`` groups of the model's shape for each two GPUs; ``--fixed-batch`` keeps it.
Runs that fit beside each other on the host do so; ``--alone`` runs them one after the other.
With ``--smoke``, GPUs are processes of a CPU and models are tiny.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.report import device_name, read_json, write_json
from bench.scaling.bars import bars
from bench.scaling.cells import Cell, Host, entry_of, trained
from bench.scaling.kills import kill_each
from bench.scaling.models import MODELS, ScaledModel, smoke_models
from bench.scaling.plans import measured_rates, planned_splits
from bench.whole_run import REPOSITORY, run_folder

RESULTS = REPOSITORY / "bench" / "results" / "scaling.json"
PARTS = ("grid", "arms", "weights", "kills")
_SOURCES, _RECEIVERS = (1, 2, 4), (1, 3, 7)
_RAW_MODEL = "qwen2.5-1.5b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--gpus", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--lags", nargs="*", type=int, default=[0, 1, 4])
    parser.add_argument(
        "--fixed-batch", action="store_true", help="as many samples on all numbers of GPUs"
    )
    parser.add_argument("--alone", action="store_true", help="no two runs at the same time")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models on CPUs; writes no results"
    )
    parser.add_argument("--set", action="append", default=[], help="further settings of the runs")
    parser.add_argument(
        "--folder", type=Path, help="where models, runs and logs stay; default: nowhere"
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/scaling.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {*PARTS}:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    with run_folder(arguments.folder) as folder:
        scaling = Scaling(arguments, folder)
        for name in arguments.parts or PARTS:
            getattr(scaling, name)()
        scaling.report()


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


class Scaling:
    """Measures the parts and keeps their results.

    Args:
        arguments: Options of the command.
        folder: Folder of models, runs and logs.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._models: Mapping[str, ScaledModel] = (
            smoke_models(arguments.models)
            if arguments.smoke
            else {name: MODELS[name] for name in arguments.models}
        )
        self._out = arguments.out or (None if arguments.smoke else RESULTS)
        self._results: dict[str, Any] = {
            "device": device_name(),
            "host_gpus": torch.cuda.device_count(),
            "batch": "fixed" if arguments.fixed_batch else "grows with the GPUs",
            **read_json(self._out),
        }
        gpus = max(arguments.gpus) if arguments.smoke else torch.cuda.device_count()
        self._host = Host(gpus, is_alone=arguments.alone or arguments.smoke)
        self._lock = threading.Lock()

    def grid(self) -> None:
        """Measures the splits of each model, number of GPUs and staleness bound."""
        for name, model in self._models.items():
            counts = [count for count in model.gpu_counts if count in self._arguments.gpus]
            if not counts:
                continue
            self._prepare(name)
            self._measure_rates(name, counts)
            jobs: dict[Cell, tuple[str, float | None]] = {}
            for count in counts:
                for lag in self._arguments.lags:
                    jobs |= self._splits(name, count, lag)
            self._run(jobs)

    def _run(self, jobs: Mapping[Cell, tuple[str, float | None]]) -> None:
        self._host.run(jobs, lambda cell, env: self._measure(cell, *jobs[cell], env))

    def arms(self) -> None:
        """Measures the arms of verl #2231: separate synchronous, one step off, and all GPUs in turns."""
        name = next(iter(self._models))
        gpus = max(self._arguments.gpus)
        self._prepare(name)
        apart = Cell(model=name, gpus=gpus, trainer_gpus=gpus // 2, lag=0)
        cells = {
            "separate synchronous": apart,
            "one step off": replace(apart, lag=1),
            "colocated synchronous": replace(apart, trainer_gpus=gpus, placement="colocated"),
        }
        for arm, cell in cells.items():
            self._host.run([cell], lambda cells, env, arm=arm: self._measure_arm(arm, cells, env))  # type: ignore[misc]

    def weights(self) -> None:
        """Measures transfers between several ranks and several replicas."""
        limit = max(self._arguments.gpus)
        for sources in _SOURCES:
            for receivers in _RECEIVERS:
                if sources + receivers > limit:
                    continue
                self._keep("weights", f"{sources}+{receivers}", self._transfer(sources, receivers))

    def kills(self) -> None:
        """Kills a trainer rank, a replica and the transferqueue in a run on all GPUs."""
        name = next(iter(self._models))
        gpus = max(self._arguments.gpus)
        self._prepare(name)
        cell = Cell(model=name, gpus=gpus, trainer_gpus=gpus // 2, lag=4)
        model = self._models[name]
        spec = self._spec_of(name)
        settings = [
            *cell.settings(model, prompts_per_step=self._batch(name, gpus)),
            "trainer.checkpoint.every=2",
            *self._arguments.set,
        ]

        def killed(cell: Cell, environment: Mapping[str, str]) -> None:
            result = kill_each(self._folder / "kills", settings, spec=spec, environment=environment)
            self._keep("kills", str(cell), result)

        self._host.run([cell], killed)

    def report(self) -> None:
        """Prints the cells and the bars."""
        print(
            "cell                                          samples/s  step s  predicted   MFU  sync p50"
        )
        for name, entry in self._results.get("cells", {}).items():
            predicted = entry["predicted_step_s"]
            print(
                f"{name:45} {entry['samples_per_s']:9.1f}  {entry['step_s']:6.2f}  "
                f"{'-' if predicted is None else f'{predicted:.2f}':>9}  {entry['mfu'] or 0:.2f}  "
                f"{entry['sync_ms']['p50'] or 0:8.1f}"
            )
        self._results["bars"] = bars(self._results)
        print(json.dumps(self._results["bars"], indent=1))
        if self._out is not None:
            write_json(self._out, self._results)

    def _splits(self, name: str, gpus: int, lag: int) -> dict[Cell, tuple[str, float | None]]:
        """Returns the cells to measure, with their role and their predicted step time in seconds."""
        jobs: dict[Cell, tuple[str, float | None]] = {}
        model = self._models[name]
        for size in model.engine_sizes:
            if size >= gpus > 1:
                continue
            cell = Cell(model=name, gpus=gpus, trainer_gpus=1, engine_gpus=size, lag=lag)
            if gpus == 1 or self._arguments.smoke:
                # One GPU has one split; the planner's sizes are those of GPUs, not of processes.
                split = replace(cell, trainer_gpus=max(1, gpus // 2))
                jobs[split] = ("planned", None)
                continue
            best, *neighbours = planned_splits(
                self._spec_of(name),
                [
                    *cell.settings(model, prompts_per_step=self._batch(name, gpus)),
                    *self._arguments.set,
                ],
                cell,
                folder=self._folder,
                rates=self._results.get("rates", {}).get(name),
            )
            jobs[best.cell] = ("planned", best.predicted_step_s)
            if lag == max(self._arguments.lags):
                jobs |= {n.cell: ("neighbour", n.predicted_step_s) for n in neighbours}
        return jobs

    def _measure_rates(self, name: str, counts: Sequence[int]) -> None:
        """Measures the rates for plans, unless an earlier call did."""
        several = [count for count in counts if count > 1]
        if self._arguments.smoke or not several or name in self._results.get("rates", {}):
            return
        model = self._models[name]
        gpus = min(several)
        size = model.engine_sizes[0]
        trainer_gpus = gpus - size if gpus == 2 else gpus // 2
        cell = Cell(model=name, gpus=gpus, trainer_gpus=trainer_gpus, engine_gpus=size, lag=1)
        settings = cell.settings(model, prompts_per_step=self._batch(name, gpus))

        def measured(cell: Cell, environment: Mapping[str, str]) -> None:
            run = self._train(cell, environment)
            rates = measured_rates(run, model, self._spec_of(name), settings)
            self._keep("rates", name, rates)
            self._keep_cell(cell, "rates", None, entry_of(cell, run))

        self._host.run([cell], measured)

    def _measure(
        self, cell: Cell, role: str, predicted_step_s: float | None, environment: Mapping[str, str]
    ) -> None:
        self._keep_cell(
            cell, role, predicted_step_s, entry_of(cell, self._train(cell, environment))
        )

    def _measure_arm(self, arm: str, cell: Cell, environment: Mapping[str, str]) -> None:
        self._keep("arms", arm, entry_of(cell, self._train(cell, environment)))

    def _train(self, cell: Cell, environment: Mapping[str, str]) -> Any:
        print(f"begins: {cell}", flush=True)
        return trained(
            cell,
            self._models[cell.model],
            self._folder,
            spec=self._spec_of(cell.model),
            environment=environment,
            prompts_per_step=self._batch(cell.model, cell.gpus),
            is_smoke=self._arguments.smoke,
            further=self._arguments.set,
        )

    def _transfer(self, sources: int, receivers: int) -> dict[str, float]:
        """Returns times of verified transfers, and their share of the raw broadcast's bandwidth."""
        out = self._folder / f"weights-{sources}-{receivers}.json"
        model = "smoke" if self._arguments.smoke else _RAW_MODEL
        command = [sys.executable, "-m", "bench.weightsync", "--model", model, "--out", str(out)]
        command += ["--sources", str(sources), "--receivers", str(receivers)]
        if self._arguments.smoke:
            command.append("--smoke")
        subprocess.run(command, cwd=REPOSITORY, check=True)
        (setting,) = read_json(out).values()
        ours, raw = setting["rows"]["ours"], setting["rows"]["raw"]
        return {
            "p50_ms": ours["transfer_ms"],
            "p95_ms": ours["transfer_p95_ms"],
            "share_of_raw": raw["ms"] / ours["transfer_ms"],
            "gb": ours["gb"],
        }

    def _batch(self, name: str, gpus: int) -> int:
        groups = self._models[name].shape.prompts_per_step
        return groups if self._arguments.fixed_batch else max(groups, groups * gpus // 2)

    def _spec_of(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _prepare(self, name: str) -> None:
        """Writes a model, unless it exists, and the specification of its runs."""
        shape, folder = self._models[name].shape, self._folder / f"model-{name}"
        if not (folder / "config.json").exists():
            shape.save_model(folder)
        self._spec_of(name).write_text(json.dumps(shape.spec(folder, steps=10_000)))

    def _keep_cell(
        self, cell: Cell, role: str, predicted_step_s: float | None, entry: Mapping[str, Any]
    ) -> None:
        rest = {"model": cell.model, "role": role, "predicted_step_s": predicted_step_s}
        self._keep("cells", str(cell), {**rest, **entry})

    def _keep(self, section: str, name: str, entry: Mapping[str, Any]) -> None:
        """Adds an entry, prints it and writes all results so far."""
        with self._lock:
            self._results.setdefault(section, {})[name] = entry
            print(f"{section}: {name}: {json.dumps(entry)}", flush=True)
            if self._out is not None:
                write_json(self._out, self._results)


if __name__ == "__main__":
    main()
