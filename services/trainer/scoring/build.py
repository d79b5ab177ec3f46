"""Builds a rank that scores from a run's specification."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from services.common.models.tokenizer import check_teacher
from services.common.runspec.run import RunSpec
from services.trainer.collectives import Ranks
from services.trainer.engines.base import Progress
from services.trainer.engines.fsdp.build import Loader
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.oom import load_oom_limits
from services.trainer.engines.fsdp.parallel import RankTopology, build_topology
from services.trainer.model.policy import Policy, freeze
from services.trainer.ranks.build import device_of
from services.trainer.scoring.leader import Scorer
from services.trainer.settings import TrainerSettings
from services.trainer.steps.fields import FieldScoring
from services.trainer.transfers import QueueTransfers, of_vocabulary


@dataclass(frozen=True, slots=True)
class LoadedScorer:
    """A loaded rank of a scoring worker."""

    scorer: Scorer
    fields: FieldScoring


def build_policy(
    spec: RunSpec, settings: TrainerSettings, *, transfers: QueueTransfers, progress: Progress
) -> LoadedScorer:
    """Builds the policy of the role logp, without weights: it must adopt published ones before it scores.

    Blocks; runs in a thread. All ranks must call it.

    Raises:
        ValueError: If the model does not load, or the number of processes differs from the run's.
    """
    return _build(spec, settings, transfers=transfers, progress=progress, is_reference=False)


def build_reference(
    spec: RunSpec, settings: TrainerSettings, *, transfers: QueueTransfers, progress: Progress
) -> LoadedScorer:
    """Loads the frozen base model of the role ref_logp, in the dtype that the trainer computes in.

    Blocks; runs in a thread. All ranks must call it.

    Raises:
        ValueError: If the model does not load, or the number of processes differs from the run's.
    """
    check_teacher(spec)
    return _build(
        spec.of_reference, settings, transfers=transfers, progress=progress, is_reference=True
    )


def _build(
    spec: RunSpec,
    settings: TrainerSettings,
    *,
    transfers: QueueTransfers,
    progress: Progress,
    is_reference: bool,
) -> LoadedScorer:
    spec = _scoring_spec(spec)
    topology = _topology(spec, settings)
    loader = Loader(spec, settings, topology, progress)

    def make(model: PreTrainedModel) -> Policy:
        # Engines chose experts under the policy; the reference chooses its own.
        replay = "off" if is_reference else spec.rollout.routing_replay
        temperature = spec.rollout.sampling.temperature
        is_policy = not is_reference or spec.teacher is None
        policy = Policy(
            model,
            temperature=temperature,
            routing_replay=replay,
            is_invariant=spec.computes_as_engine and is_policy,
        )
        return freeze(policy)

    policy = loader.load(make) if is_reference else loader.shape(make)
    oom_limits = load_oom_limits(settings, spec.trainer, ranks=topology.data)
    engine = FsdpEngine(policy, spec=spec, topology=topology, oom_limits=oom_limits)
    fields = FieldScoring(
        "ref_logprobs" if is_reference else "proximal_logprobs",
        engine,
        fetch=of_vocabulary(transfers.fetch, engine.model.config.vocab_size),
        add=transfers.add,
        shares_prefixes=spec.shares_prefixes,
    )
    return LoadedScorer(Scorer(engine), fields)


def _scoring_spec(spec: RunSpec) -> RunSpec:
    """Returns the run with a trainer of this worker's size, without features that only training needs."""
    changes = {
        "world_size": spec.topology.scoring_ranks,
        "tensor_parallel": 1,
        "expert_parallel": 1,
        "context_parallel": 1,
        "zero_stage": 3,
        "activation_checkpointing": False,
        "cpu_offload": False,
        "compile": False,
    }
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})


def _topology(spec: RunSpec, settings: TrainerSettings) -> RankTopology:
    device, world_size = device_of(settings), settings.world_size
    if world_size == spec.trainer.world_size == 1:
        # Nothing is sharded, and the weights already have the right dtype.
        return RankTopology(device=device, data=Ranks())
    return build_topology(spec.trainer, device=device, rank=settings.rank, world_size=world_size)
