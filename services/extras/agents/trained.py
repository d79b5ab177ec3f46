"""Selects the conversations of an agent's or environment's episode that train."""

from collections.abc import Sequence
from typing import Final

from services.rollout import metrics
from services.rollout.failures import CallError
from services.rollout.workflows.base import Episode
from services.rollout.workflows.training import messages_of
from services.rollout.workflows.turns import Conversation, num_sampled, trained_once

_KEY: Final = "rollout.workflow_arguments.train"
_TIMEOUT_S = 30.0


class TrainedConversations:
    """Selects the conversations that train after an episode is complete.

    Args:
        train: ``last`` for the conversation that was continued last, ``all``, or
            ``module:function`` / ``file.py:function``. The function receives all conversations and
            the prompt's row and returns the indices of those that train.
    """

    def __init__(self, train: str) -> None:
        if train not in ("last", "all") and ":" not in train:
            raise ValueError(f"{_KEY} must be last, all or module:function, got {train!r}")
        self._train = train

    async def choose(self, episode: Episode) -> None:
        """Sets the conversations of an episode that train.

        Raises:
            CallError: If the user's function fails or returns invalid indices.
        """
        everything = episode.conversations
        if self._train != "last" and everything:
            numbers = (
                range(len(everything)) if self._train == "all" else await self._chosen(episode)
            )
            episode.trained = [everything[number] for number in numbers]
        unused = _num_sampled(everything) - _num_sampled(episode.sequences)
        metrics.UNUSED_AGENT_TOKENS.inc(max(unused, 0))

    async def _chosen(self, episode: Episode) -> Sequence[int]:
        """Returns the indices that the user's function selects."""
        last = tuple(episode.turns)
        conversations = [
            {"messages": messages_of(episode, talk), "is_last": talk == last}
            for talk in episode.conversations
        ]
        row = dict(episode.prompt.row)
        numbers = await episode.call(self._train, (conversations, row), timeout_s=_TIMEOUT_S)
        choices = range(len(conversations))
        if (
            not isinstance(numbers, list)
            or not numbers
            or not all(type(number) is int and number in choices for number in numbers)
            or len(set(numbers)) < len(numbers)
        ):
            raise CallError(
                "invalid_value",
                f"{_KEY} {self._train!r} must return distinct indexes of conversations, at least one from 0 "
                f"to {len(conversations) - 1}, got {numbers!r:.200}",
            )
        return numbers


def _num_sampled(conversations: Sequence[Conversation]) -> int:
    """Returns the number of sampled tokens; a prefix that several conversations share counts once."""
    return sum(map(num_sampled, trained_once(conversations)))
