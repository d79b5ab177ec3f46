"""RunSpec: the one description of a run."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.base import SpecPart
from services.common.spec.data import DataSpec
from services.common.spec.limits import LimitsSpec
from services.common.spec.model import ModelSpec
from services.common.spec.rollout import RolloutSpec
from services.common.spec.topology import TopologySpec
from services.common.spec.trainer import TrainerSpec
from services.common.spec.transferqueue import TransferQueueSpec
from services.common.spec.validation import ValidationSpec
from services.common.spec.weight_sync import WeightSyncSpec


class RunSpec(SpecPart):
    """What to train. Written by the user, resolved once, then the same for every process."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Name of the run: a DNS label."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order, sampling and initial weights."""
    model: ModelSpec
    """The policy that is trained."""
    data: DataSpec
    """Prompts."""
    rollout: RolloutSpec
    """Generation and rewards."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Loss, advantage, correction, staleness."""
    trainer: TrainerSpec
    """Optimization."""
    topology: TopologySpec = TopologySpec()
    """Which tasks have GPUs of their own."""
    validation: ValidationSpec = ValidationSpec()
    """Evaluation on held-out prompts."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """The weight plane."""
    transferqueue: TransferQueueSpec = TransferQueueSpec()
    """The data plane."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines and restarts."""

    @property
    def needs_reference(self) -> bool:
        """Whether training compares with the frozen base model."""
        return self.algorithm.kl.coefficient > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether training compares with the weights at the start of the step, in a pass of its own.

        With one update per batch they are the current ones, and under ``bypass`` the rollouts' stand in.
        """
        updates = self.trainer.updates_per_step
        is_bypassed = self.algorithm.resolved_correction(updates_per_step=updates) == "bypass"
        in_reward = self.needs_reference and self.algorithm.kl.placement == "reward"
        return in_reward or (updates > 1 and not is_bypassed)

    @property
    def samples_per_group(self) -> int:
        """Samples of a group: its members, and the greedy baseline of ReMax."""
        return self.rollout.group_size + (self.algorithm.advantage == "remax")

    @property
    def engine_gpus(self) -> int:
        """GPUs of one rollout, where there are GPUs."""
        return _engine_gpus(self.rollout.engine_arguments)

    @model_validator(mode="before")
    @classmethod
    def _topology_gives_the_counts(cls, values: Any) -> Any:
        """Fill in what follows from task groups; that it is not contradicted is checked later."""
        if not isinstance(values, Mapping) or "topology" not in values:
            return values
        try:
            topology = TopologySpec.model_validate(values["topology"])
        except ValidationError:
            return values  # it is reported with its key when the field itself is validated
        trainer, rollout = values.get("trainer"), values.get("rollout")
        if not topology.task_groups or not isinstance(trainer, Mapping):
            return values
        if not isinstance(rollout, Mapping):
            return values
        engine_arguments = rollout.get("engine_arguments", {})
        if not isinstance(engine_arguments, Mapping):
            return values
        engine_gpus = _engine_gpus(engine_arguments)
        counts = topology.gpus_of("train"), topology.gpus_of("generate") // engine_gpus
        return {
            **values,
            "trainer": {"world_size": counts[0], **trainer},
            "rollout": {"replicas": counts[1], **rollout},
        }

    @model_validator(mode="after")
    def _topology_fits(self) -> Self:
        if self.topology.task_groups:
            _check_counts(self)
            _check_roles(self)
        return self

    @model_validator(mode="after")
    def _engine_takes_weights(self) -> Self:
        if self.weight_sync.mode == "inplace" and self.rollout.engine != "torch":
            raise ValueError(
                "weight_sync.mode inplace writes into live weights, which engine "
                f"{self.rollout.engine!r} keeps to itself; choose mode shadow, or rollout.engine torch"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_room(self) -> Self:
        lora = self.trainer.lora
        if lora is not None and lora.sync == "adapter" and self.weight_sync.mode == "inplace":
            raise ValueError(
                "trainer.lora.sync adapter keeps what adapters are merged into beside the live weights, but "
                "weight_sync.mode inplace has no second copy; choose mode shadow, or sync merged"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        sampling = self.rollout.sampling
        if sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0 (greedy), so all members of a group would be equal; "
                "training needs a temperature above 0"
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                "rollout.sampling.top_p must be 1 and top_k 0 for training, because the trainer's "
                f"logprobs cover all tokens, but they are {sampling.top_p} and {sampling.top_k}"
            )
        if self.trainer.updates_per_step > self.trainer.prompts_per_step:
            raise ValueError(
                f"trainer.updates_per_step ({self.trainer.updates_per_step}) must not exceed "
                f"trainer.prompts_per_step ({self.trainer.prompts_per_step}): each mini-batch needs a group"
            )
        group_size, least = self.rollout.group_size, self.algorithm.min_group_size
        if group_size < least:
            raise ValueError(
                f"rollout.group_size ({group_size}) is below algorithm.min_group_size ({least}), so no "
                "group could ever be trained; raise the first or lower the second"
            )
        if self.trainer.world_size % self.trainer.tensor_parallel:
            raise ValueError(
                f"trainer.world_size ({self.trainer.world_size}) must be a multiple of "
                f"trainer.tensor_parallel ({self.trainer.tensor_parallel})"
            )
        if self.validation.replicas >= self.rollout.replicas:
            raise ValueError(
                f"validation.replicas ({self.validation.replicas}) must be below rollout.replicas "
                f"({self.rollout.replicas}), because somebody has to generate meanwhile; 0 shares all of them"
            )
        if self.validation.only and self.data.heldout is None:
            raise ValueError("validation.only needs data.heldout; name the held-out prompts")
        return self


def _engine_gpus(engine_arguments: Mapping[str, Any]) -> int:
    """GPUs of one rollout, by the names that the engines give them.

    Raises:
        ValueError: If that is no number of GPUs.
    """
    for name in ("tensor_parallel_size", "tp_size"):
        count = engine_arguments.get(name, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"rollout.engine_arguments.{name} must be a number of GPUs from 1, but is {count!r}"
            )
        if name in engine_arguments:
            return count
    return 1


def _check_counts(spec: RunSpec) -> None:
    """Processes must be those that the task groups give."""
    scoring = [task for task in ("logp", "ref_logp") if spec.topology.own_gpus(task)]
    parallelism = {
        "train": spec.trainer.tensor_parallel,
        "generate": spec.engine_gpus,
        **dict.fromkeys(scoring, spec.topology.scoring_ranks),
    }
    placed = spec.topology.place(parallelism)
    given = {
        "trainer.world_size": (spec.trainer.world_size, spec.topology.gpus_of("train")),
        "rollout.replicas": (
            spec.rollout.replicas,
            spec.topology.gpus_of("generate") // spec.engine_gpus,
        ),
    }
    for key, (stated, follows) in given.items():
        if stated != follows:
            raise ValueError(
                f"{key} is {stated}, but topology gives {follows}; leave it out, or change "
                "topology.ratios"
            )
    for group in placed.groups:
        if "generate" in group.tasks and set(group.tasks) - {"generate", "reward"}:
            raise ValueError(
                f"topology.task_groups puts {', '.join(group.tasks)} on the same GPUs, but an engine "
                "needs its GPUs for itself; give generate a group of its own"
            )


def _check_roles(spec: RunSpec) -> None:
    """Tasks with GPUs of their own must have something to do, and get what they need."""
    topology = spec.topology
    if topology.own_gpus("ref_logp") and not spec.needs_reference:
        raise ValueError(
            "topology.task_groups gives ref_logp GPUs of its own, but algorithm.kl.coefficient is 0, "
            "so nothing is compared with the reference; set it above 0, or leave ref_logp out"
        )
    if topology.own_gpus("logp") and not spec.needs_proximal:
        raise ValueError(
            "topology.task_groups gives logp GPUs of its own, but with trainer.updates_per_step "
            f"{spec.trainer.updates_per_step} and algorithm.correction {spec.algorithm.correction!r} "
            "nothing needs proximal logprobs; let it share the group of train"
        )
    if topology.own_gpus("logp") and spec.weight_sync.publish_every > 1:
        raise ValueError(
            "topology.task_groups gives logp GPUs of its own, which must get the weights of every step, but "
            f"weight_sync.publish_every is {spec.weight_sync.publish_every}; set it to 1, or let logp share "
            "the group of train"
        )
    if topology.scoring_ranks > 1 and topology.own_gpus("logp"):
        _check_sharded_logp(spec)
    if topology.own_gpus("critic"):
        _check_critic(spec)
    group = next((group for group in topology.task_groups if "reward" in group), ())
    if group and "generate" not in group:
        raise ValueError(
            "topology.task_groups gives reward GPUs of its own, but it runs inside the processes of "
            "generate; put it into the group of generate, or leave it out"
        )


def _check_sharded_logp(spec: RunSpec) -> None:
    """A sharded policy has no GPU that could take the weights whole."""
    if spec.weight_sync.mode != "cpu_async":
        raise ValueError(
            f"topology.scoring_ranks is {spec.topology.scoring_ranks}, so logp is sharded and gets its "
            f"weights through host memory, but weight_sync.mode is {spec.weight_sync.mode!r}; set it to "
            "'cpu_async', or let logp share the group of train"
        )


def _check_critic(spec: RunSpec) -> None:
    """A critic with GPUs of its own computes returns by itself, from what is stored."""
    if spec.algorithm.advantage != "gae":
        raise ValueError(
            "topology.task_groups gives critic GPUs of its own, but algorithm.advantage "
            f"{spec.algorithm.advantage!r} has no critic; set it to 'gae', or leave critic out"
        )
    if spec.needs_reference and spec.algorithm.kl.placement == "reward":
        raise ValueError(
            "topology.task_groups gives critic GPUs of its own, but algorithm.kl.placement 'reward' changes "
            "rewards inside the trainer, where the critic does not see them; set it to 'loss', or let critic "
            "share the group of train"
        )
    group = spec.topology.place().group_of("critic")
    if group is not None and len(group.tasks) > 1:
        raise ValueError(
            f"topology.task_groups puts {', '.join(group.tasks)} on the same GPUs, but a critic outside of "
            "train needs its GPUs for itself; give it a group of its own"
        )
