"""JSON-like form of an episode for user functions."""

from collections.abc import Mapping
from typing import Any

from services.rollout.workflows.base import Episode
from services.rollout.workflows.turns import Conversation, observed


def history_of(episode: Episode) -> Mapping[str, Any]:
    """Returns the whole episode in JSON-like form.

    Returns:
        ``messages``: see :func:`messages_of`; if there are several conversations, the messages of the
        one continued last. ``other_conversations``: a list of messages for each other conversation.
        ``finish_reason``: ``stop`` or ``length``. ``seconds``: total of all messages.
    """
    judged = (observed(episode.prompt_ids), *episode.response_turns)
    last = tuple(episode.turns)
    rest = [messages_of(episode, talk) for talk in episode.conversations if talk != last]
    return {
        "messages": messages_of(episode, judged),
        "other_conversations": rest,
        "finish_reason": episode.finish_reason,
        "seconds": sum(turn.seconds for turn in episode.turns),
    }


def messages_of(episode: Episode, conversation: Conversation) -> list[dict[str, Any]]:
    """Returns the messages of a conversation in JSON-like form.

    Returns:
        The prompt, then every turn. Each has ``role`` (``user`` for the prompt, ``assistant`` for a
        sampled turn, ``tool`` for an observed one), ``content`` (text without special tokens),
        ``token_ids``, ``seconds`` and, if it was sampled, ``logprobs`` and ``versions`` (pairs of
        weight version and number of tokens).
    """
    messages: list[dict[str, Any]] = []
    for turn in conversation:
        message: dict[str, Any] = {
            "role": "assistant" if turn.is_sampled else "tool" if messages else "user",
            "content": episode.text(turn),
            "token_ids": list(turn.token_ids),
            "seconds": turn.seconds,
        }
        if turn.is_sampled:
            message["logprobs"] = list(turn.logprobs)
            message["versions"] = [list(run) for run in turn.version_runs]
        messages.append(message)
    return messages
