"""Builds a rank that can train from a run's specification."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.errors import DataLossError, FailedPreconditionError, NotFoundError
from services.common.models.tokenizer import check_teacher, load_tokenizer
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import checkpoint_root
from services.common.stores import StoredCheckpoints, fetch, is_url, join_url, open_checkpoints
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.checkpoint.compatibility import CRITIC, critic_folder, model_facts
from services.trainer.checkpoint.manifest import STEP_PREFIX, UnusableCheckpointError
from services.trainer.engines.base import EngineArgs, ModelRole, Progress, build_engines
from services.trainer.ranks.rank import Rank, Runner, StepProfiler, StepRecorder, prepare_recorder
from services.trainer.ranks.training_recorder import TrainingRecorder
from services.trainer.settings import TrainerSettings
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.fields import FieldScoring
from services.trainer.steps.step import CriticStepRunner, StepRunner
from services.trainer.transfers import QueueTransfers, Transfers, of_vocabulary


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A loaded rank of a policy trainer."""

    rank: Rank
    step: int
    """Newest trained step: 0, or the step of the checkpoint that training resumes from."""


@dataclass(frozen=True, slots=True)
class LoadedCritic:
    """A loaded rank of a critic."""

    rank: Rank
    values: FieldScoring
    step: int
    """Newest trained step, as in :class:`LoadedRank`."""


def build_rank(
    spec: RunSpec, settings: TrainerSettings, *, transfers: Transfers, progress: Progress
) -> LoadedRank:
    """Loads the policy, its reference and critic if needed, and the newest checkpoint.

    Blocks; runs in a thread. All ranks must call it.

    Raises:
        ValueError: If the model does not load or cannot be trained.
        UnusableCheckpointError: If the checkpoint to start from is damaged or gone.
    """
    make_recorder = prepare_recorder(spec)
    roles: list[ModelRole] = ["policy"]
    if spec.needs_reference and not spec.topology.own_gpus("ref_logp"):
        check_teacher(spec)
        roles.append("reference")
    if spec.algorithm.advantage_kind.needs_critic and not spec.topology.own_gpus("critic"):
        roles.append("critic")
    engines = build_engines(EngineArgs(spec, settings, device_of(settings), roles, progress))
    policy, critic = engines["policy"], engines.get("critic")
    runner = StepRunner(
        policy,
        reference=engines.get("reference"),
        critic=None if critic is None else CriticRunner(critic, spec=spec),
        spec=spec,
    )
    recorder = None
    if spec.samples.is_on and policy.ranks.is_first_of_peers:
        recorder = TrainingRecorder(transfers.store_records, spec)
        runner.on_trained = recorder.collect
    root = checkpoint_root(spec.trainer.checkpoint.directory, settings.state_directory)
    step_recorder = make_recorder and make_recorder(root, settings.rank, policy)
    rank = _rank(
        runner,
        spec,
        settings,
        transfers=transfers,
        root=root,
        recorder=recorder,
        step_recorder=step_recorder,
    )
    step = _resume(rank, root, spec.trainer.checkpoint.start_from, settings)
    if step_recorder is not None:
        step_recorder.begin(step, spec, policy)
    return LoadedRank(rank=rank, step=step)


def build_critic(
    spec: RunSpec, settings: TrainerSettings, *, transfers: QueueTransfers, progress: Progress
) -> LoadedCritic:
    """Loads a critic that has its own processes. Blocks; runs in a thread. All ranks must call it.

    Raises:
        ValueError: If the model does not load or cannot be trained.
        UnusableCheckpointError: If the checkpoint to start from is damaged or gone.
    """
    spec = spec.of_critic
    roles: Sequence[ModelRole] = ["critic"]
    (engine,) = build_engines(
        EngineArgs(spec, settings, device_of(settings), roles, progress)
    ).values()
    runner = CriticStepRunner(CriticRunner(engine, spec=spec), spec=spec)
    root = checkpoint_root(spec.trainer.checkpoint.directory, settings.state_directory) / CRITIC
    rank = _rank(runner, spec, settings, transfers=transfers, root=root, folder=CRITIC)
    values = FieldScoring(
        "values",
        engine,
        fetch=of_vocabulary(transfers.fetch, engine.model.config.vocab_size),
        add=transfers.add,
        shares_prefixes=spec.shares_prefixes,
    )
    start_from = spec.trainer.checkpoint.start_from
    folder = critic_folder(start_from) if start_from else None
    return LoadedCritic(rank=rank, values=values, step=_resume(rank, root, folder, settings))


def _store(spec: RunSpec, settings: TrainerSettings, folder: str) -> StoredCheckpoints | None:
    """Returns the object store of the checkpoints; None without one.

    Args:
        folder: Subfolder of the critic's checkpoints; empty for those of the policy.
    """
    url = spec.trainer.checkpoint.directory
    if url is None or not is_url(url):
        return None
    url = join_url(url, folder) if folder else url
    return open_checkpoints(url, rank=settings.rank, world_size=settings.world_size)


def _rank(
    runner: Runner,
    spec: RunSpec,
    settings: TrainerSettings,
    *,
    transfers: Transfers,
    root: Path,
    folder: str = "",
    recorder: TrainingRecorder | None = None,
    step_recorder: StepRecorder | None = None,
) -> Rank:
    """Creates a rank; ``folder`` is the subfolder of its profiles."""
    engine = runner.engine
    return Rank(
        runner,
        fetch=of_vocabulary(transfers.fetch, engine.model.config.vocab_size),
        spec=spec,
        checkpointer=Checkpointer(
            runner.trained(),
            root=root,
            keep=spec.trainer.checkpoint.keep,
            ranks=engine.ranks,
            model=model_facts(spec, engine.model.config, load_tokenizer(spec.model)),
            store=_store(spec, settings, folder),
        ),
        profiler=StepProfiler(
            settings.state_directory / "profiles" / folder,
            rank=settings.rank,
            steps=frozenset(spec.trainer.profile_steps),
        ),
        recorder=recorder,
        step_recorder=step_recorder,
    )


def _resume(rank: Rank, root: Path, start_from: str | None, settings: TrainerSettings) -> int:
    """Loads the checkpoint that training resumes from; returns its step, or 0 if there is none.

    A checkpoint of this run exists if its worker was lost before; it takes precedence over ``start_from``.

    Raises:
        UnusableCheckpointError: If it is damaged or gone, or the object store refuses to give it.
        OtherCheckpointError: If it is of another model, or lacks one.
        UnavailableError: If the object store does not answer before the deadline.
    """
    is_expected = settings.resume or any(root.glob(f"{STEP_PREFIX}*"))
    try:
        if is_expected or rank.checkpointer.store is not None:
            try:
                return rank.restore()
            except NotFoundError:
                if is_expected:
                    raise
        if start_from is None:
            return 0
        if is_url(start_from):
            return rank.restore(fetch(start_from, "checkpoint", cache=settings.object_cache))
        return rank.restore(Path(start_from))
    except (DataLossError, NotFoundError, FailedPreconditionError) as error:
        raise UnusableCheckpointError(error.message) from error


def device_of(settings: TrainerSettings) -> torch.device:
    """Returns the device of this process: its own GPU, or the CPU."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", settings.local_rank)


def gpu_names() -> list[str]:
    """Returns the GPUs that this process sees, in the form that ``CUDA_VISIBLE_DEVICES`` accepts anywhere."""
    devices = range(torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
