"""The roles of workers that only score or hold the critic, as placement and launchers read them."""

import re
from collections.abc import Iterator
from typing import Final

from services.common.runspec.base import in_yaml
from services.common.runspec.rules import optimizer, parallelism, train_engine
from services.common.runspec.run import RunSpec
from services.common.runspec.topology import ScoringSpec
from services.common.runspec.trainer import CriticSpec
from services.common.runspec.weight_modes import HOST_MODE, MODES
from services.common.runspec.workers import WorkerKind, scoring_ranks


def _logp_problems(spec: RunSpec) -> Iterator[str]:
    topology = spec.topology
    if not spec.needs_proximal:
        yield (
            "topology.task_groups gives logp its own GPUs, but with trainer.updates_per_step "
            f"{spec.trainer.updates_per_step} and algorithm.correction {spec.algorithm.correction!r} "
            "no proximal logprobs are used; put logp into the group of train"
        )
    if spec.weight_sync.publish_every > 1:
        yield (
            "topology.task_groups gives logp its own GPUs, which need the weights of every step, but "
            f"weight_sync.publish_every is {spec.weight_sync.publish_every}; set it to 1, or put logp into "
            "the group of train"
        )
    if spec.trainer.accumulate_early:
        yield (
            "topology.task_groups gives logp its own GPUs, which score whole batches, but "
            "trainer.accumulate_early is true; set it to false, or put logp into the group of train"
        )
    if topology.scoring_ranks > 1 and not MODES[spec.weight_sync.mode].through_host:
        # No GPU of a sharded policy could receive whole weights.
        yield (
            f"topology.scoring_ranks is {topology.scoring_ranks}, so logp is sharded and receives "
            f"weights through host memory, but weight_sync.mode is {spec.weight_sync.mode!r}; set it to "
            f"{HOST_MODE!r}, or put logp into the group of train"
        )


def _ref_logp_problems(spec: RunSpec) -> Iterator[str]:
    if not spec.needs_reference:
        yield (
            "topology.task_groups gives ref_logp its own GPUs, but algorithm.kl.coefficient is 0, "
            "so no reference logprobs are used; set it above 0, or remove ref_logp"
        )
    teacher = spec.teacher
    if spec.distillation is not None or (teacher is not None and teacher.has_own_prompt):
        yield (
            "topology.task_groups gives ref_logp its own GPUs, but its workers compute logprobs of the "
            "policy's prompts only; put ref_logp into the group of train, or serve the teacher (teacher.url)"
        )

    lora, scoring = spec.trainer.lora, spec.topology.scoring
    if teacher is None and lora is not None and lora.base_dtype is not None:
        # Every process holds all rounded weights.
        for key in ("tensor_parallel", "cpu_offload"):
            value, default = getattr(scoring, key), ScoringSpec.model_fields[key].default
            if value != default:
                yield (
                    f"trainer.lora.base_dtype {lora.base_dtype} rounds the weights of ref_logp, of which "
                    f"each GPU holds all, but topology.scoring.{key} is {in_yaml(value)}; set it to "
                    f"{in_yaml(default)}"
                )


def _critic_problems(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a critic that computes returns from stored samples only."""
    if not spec.algorithm.advantage_kind.needs_critic:
        yield (
            "topology.task_groups gives critic its own GPUs, but algorithm.advantage "
            f"{spec.algorithm.advantage!r} has no critic; set it to 'gae', or remove critic"
        )
    if spec.needs_reference and spec.algorithm.kl.placement == "reward":
        yield (
            "topology.task_groups gives critic its own GPUs, but algorithm.kl.placement 'reward' changes "
            "rewards in the trainer, and the critic would not receive them; set it to 'loss', or put critic "
            "into the group of train"
        )
    for rule in (parallelism, optimizer, train_engine):
        for problem in set(rule(spec.of_critic)).difference(rule(spec)):
            if _TRAINER_KEY.search(problem):
                yield _TRAINER_KEY.sub(r"critic.\1", problem).replace(
                    "trainer.world_size", "the number of GPUs of critic"
                )


_TRAINER_KEY: Final = re.compile(rf"trainer\.({'|'.join(CriticSpec.LAYOUT)})\b")
"""Keys that a critic has too."""


LOGP: Final = WorkerKind(
    tasks=("logp",),
    serve="services.extras.scoring.worker:serve_logp",
    follow="services.extras.scoring.worker:follow_logp",
    ranks=scoring_ranks,
    unit=scoring_ranks,
    problems=_logp_problems,
    memory="services.extras.scoring.memory:policy_memory",
    receives_weights=True,
    scores="batches",
)
REF_LOGP: Final = WorkerKind(
    tasks=("ref_logp",),
    aliases=("ref",),
    serve="services.extras.scoring.worker:serve_ref_logp",
    follow="services.extras.scoring.worker:follow_ref_logp",
    ranks=scoring_ranks,
    unit=scoring_ranks,
    problems=_ref_logp_problems,
    memory="services.extras.scoring.memory:reference_memory",
    scores="groups",
    adds=("ref_logprobs",),
)
CRITIC: Final = WorkerKind(
    tasks=("critic",),
    is_alone=True,
    serve="services.extras.scoring.critic:serve_critic",
    follow="services.extras.scoring.critic:follow_critic",
    ranks=lambda spec: spec.topology.own_gpus("critic"),
    unit=lambda spec: spec.critic.tensor_parallel * spec.critic.pipeline_parallel,
    problems=_critic_problems,
    memory="services.extras.scoring.memory:critic_memory",
    trains=True,
    scores="batches",
    adds=("values",),
)
