"""Layout of a micro-batch: no padding, and prefixes that its sequences share only once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.fields import ALL_TOKENS
from services.trainer.batch.context import ContextRanks
from services.trainer.batch.layout import AttentionLayout, build_layout
from services.trainer.batch.prefixes import (
    Branch,
    InputSpan,
    Prefixes,
    branches,
    sharing_keys,
    token_ids,
    unshared,
    worthwhile,
)
from services.trainer.batch.segments import on_device
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of a pack."""

    sequence_tokens: int = 0
    """Tokens of its sequences."""
    tokens: int = 0
    """Tokens that the model computes: shared ones count once."""
    squares: float = 0.0
    """Twice the number of pairs of a token and one that it attends to: the square of each sequence's length,
    minus that of its shared prefix.
    """
    predictions: int = 0
    """Number of predictions, each of which costs a row of logits."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.sequence_tokens + other.sequence_tokens,
            self.tokens + other.tokens,
            self.squares + other.squares,
            self.predictions + other.predictions,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlacedInputs:
    """Model inputs in a pack, once for all sequences that share their tokens."""

    inputs: ModelInputs
    start: int
    """Place of the first token with these inputs."""
    end: int
    """Place after the last token of all sequences that have them."""
    depth: int = 0
    """Position of the first token in these sequences."""


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Prompts and responses of a micro-batch, laid end to end.

    The last token of each sequence is left out, because nothing is predicted from it.
    """

    input_ids: Tensor
    """``[T]`` int64."""
    position_ids: Tensor
    """``[T]`` int64, from 0 in each sequence."""
    predictors: Tensor
    """``[P]`` int64, ascending: position from which each target is predicted.

    The last token of a shared prompt has as many targets as its responses have different first tokens.
    """
    targets: Tensor
    """``[P]`` int64 tokens."""
    predictions: Tensor | None
    """``[R]`` int64: index among the ``P`` predictions of each response token; None if they are the same."""
    layout: AttentionLayout
    """Attention layout of the tokens."""
    work: Work
    """Cost of the pack."""
    places: NDArray[np.int64]
    """``predictors`` in host memory."""
    uses: Tensor | None = None
    """``[T]`` int64: number of sequences that contain each token; None if nothing is shared."""
    experts: Tensor | None = None
    """``[T, layers, K]`` int64 experts that the engine chose, -1 if unknown."""
    mask: Tensor | None = None
    """``[2, S]`` int64 pairs of a prediction and a token that could be drawn, by ascending prediction. A
    prediction without pairs was drawn from all tokens. None if all were.
    """
    distributions: Tensor | None = None
    """``[P, ...]`` float32: the teacher's or the sampler's distribution of each prediction; None if the run
    compares none.
    """
    inputs: tuple[PlacedInputs, ...] = ()
    """Model inputs, in the order of their tokens."""
    context: ContextRanks | None = None
    """Ranks that compute the pack together. Tokens and predictions are then those of this rank only; layout,
    work and ``places`` cover all ranks.
    """
    counts: tuple[int, ...] = ()
    """Number of predictions of each of these ranks."""
    states: Tensor | None = None
    """``[T, H]`` states that the layers of earlier pipeline stages computed; None if a model begins with its
    embedding.
    """

    def shared_with(self, ranks: ContextRanks) -> "PackedTokens":
        assert not self.inputs, (
            "a specification with model inputs and context parallelism is refused"
        )
        size = ranks.chunk(len(self.input_ids))
        bounds = np.searchsorted(self.places, np.arange(ranks.size + 1) * size).tolist()
        range_of_rank = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        mask = self.mask
        if mask is not None:
            mask = mask[:, (mask[0] >= range_of_rank.start) & (mask[0] < range_of_rank.stop)]
            mask = torch.stack([mask[0] - range_of_rank.start, mask[1]])
        return replace(
            self,
            input_ids=ranks.own(self.input_ids),
            position_ids=ranks.own(self.position_ids),
            uses=None if self.uses is None else ranks.own(self.uses),
            experts=None if self.experts is None else ranks.own(self.experts, filler=-1),
            predictors=self.predictors[range_of_rank] - ranks.rank * size,
            targets=self.targets[range_of_rank],
            mask=mask,
            distributions=None if self.distributions is None else self.distributions[range_of_rank],
            context=ranks,
            counts=tuple(end - start for start, end in pairwise(bounds)),
        )

    def of_responses(self, values: Tensor) -> Tensor:
        """Expands ``[P, ...]`` values of predictions to ``[R, ...]`` values of response tokens.

        If ranks compute the pack together, all of them must call it, and each gets the values of all.
        """
        if self.context is not None:
            values = self.context.gathered(values, self.counts)
        return values if self.predictions is None else values[self.predictions]


def pack(
    prompts: Jagged,
    responses: Jagged,
    *,
    device: torch.device,
    shares_prefixes: bool = False,
    experts: Jagged | None = None,
    masks: Jagged | None = None,
    distributions: Tensor | None = None,
    inputs: Sequence[Sequence[InputSpan]] = (),
) -> PackedTokens:
    """Packs prompts and their responses.

    Args:
        prompts: ``N`` rows of token ids, each with at least one token.
        responses: ``N`` rows of token ids.
        shares_prefixes: True to lay out common prefixes of sequences only once, unless that would save
            little.
        experts: ``N`` rows, one entry for each token except the last.
        masks: ``N`` rows with the tokens that could be drawn for each response token, as in the data
            dictionary; None if all could.
        distributions: ``[R, ...]`` float32 distributions of the teacher or the sampler; None if the run
            compares none.
        inputs: Model inputs of each sequence; empty if the run has none.

    Raises:
        ValueError: If a prompt is empty, so that its first response token has no predictor.
    """
    if len(prompts.lengths) and int(prompts.lengths.min()) < 1:
        raise ValueError("a prompt has no token; a response needs at least one to follow")
    with_response = torch.nonzero(responses.lengths).flatten()
    if not len(with_response):
        # Nothing is predicted, but a model needs input, and other ranks may wait for it.
        return _idle_tokens(device)
    sequences = _place(
        prompts.select(with_response),
        responses.select(with_response),
        shares_prefixes=shares_prefixes,
        experts=None if experts is None else experts.select(with_response).unbind(),
        inputs=[inputs[index] for index in with_response.tolist()] if inputs else [],
    )
    predictions = _predict(
        sequences,
        responses.values.to(torch.int64).numpy(),
        # Equal tokens may have different sampling masks or distributions.
        merges_equal=masks is None and distributions is None,
    )
    layout = build_layout(sequences.branches, device)
    return PackedTokens(
        input_ids=_on_device(sequences.input_ids(), device),
        position_ids=layout.depths,
        predictors=_on_device(predictions.predictors, device),
        targets=_on_device(predictions.targets, device),
        predictions=None if predictions.index is None else _on_device(predictions.index, device),
        layout=layout,
        work=_work(sequences.branches, len(predictions.predictors)),
        places=predictions.predictors,
        uses=_on_device(sequences.uses(), device) if sequences.is_shared else None,
        experts=sequences.experts_on(device),
        mask=None if masks is None else on_device(_pairs(masks.values, predictions.index), device),
        distributions=None
        if distributions is None
        else on_device(predictions.ordered(distributions), device),
        inputs=sequences.inputs_in_pack(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PlacedSequences:
    """Sequences without their last tokens, and where each one lies in a pack."""

    contexts: Sequence[NDArray[Any]]
    prompt_lengths: Sequence[int]
    prefixes: Prefixes
    branches: list[Branch]
    """Part of each sequence that no earlier one has, in the order of the pack."""
    experts: Sequence[Tensor] | None
    inputs: Sequence[Sequence[InputSpan]]

    @property
    def is_shared(self) -> bool:
        """True if sequences share tokens."""
        return any(self.prefixes.shared)

    def input_ids(self) -> NDArray[np.int64]:
        rows = [self.contexts[index][branch.depth :] for index, branch in self._in_order()]
        return token_ids(np.concatenate(rows))

    def predictors(self) -> NDArray[np.int64]:
        """Returns the place in the pack from which each response token is predicted, ``[R]``."""
        paths = {index: branch.path for index, branch in self._in_order()}
        rows = [paths[index][prompt - 1 :] for index, prompt in enumerate(self.prompt_lengths)]
        return np.concatenate(rows)

    def uses(self) -> NDArray[np.int64]:
        """Returns the number of sequences that contain each token."""
        return np.bincount(np.concatenate([branch.path for branch in self.branches]))

    def experts_on(self, device: torch.device) -> Tensor | None:
        if self.experts is None:
            return None
        rows = [self.experts[index][branch.depth :] for index, branch in self._in_order()]
        return _known(on_device(torch.cat(rows), device))

    def inputs_in_pack(self) -> tuple[PlacedInputs, ...]:
        return _placed(self.inputs, self.prefixes, self.branches)

    def _in_order(self) -> Iterator[tuple[int, Branch]]:
        return zip(self.prefixes.order, self.branches, strict=True)


def _place(
    prompts: Jagged,
    responses: Jagged,
    *,
    shares_prefixes: bool,
    experts: Sequence[Tensor] | None,
    inputs: Sequence[Sequence[InputSpan]],
) -> _PlacedSequences:
    """Finds shared prefixes, if they are to be shared, and places the sequences."""
    sequences = sharing_keys(
        prompts.unbind(), responses.unbind(), experts if shares_prefixes else None, inputs
    )
    contexts = [sequence[:-1] for sequence in sequences]
    prefixes = worthwhile(contexts) if shares_prefixes else unshared(len(contexts))
    return _PlacedSequences(
        contexts=contexts,
        prompt_lengths=prompts.lengths.tolist(),
        prefixes=prefixes,
        branches=branches(prefixes, [len(context) for context in contexts]),
        experts=experts,
        inputs=inputs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Predictions:
    """Predictions of a pack, by ascending place."""

    predictors: NDArray[np.int64]
    targets: NDArray[np.int64]
    index: NDArray[np.int64] | None = None
    """Prediction of each response token; None if they are the same."""
    order: NDArray[np.int64] | None = None
    """Response token of each prediction; None if they are the same, or equal ones were merged."""

    def ordered(self, column: Tensor) -> Tensor:
        """Brings values of response tokens, ``[R, ...]``, into the order of the predictions."""
        return column if self.order is None else column[torch.from_numpy(self.order)]


def _predict(
    sequences: _PlacedSequences, targets: NDArray[np.int64], *, merges_equal: bool
) -> _Predictions:
    """Orders the predictions of all response tokens.

    Args:
        merges_equal: True to compute predictions of the same token from the same place once.
    """
    predictors = sequences.predictors()
    if not sequences.is_shared:
        return _Predictions(predictors, targets)
    if merges_equal:
        return _Predictions(*_distinct(predictors, targets))
    order = np.argsort(predictors, kind="stable")
    return _Predictions(predictors[order], targets[order], np.argsort(order), order)


def _pairs(masks: Tensor, predictions: NDArray[np.int64] | None) -> Tensor:
    """Returns the ``[2, S]`` pairs of predictions and tokens of sampling masks, in order of predictions."""
    tokens = torch.cumsum(masks < 0, 0) - 1
    pairs = torch.stack([tokens, torch.where(masks < 0, ~masks, masks).long()])
    pairs = pairs[:, masks != ALL_TOKENS]
    if predictions is not None:
        pairs[0] = torch.from_numpy(predictions)[pairs[0]]
        pairs = pairs[:, torch.argsort(pairs[0], stable=True)]
    return pairs


def _placed(
    inputs: Sequence[Sequence[InputSpan]], prefixes: Prefixes, branch_list: Sequence[Branch]
) -> tuple[PlacedInputs, ...]:
    """Returns the places of model inputs. The sequences that share a token follow one another in a pack."""
    if not inputs:
        return ()
    ends = np.cumsum([branch.length for branch in branch_list]).tolist()
    placed_inputs = []
    for number, (index, branch) in enumerate(zip(prefixes.order, branch_list, strict=True)):
        for span in inputs[index]:
            # Sequences with such a span share all of its tokens with an earlier one, or none.
            if branch.depth <= span.start < len(branch.path):
                last = number
                while last + 1 < len(branch_list) and branch_list[last + 1].depth > span.start:
                    last += 1
                start = int(branch.path[span.start])
                placed_inputs.append(PlacedInputs(span.inputs, start, ends[last], span.start))
    return tuple(placed_inputs)


def _distinct(
    predictors: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns predictors and targets of the distinct predictions, and the index of each given prediction."""
    # Sorts one combined integer per prediction, because sorting rows of two numbers takes ten times as long.
    distinct, inverse = np.unique(predictors << 32 | targets, return_inverse=True)
    return distinct >> 32, distinct & 0xFFFFFFFF, inverse


def _work(branch_list: list[Branch], num_predictions: int) -> Work:
    return Work(
        sequence_tokens=sum(len(branch.path) for branch in branch_list),
        tokens=sum(branch.length for branch in branch_list),
        squares=float(sum(len(branch.path) ** 2 - branch.depth**2 for branch in branch_list)),
        predictions=num_predictions,
    )


def _known(experts: Tensor) -> Tensor:
    """Returns expert ids as int64, with -1 for the highest value of their dtype, which means unknown."""
    return experts.long().masked_fill(experts == torch.iinfo(experts.dtype).max, -1)


def _idle_tokens(device: torch.device) -> PackedTokens:
    """Returns a pack without predictions, of two tokens: one token would need another compilation."""
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    return PackedTokens(
        input_ids=zeros,
        position_ids=zeros,
        predictors=zeros[:0],
        targets=zeros[:0],
        predictions=None,
        layout=build_layout(branches(unshared(1), [2]), device),
        work=Work(),
        places=np.zeros(0, np.int64),
    )


def _on_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.ascontiguousarray(values)), device)
