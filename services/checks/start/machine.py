"""Checks of this machine for a run: GPUs, packages and memory."""

import importlib.util
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.gpus import gpu_memory, visible_gpus
from services.common.host import host_bytes_here, missing_compiler, usable_processors
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TaskGroupError
from services.common.runspec.trackers import TRACKERS
from services.common.runspec.worker_kinds import gpu_needs, total_gpus, worker_names
from services.controller.launch.gpus import host_gpus

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class MachineSettings(BaseSettings):
    """Properties of this machine from the environment."""

    visible_gpus: str | None = Field(None, validation_alias="CUDA_VISIBLE_DEVICES")
    """GPUs that may be used; None means all."""
    queue_bytes: int = Field(1 << 30, validation_alias="SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES")
    """Memory of the transferqueue that the command line starts on this machine."""
    queue_spill_bytes: int = Field(0, validation_alias="SLIPSTREAM_TRANSFERQUEUE_SPILL_BYTES")
    """Additional disk space of that transferqueue."""


def gpu_names() -> tuple[str, ...]:
    """Returns this machine's GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` names them."""
    return host_gpus(MachineSettings().visible_gpus)


def num_gpus() -> int:
    """Returns the number of this machine's GPUs that may be used."""
    return len(gpu_names())


# Without GPUs, one process replaces each GPU. With more processes per core, a run makes no useful progress.
_PROCESSES_A_CORE = 4
_MIN_PROCESSES = 9  # a rollout, and a trainer of 2 stages x 2 tensor- x 2 expert-parallel ranks
_MEASURED_SIZE, _MEASURED_TIMES = 256, 5
_NOTABLE_SLOWDOWN = 1.5


def unmet_requirements(spec: RunSpec, *, has_workers: bool = True) -> Iterator[str]:
    """Yields requirements of a run that this machine does not meet.

    Args:
        has_workers: True if the run's workers run on this machine; otherwise it only has their packages.
    """
    rollout, gpus = spec.rollout, num_gpus() if has_workers else 0
    yield from engine_kind(rollout.engine).machine_problems(
        rollout.engine,
        rollout,
        is_cpu=has_workers and gpus == 0,
        is_invariant=rollout.reproducible == "batch_invariant",
        truncates=rollout.sampling.is_truncated,
    )
    for index, tracker in enumerate(spec.trackers):
        package = TRACKERS[tracker.kind].package
        if importlib.util.find_spec(package) is None:
            yield (
                f"trackers.{index}.kind is {tracker.kind!r}, but the package {package} is not installed; "
                f"pip install 'slipstream[{tracker.kind}]', or remove the tracker"
            )
    if not has_workers:
        return
    if gpus == 0 and spec.weight_sync.backend == "nccl":
        yield (
            "weight_sync.backend is 'nccl', but this machine has no GPU; set it to 'auto' or 'gloo'"
        )
    if gpus and (problem := missing_compiler()):
        yield problem
    yield from _too_many(spec, gpus)


@dataclass(frozen=True, slots=True)
class MachineDefault:
    """A key that the specification does not set, with the default for this machine."""

    key: str
    value: int | str
    why: str


def machine_defaults(
    spec: RunSpec, left_out: Collection[str], *, has_workers: bool = True
) -> Iterator[MachineDefault]:
    """Yields the defaults that this machine's GPUs change.

    Args:
        left_out: Keys that the user did not set; other keys keep their values.
        has_workers: True if all workers of the run run on this machine.
    """
    if "rollout.replicas" in left_out and has_workers:
        yield from _fewer_rollouts(spec)
    if "trainer.dtype" in left_out and has_gpus() and not spec.model.is_tiny:
        yield MachineDefault(
            "trainer.dtype",
            "bfloat16",
            "trainer.dtype is not set: using bfloat16, because this machine has GPUs; master weights stay "
            "float32",
        )


def has_gpus() -> bool:
    """Returns True if workers on this machine can use GPUs."""
    return num_gpus() > 0


def gpu_bytes_here() -> int | None:
    """Returns the memory of this machine's smallest GPU in bytes; None if nvidia-smi does not report it."""
    return min((gpu.total for gpu in gpu_memory()), default=None)


def gpu_shortages(spec: RunSpec, config: "PretrainedConfig") -> Iterator[str]:
    """Yields the GPUs whose free memory does not suffice for a run now, and who holds the rest."""
    from services.checks.start.memory import needed_by_gpu  # imports torch

    gpus = visible_gpus(gpu_names(), gpu_memory())
    if not gpus or not spec.runs_engines:
        return
    smallest = min(gpu.total for gpu in gpus.values())
    bytes_by_gpu = needed_by_gpu(spec, config, gpu_bytes=smallest, gpus=[*gpus])
    share = engine_kind(spec.rollout.engine).memory_argument
    lower = f", or lower rollout.engine_arguments.{share}" if share is not None else ""
    for name, gpu in gpus.items():
        if shortage := gpu.shortage(bytes_by_gpu[name]):
            yield f"{shortage}; end it, choose other GPUs with CUDA_VISIBLE_DEVICES{lower}"


def memory_problems(spec: RunSpec, config: "PretrainedConfig") -> Iterator[str]:
    """Yields the reason why a run exceeds this machine's memory.

    On GPUs, ``run_memory`` gives the reason; it plans the same memory as the workers when they load.
    """
    # This imports torch.
    from services.checks.start.memory import host_problem, run_memory

    if not has_gpus():
        yield from host_problem(spec, config, host_bytes=host_bytes_here())
    elif (gpu_bytes := gpu_bytes_here()) is not None:
        gpus = num_gpus()
        try:
            run_memory(spec, config, gpu_bytes=gpu_bytes, gpus=gpus).check()
        except ValueError as error:
            yield f"model.path: {str(error).partition(chr(10))[0]}"


def _fewer_rollouts(spec: RunSpec) -> Iterator[MachineDefault]:
    """Yields a number of rollouts that fits this machine's GPUs, if the default does not.

    Two engines on one GPU hold the weights twice and have half of the cache each, for the same work.
    """
    gpus = num_gpus()
    default_replicas = spec.rollout.replicas
    if not 0 < gpus < total_gpus(spec):
        return
    other_gpus = total_gpus(spec) - default_replicas * spec.engine_gpus
    count = max(1, (gpus - other_gpus) // spec.engine_gpus)
    if count < default_replicas:
        why = (
            f"rollout.replicas is not set: using {count} instead of {default_replicas}, because this machine "
            f"has {gpus} GPU(s); set it to let several rollouts share one"
        )
        yield MachineDefault("rollout.replicas", count, why)


def shared_gpus(spec: RunSpec) -> str:
    """Returns a note if workers must share this machine's GPUs; empty otherwise."""
    gpus = num_gpus()
    if gpus == 0 or total_gpus(spec) <= gpus:
        return ""
    text = (
        f"{len(worker_names(spec))} workers share the {gpus} GPU(s) of this machine, in time and memory"
        " (slipstream validate --gpu-gb shows the split)"
    )
    if spec.rollout.replicas > 1:
        text += f"; rollout.replicas is {spec.rollout.replicas}; with fewer, each engine has more memory"
    return text


def half_slowdown(name: str) -> float:
    """Measures the ratio of a matrix product's time in a 16-bit dtype to its time in float32 on this CPU."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        factor = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype)
        times = []
        for _ in range(_MEASURED_TIMES):
            begin = time.perf_counter()
            factor @ factor
            times.append(time.perf_counter() - begin)
        return min(times)

    return seconds(getattr(torch, name)) / seconds(torch.float32)


def slow_settings(spec: RunSpec, slowdown: Callable[[str], float] = half_slowdown) -> str:
    """Returns a note about trainer settings that are slow on this machine; empty if there are none.

    Args:
        slowdown: Measures the slowdown of a 16-bit dtype on the CPU.
    """
    if not has_gpus():
        return "; ".join(_slow_on_cpus(spec, slowdown))
    if spec.model.is_tiny:
        return ""
    faster = []
    if spec.trainer.dtype == "float32":
        faster.append("trainer.dtype: bfloat16 is much faster than float32")
    if not spec.trainer.compile:
        faster.append("trainer.compile: true takes less time and memory after a longer start")
    return "on GPUs " + "; ".join(faster) if faster else ""


def _slow_on_cpus(spec: RunSpec, slowdown: Callable[[str], float]) -> Iterator[str]:
    dtype = spec.trainer.dtype
    if dtype != "float32" and (times := slowdown(dtype)) >= _NOTABLE_SLOWDOWN:
        yield (
            f"trainer.dtype is {dtype}, but on this machine's CPU a matrix product takes {times:.2g} times "
            "as long as in float32; set trainer.dtype to float32"
        )
    if spec.trainer.compile:
        yield (
            "trainer.compile is true, but layers are compiled for GPUs only; this machine's CPU trains "
            "without"
        )


def _too_many(spec: RunSpec, gpus: int) -> Iterator[str]:
    try:
        spec.topology.gpus_of("train")
    except TaskGroupError:
        return  # the rules report it
    key = "topology.gpus" if spec.topology.task_groups else "trainer.world_size"
    needs = gpu_needs(spec)
    total = spec.topology.gpus or sum(needs.values())
    if gpus:
        worker_id, count = max(needs.items(), key=lambda item: item[1])
        if spec.topology.placement == "mixed" and total_gpus(spec) > gpus:
            yield (
                f"topology.placement is 'mixed': with {spec.rollout.replicas - spec.colocated_rollouts} "
                f"rollout(s) outside the trainer's {spec.trainer.world_size} GPU(s) the run needs "
                f"{total_gpus(spec)} GPUs, but this machine has {gpus}; lower trainer.world_size or "
                "rollout.replicas, set topology.placement to 'colocated', or submit it to other machines "
                "(SLIPSTREAM_URL)"
            )
        elif count > gpus or spec.topology.gpus > gpus:
            yield (
                f"{key}: the run needs {max(count, spec.topology.gpus)} GPUs ({worker_id} alone {count}), "
                f"but this machine has {gpus}; lower trainer.world_size, topology.gpus or "
                "rollout.engine_arguments, or submit it to other machines (SLIPSTREAM_URL)"
            )
        return
    cores = usable_processors()
    most_processes = max(_MIN_PROCESSES, _PROCESSES_A_CORE * cores)
    if total > most_processes:
        yield (
            f"{key}: the run starts {total} worker processes, but this machine has no GPU, and its {cores} "
            f"cores can run at most {most_processes}; lower trainer.world_size, "
            "rollout.replicas or topology.gpus, or submit it to other machines (SLIPSTREAM_URL)"
        )
