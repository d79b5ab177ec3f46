"""An episode as rewards are told of it."""

from collections.abc import Mapping
from typing import Any

from services.rollout.workflows.base import Episode


def history_of(episode: Episode) -> Mapping[str, Any]:
    """The whole episode, JSON-like.

    Returns:
        ``messages``: the prompt, then every turn. Each has ``role`` (``user`` for the prompt, ``assistant``
        for what the policy sampled, ``tool`` for what it observed), ``content`` (text, special tokens left
        out), ``token_ids``, ``seconds`` and, if it was sampled, ``logprobs`` and ``versions`` (pairs of
        weight version and number of tokens). ``finish_reason``: ``stop`` or ``length``. ``seconds``: of all.
    """
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": episode.tokenizer.decode(episode.prompt_ids),
            "token_ids": list(episode.prompt_ids),
            "seconds": 0.0,
        }
    ]
    for turn in episode.response_turns:
        message: dict[str, Any] = {
            "role": "assistant" if turn.is_sampled else "tool",
            "content": episode.text(turn),
            "token_ids": list(turn.token_ids),
            "seconds": turn.seconds,
        }
        if turn.is_sampled:
            message["logprobs"] = list(turn.logprobs)
            message["versions"] = [list(run) for run in turn.version_runs]
        messages.append(message)
    return {
        "messages": messages,
        "finish_reason": episode.finish_reason,
        "seconds": sum(turn.seconds for turn in episode.turns),
    }
