"""The part of a policy or critic that a pipeline stage has, as the module that a schedule calls.

A schedule passes states between stages, and the number of the micro-batch; packs are set before. All states
of one schedule have the same shape, so a stage pads those that it sends to the longest pack. While engines
start, a stage is called with a pack and no number, and compiles its layers without the other stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from services.common.models.experts import routers_of
from services.extras.stages.layout import (
    Stage,
    WholeModel,
    describe,
    hidden_size,
    keep_stage,
)
from services.trainer.batch.context import ContextRanks
from services.trainer.batch.packing import PackedTokens
from services.trainer.model.policy import Critic, Policy, decoder_states
from services.trainer.model.routing import Routing


class StagePart:
    """Adds to a policy or critic the forward pass of its stage."""

    stage: Stage
    whole: WholeModel
    """Facts about the whole model."""
    packs: Sequence[PackedTokens] = ()
    """Micro-batches of the running schedule."""
    width: int = 0
    """Tokens of the longest of them, to which states are padded."""
    number: int = 0
    """Micro-batch of the newest forward pass."""
    options: Mapping[str, Any]
    """Arguments of the last stage's forward pass, besides the pack."""
    model: PreTrainedModel
    context: ContextRanks | None
    dtype: torch.dtype = torch.float32
    """Dtype of the states that stages exchange."""
    num_columns: int
    """Number of tensors that the last stage returns."""
    replay: str = "off"
    """Use of the engine's choice of experts: value of ``rollout.routing_replay``."""
    routing: Routing | None = None
    """Routers of this stage's layers; None if it has none."""
    expert_counts: Tensor | None = None
    """``[layers, E]`` int64: tokens that chose each expert in the newest schedule, in this stage's layers."""

    routers: slice = slice(0)
    """Place of this stage's routers among those of the whole model."""
    differs: dict[int, tuple[Tensor, Tensor]]
    """By micro-batch of the newest schedule, ``[T]`` bool each: tokens for which a layer of this stage and
    the engine chose other experts, and tokens whose experts are known.
    """

    def begin(self, packs: Sequence[PackedTokens], **options: Any) -> None:
        """Sets the micro-batches of a schedule."""
        self.packs, self.options, self.expert_counts, self.differs = packs, options, None, {}
        self.width = max(self._num_tokens(packed) for packed in packs)

    def begin_alone(self, packed: PackedTokens) -> tuple[tuple[Tensor, ...], Tensor]:
        """Sets one micro-batch of a pass without other stages, as the compiler runs it.

        Returns:
            The inputs of the pass: zeros as states, and the number of the micro-batch.
        """
        self.begin([packed])
        number = torch.zeros(1, dtype=torch.int64)
        if self.stage.is_first:
            return (number,), number
        states = torch.zeros(
            (1, self.width, hidden_size(self.model.config)),
            dtype=self.dtype,
            device=packed.input_ids.device,
            requires_grad=torch.is_grad_enabled(),
        )
        return (states,), number

    def with_own_experts(self, packed: PackedTokens) -> PackedTokens:
        """Returns a pack with the engine's experts for this stage's layers only, as int16.

        A schedule has all of its packs on the GPU. Stages share the same prefixes only if they pack with the
        experts of all layers.
        """
        if packed.experts is None:
            return packed
        stage_experts = packed.experts[:, self.routers].to(torch.int16, copy=True)
        return replace(packed, experts=stage_experts)

    def inputs_of(
        self, inputs: tuple[Any, ...], number: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns the states and the number of a micro-batch; a pack alone has no number."""
        return self.begin_alone(inputs[0]) if number is None else (inputs, number)

    def pass_states(self, inputs: tuple[Tensor, ...], number: Tensor) -> Tensor | PackedTokens:
        """Computes this stage's layers, or returns the pack with states for the last stage's."""
        self.number = int(number)
        packed = self.packs[self.number]
        if packed.experts is not None:
            packed = replace(packed, experts=packed.experts.long())
        if not self.stage.is_first:
            packed = replace(packed, states=inputs[0][0, : self._num_tokens(packed)])
        if self.stage.is_last:
            return packed
        if self.context is not None:
            packed = packed.shared_with(self.context)
        if self.routing is not None:
            self.routing.begin(packed, self.replay)
        states = decoder_states(self.model, packed)
        self.observe_routing()
        return functional.pad(states[None], (0, 0, 0, self.width - len(states)))

    def _num_tokens(self, packed: PackedTokens) -> int:
        """Returns the tokens of a whole pack that this rank computes."""
        num_tokens = len(packed.input_ids)
        return num_tokens if self.context is None else self.context.chunk(num_tokens)

    def observe_routing(self) -> None:
        """Adds the choices of the newest forward pass, and keeps how they differ from the engine's."""
        if self.routing is None or self.routing.num_layers == 0:
            return
        counts = self.routing.counts()
        total = self.expert_counts
        self.expert_counts = counts if total is None else total + counts
        if (differences := self.routing.differences()) is not None:
            self.differs[self.number] = differences


class StagedPolicy(StagePart, Policy):
    """A stage of a policy: returns states ``[1, width, H]``, on the last stage what a policy returns.

    Args:
        model: A whole causal language model, on any device; it keeps the stage's part.
        **options: Arguments of :class:`Policy`.
    """

    num_columns = 2

    def __init__(self, model: PreTrainedModel, stage: Stage, **options: Any) -> None:
        whole_model, routers = describe(model), list(routers_of(model))
        keep_stage(model, stage, whole_model.layers(stage.count)[stage.index], uses_head=True)
        super().__init__(model, **options)
        self.stage, self.whole, self.options, self.differs = stage, whole_model, {}, {}
        self.replay = str(options.get("routing_replay", "off"))
        positions = [
            layer for layer, router in enumerate(routers) if router in [*routers_of(model)]
        ]
        self.routers = slice(positions[0], positions[-1] + 1) if positions else slice(0)

    def forward(  # type: ignore[override]
        self, *inputs: Tensor | PackedTokens, number: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        stage_output = self.pass_states(*self.inputs_of(inputs, number))
        if isinstance(stage_output, Tensor):
            return stage_output
        scores = super().forward(stage_output, **self.options)
        self.observe_routing()
        return scores


class StagedCritic(StagePart, Critic):
    """A stage of a critic: returns states ``[1, width, H]``, on the last stage ``[R]`` values.

    Args:
        model: A whole causal language model, on any device; it keeps the stage's part.
    """

    num_columns = 1

    def __init__(self, model: PreTrainedModel, stage: Stage) -> None:
        whole_model = describe(model)
        keep_stage(model, stage, whole_model.layers(stage.count)[stage.index], uses_head=False)
        super().__init__(model)
        self.stage, self.whole, self.options, self.differs = stage, whole_model, {}, {}
        if not stage.is_last:
            del self.head

    def forward(  # type: ignore[override]
        self, *inputs: Tensor | PackedTokens, number: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        stage_output = self.pass_states(*self.inputs_of(inputs, number))
        if isinstance(stage_output, Tensor):
            return stage_output
        return (super().forward(stage_output),)
