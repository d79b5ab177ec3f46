"""The finished sample and its tensors and tags."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import regex
import torch
from torch import Tensor

from services.common.fields import ROUTED_EXPERTS, TOKEN_REWARDS, TOOL_VERSION
from services.common.models.routing_shape import RoutingShape
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import VersionRun
from services.rollout.rewards.base import Score
from services.rollout.workflows.conversations import Conversation, divided
from services.rollout.workflows.turns import (
    Turn,
    observed,
    routed_experts,
    sampled_versions,
    token_ids,
    version_runs,
)

logger = logging.getLogger(__name__)

# The pattern comes from the user, and matching blocks the event loop.
_PATTERN_TIMEOUT_S = 0.1
Tag = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scored response of a group."""

    member: int
    """Index in the group."""
    prompt_ids: tuple[int, ...]
    """Tokens before the response."""
    turns: tuple[Turn, ...]
    """The response; then any further conversations of the episode, each with its prompt."""
    score: Score
    """Task reward and its terms; 0 and without meaning if the sample failed."""
    finish_reason: str
    """``stop``, ``length`` or ``failed``."""
    is_greedy: bool
    """True if the sample was decoded greedily."""
    token_rewards: tuple[float, ...] = ()
    """Reward of each response token, if a reward assigns it by token; otherwise empty."""
    answer: str = ""
    """Digest of the answer; empty in training."""

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return list(token_ids(self.turns))

    @property
    def version_runs(self) -> list[VersionRun]:
        """Run-length encoded weight versions of all tokens."""
        return version_runs(self.turns)

    @property
    def sampled_versions(self) -> list[int]:
        """Weight versions of the sampled stretches, in order, without consecutive repeats."""
        return sampled_versions(self.turns)


def answer_digest(response: str, pattern: str) -> str:
    """Returns a digest that is equal for responses with equal answers.

    Args:
        response: Text of a response.
        pattern: Regular expression. The answer is its last match, or the first group of that match
            if the pattern has groups. The whole response is the answer if the pattern is empty,
            does not match or times out.
    """
    answer: str | None = response
    try:
        for found in (
            regex.finditer(pattern, response, timeout=_PATTERN_TIMEOUT_S) if pattern else ()
        ):
            answer = found[min(1, len(found.groups()))]
    except TimeoutError:
        answer = response
        logger.warning("matching rollout.answer_pattern takes too long", extra={"pattern": pattern})
    return hashlib.sha256((answer or "").strip().encode()).hexdigest()[:16]


def placed_rewards(
    tokens: Sequence[float], judged: Conversation, trained: Sequence[Conversation]
) -> tuple[float, ...]:
    """Maps per-token rewards to the positions of a sample's response; other tokens get 0.

    Args:
        tokens: One reward for each sampled token of the judged conversation.
        judged: The conversation that the reward scored.
        trained: The conversations of the sample; tokens that are context there get 0.
    """
    by_turn, place = dict[int, Sequence[float]](), 0
    for turn in judged:
        if turn.is_sampled:
            by_turn[id(turn)] = tokens[place : place + len(turn.token_ids)]
            place += len(turn.token_ids)
    first, *_ = trained
    placed = [
        number
        for conversation in trained
        for turn in conversation
        for number in by_turn.get(id(turn), (0.0,) * len(turn.token_ids))
    ]
    return tuple(placed[len(first[0].token_ids) :])


def prompt_fields(samples: Sequence[Sample]) -> list[Tensor]:
    """Returns the prompts' tokens, ``[P]`` int32 each; a single row if all samples share the prompt."""
    prompts = [sample.prompt_ids for sample in samples]
    rows = prompts[:1] if len(set(prompts)) == 1 else prompts
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


def row_of(parts: Iterable[Sequence[float]], dtype: Any) -> Tensor:
    """Concatenates parts into one tensor, three times as fast as ``torch.tensor`` on a flat list."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype=dtype))


def sample_fields(
    samples: Sequence[Sample],
    routing: RoutingShape | None = None,
    *,
    has_token_rewards: bool = False,
) -> dict[str, list[Tensor]]:
    """Returns the tensors of the samples by field name, as the data dictionary defines them.

    Args:
        samples: Samples of one group.
        routing: Shape of the routers' choices, if the trainer replays them.
        has_token_rewards: True if a reward of the run scores turns or tokens.

    Raises:
        ValueError: If a sample's logprobs or versions do not cover its tokens.
    """
    fields: dict[str, list[Tensor]] = {
        name: []
        for name in ("response_ids", "response_mask", "rollout_logprobs", "version_runs", "rewards")
    }
    for sample in samples:
        turns, runs = sample.turns, sample.version_runs
        response_ids = row_of((turn.token_ids for turn in turns), np.int32)
        logprobs = row_of((turn.logprobs for turn in turns), np.float32)
        counted = sum(count for _, count in runs)
        if not len(response_ids) == len(logprobs) == counted:
            raise ValueError(
                f"sample {sample.member} has {len(response_ids)} tokens, {len(logprobs)} logprobs and "
                f"versions for {counted}; they must be equal"
            )
        is_trained = sample.finish_reason != "failed"
        mask = ((turn.is_sampled and is_trained,) * len(turn.token_ids) for turn in turns)
        fields["response_ids"].append(response_ids)
        fields["response_mask"].append(row_of(mask, np.bool_))
        fields["rollout_logprobs"].append(logprobs)
        fields["version_runs"].append(torch.tensor(runs, dtype=torch.int32).reshape(-1, 2))
        fields["rewards"].append(torch.tensor(sample.score.value, dtype=torch.float32))
    if has_token_rewards:
        fields[TOKEN_REWARDS] = [
            torch.tensor(sample.token_rewards or (0.0,) * len(sample.response_ids))
            for sample in samples
        ]
    if routing is not None:
        fields[ROUTED_EXPERTS] = [_experts(sample, routing) for sample in samples]
    return fields


def _experts(sample: Sample, routing: RoutingShape) -> Tensor:
    """Returns the experts of all tokens but the last; tokens without a report get ``routing.missing``."""
    num_tokens = max(len(sample.prompt_ids) + len(sample.response_ids) - 1, 0)
    experts = np.full((num_tokens, *routing.tail), routing.missing, routing.dtype)
    start = 0
    for conversation in divided((observed(sample.prompt_ids), *sample.turns)):
        known, length = routed_experts(conversation), len(token_ids(conversation))
        if known is not None:
            end = min(start + min(len(known), length - 1), num_tokens)
            experts[start:end] = known[: end - start]
        start += length
    return torch.from_numpy(experts)


def sample_tags(
    samples: Sequence[Sample], prompt: Prompt, *, group_id: str, attempt: int
) -> dict[str, list[Any]]:
    """Returns the tags of the samples by name, as the data dictionary defines them."""
    rows = [_tags(sample, prompt, group_id=group_id, attempt=attempt) for sample in samples]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _tags(sample: Sample, prompt: Prompt, *, group_id: str, attempt: int) -> dict[str, Tag]:
    versions = sample.sampled_versions or [TOOL_VERSION]
    tags: dict[str, Tag] = {
        "group_id": group_id,
        "member": sample.member,
        "attempt": attempt,
        "v_min": min(versions),
        "v_max": max(versions),
        "v_first": versions[0],
        "num_segments": len(versions),
        "prompt_tokens": len(sample.prompt_ids),
        "response_tokens": len(sample.response_ids),
        "reward": sample.score.value,
        "terms": json.dumps(dict(sample.score.terms)),
        "finish_reason": sample.finish_reason,
        "data_source": prompt.data_source,
        "greedy": int(sample.is_greedy),
    }
    return tags | {"answer": sample.answer} if sample.answer else tags
