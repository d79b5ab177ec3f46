"""Conversion of samples to token sequences: an episode of several conversations is one stored response.

::

    prompt_ids        response_ids
    [prompt 0]        [response 0] [prompt 1] [response 1] ...
    version_runs            >= -1         -2         >= -1
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.common.fields import PROMPT_VERSION, ROUTED_EXPERTS, SAMPLING_MASK
from services.wire.data.jagged import Jagged


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The ``n`` token sequences of ``N`` samples, one sample after the other."""

    samples: Tensor
    """``[n]`` int64: position of each sequence's sample."""
    numbers: Tensor
    """``[n]`` int64: number of each sequence among those of its sample, from 0."""
    prompts: Jagged
    """``n`` rows of token ids."""
    responses: Jagged
    """``n`` rows of token ids."""
    is_response: Tensor
    """``[R]`` bool: tokens after the samples' prompts that are not the prompt of a further sequence."""
    experts: Jagged | None = None
    """``n`` rows ``[P + R - 1, layers, K]``; None if unknown."""
    masks: Jagged | None = None
    """``n`` rows ``[S]``: sampling masks of the responses; None if all tokens could be drawn."""

    def joined(self, columns: Tensor) -> Tensor:
        """Maps values of the sequences' response tokens to those of the samples, 0 at further prompts."""
        whole = columns.new_zeros(len(self.is_response), *columns.shape[1:])
        whole[self.is_response] = columns
        return whole


def sequences_of(fields: Mapping[str, Jagged]) -> Sequences:
    """Splits samples into their sequences.

    Args:
        fields: ``prompt_ids``, ``response_ids`` and optionally ``version_runs``, ``routed_experts`` and
            ``sampling_mask``, of matching lengths. Without versions every sample is one sequence.
    """
    prompts, responses = fields["prompt_ids"], fields["response_ids"]
    experts, masks = fields.get(ROUTED_EXPERTS), fields.get(SAMPLING_MASK)
    rows = torch.arange(len(responses))
    is_prompt = torch.zeros(len(responses.values), dtype=torch.bool)
    if "version_runs" in fields:
        runs = fields["version_runs"].values.to(torch.int64).reshape(-1, 2)
        is_prompt = torch.repeat_interleave(runs[:, 0] == PROMPT_VERSION, runs[:, 1])
    if not bool(is_prompt.any()):
        return Sequences(
            rows, torch.zeros_like(rows), prompts, responses, ~is_prompt, experts, masks
        )
    row_of = torch.repeat_interleave(rows, responses.lengths)
    follows = torch.zeros_like(is_prompt)
    follows[1:] = is_prompt[:-1] & (row_of[1:] == row_of[:-1])
    begins = is_prompt & ~follows
    further = torch.bincount(row_of[begins], minlength=len(rows))
    samples = torch.repeat_interleave(rows, further + 1)
    firsts = torch.cumsum(further + 1, 0) - further - 1
    sequence_of = row_of + torch.cumsum(begins, 0)
    inner, lengths = (
        torch.bincount(sequence_of[chosen], minlength=len(samples))
        for chosen in (is_prompt, ~is_prompt)
    )
    whole = Jagged(responses.values[is_prompt], inner).unbind()
    for first, prompt in zip(firsts.tolist(), prompts.unbind(), strict=True):
        whole[first] = prompt.to(responses.values.dtype)
    found = Sequences(
        samples=samples,
        numbers=torch.arange(len(samples)) - firsts[samples],
        prompts=Jagged.from_list(whole),
        responses=Jagged(responses.values[~is_prompt], lengths),
        is_response=~is_prompt,
    )
    if masks is not None:
        token_of = torch.cumsum(masks.values < 0, 0) - 1
        kept = found.is_response[token_of]
        sizes = torch.bincount(sequence_of[token_of][kept], minlength=len(samples))
        found = replace(found, masks=Jagged(masks.values[kept], sizes))
    return found if experts is None else _with_experts(found, experts)


def _with_experts(found: Sequences, experts: Jagged) -> Sequences:
    """Splits the experts of samples by sequence; a sample has experts for all tokens but its last."""
    lengths = found.prompts.lengths + found.responses.lengths
    kept, rows, place = [], experts.unbind(), 0
    for sample, number, length in zip(
        found.samples.tolist(), found.numbers.tolist(), lengths.tolist(), strict=True
    ):
        place = 0 if number == 0 else place
        kept.append(rows[sample][place : place + length - 1])
        place += length
    return replace(found, experts=Jagged.from_list(kept))
