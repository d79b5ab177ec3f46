"""Memory plan of a whole run, used by ``init``, ``validate``, ``plan`` and the start of a run.

The trainer and the rollouts check the same numbers when they load (``fitted_to_gpu``, ``plan_of``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from transformers import PretrainedConfig

from services.checks.start.hub import model_config
from services.checks.start.layouts import fitting_layout
from services.common.callables import load_callable
from services.common.memory.rollout import MemoryPlan, needed_bytes, plan_of
from services.common.memory.sizes import weight_bytes
from services.common.memory.trainer import SPARE, STATE, TrainerMemory, fitted, trainer_memory
from services.common.models.families import num_experts
from services.common.runspec.base import in_yaml
from services.common.runspec.engines import engine_kind
from services.common.runspec.loader import SpecError
from services.common.runspec.rules import parallelism, placement, train_engine
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec
from services.common.runspec.trainer import LoraSpec
from services.common.runspec.weight_modes import HOST_MODE
from services.common.runspec.worker_kinds import gpu_hosts, gpu_needs, total_gpus, worker_names
from services.common.runspec.workers import WORKERS, kinds_with_own_gpus, scoring_ranks
from services.controller.launch.gpus import HostGpus


def memory_table(spec: RunSpec, *, gpu_bytes: int, gpus: int | None = None) -> str:
    """Returns the memory contents of each GPU of a run as text.

    Args:
        gpus: Number of GPUs; if it is lower than the workers need, some workers share GPUs.
            None means enough.

    Raises:
        SpecError: If the run does not fit, with the smallest change that makes it fit.
    """
    config = model_config(spec)
    try:
        memory = run_memory(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
        memory.check()
    except ValueError as error:
        raise SpecError([str(error)]) from error
    return memory.table()


_MIN_TOKENS = 1024
_Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Memory contents of one GPU of the trainer and one GPU of a rollout."""

    trainer: TrainerMemory
    trainer_gpus: int
    rollout: MemoryPlan
    spec: RunSpec
    """The run with the settings that depend on the size of the GPUs filled in."""
    apart: Mapping[str, TrainerMemory]
    """Memory of one GPU of each further kind of worker with its own GPUs, by role."""
    why_not: str
    """Reason why a worker does not fit, and a change that makes the run fit; empty if all fit."""

    def table(self) -> str:
        """Returns the memory contents of each GPU as lines of text."""
        spec, way = self.spec, self.spec.trainer.activation_checkpointing
        return "\n".join(
            [
                f"trainer.activation_checkpointing: {str(way).lower()}",
                self.trainer.table(self.trainer_gpus),
                *([self.rollout.table()] if self.spec.runs_engines else []),
                *(plan.table(WORKERS[role].num_gpus(spec)) for role, plan in self.apart.items()),
            ]
        )

    def check(self) -> None:
        """Checks that the run fits.

        Raises:
            ValueError: If it does not, with the numbers and the smallest change that makes it fit.
        """
        if self.why_not:
            raise ValueError(self.why_not)


def run_memory(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, gpus: int | None = None
) -> RunMemory:
    """Plans the memory of a run.

    Args:
        gpus: Number of GPUs; if it is lower than the workers need, some workers share GPUs.
            None means enough.

    Raises:
        ValueError: If an engine argument cannot be planned.
    """
    memory = _planned(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
    if not memory.why_not:
        return memory
    fits = smallest_change(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
    change = "No change of one or two settings makes it fit; use more GPUs, larger GPUs, or a smaller model"
    if fits:
        change = f"It fits with {' and '.join(f'{key}: {in_yaml(fits[key])}' for key in fits)}"
    first, newline, rest = memory.why_not.partition("\n")
    reason = f"{first.rstrip('.')}. {change}{newline}{rest}"
    return replace(memory, why_not=reason)


def host_problem(spec: RunSpec, config: PretrainedConfig, *, host_bytes: int) -> Iterator[str]:
    """Yields the reason why a run without GPUs exceeds a machine's memory.

    Only states and weights are counted: all processes share the memory, and activations are short-lived.
    """
    ranks, memory = spec.trainer.world_size, trainer_memory(spec, config, gpu_bytes=host_bytes)
    state = ranks * sum(memory.parts.get(name, 0) + memory.host.get(name, 0) for name in STATE)
    dtype = getattr(torch, spec.trainer.dtype)
    engines = spec.rollout.replicas * spec.runs_engines * weight_bytes(config, dtype)
    if state + engines > host_bytes:
        yield (
            f"model.path: the run does not fit into this machine's memory of {host_bytes / 1e9:.1f} GB: "
            f"weights, gradients and optimizer of the trainer take {state / 1e9:.1f} GB, and the "
            f"engines of rollout.replicas ({spec.rollout.replicas}) take {engines / 1e9:.1f} GB; use a "
            "smaller model, or submit it to other machines (SLIPSTREAM_URL)"
        )


def _planned(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, gpus: int | None
) -> RunMemory:
    beside_trainer, beside_rollout = _neighbours(
        spec, gpus=total_gpus(spec) if gpus is None else gpus
    )
    engines = 0 if spec.topology.is_colocated else beside_trainer.count("rollout")
    fitted_spec, trainer = fitted(spec, config, gpu_bytes=gpu_bytes, engines=engines)
    rollout = plan_of(spec, config, gpu_bytes=gpu_bytes, roles=beside_rollout, checks=False)
    apart = {
        role: load_callable(kind.memory)(spec, config, gpu_bytes=gpu_bytes)
        for role, kind in kinds_with_own_gpus(spec.topology).items()
        if kind.memory
    }
    why = ""
    try:
        trainer.check(spec.trainer.world_size)
        if spec.runs_engines:
            plan_of(spec, config, gpu_bytes=gpu_bytes, roles=beside_rollout)
        for role, worker in apart.items():
            worker.check(WORKERS[role].num_gpus(spec))
    except ValueError as error:
        why = str(error)
    return RunMemory(trainer, spec.trainer.world_size, rollout, fitted_spec, apart, why)


def needed_by_gpu(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, gpus: Sequence[str]
) -> dict[str, float]:
    """Returns the bytes that a run's trainer and rollouts need of each of this machine's GPUs.

    Args:
        gpus: Names of the GPUs.
    """
    memory = _planned(spec, config, gpu_bytes=gpu_bytes, gpus=len(gpus))
    kind, arguments = engine_kind(spec.rollout.engine), spec.rollout.engine_arguments
    sizes = {
        "trainer": memory.trainer.used,
        "rollout": needed_bytes(memory.rollout, kind, arguments),
        **{role: worker.used for role, worker in memory.apart.items()},
    }
    assigned = HostGpus(gpus).assign(spec.name, gpu_needs(spec), hosts=gpu_hosts(spec))
    bytes_by_gpu = dict.fromkeys(gpus, 0.0)
    for role, worker_id in worker_names(spec):
        size = sizes.get(role, 0.0)
        for gpu in assigned[worker_id]:
            # Colocated workers use their GPU by turns.
            is_turn = spec.is_colocated(worker_id)
            bytes_by_gpu[gpu] = (
                max(bytes_by_gpu[gpu], size) if is_turn else bytes_by_gpu[gpu] + size
            )
    return bytes_by_gpu


def _neighbours(spec: RunSpec, *, gpus: int) -> tuple[list[str], list[str]]:
    """Returns the roles that share a GPU with the trainer, and those that share one with a rollout."""
    roles: dict[str, str] = {worker: role for role, worker in worker_names(spec)}
    host = HostGpus([str(number) for number in range(gpus)])
    host.assign(spec.name, gpu_needs(spec), hosts=gpu_hosts(spec))

    def neighbours(kind: str) -> list[str]:
        name = next((worker for worker, role in roles.items() if role == kind), "")
        return [roles[w] for w in host.workers_sharing(spec.name, name)] if name else []

    return neighbours("trainer"), neighbours("rollout")


def smallest_change(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, gpus: int | None
) -> _Changes:
    """Returns the settings whose change makes a run fit; empty if there are none.

    They are one setting, or the layout of the trainer's processes, or two settings.
    """
    changes = list(_changes(spec, is_mixture=num_experts(config.to_dict()) > 0))

    def fits(change: _Changes) -> bool:
        variant = _with(spec, change)
        if next(chain(placement(variant), parallelism(variant), train_engine(variant)), ""):
            return False
        try:
            memory = _planned(variant, config, gpu_bytes=gpu_bytes, gpus=gpus)
        except ValueError:
            return False
        most_used = max(worker.used for worker in (memory.trainer, *memory.apart.values()))
        return not memory.why_not and SPARE * most_used <= gpu_bytes

    if fitting_change := next(filter(fits, changes), None):
        return fitting_change
    if spec.trainer.world_size > 1:
        layout = fitting_layout(spec, config, gpu_bytes=gpu_bytes)
        if layout is not None and fits(layout):
            return layout
    for first, second in combinations(changes, 2):
        # Both may be values of one key.
        if not first.keys() & second.keys() and fits({**first, **second}):
            return {**first, **second}
    return {}


def _changes(spec: RunSpec, *, is_mixture: bool) -> Iterator[_Changes]:
    """Yields settings that reduce memory, the ones with the lowest cost first."""
    trainer = spec.trainer
    mode = trainer.activation_checkpointing
    if mode not in ("auto", True):
        yield {"trainer.activation_checkpointing": "auto"}
    if trainer.keep_gathered is True and trainer.may_free_gathered:
        yield {"trainer.keep_gathered": "auto"}
    if trainer.lora is not None and not spec.sends_adapters and trainer.lora.sync == "merged":
        yield {"trainer.lora": trainer.lora.model_copy(update={"sync": "auto"})}
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    tokens = trainer.tokens_per_micro_batch
    while (tokens := tokens // 2) >= max(_MIN_TOKENS, longest // trainer.context_parallel):
        yield {"trainer.tokens_per_micro_batch": tokens}
    yield from _changes_apart(spec)
    if trainer.dtype == "float32":
        yield {"trainer.dtype": "bfloat16"}
    if trainer.cpu_offload is False:
        yield {"trainer.cpu_offload": "optimizer"}
    if not trainer.activation_offloading:
        yield {"trainer.activation_offloading": True}
    if not (spec.topology.is_colocated or spec.topology.task_groups):
        yield {"topology.placement": "colocated"}
    if trainer.zero_stage == 3 and trainer.cpu_offload is not True:
        yield {"trainer.cpu_offload": True}
    yield from _adapters(trainer.lora, is_mixture=is_mixture)


def _changes_apart(spec: RunSpec) -> Iterator[_Changes]:
    """Yields settings that reduce the memory of a critic and of scoring workers with their own GPUs."""
    topology, num_ranks = spec.topology, spec.topology.scoring_ranks
    if topology.own_gpus("critic"):
        yield from ({"critic.cpu_offload": contents} for contents in ("optimizer", True))
    kinds = kinds_with_own_gpus(topology).values()
    most_ranks = max(
        (topology.own_gpus(k.task) for k in kinds if k.ranks is scoring_ranks), default=0
    )
    while (num_ranks := 2 * num_ranks) <= most_ranks:
        yield {"topology.scoring_ranks": num_ranks}
        yield {"topology.scoring_ranks": num_ranks, "weight_sync.mode": HOST_MODE}
    if most_ranks and not topology.scoring.cpu_offload:
        yield {"topology.scoring": topology.scoring.model_copy(update={"cpu_offload": True})}


def _adapters(lora: LoraSpec | None, *, is_mixture: bool) -> Iterator[_Changes]:
    if lora is None:
        yield {"trainer.lora": LoraSpec()}
    elif lora.base_dtype is None and not is_mixture:
        yield {"trainer.lora": lora.model_copy(update={"base_dtype": "nf4"})}


def _with(spec: RunSpec, changes: _Changes) -> RunSpec:
    sections: dict[str, Any] = {}
    for key, value in changes.items():
        name, _, field = key.partition(".")
        section = sections.get(name, getattr(spec, name))
        sections[name] = section.model_copy(update={field: value})
    if "topology.placement" in changes:
        replicas = max(1, spec.trainer.world_size // spec.engine_gpus)
        sections["topology"] = TopologySpec(placement=changes["topology.placement"])
        sections["rollout"] = spec.rollout.model_copy(update={"replicas": replicas})
    return spec.model_copy(update=sections)
