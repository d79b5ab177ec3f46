"""Conversations of one episode: branches, and their encoding as a single row of turns.

Conversations that branch from one another share the turn objects of their common beginning. One row
of turns holds them all: each conversation but the first starts with its prompt, whose weight
version is ``PROMPT_VERSION``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.common.fields import PROMPT_VERSION
from services.rollout.workflows.turns import Turn, observed

Conversation = tuple[Turn, ...]
"""Turns; the first one is the prompt if the agent or the environment wrote it."""

# Max recorded conversations to keep that this attempt has not started: an agent may never repeat a request.
_MAX_UNREACHED = 64


def with_turn(
    conversations: Sequence[Conversation], before: Conversation, turn: Turn
) -> list[Conversation]:
    """Adds a turn to the conversation that it continues, or as a new branch.

    Args:
        conversations: Conversations, none of which continues another.
    """
    found, grown = list(conversations), (*before, turn)
    for place, conversation in enumerate(found):
        if len(conversation) <= len(before) and all(map(_is, conversation, before)):
            found[place] = grown
            return found
    return [*found, grown]


def merged(reached: Sequence[Conversation], recorded: Sequence[Conversation]) -> list[Conversation]:
    """Merges the conversations of two attempts, keeping the longer version of each.

    Args:
        recorded: Conversations of the previous attempt; those that this attempt has not started are kept.
    """
    found, unreached = list(reached), list[Conversation]()
    for old in recorded:
        if any(_reaches(new, old) for new in reached):
            continue
        begun = [place for place, new in enumerate(found) if old[: len(new)] == new]
        if begun:
            found[begun[0]] = old
        else:
            unreached.append(old)
    return [*found, *unreached[-_MAX_UNREACHED:]]


def flattened(conversations: Iterable[Conversation]) -> tuple[Turn, ...]:
    first, *others = [conversation for conversation in conversations if conversation] or [()]
    further = [turn for other in others for turn in (_as_prompt(other[0]), *other[1:])]
    return (*first, *further)


def divided(turns: Iterable[Turn]) -> list[Conversation]:
    """Splits a row that :func:`flattened` made into its conversations."""
    found: list[list[Turn]] = [[]]
    for turn in turns:
        if turn.version_runs[:1] and turn.version_runs[0][0] == PROMPT_VERSION:
            found.append([observed(turn.token_ids, turn.seconds)])
        else:
            found[-1].append(turn)
    return [tuple(conversation) for conversation in found if conversation]


def trained_once(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Turns repeated sampled turns into context, so that no token trains twice."""
    seen: set[int] = set()
    found = []
    for conversation in conversations:
        found.append(
            tuple(_as_context(turn) if id(turn) in seen else turn for turn in conversation)
        )
        seen |= set(map(id, conversation))
    return found


def _as_prompt(turn: Turn) -> Turn:
    return replace(turn, version_runs=((PROMPT_VERSION, len(turn.token_ids)),))


def _as_context(turn: Turn) -> Turn:
    if not turn.is_sampled:
        return turn
    context = observed(turn.token_ids, turn.seconds)
    return replace(context, routed_experts=turn.routed_experts)


def _is(one: Turn, other: Turn) -> bool:
    return one is other


def _reaches(new: Conversation, old: Conversation) -> bool:
    """Returns True if ``new`` contains all of ``old``, whose last turn may have been cut."""
    before, last = old[:-1], old[-1]
    if len(new) < len(old) or new[: len(before)] != before:
        return False
    turn = new[len(before)]
    return turn == last or (last.is_cut and turn.token_ids[: len(last.token_ids)] == last.token_ids)
