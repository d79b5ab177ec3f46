"""RunSpec: the one description of a run."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.base import SpecPart
from services.common.runspec.data import DataSpec
from services.common.runspec.engines import ENGINES, engine_kind
from services.common.runspec.formulas import LOSSES
from services.common.runspec.rollout import RewardSpec, RolloutSpec
from services.common.runspec.topology import TopologySpec
from services.common.runspec.trackers import TrackerSpec
from services.common.runspec.trainer import CriticSpec, TrainerSpec


class LimitsSpec(SpecPart):
    """Deadlines and restarts of a run."""

    queue_timeout_s: float = Field(0.0, ge=0)
    """Longest wait for a place in the project's quota, from the submission or from a resume on; the run fails
    then. 0 waits for ever."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Deadline for all workers to be ready, warm start included."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one trainer step."""
    stall_timeout_s: float = Field(600.0, gt=0)
    """An episode that makes no token and no call for this long is stopped, and goes on from what is stored
    on any replica; an engine that makes no token is replaced. Age alone never ends a response."""
    max_restarts: int = Field(3, ge=0)
    """Times in a row, without a finished step between them, that a run goes on after it lost a worker or
    the transferqueue; one more loss fails it. A lost trainer goes on from the newest checkpoint."""


class TransferQueueSpec(SpecPart):
    """Quota and retention of a run's samples."""

    quota_bytes: int = Field(4 << 30, ge=1 << 20)
    """Bytes that unreleased samples of the run may take; a put beyond it waits. A batch of the longest
    responses must fit."""
    put_timeout_s: float = Field(300.0, gt=0)
    """Longest wait of a producer for room before it fails with the reason."""


class ValidationSpec(SpecPart):
    """Evaluation of one pinned weight version, beside training."""

    every: int = Field(10, ge=0)
    """Weight versions between evaluations; 0 evaluates at the end only (``at_end``)."""
    before_train: bool | None = None
    """Whether the initial weights are evaluated; null: if ``every`` is above 0."""
    at_end: bool = True
    """Whether the final weights are evaluated."""
    only: bool = False
    """Whether the run ends after the first evaluation."""
    mode: Literal["overlap", "barrier"] = "overlap"
    """Whether training goes on meanwhile."""
    replicas: int = Field(0, ge=0)
    """Rollouts that are lent to an evaluation: they keep its weights until it is done, while the others, and
    training, go on. 0 evaluates on all of them, and new weights wait until the last response is there."""
    samples_per_prompt: int = Field(1, ge=1)
    """Sampled responses per held-out prompt, besides a greedy one."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled responses."""
    solved_from: float = 1.0
    """Reward from which a response counts as right, for ``pass@k``."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one evaluation; past it, what was scored is reported with status ``timeout``."""

    @property
    def begins(self) -> bool:
        """Whether the initial weights are evaluated."""
        return self.only or (self.every > 0 if self.before_train is None else self.before_train)


class SamplesSpec(SpecPart):
    """Retention of the samples that are kept with their texts, beside what training needs."""

    groups_per_step: float = Field(8, ge=0)
    """Groups of a step that are kept, on average: which ones follows from their names. 0 keeps none."""
    heldout_prompts: int = Field(32, ge=0)
    """Held-out prompts whose samples are kept, about; the same ones in every evaluation. 0 keeps none."""
    max_steps: int = Field(0, ge=0)
    """Newest steps whose samples stay; 0 leaves that to ``max_bytes``."""
    max_bytes: int = Field(256 << 20, ge=1 << 20)
    """Bytes that they may take on the transferqueue's disk; the oldest go first."""

    def keeps_group(self, group_id: str, *, prompts_per_step: int) -> bool:
        """Whether the samples of a group are kept: every process draws the same ones.

        Args:
            group_id: The group.
            prompts_per_step: Groups that a step trains.
        """
        return _is_drawn(group_id, self.groups_per_step / prompts_per_step)

    def keeps_prompt(self, row: int, *, num_prompts: int) -> bool:
        """Whether the samples of a held-out prompt are kept, in every evaluation.

        Args:
            row: The prompt.
            num_prompts: Held-out prompts of the run.
        """
        return _is_drawn(f"row {row}", self.heldout_prompts / max(num_prompts, 1))

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.groups_per_step > 0 or self.heldout_prompts > 0


def _is_drawn(name: str, fraction: float) -> bool:
    """Whether a name is among that fraction of all names."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class WeightSyncSpec(SpecPart):
    """Transport, buckets and deadlines of the weight plane."""

    backend: Literal["auto", "nccl", "gloo", "handle"] = "auto"
    """Transport; ``auto`` takes NCCL when every member has a GPU of its own, and Gloo when none has.
    ``handle``: through memory that the trainer lends, of the GPU that all members share, or of their host if
    weights are sent from there; ``auto`` takes it where all members share one GPU."""
    mode: Literal["shadow", "inplace", "cpu_async", "delta"] = "shadow"
    """How weights travel. ``shadow``: into a second copy while generation goes on. ``inplace``: straight into
    the live weights under a pause, where there is no memory for a second copy. ``cpu_async``: through host
    memory and Gloo, where members share no NCCL. ``delta``: only what changed, for slow links."""
    senders: Literal["ranks", "leader"] = "ranks"
    """Who sends. ``ranks``: every trainer rank its own rows. ``leader``: rank 0, after a gather; that is also
    how merged adapters and tensors divided by columns are sent."""
    bucket_bytes: int | None = Field(None, ge=1 << 16)
    """Bytes sent by one collective. Default: 512 MiB over NCCL, 64 MiB over Gloo, where a bucket is also the
    unit in which a stopped member is noticed."""
    publish_every: int = Field(1, ge=1)
    """Trainer steps between two published versions."""
    form_timeout_s: float = Field(60.0, gt=0)
    """Deadline for building the group."""
    transfer_timeout_s: float | None = Field(None, gt=0)
    """Deadline of one transfer, verification included. Default: 1.5 s and the time that the bytes take on a
    slow wire (100 MB/s over Gloo, 5 GB/s over NCCL). A member that is gone is noticed earlier."""
    answer_timeout_s: float = Field(1.0, gt=0)
    """A member that gives no sign of life for so long is lost. Longer where hosts are overloaded; a stopped
    rollout holds up the others for about three times as long."""
    adopt_timeout_s: float = Field(60.0, gt=0)
    """A rollout that has not put a received version into service by then is replaced. Without
    ``rollout.partial_rollout`` it finishes its running responses first, for as long as that takes."""


TINY_PREFIX = "tiny:"


class WarmStartSpec(SpecPart):
    """Supervised training that turns a random ``tiny:`` model into a base model.

    The result is cached by the digest of everything that shapes it, so it is made once.
    """

    examples: str
    """Import path ``module:function`` or ``file.py:function``; called with ``(count, seed)``, it
    returns ``(prompt, response)`` pairs of text."""
    steps: int = Field(500, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Examples per step."""
    learning_rate: float = Field(1.5e-3, gt=0)
    """Peak learning rate of AdamW; 30 steps of warm-up, then a cosine down to 10 %."""


class ModelSpec(SpecPart):
    """The policy that is trained."""

    path: str = Field(min_length=1)
    """A local folder, a Hugging Face id, or a preset made on the spot such as ``tiny:qwen2-0.4m``."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id. Unused otherwise."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder or id of the tokenizer, ``chars:SYMBOLS`` (one token a character) or ``bytes``. Default:
    the model's own; a ``tiny:`` preset uses ``bytes``."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run. Only for models that you have read."""
    warm_start: WarmStartSpec | None = None
    """Makes a base model from a random ``tiny:`` preset."""

    @property
    def is_tiny(self) -> bool:
        """Whether the model is a preset made on the spot."""
        return self.path.startswith(TINY_PREFIX)


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
    def colocated_rollouts(self) -> int:
        """Rollouts on the trainer's GPUs, the first ones of all: one side sleeps while the other works."""
        if self.topology.placement == "mixed":
            return self.trainer.world_size // self.engine_gpus
        return self.rollout.replicas if self.topology.is_colocated else 0

    def is_colocated(self, worker_id: str) -> bool:
        """Whether a worker is a rollout on the trainer's GPUs."""
        return worker_id in {f"rollout-{index}" for index in range(self.colocated_rollouts)}

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
        is_given = topology.task_groups or topology.is_colocated
        if not is_given or not isinstance(engine_arguments, Mapping):
            return values
        kind = ENGINES.get(rollout.get("engine", "torch"))
        try:
            engine_gpus = 1 if kind is None else kind.num_gpus(engine_arguments)
            if topology.is_colocated:
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
