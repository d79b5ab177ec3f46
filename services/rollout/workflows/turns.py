"""Turns, the sampled or observed stretches of an episode, and the conversations that they form.

Conversations that branch from one another share the turn objects of their common prefix. One flat
sequence of turns represents all of them: each conversation but the first starts with its prompt, whose
weight version is ``PROMPT_VERSION``.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from services.common.fields import ALL_TOKENS, PROMPT_VERSION, TOOL_VERSION
from services.rollout.engines.base import (
    NO_LOGPROB,
    FinishReason,
    GenerationResult,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
    VersionRun,
    append_version,
)

if TYPE_CHECKING:
    from services.rollout.data.images import Picture
    from services.wire.data.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of the response that was either sampled or observed."""

    token_ids: tuple[int, ...]
    """Tokens of the turn."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token; 0 for observed ones."""
    version_runs: tuple[VersionRun, ...]
    """Run-length encoded weight versions; observed tokens have version -1."""
    finish_reason: FinishReason | None
    """Reason why sampling ended; None for an observed turn."""
    seconds: float = field(default=0.0, compare=False)
    """Duration of the turn in seconds, including waits."""
    routed_experts: RoutedExperts | None = field(default=None, compare=False, repr=False)
    """Experts of all tokens so far that earlier turns do not cover, except the last token."""
    sampling_mask: SamplingMask | None = field(default=None, compare=False, repr=False)
    """Tokens that could be drawn for each token; None if no limit is known."""
    top_logprobs: TopLogprobs | None = field(default=None, compare=False, repr=False)
    """Most likely tokens in place of each token; None if none are reported."""
    model_inputs: "ModelInputs | None" = field(default=None, repr=False)
    """Tensors that the model takes besides the tokens of an observed turn, at places counted from the first
    token of the conversation; None if it takes none.
    """
    pictures: "tuple[Picture, ...]" = field(default=(), compare=False, repr=False)
    """Images of an observed turn, for people."""

    @property
    def is_sampled(self) -> bool:
        """True if the policy sampled these tokens."""
        return self.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """True if sampling was interrupted and must continue."""
        return self.finish_reason == "aborted"

    def continued(self, result: GenerationResult, seconds: float = 0.0) -> "Turn":
        """Returns this turn extended by a result that took the given time."""
        runs = list(self.version_runs)
        for run in result.version_runs:
            append_version(runs, *run)
        return Turn(
            token_ids=self.token_ids + result.token_ids,
            logprobs=self.logprobs + result.logprobs,
            version_runs=tuple(runs),
            finish_reason=result.finish_reason,
            seconds=self.seconds + seconds,
            routed_experts=_concatenated([self.routed_experts, result.routed_experts]),
            sampling_mask=_concatenated([self.sampling_mask, result.sampling_mask]),
            top_logprobs=_concatenated([self.top_logprobs, result.top_logprobs]),
        )


NOTHING_SAMPLED = Turn(token_ids=(), logprobs=(), version_runs=(), finish_reason="aborted")
"""A turn before its first token."""


def observed(
    token_ids: Sequence[int],
    seconds: float = 0.0,
    *,
    model_inputs: "ModelInputs | None" = None,
    pictures: "tuple[Picture, ...]" = (),
) -> Turn:
    return Turn(
        token_ids=tuple(token_ids),
        logprobs=(0.0,) * len(token_ids),
        version_runs=((TOOL_VERSION, len(token_ids)),) if token_ids else (),
        finish_reason=None,
        seconds=seconds,
        model_inputs=model_inputs,
        pictures=pictures,
    )


def shown(token_ids: Sequence[int], *, is_answer: bool) -> Turn:
    """Returns a turn of a demonstration; an answer's tokens train like sampled ones."""
    return replace(observed(token_ids), finish_reason="stop" if is_answer else None)


def routed_experts(turns: Iterable[Turn]) -> RoutedExperts | None:
    """Returns the experts of the tokens from the first one on, as far as known; None if no turn has any."""
    return _concatenated([turn.routed_experts for turn in turns])


def sampling_mask(turns: Iterable[Turn]) -> SamplingMask:
    """Returns the tokens that could be drawn for each token of all turns."""
    masks = [
        np.full(len(turn.token_ids), ALL_TOKENS, np.int32)
        if turn.sampling_mask is None
        else turn.sampling_mask
        for turn in turns
    ]
    return np.concatenate(masks) if masks else np.zeros(0, np.int32)


def top_logprobs(turns: Iterable[Turn], count: int) -> TopLogprobs:
    """Returns the ``count`` most likely tokens in place of each token of all turns; zeros where unknown.

    A vocabulary of fewer tokens fills the other places with the id -1.
    """
    rows = []
    for turn in turns:
        table = np.zeros((len(turn.token_ids), count + 1, 2), np.float32)
        if (table_of_turn := turn.top_logprobs) is not None:
            num_known = table_of_turn.shape[1] - 1
            table[:, :, 0] = -1
            table[:, :, 1] = NO_LOGPROB
            table[:, :num_known] = table_of_turn[:, :-1]
            table[:, -1] = table_of_turn[:, -1]
        rows.append(table)
    return np.concatenate(rows) if rows else np.zeros((0, count + 1, 2), np.float32)


def concat_inputs(bundles: "Iterable[ModelInputs | None]") -> "ModelInputs | None":
    """Joins the inputs of a prompt and its turns; None if there are none."""
    present = [bundle for bundle in bundles if bundle is not None]
    # Joined by its class, so that episodes without inputs do not import torch.
    return type(present[0]).concat(present) if present else None


def _concatenated(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None


def token_ids(turns: Iterable[Turn]) -> tuple[int, ...]:
    ids: list[int] = []
    for turn in turns:
        ids += turn.token_ids  # extends in bulk; token by token is ten times slower
    return tuple(ids)


def num_tokens(turns: Iterable[Turn]) -> int:
    return sum(len(turn.token_ids) for turn in turns)


def num_sampled(turns: Iterable[Turn]) -> int:
    """Returns the number of tokens that the policy sampled."""
    return sum(len(turn.token_ids) for turn in turns if turn.is_sampled)


def version_runs(turns: Iterable[Turn]) -> list[VersionRun]:
    """Returns the run-length encoded weight versions of all tokens."""
    runs: list[VersionRun] = []
    for turn in turns:
        for run in turn.version_runs:
            append_version(runs, *run)
    return runs


def sampled_versions(turns: Iterable[Turn]) -> list[int]:
    """Returns the weight versions of the sampled stretches, in order, without consecutive repeats."""
    versions: list[int] = []
    for version, _ in version_runs(turn for turn in turns if turn.is_sampled):
        if versions[-1:] != [version]:
            versions.append(version)
    return versions


Conversation = tuple[Turn, ...]
"""Turns; the first one is the prompt if the agent or the environment wrote it."""

# Max number of recorded conversations to keep that this attempt has not started; it may never start them.
_MAX_UNREACHED = 64


def with_turn(
    conversations: Sequence[Conversation], before: Conversation, turn: Turn
) -> list[Conversation]:
    """Adds a turn to the conversation that it continues, or as a new branch.

    Args:
        conversations: Conversations, none of which continues another.
    """
    grown_conversations, grown = list(conversations), (*before, turn)
    for index, conversation in enumerate(grown_conversations):
        if len(conversation) <= len(before) and all(map(operator.is_, conversation, before)):
            grown_conversations[index] = grown
            return grown_conversations
    return [*grown_conversations, grown]


def merged(reached: Sequence[Conversation], recorded: Sequence[Conversation]) -> list[Conversation]:
    """Merges the conversations of two attempts, keeping the longer version of each.

    Args:
        recorded: Conversations of the previous attempt; those that this attempt has not started are kept.
    """
    conversations, unreached = list(reached), list[Conversation]()
    for old in recorded:
        if any(_reaches(new, old) for new in reached):
            continue
        prefixes = [index for index, new in enumerate(conversations) if old[: len(new)] == new]
        if prefixes:
            conversations[prefixes[0]] = old
        else:
            unreached.append(old)
    return [*conversations, *unreached[-_MAX_UNREACHED:]]


def flattened(conversations: Iterable[Conversation]) -> tuple[Turn, ...]:
    first, *rest = [conversation for conversation in conversations if conversation] or [()]
    further = [turn for talk in rest for turn in (_as_prompt(talk[0]), *talk[1:])]
    return (*first, *further)


def divided(turns: Iterable[Turn]) -> list[Conversation]:
    """Splits the turns that :func:`flattened` returned into their conversations."""
    stretches: list[list[Turn]] = [[]]
    for turn in turns:
        if turn.version_runs[:1] and turn.version_runs[0][0] == PROMPT_VERSION:
            first = observed(
                turn.token_ids,
                turn.seconds,
                model_inputs=turn.model_inputs,
                pictures=turn.pictures,
            )
            stretches.append([first])
        else:
            stretches[-1].append(turn)
    return [tuple(conversation) for conversation in stretches if conversation]


def trained_once(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Converts repeated sampled turns to observed ones, so that no token trains twice."""
    turn_ids: set[int] = set()
    result = []
    for conversation in conversations:
        result.append(
            tuple(_as_context(turn) if id(turn) in turn_ids else turn for turn in conversation)
        )
        turn_ids |= set(map(id, conversation))
    return result


def _as_prompt(turn: Turn) -> Turn:
    return replace(turn, version_runs=((PROMPT_VERSION, len(turn.token_ids)),))


def _as_context(turn: Turn) -> Turn:
    if not turn.is_sampled:
        return turn
    context = observed(turn.token_ids, turn.seconds)
    return replace(context, routed_experts=turn.routed_experts)


def _reaches(new: Conversation, old: Conversation) -> bool:
    """Returns True if ``new`` contains all of ``old``, whose last turn may have been cut."""
    before, last = old[:-1], old[-1]
    if len(new) < len(old) or new[: len(before)] != before:
        return False
    turn = new[len(before)]
    return turn == last or (last.is_cut and turn.token_ids[: len(last.token_ids)] == last.token_ids)
