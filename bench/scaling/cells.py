"""One measured cell: a model, a split of GPUs and a staleness bound; and how cells share a host."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.e2e.timeline import facts
from bench.scaling.models import ScaledModel
from bench.whole_run import WholeRun, run_for

FIRST_STEP = 5
_SPARE_STEPS = 11
_SMOKE_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """Figures of one run."""

    model: str
    gpus: int
    trainer_gpus: int
    engine_gpus: int = 1
    lag: int
    placement: str = "disaggregated"
    """On one GPU, both sides of a disaggregated run share it."""
    slots: int | None = None
    """``rollout.max_running_samples``; None for the default."""

    @property
    def replicas(self) -> int:
        """Number of engines."""
        gpus_for_engines = self.gpus if self.shares else self.gpus - self.trainer_gpus
        return max(1, gpus_for_engines // self.engine_gpus)

    @property
    def shares(self) -> bool:
        """True if trainer and engines use the same GPUs."""
        return self.placement == "colocated" or self.gpus == 1

    def __str__(self) -> str:
        way = {"disaggregated": "+", "colocated": " colocated "}[self.placement]
        engines = f"{self.replicas}x{self.engine_gpus}"
        return f"{self.model}, {self.gpus} GPUs, {self.trainer_gpus}{way}{engines}, lag {self.lag}"

    def settings(self, model: ScaledModel, *, prompts_per_step: int) -> list[str]:
        """Returns the overrides of the specification."""
        return [
            f"topology.placement={self.placement}",
            f"trainer.world_size={self.trainer_gpus}",
            f"trainer.prompts_per_step={prompts_per_step}",
            f"rollout.replicas={self.replicas}",
            f"algorithm.max_staleness={self.lag}",
            *(
                []
                if self.engine_gpus == 1
                else [f"rollout.engine_arguments.tensor_parallel_size={self.engine_gpus}"]
            ),
            *([] if self.slots is None else [f"rollout.max_running_samples={self.slots}"]),
            *model.settings_of(self.trainer_gpus),
        ]


class Host:
    """Runs cells beside each other, each on its own GPUs.

    Args:
        gpus: GPUs of the host; on CPUs, the number of them that a smoke test pretends to have.
        is_alone: True if no two cells run at the same time.
    """

    def __init__(self, gpus: int, *, is_alone: bool) -> None:
        self._free = set(range(gpus))
        self._is_alone = is_alone
        self._gpus = gpus

    def run(
        self, cells: Iterable[Cell], measure: Callable[[Cell, Mapping[str, str]], None]
    ) -> None:
        """Measures all cells, the largest first.

        Args:
            measure: Gets a cell and the environment that restricts its run to its GPUs.

        Raises:
            SystemExit: If a cell needs more GPUs than there are.
        """
        waiting = sorted(cells, key=lambda cell: -cell.gpus)
        if too_large := [str(cell) for cell in waiting if cell.gpus > self._gpus]:
            raise SystemExit(f"this host has {self._gpus} GPUs, too few for {'; '.join(too_large)}")
        running: dict[Future[None], set[int]] = {}
        with ThreadPoolExecutor(max(1, self._gpus)) as pool:
            while waiting or running:
                for cell in [*waiting]:
                    if cell.gpus > len(self._free) or (self._is_alone and running):
                        continue
                    waiting.remove(cell)
                    gpus = set(sorted(self._free)[: cell.gpus])
                    self._free -= gpus
                    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, sorted(gpus)))}
                    running[pool.submit(measure, cell, environment)] = gpus
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    self._free |= running.pop(future)
                    future.result()


def trained(
    cell: Cell,
    model: ScaledModel,
    folder: Path,
    *,
    spec: Path,
    environment: Mapping[str, str],
    prompts_per_step: int,
    is_smoke: bool,
    further: Sequence[str] = (),
) -> WholeRun:
    """Trains enough steps of a cell.

    Args:
        folder: Folder in which the run's folder is made.
        spec: Specification of the model's runs.
        environment: Further environment of the run.
    """
    name = "".join(c if c.isalnum() else "-" for c in f"{cell}{cell.slots or ''}")
    return run_for(
        FIRST_STEP + (_SMOKE_STEPS if is_smoke else _SPARE_STEPS),
        folder / name,
        [
            *cell.settings(model, prompts_per_step=prompts_per_step),
            "trainer.checkpoint.every_s=0",
            *further,
        ],
        spec=spec,
        environment={**os.environ, **environment},  # noqa: TID251 -- the run inherits it
    )


def entry_of(cell: Cell, run: WholeRun) -> dict[str, Any]:
    """Returns the figures of a cell: rates, idle shares, weight sync and MFU."""
    figures = facts(run, first=FIRST_STEP)
    steps = run.steps[FIRST_STEP - 1 :]
    mfus = [step["mfu"] for step in steps if "mfu" in step]
    return {
        "gpus": cell.gpus,
        "trainer_gpus": cell.trainer_gpus,
        "replicas": cell.replicas,
        "engine_gpus": cell.engine_gpus,
        "lag": cell.lag,
        "placement": cell.placement,
        "samples_per_s": figures["samples_per_s"],
        "step_s": figures["step_s"],
        "trained_tokens_per_s": figures["trained_tokens_per_s"],
        "engine_tokens_per_s": figures["engine_tokens_per_s"],
        "trainer_idle_share": round(1 - figures["trainer_works_share"], 4),
        "engine_idle_share": round(figures["engine_idle_s"] / figures["step_s"], 4),
        "mfu": round(median(mfus), 4) if mfus else None,
        "sync_ms": figures["sync_ms"],
        "staleness_mean": figures["staleness_mean"],
        "staleness_max": max(step.get("staleness_max", 0) for step in steps),
        "first_step_s": figures["first_step_s"],
    }
