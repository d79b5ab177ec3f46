"""The policy and the critic: causal language models that score packed responses."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from services.common.models.families import check_trainer, is_mixture
from services.common.models.invariant import token_multiple, use_invariant_operators
from services.common.models.vision import image_arguments, set_attention, vision_tower
from services.common.models.vllm_operators import missing_operators, use_vllm_operators
from services.common.runspec.engines import InvariantEngine, engine_kind
from services.common.runspec.formulas import DistillArguments
from services.common.runspec.run import RunSpec
from services.common.settings import set_defaults
from services.trainer.algorithm.centering import ScoreCentering
from services.trainer.algorithm.divergence import TokenDivergence, most_likely
from services.trainer.algorithm.logprobs import ChunkDivergence, OutputHead, token_logprobs
from services.trainer.batch.attention import PACKED_AS
from services.trainer.batch.context import ContextRanks
from services.trainer.batch.packing import PackedTokens
from services.trainer.batch.recurrence import use_packed_recurrence
from services.trainer.model.experts import EXPERTS
from services.trainer.model.routing import Routing
from services.wire.data.model_inputs import check_arguments, model_arguments

_Module = TypeVar("_Module", bound=nn.Module)
logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """Scores response tokens without padding and without a matrix of all logits.

    Args:
        model: A Hugging Face causal language model; its attention is switched to the packed one.
        temperature: Divides the logits, as in sampling.
        routing_replay: Use of the engine's choice of experts, if a pack has it: value of
            ``rollout.routing_replay``.
        distill: Divergence from the teacher, if the loss is one.
        centering: Score centering, if the run has it.
        engine: Engine whose logprobs these equal, to the last bit; None computes with the ordinary operators.

    Raises:
        ValueError: If the trainer does not compute the architecture exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        routing_replay: str = "off",
        distill: DistillArguments | None = None,
        centering: ScoreCentering | None = None,
        engine: InvariantEngine | None = None,
    ) -> None:
        super().__init__()
        problems = check_trainer(model.config.to_dict())
        if problems:
            raise ValueError("; ".join(problems))
        _use_packs(model, engine)
        self._engine = engine
        self.model = model
        config = model.config.to_dict()
        self.routing = Routing(model, config) if is_mixture(config) else None
        self._routing_replay = routing_replay
        self._temperature = temperature
        self._distill = distill
        self._centering = centering
        self.teacher_head: OutputHead | None = None
        """Output head of another model that teaches the whole vocabulary; None if this one does."""
        self.context: ContextRanks | None = None
        """Ranks that compute each pack together; None without context parallelism."""

    def forward(
        self,
        packed: PackedTokens,
        *,
        temperature: float | None = None,
        teaches: DistillArguments | None = None,
    ) -> tuple[Tensor, ...]:
        """Scores the response tokens of a micro-batch.

        Args:
            temperature: Divides the logits; None uses the sampling temperature.
            teaches: Returns the distributions that this divergence compares with, instead of scores.

        Returns:
            ``[R]`` float32 logprobs and ``[R]`` float32 entropies, both with gradients; with
            distributions in the pack, also the ``[R]`` divergence from the teacher's, or the term of score
            centering with the sampler's. With ``teaches``:
            ``[R, K + 1, 2]`` tokens and logprobs, or ``[R, H]`` final hidden states, in float32.
        """
        packed = packed if self.context is None else packed.shared_with(self.context)
        if self.routing is not None:
            self.routing.begin(packed, self._routing_replay)
        multiple = token_multiple(self.model) if self._engine == "torch" else 1
        states = decoder_states(self.model, packed, multiple=multiple)
        hidden = states[packed.predictors]
        head = replace(output_head(self.model), engine=self._engine)
        temperature = temperature or self._temperature
        if teaches is not None:
            if teaches.top_k is None:
                return (packed.of_responses(hidden.float()),)
            candidates = most_likely(hidden, head, teaches.top_k, temperature=temperature)
            return (packed.of_responses(candidates),)
        scores = token_logprobs(
            hidden,
            head,
            packed.targets,
            temperature=temperature,
            mask=packed.mask,
            divergence=None
            if packed.distributions is None
            else self._divergence(head, temperature),
            distributions=packed.distributions,
        )
        return tuple(packed.of_responses(values) for values in scores)

    def _divergence(self, head: OutputHead, temperature: float) -> ChunkDivergence | None:
        if self._centering is not None:
            return self._centering
        if self._distill is None:
            return None  # a reference, whose packs have the distributions that the policy needs
        teacher_head = None
        if self._distill.top_k is None:
            teacher_head = self.teacher_head or replace(head, weight=head.weight.detach())
        return TokenDivergence(arguments=self._distill, temperature=temperature, head=teacher_head)


class Critic(nn.Module):
    """Predicts the return from each response token on (GAE), or the reward of a response (reward models).

    Args:
        model: A Hugging Face causal language model; its output embedding is not used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        _use_packs(model)
        config: Any = model.config
        self.model = model
        self.head = nn.Linear(config.hidden_size, 1, bias=False, device=model.device)
        # Zeros, so that an untrained critic does not disturb the first advantages.
        nn.init.zeros_(self.head.weight)
        self.context: ContextRanks | None = None
        """Ranks that compute each pack together, as in :class:`Policy`."""

    def forward(self, packed: PackedTokens) -> Tensor:
        """Returns the ``[R]`` float32 value of the state in which each response token is chosen."""
        packed = packed if self.context is None else packed.shared_with(self.context)
        hidden = decoder_states(self.model, packed)[packed.predictors]
        return packed.of_responses(self.head(hidden).squeeze(-1).float())


def computes_as(spec: RunSpec, config: PretrainedConfig) -> InvariantEngine | None:
    """Returns the engine whose logprobs equal the policy's for equal weights; None if there is none.

    Logs a warning if vLLM's operators do not support the model, so that the logprobs differ.
    """
    engine = spec.computes_as
    if engine == "vllm":
        dtype = getattr(torch, spec.trainer.dtype)
        if lacks := missing_operators(config.to_dict(), dtype):
            logger.warning(
                "the trainer computes with other operators than the engine, so their logprobs differ",
                extra={"not_computed_with_vllm_operators": ", ".join(lacks)},
            )
            return None
    return engine


def output_head(model: PreTrainedModel) -> OutputHead:
    """Returns the output head of a causal language model, with scale and cap from its configuration."""
    # Read declared fields only: a family does not compute what its configuration does not declare.
    declared = type(model.config).__dataclass_fields__
    config = {key: value for key, value in vars(model.config).items() if key in declared}
    multipliers = [float(config.get(key) or 1.0) for key in ("logit_scale", "lm_head_multiplier")]
    return OutputHead(
        _untyped(model).get_output_embeddings().weight,
        scale=prod(multipliers) / float(config.get("logits_scaling") or 1.0),
        cap=config.get("final_logit_softcapping"),
    )


def decoder_states(model: PreTrainedModel, packed: PackedTokens, *, multiple: int = 1) -> Tensor:
    """Returns the ``[T, H]`` final hidden states of a pack, or of this rank's part of it.

    Args:
        multiple: Tokens are padded at the end to a multiple of this number.
    """
    decoder = _untyped(model).get_decoder()
    padding = (0, -len(packed.input_ids) % multiple)
    begin = {"input_ids": functional.pad(packed.input_ids, padding)[None]}
    if packed.states is not None:
        begin = {"inputs_embeds": functional.pad(packed.states, (0, 0, *padding))[None]}
    bundles = [model_inputs_of_span.inputs for model_inputs_of_span in packed.inputs]
    if bundles and vision_tower(model) is not None:
        spans = [(span.start, span.end, span.depth) for span in packed.inputs]
        for bundle in bundles:
            check_arguments(decoder, bundle)
        tensors = [bundle.tensors for bundle in bundles]
        arguments = image_arguments(tensors, spans, packed.input_ids.device)
    else:
        arguments = model_arguments(decoder, bundles, packed.input_ids.device)
    output = decoder(
        **begin,
        position_ids=functional.pad(packed.position_ids, padding)[None],
        use_cache=False,
        layout=packed.layout,
        context=packed.context,
        **arguments,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def _use_packs(model: PreTrainedModel, engine: InvariantEngine | None = None) -> None:
    """Switches a model's attention, recurrent layers and experts, if it has any, to those for packs."""
    if engine == "torch":
        use_invariant_operators(model)
    elif engine == "vllm":
        kind = engine_kind(engine)
        set_defaults({**kind.environment, **(kind.invariant_environment or {})})
        use_vllm_operators(model)
    set_attention(model, PACKED_AS[engine])
    use_packed_recurrence(model)
    if is_mixture(model.config.to_dict()):
        model.set_experts_implementation(EXPERTS)


def _untyped(model: PreTrainedModel) -> Any:
    """Returns the model as ``Any``, because some of its annotations are missing."""
    return model


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def freeze_tower(model: nn.Module, *, is_frozen: bool) -> None:
    """Freezes a model's vision tower, if it has one and ``trainer.freeze_vision_tower`` is true."""
    tower = vision_tower(model)
    if tower is not None and is_frozen:
        tower.requires_grad_(False)


def freeze(module: _Module) -> _Module:
    """Freezes a module in evaluation mode, for example the reference policy."""
    return module.requires_grad_(False).eval()


@torch.no_grad()
def score(policy: Policy, packs: Iterable[PackedTokens]) -> list[Tensor]:
    """Returns the ``[R]`` logprobs of each pack, without gradients."""
    return [policy(packed)[0] for packed in packs]
