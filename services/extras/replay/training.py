"""Replays recorded steps on all ranks of a trainer, without rollouts.

torchrun --standalone --nproc-per-node RANKS -m services.extras.replay.training PLAN

``slipstream replay`` starts it. Each rank trains with the code of a run, from recorded batches instead of the
transferqueue, and compares its weights with the recorded digests. Rank 0 writes a line of JSON per step.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers.utils import logging as transformers_logging

from services.common.errors import ServiceError
from services.common.runspec.loader import parse_spec
from services.common.settings import set_defaults
from services.common.telemetry.logging import configure
from services.extras.replay import files
from services.extras.replay.files import RecordedStep
from services.extras.replay.recorder import comparable, compute_deterministically, start_digests
from services.trainer.collectives import join_processes
from services.trainer.ranks.build import build_rank, device_of
from services.trainer.ranks.rank import Rank
from services.trainer.settings import TrainerSettings
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand

_OUTDATED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """Comparison of a replayed step with its record."""

    step: int
    tensors: Mapping[str, int]
    """Tensors whose digests differ, in the order of the model, with the first rank that has other rows."""
    metrics: Mapping[str, float]
    recorded: Mapping[str, float]
    """Metrics of the run's step."""
    max_tokens: tuple[int, int]
    """Token budget of a micro-batch: replayed, recorded."""
    nondeterministic: Sequence[str] = ()
    """Operators that were not computed deterministically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVersion:
    """Weights of a version, written for the regeneration of responses."""

    version: int
    file: str


@dataclass(slots=True)
class RecordedBatches:
    """Serves the samples of one recorded step after another, like a transferqueue.

    Args:
        is_experiment: True if the weights differ from the run's: logprobs that other workers computed
            under its weights then count as outdated.
    """

    is_experiment: bool
    step: RecordedStep = field(init=False)

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        """Returns recorded fields of samples."""
        values = self.step.fetch(meta, fields)
        if self.is_experiment and (versions := values.get("proximal_version")) is not None:
            outdated = torch.full_like(versions.values, _OUTDATED)
            values["proximal_version"] = Jagged(outdated, versions.lengths, is_scalar=True)
        return values

    def store_records(
        self, partition_id: str, keys: Sequence[str], fields: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Drops records for people to read: the run has written them."""


def replay(
    plan: Mapping[str, Any], settings: TrainerSettings
) -> Iterator[ReplayedStep | WrittenVersion]:
    """Trains the recorded steps of a plan, and yields the comparison of each step with its record.

    First yields the comparison of the weights that the replay starts from, if they are recorded. Before a
    step that starts from a weight version that the plan requests, yields the file of that version.

    All ranks must iterate.

    Args:
        plan: JSON of a ``ReplayPlan``.
    """
    spec, folder = parse_spec(plan["spec"]), Path(plan["folder"])
    source = RecordedBatches(is_experiment=bool(plan["changes"]))
    loaded = build_rank(spec, settings, transfers=source, progress=lambda activity: None)
    rank, num_ranks = loaded.rank, settings.world_size
    # A colocated trainer compiles during its first sleep, so the replay sleeps once, as the run did.
    if spec.topology.is_colocated:
        rank.sleep()
        rank.wake()
    if files.rank_file(folder, loaded.step, settings.rank).exists():
        recorded = files.read_step(folder, loaded.step, num_ranks=num_ranks)
        yield _compared(loaded.step, rank, recorded, {}, settings)
    for step in range(loaded.step + 1, plan["last"] + 1):
        source.step = recorded = files.read_step(folder, step, num_ranks=num_ranks)
        numbers, (meta, *early_metas) = recorded.numbers, recorded.ranks[0].metas
        if numbers.weight_version in plan["versions"]:
            yield _written(numbers.weight_version, rank, settings)
        for early_meta in early_metas:
            rank.accumulate(early_meta, weight_version=numbers.weight_version)
        command = StepCommand(
            step, meta, weight_version=numbers.weight_version, num_steps=numbers.num_steps
        )
        result = rank.train(command)
        if step in plan["saved"]:
            rank.checkpointer.write(rank.snapshot(step))
        yield _compared(step, rank, recorded, result.metrics, settings)


def _written(version: int, rank: Rank, settings: TrainerSettings) -> WrittenVersion:
    """Writes the weights that rollouts received; all ranks must call it."""
    file = settings.state_directory / f"version-{version}.safetensors"
    tensors = {n: v.cpu().contiguous() for n, v in rank.runner.engine.export_weights()}
    if settings.rank == 0:
        save_file(tensors, file)
    return WrittenVersion(version=version, file=str(file))


def _compared(
    step: int,
    rank: Rank,
    recorded: RecordedStep,
    metrics: Mapping[str, float],
    settings: TrainerSettings,
) -> ReplayedStep:
    engine, record = rank.runner.engine, recorded.ranks[settings.rank].numbers
    rows = engine.export_weights(rows=True)
    digests = start_digests((name, value) for name, value in rows if name in record.weights)()
    differing = [name for name, digest in digests.items() if record.weights[name] != digest]
    everywhere: list[list[str]] = [differing]
    if settings.world_size > 1:
        everywhere = [[] for _ in range(settings.world_size)]
        distributed.all_gather_object(everywhere, differing)
    tensors: dict[str, int] = {}
    for name in record.weights:
        owners = [number for number, names in enumerate(everywhere) if name in names]
        if owners:
            tensors[name] = owners[0]
    # A rank may hold no rows of a small tensor that is divided among other ranks.
    tensors |= {n: r for r, names in enumerate(everywhere) for n in names if n not in tensors}
    return ReplayedStep(
        step=step,
        tensors=tensors,
        metrics=comparable(metrics),
        recorded=recorded.numbers.metrics,
        max_tokens=(engine.bounds.max_tokens, record.max_tokens),
        nondeterministic=record.nondeterministic,
    )


def main() -> None:
    """Replays the plan in the file that the arguments name."""
    file = Path(sys.argv[1])
    plan = json.loads(file.read_text("utf-8"))
    settings = TrainerSettings(
        controller_address="none",
        run_id="replay",
        worker_id="replay",
        device=plan["device"],
        state_directory=file.parent,
    )
    configure(level="WARNING", service="trainer", worker=str(settings.rank))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    set_defaults({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    torch.set_num_threads(plan["threads"])
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.world_size > 1:
        join_processes(device=device, rank=settings.rank, world_size=settings.world_size)
    compute_deterministically()
    try:
        for step in replay(plan, settings):
            if settings.rank == 0:
                print(json.dumps(asdict(step)), flush=True)  # noqa: T201 -- its output
            if isinstance(step, ReplayedStep) and step.tensors and not plan["changes"]:
                break
    except (ServiceError, ValueError) as error:
        sys.exit(f"rank {settings.rank}: {error}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
