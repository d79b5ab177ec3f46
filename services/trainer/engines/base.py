"""Protocol of a training engine: computes, updates, exports and saves one model on one rank.

A step and the ranks know engines through :class:`TrainEngine` only. One process has an engine for each of
its models: the policy, and depending on the algorithm the reference and the critic. ``ENGINES`` in
``services/common/runspec/engines.py`` has the engines that a run can name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from services.common.errors import InternalError
from services.common.runspec.engines import train_engine_kind
from services.common.runspec.formulas import DistillArguments
from services.common.runspec.run import RunSpec
from services.trainer.batch.packing import Work
from services.trainer.batch.samples import Samples
from services.trainer.batch.step_plan import Bounds, StepPlan
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.settings import TrainerSettings
from services.weightsync.weight_plan import TensorSpec
from services.wire.data.jagged import Jagged

ModelRole = Literal["policy", "reference", "critic"]
Micros = tuple[tuple[int, ...], ...]
"""Micro-batches of an update, each with positions in a rank's sequences."""
UNSCORED: Final = torch.finfo(torch.float32).max
"""Score of each token of a sequence that did not fit into memory."""
_REMEDY = (
    "lower trainer.tokens_per_micro_batch or rollout.max_response_tokens, or set "
    "trainer.activation_checkpointing, trainer.activation_offloading or trainer.context_parallel"
)


class OomLimitError(InternalError):
    """A micro-batch does not fit into memory, and its update or pass cannot be repeated."""

    reason = "OUT_OF_MEMORY"

    def __init__(
        self, size: str, cause: str, *, consequence: str = "the update or pass cannot be repeated"
    ) -> None:
        super().__init__(
            f"a micro-batch of {size} does not fit into memory: {cause}; {consequence}; {_REMEDY}"
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model from which batches are planned."""

    config: Any
    """Its Hugging Face configuration."""
    active_weights: float
    """Number of layer weights that a token passes."""

    def cost(self, length: int) -> float:
        """Returns the relative cost of a sequence: linear layers plus attention.

        For each token, a forward pass takes about ``2 P`` operations in the ``P`` weights of the layers, and
        ``2 n h`` in the ``n`` attention layers of width ``h`` for each earlier token, half of the length on
        average.
        """
        width = self.config.num_hidden_layers * self.config.hidden_size
        return float(length * (1.0 + length * width / (2.0 * self.active_weights)))


class UpdateLoss(Protocol):
    """Loss of one update, whose micro-batches are known."""

    tally: MetricTotals
    """Receives the metrics."""

    def weight(self, samples: Samples) -> Tensor:
        """Returns the scalar weight of a micro-batch in a further loss, which is a mean over micro-batches.

        The weights of all micro-batches of an update sum to 1 once its gradients have their final scale.
        """

    def __call__(
        self,
        samples: Samples,
        scores: Tensor,
        entropy: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> Tensor:
        """Returns a micro-batch's share of the loss, a scalar with gradient.

        Args:
            scores: ``[R]`` float32 with gradient: logprobs of a policy, values of a critic.
            entropy: ``[R]`` float32 with gradient; None for a critic.
            divergence: ``[R]`` float32 with gradient, from the distributions in ``samples``: the
                divergence from the teacher's, or the term of score centering; None without them.
        """


LossT = TypeVar("LossT", bound=UpdateLoss)


@dataclass(slots=True)
class Passes(Generic[LossT]):
    """Forward and backward passes of an update, or of a part of it."""

    loss_of: LossT
    """The loss, made for ``micros``."""
    micros: Micros
    """Micro-batches that were computed."""
    loss: Tensor
    """Scalar: this rank's share of the loss."""
    work: Work
    """Work of this rank."""
    left_out: frozenset[int] = frozenset()
    """Positions of the sequences that did not fit into memory."""
    num_divided: int = 0
    """Micro-batches that were divided because they did not fit."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Outcome of an optimizer step."""

    grad_norm: float
    """Norm of the gradients before they are clipped, over all ranks; NaN if they were dropped."""
    moved: bool
    """True if weights changed."""
    expert_counts: Tensor | None = None
    """``[layers, experts]`` tokens that chose each expert in the update, over all ranks; None for a dense
    model.
    """


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Describes the tensors that :meth:`TrainEngine.export_weights` yields."""

    specs: Sequence[TensorSpec]
    """All tensors, in sending order."""
    sends_rows: bool = False
    """True if every rank sends its own rows; otherwise rank 0 sends whole tensors."""
    gathers_rows: bool = False
    """True if ranks communicate for the rows that they send, so that all of them must iterate together."""


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A copy of an engine's training state in host memory, valid until the next one."""

    num_bytes: int
    """Bytes of all ranks' parts."""
    write: Callable[[Path], None]
    """Creates a folder and writes safetensors to it. Blocks, while training may continue; raises ``OSError``
    if it fails. All ranks must call it.
    """
    tensors: Mapping[str, Tensor]
    """This rank's part of each tensor, by name."""


class TrainEngine(Protocol):
    """One model of one rank. All ranks must make the same calls in the same order."""

    @property
    def ranks(self) -> Ranks:
        """Data-parallel ranks, one for each micro-batch that is computed at a time."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""

    @property
    def model(self) -> ModelFacts:
        """Facts about the model."""

    @property
    def bounds(self) -> Bounds:
        """Token budget of a micro-batch, and sizes that are known to exceed memory."""

    @property
    def weights(self) -> WeightLayout:
        """Layout of the exported weights."""

    def forward_logprobs(
        self,
        samples: Samples,
        plan: StepPlan,
        *,
        temperature: float | None = None,
        teaches: DistillArguments | None = None,
    ) -> Tensor:
        """Scores samples without gradients: logprobs of a policy, values of a critic.

        Args:
            plan: Micro-batches of the samples. All ranks have the same number.
            temperature: Divides the logits; None uses the sampling temperature.
            teaches: Returns the distributions that this divergence compares with, instead of logprobs.

        Returns:
            ``[R]`` float32 on the CPU; with ``teaches``, ``[R, K + 1, 2]`` tokens and logprobs, or ``[R, H]``
            final hidden states for the whole vocabulary. :data:`UNSCORED` for tokens of sequences that do not
            fit into memory.

        Raises:
            OomLimitError: If a micro-batch does not fit and the ranks cannot repeat the pass.
        """

    def forward_backward(
        self,
        samples: Samples,
        micros: Micros,
        make_loss: Callable[[Micros], LossT],
        *,
        may_repeat: bool = True,
        loss_scale: float = 1.0,
    ) -> Passes[LossT]:
        """Adds the gradients of micro-batches to the accumulated ones.

        The gradients are those of the sum of the losses of all ranks, times ``loss_scale``.

        Args:
            samples: This rank's samples, with all columns that their loss needs.
            micros: The micro-batches. All ranks have the same number; an empty one has no samples.
            make_loss: Returns the loss of an update with these micro-batches. It is called again if
                micro-batches had to be divided. All ranks call it the same number of times.
            may_repeat: False if gradients were accumulated before, which a repetition would lose.
            loss_scale: Multiplies the loss, so that gradients do not underflow in float16;
                :meth:`optimizer_step` must divide by it.

        Raises:
            OomLimitError: If a micro-batch does not fit into memory and the passes cannot be repeated.
        """

    def optimizer_step(
        self, learning_rate: float | None, *, scale: Tensor | None = None
    ) -> OptimizerStep:
        """Clips the accumulated gradients, updates the weights with them, and drops them.

        Weights and optimizer state stay unchanged if the gradients are not finite.

        Args:
            learning_rate: Learning rate of the update. 0 measures the gradients and changes nothing.
                None only drops the gradients; a rank may then call this method alone.
            scale: Scalar that multiplies the gradients first; None for 1.
        """

    def export_weights(self, *, rows: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that rollouts receive, by their Hugging Face names.

        Args:
            rows: True for the rows that this rank sends, without communication unless the layout says that it
                gathers them; False for whole tensors, for which all ranks must iterate.
        """

    def save(self) -> PendingSave:
        """Copies weights and optimizer state to host memory."""

    def load(self, folder: Path, *, num_updates: int) -> None:
        """Loads weights and optimizer state in place.

        Args:
            folder: Folder that a :class:`PendingSave` of this engine wrote, with any number of ranks.
            num_updates: Number of optimizer updates until the state was saved.
        """

    def sleep(self) -> None:
        """Releases device memory for other processes. Safe to repeat; :meth:`save` still works."""

    def wake(self) -> None:
        """Restores the state to the device. Safe to repeat."""


Progress = Callable[[str], None]
"""Called with a description of what a process does while it loads its models."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Everything that an engine is built from."""

    spec: RunSpec
    settings: TrainerSettings
    device: torch.device
    roles: Sequence[ModelRole]
    """Models to load."""
    progress: Progress = lambda activity: None


def build_engines(args: EngineArgs) -> dict[ModelRole, TrainEngine]:
    """Loads the models of a process with the engine that the run names. Blocks. All ranks must call it.

    Raises:
        ValueError: If a model does not load, cannot be trained, or does not fit into memory.
    """
    build: Callable[[EngineArgs], dict[ModelRole, TrainEngine]] = resolve_name(
        train_engine_kind(args.spec.trainer.engine).build
    )
    return build(args)


def score_text(engine: TrainEngine, token_ids: Sequence[int]) -> list[float]:
    """Returns the logprob of each token except the first, at temperature 1. All ranks must call it."""
    text = torch.tensor(token_ids, dtype=torch.int64)
    samples = Samples(
        rows=torch.zeros(1, dtype=torch.int64),
        numbers=torch.zeros(1, dtype=torch.int64),
        prompts=Jagged.from_list([text[:1]]),
        responses=Jagged.from_list([text[1:]]),
        rewards=torch.zeros(1),
        tokens={},
    )
    plan = StepPlan(updates=(((0,),),))
    return [float(value) for value in engine.forward_logprobs(samples, plan, temperature=1.0)]
