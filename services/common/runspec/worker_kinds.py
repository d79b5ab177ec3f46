"""The kinds of workers that are built in, and the workers of a run. Imports no service."""

from typing import Final

from services.common.runspec.run import RunSpec
from services.common.runspec.workers import WORKERS, WorkerKind, possible_kinds, rows_gauge


def _policy_unit(spec: RunSpec) -> int:
    trainer = spec.trainer
    return trainer.tensor_parallel * trainer.context_parallel * trainer.pipeline_parallel


TRAINER: Final = WorkerKind(
    tasks=("train",),
    aliases=("actor-train", "actor_train", "actor"),
    is_required=True,
    serve="services.trainer.worker:serve_trainer",
    follow="services.trainer.worker:follow_trainer",
    count=lambda spec: 1,
    ranks=lambda spec: spec.trainer.world_size,
    unit=_policy_unit,
    trains=True,
)
ROLLOUT: Final = WorkerKind(
    tasks=("generate", "reward"),
    aliases=("rollout",),
    is_required=True,
    is_alone=True,
    program="rollout",
    count=lambda spec: spec.rollout.replicas,
    gpus=lambda spec: spec.engine_gpus if spec.runs_engines else 0,
    unit=lambda spec: spec.engine_gpus,
    receives_weights=True,
    merges_adapters=True,
    gauges=lambda spec: [rows_gauge(split) for split in spec.data.sets],
)


def worker_names(spec: RunSpec) -> list[tuple[str, str]]:
    return [
        (role, f"{role.replace('_', '-')}-{index}")
        for role, kind in possible_kinds(spec.topology).items()
        for index in range(kind.num_workers(spec))
    ]


def gpu_needs(spec: RunSpec) -> dict[str, int]:
    """Returns the number of GPUs of each worker of a run, by name."""
    return {worker_id: WORKERS[role].num_gpus(spec) for role, worker_id in worker_names(spec)}


def gpu_hosts(spec: RunSpec) -> dict[str, str]:
    """Maps each colocated worker to the worker whose GPUs it uses."""
    names = [worker_id for _, worker_id in worker_names(spec)]
    return {worker_id: "trainer-0" for worker_id in names if spec.is_colocated(worker_id)}


def total_gpus(spec: RunSpec) -> int:
    """Returns the number of GPUs of all workers of a run; shared ones count once."""
    hosts = gpu_hosts(spec)
    return sum(count for name, count in gpu_needs(spec).items() if name not in hosts)
