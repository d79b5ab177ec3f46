"""RunSpec: the complete description of a run."""

import hashlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from services.common.doors import References
from services.common.fields import TEACHER_PROMPT, TEACHER_TOP_K
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.base import MAX_SECONDS, NameIn, SpecPart
from services.common.runspec.data import DataSpec
from services.common.runspec.engines import ENGINES, InvariantEngine, engine_kind
from services.common.runspec.formulas import LOSSES, DistillArguments
from services.common.runspec.pods import PodSpec
from services.common.runspec.rollout import NEED_ANSWERS, RewardSpec, RolloutSpec
from services.common.runspec.topology import TopologySpec
from services.common.runspec.trackers import TrackerSpec
from services.common.runspec.trainer import CriticSpec, FolderPath, TrainerSpec
from services.common.runspec.weight_modes import MIN_BUCKET_BYTES, MODES, STAGING_SLOTS, TRANSPORTS
from services.common.runspec.workers import WORKERS, needs_whole_weights
from services.common.stores import is_url

RECORDERS: Final = References("step_recorders")
"""The recorders of steps by the value of ``record``."""


class LimitsSpec(SpecPart):
    """Deadlines and restart limits of a run."""

    queue_timeout_s: float = Field(0.0, ge=0, le=MAX_SECONDS)
    """Max seconds that the run waits in the queue for capacity in the project's quota, counted from
    its submission or from a resume. The run fails after that. 0 waits without a limit."""
    start_timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Max seconds until all workers are ready, including the warm start."""
    step_timeout_s: float = Field(1800.0, gt=0, le=MAX_SECONDS)
    """Max seconds of one trainer step."""
    stall_timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Max seconds without progress. An episode that produces no token and no call for this long is
    stopped and continues from its stored tokens on any replica; an engine that produces no token
    is replaced. The age of a response alone never ends it."""
    max_restarts: int = Field(3, ge=0)
    """Max consecutive restarts after the loss of a worker or of the transferqueue, without a
    finished step between them; the next loss fails the run. After the loss of a trainer, the run
    resumes from the newest checkpoint."""


class TransferQueueSpec(SpecPart):
    """Quota and time-out of a run's samples in the transferqueue."""

    quota_bytes: int = Field(4 << 30, ge=1 << 20)
    """Max bytes of the run's samples that have not been released; a put that exceeds them waits. A
    batch of responses of maximum length must fit."""
    put_timeout_s: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """Max seconds that a producer waits for free space, and a rollout for a lost connection, before
    its put fails; the error states the reason."""


class ValidationSpec(SpecPart):
    """Evaluation of one pinned weight version during training."""

    every: int = Field(10, ge=0)
    """Number of weight versions between evaluations. 0 evaluates only at the end (``at_end``)."""
    before_train: bool | None = None
    """If true, the initial weights are evaluated. Default (null): true if ``every`` is above 0."""
    at_end: bool = True
    """If true, the final weights are evaluated."""
    only: bool = False
    """If true, the run evaluates the initial weights and ends without training."""
    mode: Literal["overlap", "barrier"] = "overlap"
    """``overlap``: training continues during an evaluation. ``barrier``: training waits until it is
    complete."""
    replicas: int = Field(0, ge=0)
    """Number of rollouts that are reserved for an evaluation while it runs: they keep its weights
    until it is complete, and the other rollouts and the trainer continue. 0 evaluates on all
    rollouts, and new weights wait until the last response is finished."""
    samples_per_prompt: int = Field(1, ge=1)
    """Sampled responses per held-out prompt, in addition to one greedy response."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled responses."""
    solved_from: float = 1.0
    """Min reward of a response that counts as correct for ``pass@k``."""
    timeout_s: float = Field(1800.0, gt=0, le=MAX_SECONDS)
    """Max seconds of one evaluation. After that, the scores that exist are reported with status
    ``timeout``."""

    @property
    def begins(self) -> bool:
        """True if the initial weights are evaluated."""
        return self.only or (self.every > 0 if self.before_train is None else self.before_train)


class SamplesSpec(SpecPart):
    """Retention of samples with their texts, for people to read; independent of the data for training."""

    groups_per_step: float = Field(8, ge=0)
    """Mean number of groups per step that are kept. A hash of the group's id decides which ones. 0
    keeps none."""
    heldout_prompts: int = Field(32, ge=0)
    """Approximate number of held-out prompts whose samples are kept; every evaluation keeps the
    same prompts. 0 keeps none."""
    max_steps: int = Field(0, ge=0)
    """Number of newest steps whose samples are kept. 0 sets no limit besides ``max_bytes``."""
    max_bytes: int = Field(256 << 20, ge=1 << 20)
    """Max bytes of kept samples on the transferqueue's disk; the oldest are deleted first."""
    directory: FolderPath | None = None
    """URL in an object store, such as ``s3://bucket/folder``, to which the samples are uploaded while
    training continues, each run's to its own folder. null keeps them on the transferqueue's disk only."""

    @field_validator("directory")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value and not is_url(value):
            raise ValueError(
                f"must be a URL of an object store, such as s3://bucket/folder, got {value!r}"
            )
        return value

    def records_group(self, group_id: str, *, prompts_per_step: int) -> bool:
        """Returns True if the samples of a group are kept; all processes decide alike."""
        return _is_drawn(group_id, self.groups_per_step / prompts_per_step)

    def keeps_prompt(self, row: int, *, num_prompts: int) -> bool:
        """Returns True if the samples of a held-out prompt are kept; all evaluations decide alike."""
        return _is_drawn(f"row {row}", self.heldout_prompts / max(num_prompts, 1))

    @property
    def is_on(self) -> bool:
        return self.groups_per_step > 0 or self.heldout_prompts > 0


def _is_drawn(name: str, fraction: float) -> bool:
    """Returns True for a fraction of all names, chosen by their hash."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class WeightStorageSpec(SpecPart):
    """Folder or object store through which weight versions reach the rollouts."""

    directory: Annotated[FolderPath, Field(min_length=1)]
    """Folder of the versions, which trainer and rollouts see under the same path, or a URL such as
    ``s3://bucket/folder``. Each run has its own folder in it."""
    keep: int = Field(4, ge=2)
    """Max number of stored versions. A rollout that still reads an older one starts again with the newest."""
    timeout_s: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Max seconds during which the store may fail, for the trainer or for one rollout; then the run
    restarts its loops with the first cause. Training continues meanwhile as far as
    ``algorithm.max_staleness`` allows."""


class WeightSyncSpec(SpecPart):
    """Transport, bucket size and deadlines of weight transfers."""

    backend: Annotated[str, NameIn(TRANSPORTS, ("auto",))] = "auto"
    """Transport of the weights. ``nccl`` and ``gloo`` use the collectives of these libraries.
    ``handle`` uses memory that the trainer shares: memory of the GPU that all members share, or
    host memory if weights are sent from there. ``storage`` writes versions to the folder or object
    store ``weight_sync.storage``, from which each rollout loads them at its own pace. ``auto`` selects
    ``handle`` if all members share one GPU, NCCL if every member has its own GPU, and Gloo if none has
    one. ``servers`` belongs to the mode of that name."""
    mode: Annotated[str, NameIn(MODES)] = "shadow"
    """Mode of the transfer. ``shadow``: rollouts receive into a second copy of the weights while
    generation continues. ``inplace``: rollouts pause and receive into the live weights, for GPUs
    without memory for a second copy. ``cpu_async``: weights travel through host memory and Gloo, for
    members that share no NCCL. ``delta``: only changed values are sent, for slow links. ``offloaded``:
    like ``shadow``, but the trainer's copy of the weights is in host memory, for a trainer whose GPU has no
    memory for one. ``servers``: the trainer sends to the workers of attached vLLM servers, between GPUs."""
    storage: WeightStorageSpec | None = None
    """Store of the versions of ``backend: storage``; null for other transports."""
    senders: Literal["ranks", "leader"] = "ranks"
    """Senders. ``ranks``: every trainer rank sends its own rows. ``leader``: rank 0 gathers all
    weights and sends them. A model with merged adapters, or with tensors that are sharded by
    columns, is always sent by rank 0."""
    bucket_bytes: int | None = Field(None, ge=MIN_BUCKET_BYTES)
    """Bytes of one collective. Default: 512 MiB over NCCL, and 64 MiB over Gloo, which detects a
    stopped member once per bucket."""
    staging_bytes: int | None = Field(None, ge=1 << 18)
    """Max bytes of the buffers through which a receiver places buckets: two for each sender. Larger buckets
    become smaller. null sets no limit besides ``bucket_bytes``."""
    publish_every: int = Field(1, ge=1)
    """Trainer steps between two published weight versions."""
    form_timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Max seconds to form the weight group. A member that has not prepared a version yet may be silent for as
    long: while it allocates its buffers, its process may stand still."""
    transfer_timeout_s: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Max seconds of one transfer, including verification. Default: 1.5 s plus the time that the
    bytes take at a low bandwidth (100 MB/s over Gloo, 5 GB/s over NCCL), or four times that of the
    transfer before; a transfer that exceeds it is repeated with four times as much. A terminated
    member is detected earlier."""
    answer_timeout_s: float = Field(1.0, gt=0, le=MAX_SECONDS)
    """Seconds without a sign of life after which a member that has prepared a version counts as lost; before
    that it has ``form_timeout_s``. A killed one is seen at once. Increase it on overloaded hosts; a stopped
    rollout delays the other members by about three times this value."""
    adopt_timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Max seconds until a rollout has adopted a received version; after that it is replaced.
    Without ``rollout.partial_rollout``, a rollout first finishes its running responses, however
    long they take."""

    @property
    def is_stored(self) -> bool:
        """True if rollouts load weights from a store."""
        return self.backend in TRANSPORTS and TRANSPORTS[self.backend].is_stored

    def staged_bucket_bytes(self, default: int, *, num_sources: int) -> int:
        """Returns the bytes of a bucket whose staging buffers are within ``staging_bytes``.

        Args:
            default: Bytes of a bucket if ``bucket_bytes`` is not set.
            num_sources: Number of senders.
        """
        size = self.bucket_bytes or default
        if self.staging_bytes is not None:
            size = min(size, self.staging_bytes // (STAGING_SLOTS * num_sources))
        return max(size, MIN_BUCKET_BYTES)


TINY_PREFIX = "tiny:"


class WarmStartSpec(SpecPart):
    """Supervised training that turns a randomly initialized ``tiny:`` model into a base model.

    The result is cached by a digest of all inputs, so each is trained once.
    """

    examples: str
    """Import path ``module:function`` or ``file.py:function``. The function receives ``(count,
    seed)`` and returns ``(prompt, response)`` pairs of text."""
    steps: int = Field(500, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Examples per step."""
    learning_rate: float = Field(1.5e-3, gt=0)
    """Peak learning rate of AdamW. The schedule has 30 steps of warm-up and a cosine decay to 10 %
    of the peak."""


class ModelSpec(SpecPart):
    """A model: its weights, tokenizer and optional warm start."""

    path: str = Field(min_length=1)
    """A local folder, a Hugging Face id, or a randomly initialized preset such as
    ``tiny:qwen2-0.4m``."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id. Unused otherwise."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder or Hugging Face id of the tokenizer, ``chars:SYMBOLS`` (one token per character) or
    ``bytes``. Default: the model's own tokenizer, and ``bytes`` for a ``tiny:`` preset."""
    trust_remote_code: bool = False
    """If true, code that comes with the model may run. Enable it only for models whose code you
    have reviewed."""
    warm_start: WarmStartSpec | None = None
    """Supervised training that makes a base model of a ``tiny:`` preset."""
    images: bool = False
    """If true, the vision tower of a multimodal checkpoint is loaded too, and prompts may have images.
    Otherwise only its language model is."""

    @property
    def is_tiny(self) -> bool:
        """True if the model is a randomly initialized preset."""
        return self.path.startswith(TINY_PREFIX)


_POLICY: Final = "policy"


class TeacherSpec(ModelSpec):
    """The model whose distribution the policy learns."""

    path: str = Field(_POLICY, min_length=1)
    """A model as in ``model.path``, with the policy's tokenizer. ``policy``: the policy is its own teacher,
    with the weights at the start of the step and a prompt with more information (self-distillation)."""
    url: str | None = Field(None, pattern=r"^https?://")
    """Address of a vLLM or SGLang server of the teacher, such as ``http://teacher:8000``. Rollouts ask it for
    each finished response; then the trainer does not load the teacher, and uses ``path`` only to compare the
    tokenizers. null loads the teacher in the trainer."""
    server: Literal["vllm", "sglang"] = "vllm"
    """Program that serves the teacher."""
    timeout_s: float = Field(300.0, gt=0)
    """Max seconds until a served teacher has scored a group."""
    concurrency: int = Field(16, ge=1)
    """Max responses that a rollout sends to a server at once."""
    prompt_column: str | None = None
    """Column with the prompt that the teacher sees in place of the policy's, for example with the solution
    (OPSD, arXiv:2601.18734); a text or chat messages, like ``data.prompt_column``."""
    demonstration: str | None = None
    """Text that follows the prompt for the teacher, in which ``{response}`` is the best other response of the
    group (SDPO, arXiv:2601.20802). A response without another one of at least ``min_reward`` does not
    train."""
    min_reward: float = 1.0
    """Min reward of a response that ``demonstration`` shows."""

    @property
    def is_policy(self) -> bool:
        """True if the policy is its own teacher."""
        return self.path == _POLICY

    @property
    def has_own_prompt(self) -> bool:
        """True if the teacher sees another prompt than the policy."""
        return self.prompt_column is not None or self.demonstration is not None


# Lower bound of the default of rollout.max_running_samples: evaluations need slots too.
_MIN_RUNNING = 64


class RunSpec(SpecPart):
    """The description of a run.

    The user writes it; it is resolved once, and all processes use the same one.
    """

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Name of the run, a DNS label: 1 to 63 lower-case letters, digits and hyphens, with no hyphen
    at an end."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the data order, of sampling and of the initial weights."""
    model: ModelSpec
    """The policy that is trained."""
    teacher: TeacherSpec | None = None
    """Teacher of an on-policy distillation: a model with the same tokenizer whose distribution the
    policy learns on its own responses. With ``algorithm.loss: distill`` whole distributions are compared.
    Otherwise it is the reference of ``algorithm.kl``, whose default coefficient is then 1 and whose
    default estimator is then ``k1+``; rewards have no influence on training unless
    ``algorithm.advantage`` names an estimator."""
    data: DataSpec
    """Training and held-out prompts."""
    rollout: RolloutSpec
    """Generation and rewards."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Advantage, loss, off-policy correction and staleness."""
    trainer: TrainerSpec
    """Batch, optimizer, precision, parallelism and checkpoints."""
    critic: CriticSpec = CriticSpec()
    """The critic for ``algorithm.advantage: gae``."""
    topology: TopologySpec = TopologySpec()
    """Assignment of GPUs to tasks."""
    validation: ValidationSpec = ValidationSpec()
    """Evaluation on held-out prompts."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """Transfer of weights from the trainer to rollouts."""
    transferqueue: TransferQueueSpec = TransferQueueSpec()
    """Storage of samples between rollouts and the trainer."""
    samples: SamplesSpec = SamplesSpec()
    """Samples that are kept for people to read."""
    record: Annotated[str, NameIn(RECORDERS, ("off",))] = "off"
    """``full``: the trainer writes for each step everything that its outcome depended on, and a digest
    of the new weights, to ``record`` in the folder of the checkpoints, and computes with deterministic
    operators. ``slipstream replay`` repeats the training from it bit by bit, or with other
    settings. ``off``: nothing."""
    trackers: tuple[TrackerSpec, ...] = ()
    """Experiment trackers that receive the run's metrics."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines and restart limits."""
    pods: dict[str, PodSpec] = Field(default_factory=dict)
    """Pods on Kubernetes by the kind of their worker, such as ``trainer``, ``rollout`` or ``ref_logp``, as
    far as the installation lets runs choose them. Other launchers ignore it."""

    @field_validator("pods")
    @classmethod
    def _pods_are_of_workers(cls, pods: dict[str, PodSpec]) -> dict[str, PodSpec]:
        roles = WORKERS.names()
        if unknown := sorted(set(pods) - set(roles)):
            raise ValueError(
                f"unknown kind of worker {unknown[0]!r}; use one of {', '.join(roles)}"
            )
        return pods

    @field_validator("trackers")
    @classmethod
    def _trackers_are_named_once(cls, trackers: tuple[TrackerSpec, ...]) -> tuple[TrackerSpec, ...]:
        kinds = [tracker.kind for tracker in trackers]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(
                f"duplicate tracker {twice[0]!r} ({kinds.count(twice[0])} times); keep one"
            )
        return trackers

    @property
    def needs_reference(self) -> bool:
        """True if the trainer, or ``ref_logp``, needs the frozen base model or a frozen teacher."""
        is_elsewhere = self.teacher is not None and (self.teacher_urls or self.teacher.is_policy)
        is_compared = self.algorithm.kl.coefficient > 0 or self.algorithm.loss_kind.needs_reference
        return is_compared and not is_elsewhere

    @property
    def distillation(self) -> DistillArguments | None:
        """The divergence from the teacher's distributions; None unless the loss is one."""
        algorithm = self.algorithm
        if not algorithm.loss_kind.distills:
            return None
        return DistillArguments.model_validate(algorithm.loss_arguments)

    @property
    def teacher_urls(self) -> dict[str, str]:
        """Addresses of served teachers by split of ``data.train``; empty if the teacher is not served."""
        if self.teacher is None:
            return {}
        urls = {
            split: getattr(dataset, "teacher_url", None) or self.teacher.url
            for split, dataset in self.data.train_sets.items()
        }
        return {split: url for split, url in urls.items() if url is not None}

    @property
    def teacher_fields(self) -> tuple[str, ...]:
        """Fields that rollouts add to samples for the teacher."""
        is_served = bool(self.teacher_urls)
        is_used = {
            TEACHER_PROMPT: self.teacher is not None and self.teacher.has_own_prompt,
            TEACHER_TOP_K: is_served and self.algorithm.loss_kind.distills,
            "ref_logprobs": is_served and self.algorithm.kl.coefficient > 0,
        }
        return tuple(name for name, is_present in is_used.items() if is_present)

    @property
    def sends_rows(self) -> bool:
        """True if each trainer process sends its own rows of the weights; else rank 0 sends all."""
        trainer = self.trainer
        if self.weight_sync.senders == "leader" or trainer.lora is not None:
            return False
        # Without stages, columns of matrices and copies of experts are no rows that follow one another.
        return trainer.pipeline_parallel > 1 or (
            trainer.tensor_parallel == 1 and trainer.expert_parallel in (1, trainer.world_size)
        )

    @property
    def sends_adapters(self) -> bool:
        """True if rollouts receive adapters only (``trainer.lora.sync``, resolved)."""
        lora = self.trainer.lora
        if lora is None or lora.sync != "auto":
            return lora is not None and lora.sync == "adapter"
        return not (
            self.model.is_tiny
            or not self.has_engine
            or lora.adapts_experts
            or needs_whole_weights(self.topology)
            or self.weight_sync.mode == "inplace"
        )

    @property
    def adds_adapters(self) -> bool:
        """True if the rollout engine adds the adapters that it receives to its own base weights."""
        is_able = engine_kind(self.rollout.engine).takes_adapters and not self.model.images
        return is_able and self.sends_adapters

    @property
    def is_rewarded(self) -> bool:
        """True if the samples that train have rewards."""
        have_own = any(dataset.rewards for dataset in self.data.train_sets.values())
        is_scored = bool(self.rollout.rewards) or have_own
        return is_scored and not self.algorithm.num_demonstrations

    @property
    def of_reference(self) -> "RunSpec":
        """The run with the reference's model: the teacher replaces the policy, if there is one."""
        if self.teacher is None or not self.needs_reference:
            return self
        return self.model_copy(update={"model": self.teacher})

    @property
    def of_critic(self) -> "RunSpec":
        """The run with the layout of a critic that has its own GPUs as the trainer's."""
        trainer, critic = self.trainer, self.critic
        changes: dict[str, Any] = {
            "world_size": self.topology.own_gpus("critic"),
            "context_parallel": 1,
            **{key: getattr(critic, key) for key in CriticSpec.LAYOUT},
        }
        if critic.cpu_offload is None:
            changes["cpu_offload"] = trainer.cpu_offload
        if trainer.pipeline_parallel > critic.pipeline_parallel == 1:
            changes["engine"] = "fsdp"
        return self.model_copy(update={"trainer": trainer.model_copy(update=changes)})

    @property
    def shares_prefixes(self) -> bool:
        """True if tokens that samples share are computed once.

        It is False if each sample needs its own choice of experts for them, or counts them in the
        experts' load balance.
        """
        has_own_experts = self.rollout.routing_replay != "off"
        return (
            self.trainer.share_prefixes
            and not has_own_experts
            and self.trainer.balancing.kind != "loss"
        )

    @property
    def computes_as(self) -> InvariantEngine | None:
        """Engine whose operators the trainer uses, so that equal weights give equal logprobs; None if none.

        The logprobs are equal to the last bit if the trainer has the operators for the model. It is None
        with ranks that divide a layer or a pack, because they add in another order, and with adapters,
        because an engine adds them to the weights.
        """
        trainer, rollout = self.trainer, self.rollout
        if (
            rollout.reproducible != "batch_invariant"
            or trainer.engine != "fsdp"
            or trainer.tensor_parallel != 1
            or trainer.context_parallel != 1
            or trainer.lora is not None
        ):
            return None
        if rollout.engine == "torch":
            return "torch"
        is_alone = engine_kind(rollout.engine).num_gpus(rollout.engine_arguments) == 1
        return "vllm" if rollout.engine == "vllm" and is_alone else None

    @property
    def needs_proximal(self) -> bool:
        """True if training needs logprobs of the weights at the start of the step, from a separate pass.

        With one update per batch these are the current weights; ``bypass`` uses the rollouts'
        logprobs instead.
        """
        updates = self.trainer.updates_per_step
        is_bypassed = self.correction == "bypass"
        kl = self.algorithm.kl
        in_reward = kl.coefficient > 0 and kl.placement == "reward"
        in_loss = updates > 1 and not is_bypassed and not self.interpolates_proximal
        return in_reward or in_loss or self.algorithm.looks_ahead

    @property
    def interpolates_proximal(self) -> bool:
        """True if the proximal logprobs are approximated by interpolation."""
        return self.algorithm.proximal == "interpolated" and self.correction == "decoupled"

    @property
    def correction(self) -> Literal["bypass", "decoupled", "none"]:
        """The off-policy correction, with ``auto`` resolved."""
        updates = self.trainer.updates_per_step
        return self.algorithm.resolved_correction(
            updates_per_step=updates, is_quantized=self.rollout.is_quantized
        )

    @property
    def rewards(self) -> dict[str, tuple[RewardSpec, ...]]:
        """The rewards by key: ``rollout.rewards``, and those of sets that have their own."""
        sets = {
            f"data.{split}.rewards": dataset.rewards for split, dataset in self.data.sets.items()
        }
        return {"rollout.rewards": self.rollout.rewards} | {
            key: rewards for key, rewards in sets.items() if rewards is not None
        }

    @property
    def has_token_rewards(self) -> bool:
        """True if a reward scores turns or tokens."""
        return any(
            spec.per != "response" and spec.column is None
            for rewards in self.rewards.values()
            for spec in rewards
        )

    @property
    def reward_columns(self) -> tuple[str, ...]:
        """Columns of numbers per token that rewards fill for the loss or the advantage."""
        columns = {
            spec.column for rewards in self.rewards.values() for spec in rewards if spec.column
        }
        return tuple(sorted(columns))

    @property
    def needs_answers(self) -> bool:
        """True if the loss or a reward needs an expected answer in each row."""
        reward_names = {reward.name for rewards in self.rewards.values() for reward in rewards}
        return self.algorithm.num_demonstrations > 1 or not reward_names.isdisjoint(NEED_ANSWERS)

    @property
    def samples_per_group(self) -> int:
        """Samples of a group: its members, and a greedy response if the advantage needs one."""
        return self.rollout.group_size + self.algorithm.advantage_kind.needs_greedy

    @property
    def engine_gpus(self) -> int:
        """GPUs of one rollout, on a machine that has GPUs."""
        return engine_kind(self.rollout.engine).num_gpus(self.rollout.engine_arguments)

    @property
    def has_engine(self) -> bool:
        """True if rollouts have an engine.

        Without one they only encode rows: they need no GPU and receive no weights.
        """
        return self.rollout.engine != "none"

    @property
    def runs_engines(self) -> bool:
        """True if rollouts have an engine that runs where they do, not in separate servers."""
        return self.has_engine and not engine_kind(self.rollout.engine).is_remote

    @property
    def colocated_rollouts(self) -> int:
        """Number of rollouts on the trainer's GPUs.

        These are the first ones of the run. Either they or the trainer sleep while the other side
        runs.
        """
        if self.topology.placement == "mixed":
            return self.trainer.world_size // self.engine_gpus
        return self.rollout.replicas if self.topology.is_colocated else 0

    def is_colocated(self, worker_id: str) -> bool:
        """Returns True if a worker is a rollout on the trainer's GPUs."""
        return worker_id in {f"rollout-{index}" for index in range(self.colocated_rollouts)}

    def num_steps(self, num_rows: int) -> int:
        """Returns the number of steps of the whole run.

        Args:
            num_rows: Rows of the training data; used only if the run's length is given in epochs.
        """
        if self.trainer.steps is not None:
            return self.trainer.steps
        # Rounding removes the floating-point error of the product.
        prompts = round((self.data.epochs or 0) * num_rows, 6)
        return max(1, math.ceil(prompts / self.trainer.prompts_per_step))

    @model_validator(mode="before")
    @classmethod
    def _asynchrony_gives_defaults(cls, values: Any) -> Any:
        """Fills in defaults of rollouts that follow from the max staleness."""
        if not isinstance(values, Mapping) or not isinstance(values.get("rollout"), Mapping):
            return values
        try:
            algorithm = AlgorithmSpec.model_validate(values.get("algorithm", {}))
            rollout = RolloutSpec.model_validate(values["rollout"])
            trainer = TrainerSpec.model_validate(values.get("trainer"))
        except ValidationError:
            return values  # it is reported with its key when the field itself is validated
        max_staleness = algorithm.max_staleness
        slots = _slots_per_rollout(
            rollout, trainer, max_staleness=max_staleness, replicas=rollout.replicas
        )
        defaults = {"partial_rollout": max_staleness > 0, "max_running_samples": slots}
        return {**values, "rollout": {**defaults, **values["rollout"]}}

    @model_validator(mode="before")
    @classmethod
    def _demonstrations_give_defaults(cls, values: Any) -> Any:
        """Fills in defaults of a run that trains on demonstrations instead of samples."""
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
        """Fills in defaults of distillation if a teacher is named."""
        algorithm = values.get("algorithm", {}) if isinstance(values, Mapping) else None
        if not isinstance(algorithm, Mapping) or values.get("teacher") is None:
            return values
        kl, loss = algorithm.get("kl", {}), LOSSES.get(str(algorithm.get("loss")))
        if not isinstance(kl, Mapping) or (loss is not None and loss.num_demonstrations):
            return values
        if loss is None or not loss.distills:
            kl = {"coefficient": 1.0, "estimator": "k1+", **kl}
        defaults = {"advantage": "none", "min_group_size": 1}
        return {**values, "algorithm": {**defaults, **algorithm, "kl": kl}}

    @model_validator(mode="before")
    @classmethod
    def _topology_gives_the_counts(cls, values: Any) -> Any:
        """Fills in process counts that follow from task groups or colocation.

        The rules report contradictions later.
        """
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
                num_rollouts = topology.gpus_of("generate") // engine_gpus
                counts = topology.gpus_of("train"), max(1, num_rollouts)
        except ValueError:
            return values  # it is reported by the rules
        return {
            **values,
            "trainer": {"world_size": counts[0], **trainer},
            "rollout": {"replicas": counts[1], **rollout},
        }


def default_slots(spec: RunSpec, *, max_staleness: int, replicas: int) -> int:
    """Returns the default of ``rollout.max_running_samples`` for a max staleness and a number of rollouts."""
    return _slots_per_rollout(
        spec.rollout, spec.trainer, max_staleness=max_staleness, replicas=replicas
    )


def _slots_per_rollout(
    rollout: RolloutSpec, trainer: TrainerSpec, *, max_staleness: int, replicas: int
) -> int:
    ahead = (max_staleness + 1) * trainer.prompts_per_step * rollout.group_size
    max_running = engine_kind(rollout.engine).most_running
    return max(_MIN_RUNNING, min(max_running, ahead // replicas))
