"""RunSpec: the one description of a run."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.base import SpecPart
from services.common.spec.data import DataSpec
from services.common.spec.engines import ENGINES, engine_kind
from services.common.spec.formulas import LOSSES
from services.common.spec.limits import LimitsSpec
from services.common.spec.model import ModelSpec
from services.common.spec.rollout import RewardSpec, RolloutSpec
from services.common.spec.samples import SamplesSpec
from services.common.spec.topology import TopologySpec
from services.common.spec.trackers import TrackerSpec
from services.common.spec.trainer import CriticSpec, TrainerSpec
from services.common.spec.transferqueue import TransferQueueSpec
from services.common.spec.validation import ValidationSpec
from services.common.spec.weight_sync import WeightSyncSpec

# Samples that one replica decodes at once, where the specification does not say: evaluations take places too.
_LEAST_RUNNING = 64


class RunSpec(SpecPart):
    """What to train. Written by the user, resolved once, then the same for every process."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Name of the run: a DNS label."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order, sampling and initial weights."""
    model: ModelSpec
    """The policy that is trained."""
    teacher: ModelSpec | None = None
    """A model with the same tokenizer that the policy is to become like, on responses of its own (on-policy
    distillation): the reference of ``algorithm.kl``, whose coefficient then is 1 and whose estimator ``k1+``
    unless they are given. Rewards have no say in it unless ``algorithm.advantage`` names an estimator."""
    data: DataSpec
    """Prompts."""
    rollout: RolloutSpec
    """Generation and rewards."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Loss, advantage, correction, staleness."""
    trainer: TrainerSpec
    """Optimization."""
    critic: CriticSpec = CriticSpec()
    """The critic of ``algorithm.advantage: gae``."""
    topology: TopologySpec = TopologySpec()
    """Which tasks have GPUs of their own."""
    validation: ValidationSpec = ValidationSpec()
    """Evaluation on held-out prompts."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """The weight plane."""
    transferqueue: TransferQueueSpec = TransferQueueSpec()
    """The data plane."""
    samples: SamplesSpec = SamplesSpec()
    """What is kept to be read."""
    trackers: tuple[TrackerSpec, ...] = ()
    """Where its numbers go besides."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines and restarts."""

    @field_validator("trackers")
    @classmethod
    def _trackers_are_named_once(cls, trackers: tuple[TrackerSpec, ...]) -> tuple[TrackerSpec, ...]:
        kinds = [tracker.kind for tracker in trackers]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(
                f"{twice[0]!r} is named {kinds.count(twice[0])} times; leave one of them"
            )
        return trackers

    @property
    def needs_reference(self) -> bool:
        """Whether training compares with the frozen base model, or with a teacher."""
        return self.algorithm.kl.coefficient > 0 or self.algorithm.loss_kind.needs_reference

    @property
    def sends_adapters(self) -> bool:
        """Whether rollouts receive adapters alone (``trainer.lora.sync``, resolved)."""
        lora = self.trainer.lora
        if lora is None or lora.sync != "auto":
            return lora is not None and lora.sync == "adapter"
        return not (
            self.model.is_tiny
            or not self.has_engine
            or lora.adapts_experts
            or self.topology.own_gpus("logp")
            or self.weight_sync.mode == "inplace"
        )

    @property
    def is_rewarded(self) -> bool:
        """Whether samples that train have rewards."""
        have_own = any(part.rewards for part in self.data.train_sets.values())
        is_scored = bool(self.rollout.rewards) or have_own
        return is_scored and not self.algorithm.num_demonstrations

    @property
    def of_reference(self) -> "RunSpec":
        """The run as the reference sees it: the teacher is its model, if there is one."""
        return self if self.teacher is None else self.model_copy(update={"model": self.teacher})

    @property
    def shares_prefixes(self) -> bool:
        """Whether tokens that samples have in common are computed once.

        A token that was computed once would have one choice of experts, and count once in their balance.
        """
        has_own_experts = self.rollout.routing_replay != "off"
        return (
            self.trainer.share_prefixes
            and not has_own_experts
            and self.trainer.balancing.kind != "loss"
        )

    @property
    def needs_proximal(self) -> bool:
        """Whether training compares with the weights at the start of the step, in a pass of its own.

        With one update per batch they are the current ones, and under ``bypass`` the rollouts' stand in.
        """
        updates = self.trainer.updates_per_step
        is_bypassed = self.correction == "bypass"
        in_reward = self.needs_reference and self.algorithm.kl.placement == "reward"
        in_loss = updates > 1 and not is_bypassed and not self.interpolates_proximal
        return in_reward or in_loss or self.algorithm.looks_ahead

    @property
    def interpolates_proximal(self) -> bool:
        """Whether the proximal logprobs are approximated."""
        return self.algorithm.proximal == "interpolated" and self.correction == "decoupled"

    @property
    def correction(self) -> Literal["bypass", "decoupled", "none"]:
        """The off-policy correction, resolved."""
        updates = self.trainer.updates_per_step
        return self.algorithm.resolved_correction(updates_per_step=updates)

    @property
    def rewards(self) -> dict[str, tuple[RewardSpec, ...]]:
        """What scores responses, by key: ``rollout.rewards``, and of sets that have their own."""
        own = {f"data.{split}.rewards": part.rewards for split, part in self.data.sets.items()}
        return {"rollout.rewards": self.rollout.rewards} | {
            key: rewards for key, rewards in own.items() if rewards is not None
        }

    @property
    def samples_per_group(self) -> int:
        """Samples of a group: its members, and a greedy response if the advantage needs one."""
        return self.rollout.group_size + self.algorithm.advantage_kind.needs_greedy

    @property
    def engine_gpus(self) -> int:
        """GPUs of one rollout, where there are GPUs."""
        return engine_kind(self.rollout.engine).num_gpus(self.rollout.engine_arguments)

    @property
    def has_engine(self) -> bool:
        """Whether rollouts sample: those that only encode rows need no GPU and get no weights."""
        return self.rollout.engine != "none"

    @property
    def rollouts_in_turns(self) -> int:
        """Rollouts on the trainer's GPUs, the first ones of all: one side sleeps while the other works."""
        if self.topology.placement == "mixed":
            return self.trainer.world_size // self.engine_gpus
        return self.rollout.replicas if self.topology.takes_turns else 0

    def is_in_turns(self, worker_id: str) -> bool:
        """Whether a worker is a rollout on the trainer's GPUs."""
        return worker_id in {f"rollout-{index}" for index in range(self.rollouts_in_turns)}

    def num_steps(self, num_rows: int) -> int:
        """Steps of the whole run.

        Args:
            num_rows: Rows of its training data; only a run that is measured in epochs asks.
        """
        if self.trainer.steps is not None:
            return self.trainer.steps
        # Less than a millionth of a prompt is the noise of the product.
        prompts = round((self.data.epochs or 0) * num_rows, 6)
        return max(1, math.ceil(prompts / self.trainer.prompts_per_step))

    @model_validator(mode="before")
    @classmethod
    def _asynchrony_gives_defaults(cls, values: Any) -> Any:
        """Fill in how rollouts run, where that follows from how far they may run ahead of training."""
        if not isinstance(values, Mapping) or not isinstance(values.get("rollout"), Mapping):
            return values
        try:
            algorithm = AlgorithmSpec.model_validate(values.get("algorithm", {}))
            rollout = RolloutSpec.model_validate(values["rollout"])
            trainer = TrainerSpec.model_validate(values.get("trainer"))
        except ValidationError:
            return values  # it is reported with its key when the field itself is validated
        max_staleness = algorithm.max_staleness
        places = _places(rollout, trainer, max_staleness=max_staleness, replicas=rollout.replicas)
        defaults = {"partial_rollout": max_staleness > 0, "max_running_samples": places}
        return {**values, "rollout": {**defaults, **values["rollout"]}}

    @model_validator(mode="before")
    @classmethod
    def _demonstrations_give_defaults(cls, values: Any) -> Any:
        """Fill in how rows are handed on, where nothing is sampled for training."""
        if not isinstance(values, Mapping) or not isinstance(values.get("algorithm"), Mapping):
            return values
        kind = LOSSES.get(str(values["algorithm"].get("loss")))
        rollout = values.get("rollout", {})
        if kind is None or not kind.num_demonstrations or not isinstance(rollout, Mapping):
            return values
        defaults: dict[str, Any] = {
            "group_size": kind.num_demonstrations,
            "replicas": 1,
            "partial_rollout": False,
        }
        data = values.get("data")
        if isinstance(data, Mapping) and data.get("heldout") is None:
            defaults["engine"] = "none"
        values = {**values, "rollout": {**defaults, **rollout}}
        if isinstance(data, Mapping) and kind.num_demonstrations > 1:
            values["data"] = {"answer_column": "chosen", **data}
        return values

    @model_validator(mode="before")
    @classmethod
    def _teacher_gives_defaults(cls, values: Any) -> Any:
        """Fill in what distillation is, where a teacher is named."""
        algorithm = values.get("algorithm", {}) if isinstance(values, Mapping) else None
        if not isinstance(algorithm, Mapping) or values.get("teacher") is None:
            return values
        kl, loss = algorithm.get("kl", {}), LOSSES.get(str(algorithm.get("loss")))
        if not isinstance(kl, Mapping) or (loss is not None and loss.num_demonstrations):
            return values
        kl = {"coefficient": 1.0, "estimator": "k1+", **kl}
        defaults = {"advantage": "none", "min_group_size": 1}
        return {**values, "algorithm": {**defaults, **algorithm, "kl": kl}}

    @model_validator(mode="before")
    @classmethod
    def _topology_gives_the_counts(cls, values: Any) -> Any:
        """Fill in what follows from task groups, or turns; that it is not contradicted is checked later."""
        if not isinstance(values, Mapping) or "topology" not in values:
            return values
        try:
            topology = TopologySpec.model_validate(values["topology"])
        except ValidationError:
            return values  # it is reported with its key when the field itself is validated
        trainer, rollout = values.get("trainer"), values.get("rollout")
        if not (isinstance(trainer, Mapping) and isinstance(rollout, Mapping)):
            return values
        engine_arguments = rollout.get("engine_arguments", {})
        is_given = topology.task_groups or topology.takes_turns
        if not is_given or not isinstance(engine_arguments, Mapping):
            return values
        kind = ENGINES.get(rollout.get("engine", "torch"))
        try:
            engine_gpus = 1 if kind is None else kind.num_gpus(engine_arguments)
            if topology.takes_turns:
                ranks = TrainerSpec.model_validate(trainer).world_size
                num_others = 1 if topology.placement == "mixed" else 0
                counts = ranks, max(1, ranks // engine_gpus) + num_others
            else:
                counts = topology.gpus_of("train"), topology.gpus_of("generate") // engine_gpus
        except ValueError:
            return values  # it is reported by the rules
        return {
            **values,
            "trainer": {"world_size": counts[0], **trainer},
            "rollout": {"replicas": counts[1], **rollout},
        }


def default_places(spec: RunSpec, *, max_staleness: int, replicas: int) -> int:
    """``rollout.max_running_samples`` as it follows from a bound on staleness and a number of rollouts."""
    return _places(spec.rollout, spec.trainer, max_staleness=max_staleness, replicas=replicas)


def _places(
    rollout: RolloutSpec, trainer: TrainerSpec, *, max_staleness: int, replicas: int
) -> int:
    ahead = (max_staleness + 1) * trainer.prompts_per_step * rollout.group_size
    most = engine_kind(rollout.engine).most_running
    return max(_LEAST_RUNNING, min(most, ahead // replicas))
