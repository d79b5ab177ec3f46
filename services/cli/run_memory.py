"""Memory plan of a whole run, used by ``validate``, ``plan`` and the start of a run.

The trainer and the rollouts check the same numbers when they load (``fitted_to_gpu``, ``plan_of``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from transformers import PretrainedConfig

from services.common.models.training_memory import SPARE, TrainerMemory, fitted, trainer_memory
from services.common.runspec.placement_rules import placement
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import TopologySpec
from services.common.runspec.trainer import LoraSpec
from services.controller.launch.gpus import HostGpus
from services.controller.launch.launcher import gpu_hosts, gpu_needs, total_gpus, worker_names
from services.rollout.engines.memory import MemoryPlan, plan_of

_MIN_TOKENS = 1024
_Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Memory contents of one GPU of the trainer and one GPU of a rollout."""

    trainer: TrainerMemory
    trainer_gpus: int
    rollout: MemoryPlan
    chosen: RunSpec
    """The run with the settings that depend on the size of the GPUs filled in."""
    why_not: str
    """Reason why the run does not fit, and a change that makes it fit; empty if it fits."""

    def table(self) -> str:
        """Returns the memory contents of each GPU as lines of text."""
        way = self.chosen.trainer.activation_checkpointing
        return "\n".join(
            [
                f"trainer.activation_checkpointing: {str(way).lower()}",
                self.trainer.table(self.trainer_gpus),
                *([self.rollout.table()] if self.chosen.has_engine else []),
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
        spec: The run.
        config: Configuration of its model.
        gpu_bytes: Memory of one GPU.
        gpus: Number of GPUs; if it is lower than the workers need, some workers share GPUs.
            None means enough.

    Raises:
        ValueError: If an engine argument cannot be planned.
    """
    found = _planned(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
    if not found.why_not:
        return found
    fits = smallest_change(spec, config, gpu_bytes=gpu_bytes, gpus=gpus)
    change = "No change of one or two settings makes it fit; use more GPUs, larger GPUs, or a smaller model"
    if fits:
        change = f"It fits with {' and '.join(f'{key}: {shown(fits[key])}' for key in fits)}"
    first, newline, rest = found.why_not.partition("\n")
    told = f"{first.rstrip('.')}. {change}{newline}{rest}"
    return RunMemory(found.trainer, found.trainer_gpus, found.rollout, found.chosen, told)


def _planned(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, gpus: int | None
) -> RunMemory:
    beside_trainer, beside_rollout = _neighbours(
        spec, gpus=total_gpus(spec) if gpus is None else gpus
    )
    engines = 0 if spec.topology.is_colocated else beside_trainer.count("rollout")
    trainer = trainer_memory(spec, config, gpu_bytes=gpu_bytes, engines=engines)
    chosen = fitted(spec, config, gpu_bytes=gpu_bytes, engines=engines)
    rollout = plan_of(spec, config, gpu_bytes=gpu_bytes, roles=beside_rollout, checks=False)
    why = ""
    try:
        trainer.check(spec.trainer.world_size)
        if spec.has_engine:
            plan_of(spec, config, gpu_bytes=gpu_bytes, roles=beside_rollout)
    except ValueError as error:
        why = str(error)
    return RunMemory(trainer, spec.trainer.world_size, rollout, chosen, why)


def _neighbours(spec: RunSpec, *, gpus: int) -> tuple[list[str], list[str]]:
    """Returns the roles that share a GPU with the trainer, and those that share one with a rollout."""
    roles: dict[str, str] = {worker: role for role, worker in worker_names(spec)}
    host = HostGpus([str(number) for number in range(gpus)])
    host.assign(spec.name, gpu_needs(spec), hosts=gpu_hosts(spec))
    names = [
        next((w for w, role in roles.items() if role == one), "") for one in ("trainer", "rollout")
    ]
    found = [
        [roles[worker] for worker in host.neighbours(spec.name, name)] if name else []
        for name in names
    ]
    return found[0], found[1]


def smallest_change(
    spec: RunSpec, config: PretrainedConfig, *, gpu_bytes: int, gpus: int | None
) -> _Changes:
    """Returns the one or two settings whose change makes a run fit; empty if there are none."""
    changes = list(_changes(spec))
    for count in (1, 2):
        for some in combinations(changes, count):
            merged = {key: value for change in some for key, value in change.items()}
            if len(merged) < sum(map(len, some)):
                continue  # two values of one key
            changed = _with(spec, merged)
            if next(placement(changed), ""):
                continue
            try:
                found = _planned(changed, config, gpu_bytes=gpu_bytes, gpus=gpus)
            except ValueError:
                continue
            if not found.why_not and SPARE * found.trainer.used <= gpu_bytes:
                return merged
    return {}


def _changes(spec: RunSpec) -> Iterator[_Changes]:
    """Yields settings that reduce memory, the ones with the lowest cost first."""
    trainer = spec.trainer
    kept = trainer.activation_checkpointing
    if kept not in ("auto", True):
        yield {"trainer.activation_checkpointing": "auto"}
    if trainer.lora is not None and not spec.sends_adapters and trainer.lora.sync == "merged":
        yield {"trainer.lora": trainer.lora.model_copy(update={"sync": "auto"})}
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    tokens = trainer.tokens_per_micro_batch
    while (tokens := tokens // 2) >= max(_MIN_TOKENS, longest // trainer.context_parallel):
        yield {"trainer.tokens_per_micro_batch": tokens}
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
    if trainer.lora is None:
        yield {"trainer.lora": LoraSpec()}


def _with(spec: RunSpec, changes: _Changes) -> RunSpec:
    own = {
        key.removeprefix("trainer."): v for key, v in changes.items() if key.startswith("trainer.")
    }
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=own)})
    if "topology.placement" not in changes:
        return spec
    replicas = max(1, spec.trainer.world_size // spec.engine_gpus)
    parts = {
        "topology": TopologySpec(placement=changes["topology.placement"]),
        "rollout": spec.rollout.model_copy(update={"replicas": replicas}),
    }
    return spec.model_copy(update=parts)


def shown(value: Any) -> str:
    """Returns the value of a setting as YAML."""
    if isinstance(value, LoraSpec):
        return f"{{rank: {value.rank}, sync: {value.sync}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
