"""Finished samples: their tensors and tags."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
import regex
import torch
from torch import Tensor

from services.common.fields import (
    ROUTED_EXPERTS,
    SAMPLER_TOP_K,
    SAMPLING_MASK,
    TOKEN_REWARDS,
    TOOL_VERSION,
)
from services.common.models.families import RoutingShape
from services.common.runspec.rollout import RolloutSpec
from services.rollout import metrics
from services.rollout.data.demonstrations import Demonstration
from services.rollout.data.images import Picture
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import Engine, VersionRun
from services.rollout.failures import GroupError
from services.rollout.rewards.base import Score
from services.rollout.workflows.turns import (
    Conversation,
    Turn,
    divided,
    num_tokens,
    observed,
    routed_experts,
    sampled_versions,
    sampling_mask,
    shown,
    token_ids,
    top_logprobs,
    version_runs,
)
from services.wire.data.encoding.packing import Values
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs

logger = logging.getLogger(__name__)

# The pattern comes from the user, and matching blocks the event loop.
_PATTERN_TIMEOUT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scored response of a group."""

    member: int
    """Index in the group."""
    prompt_ids: tuple[int, ...]
    """Tokens before the response."""
    prompt_inputs: ModelInputs | None = None
    """Tensors that the model takes besides the prompt's tokens; None if the run has none."""
    prompt_pictures: tuple[Picture, ...] = ()
    """The prompt's images, for people."""
    turns: tuple[Turn, ...]
    """The response; then any further conversations of the episode, each with its prompt."""
    score: Score
    """Task reward and its terms; 0, which has no meaning, if the sample failed."""
    finish_reason: str
    """``stop``, ``length`` or ``failed``."""
    is_greedy: bool
    """True if the sample was decoded greedily."""
    seed: int = 0
    """Seed that the response was sampled with; 0, which has no meaning, if it was not sampled."""
    token_rewards: tuple[float, ...] = ()
    """Reward of each response token, if a reward assigns it by token; otherwise empty."""
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Further numbers of each response token, by column; a failed sample has none."""
    answer: str = ""
    """Digest of the answer; empty in training."""

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return list(token_ids(self.turns))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All images, for people."""
        return (*self.prompt_pictures, *(image for turn in self.turns for image in turn.pictures))

    @property
    def turn_inputs(self) -> Mapping[int, ModelInputs]:
        """Tensors that the model takes besides the tokens of turns, by the index of a turn's first token."""
        starts = accumulate(
            (len(turn.token_ids) for turn in self.turns), initial=len(self.prompt_ids)
        )
        return {
            start: turn.model_inputs
            for start, turn in zip(starts, self.turns, strict=False)
            if turn.model_inputs is not None
        }

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
        pattern: Regular expression. The answer is its last match, or the first group of that match
            if the pattern has groups. The whole response is the answer if the pattern is empty,
            does not match or times out.
    """
    answer: str | None = response
    try:
        for match in (
            regex.finditer(pattern, response, timeout=_PATTERN_TIMEOUT_S) if pattern else ()
        ):
            answer = match[min(1, len(match.groups()))]
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
        trained: The conversations of the sample; tokens that are context there get 0.
    """
    by_turn, start = dict[int, Sequence[float]](), 0
    for turn in judged:
        if turn.is_sampled:
            by_turn[id(turn)] = tokens[start : start + len(turn.token_ids)]
            start += len(turn.token_ids)
    first, *_ = trained
    rewards = [
        number
        for conversation in trained
        for turn in conversation
        for number in by_turn.get(id(turn), (0.0,) * len(turn.token_ids))
    ]
    return tuple(rewards[len(first[0].token_ids) :])


def prompt_fields(samples: Sequence[Sample]) -> list[Tensor]:
    """Returns the prompts' tokens, each ``[P]`` int32; a single row if all samples share the prompt."""
    prompts = [sample.prompt_ids for sample in samples]
    rows = prompts[:1] if len(set(prompts)) == 1 else prompts
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


def row_of(rows: Iterable[Sequence[float]], dtype: Any) -> Tensor:
    """Concatenates parts into one tensor, three times as fast as ``torch.tensor`` on a flat list."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=dtype))


def sample_fields(
    samples: Sequence[Sample],
    routing: RoutingShape | None = None,
    *,
    has_token_rewards: bool = False,
    columns: Sequence[str] = (),
    has_masks: bool = False,
    num_top: int = 0,
) -> dict[str, Values]:
    """Returns the tensors of the samples by field name, as the data dictionary defines them.

    Args:
        routing: Shape of the routers' choices, if the trainer replays them.
        has_token_rewards: True if a reward of the run scores turns or tokens.
        columns: Columns that rewards of the run fill.
        has_masks: True if sampling is truncated.
        num_top: Number of most likely tokens that the trainer needs in place of each token.

    Raises:
        ValueError: If a sample's logprobs or versions do not cover its tokens.
    """
    runs = [sample.version_runs for sample in samples]
    lengths = [num_tokens(sample.turns) for sample in samples]
    for sample, of_sample, length in zip(samples, runs, lengths, strict=True):
        num_logprobs = sum(len(turn.logprobs) for turn in sample.turns)
        num_versions = sum(count for _, count in of_sample)
        if not length == num_logprobs == num_versions:
            raise ValueError(
                f"sample {sample.member} has {length} tokens, {num_logprobs} logprobs and versions for "
                f"{num_versions}; they must be equal"
            )
    turns = [(turn, s.finish_reason != "failed") for s in samples for turn in s.turns]
    masks = ((turn.is_sampled and is_trained,) * len(turn.token_ids) for turn, is_trained in turns)
    versions = row_of(chain.from_iterable(runs), np.int32).reshape(-1, 2)
    # One tensor for all samples: a tensor for each row takes longer than its values.
    row_lengths = torch.tensor(lengths)
    fields: dict[str, Values] = {
        name: Jagged(values, row_lengths)
        for name, values in (
            ("response_ids", row_of((turn.token_ids for turn, _ in turns), np.int32)),
            ("response_mask", row_of(masks, np.bool_)),
            ("rollout_logprobs", row_of((turn.logprobs for turn, _ in turns), np.float32)),
        )
    }
    fields["version_runs"] = Jagged(versions, torch.tensor(list(map(len, runs))))
    fields["rewards"] = torch.tensor([s.score.value for s in samples], dtype=torch.float32)
    numbers: dict[str, list[tuple[float, ...]]] = {
        name: [sample.columns.get(name, ()) for sample in samples] for name in columns
    }
    if has_token_rewards:
        numbers[TOKEN_REWARDS] = [sample.token_rewards for sample in samples]
    for name, rows in numbers.items():
        values = [row or (0.0,) * length for row, length in zip(rows, lengths, strict=True)]
        fields[name] = Jagged(row_of(values, np.float32), row_lengths)
    if routing is not None:
        fields[ROUTED_EXPERTS] = [_experts(sample, routing) for sample in samples]
    if has_masks:
        fields[SAMPLING_MASK] = [torch.from_numpy(sampling_mask(s.turns)) for s in samples]
    if num_top:
        fields[SAMPLER_TOP_K] = [torch.from_numpy(top_logprobs(s.turns, num_top)) for s in samples]
    return fields


def _experts(sample: Sample, routing: RoutingShape) -> Tensor:
    """Returns the experts of all tokens but the last; tokens with unknown experts get ``routing.missing``."""
    num_tokens = max(len(sample.prompt_ids) + len(sample.response_ids) - 1, 0)
    experts = np.full((num_tokens, *routing.tail), routing.missing, routing.dtype)
    start = 0
    for conversation in divided((observed(sample.prompt_ids), *sample.turns)):
        routed, length = routed_experts(conversation), len(token_ids(conversation))
        if routed is not None:
            end = min(start + min(len(routed), length - 1), num_tokens)
            experts[start:end] = routed[: end - start]
        start += length
    return torch.from_numpy(experts)


def sample_tags(
    samples: Sequence[Sample], prompt: Prompt, *, group_id: str, attempt: int
) -> dict[str, list[Any]]:
    """Returns the tags of the samples by name, as docs/data-plane.md lists them."""
    versions = [sample.sampled_versions or [TOOL_VERSION] for sample in samples]
    tags: dict[str, list[Any]] = {
        "group_id": [group_id] * len(samples),
        "member": [sample.member for sample in samples],
        "attempt": [attempt] * len(samples),
        "v_min": list(map(min, versions)),
        "v_max": list(map(max, versions)),
        "v_first": [of_sample[0] for of_sample in versions],
        "num_segments": list(map(len, versions)),
        "prompt_tokens": [len(sample.prompt_ids) for sample in samples],
        "response_tokens": [num_tokens(sample.turns) for sample in samples],
        "reward": [sample.score.value for sample in samples],
        "terms": [json.dumps(dict(sample.score.terms)) for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "data_source": [prompt.data_source] * len(samples),
        "greedy": [int(sample.is_greedy) for sample in samples],
        "seed": [sample.seed for sample in samples],
    }
    if samples[0].answer:  # of held-out prompts
        tags["answer"] = [sample.answer for sample in samples]
    return tags


async def demonstration_sample(
    prompt: Prompt, member: int, spec: RolloutSpec, engine: Engine, *, is_training: bool
) -> Sample:
    """Returns a sample whose response is an answer of the prompt's row.

    Args:
        prompt: Prompt with a demonstration for each member.
        member: Index of the demonstration.
        engine: Limits the length of prompt and response; computes log-probabilities of held-out answers.
        is_training: True if the answer is trained. Otherwise the sample's score is the mean
            log-probability of the answer's tokens and the term ``loss`` is its negative; for a
            pair, the term ``preferred`` is 1 if the first answer is likelier than the second.

    Raises:
        GroupError: If the answer does not fit and may not be cut; a retry would not help.
    """
    shows = prompt.demonstrations[member]
    room = min(spec.max_response_tokens, engine.max_tokens - len(shows.prompt_ids))
    is_cut = shows.num_tokens > room
    if is_cut and not (prompt.may_be_cut and room > 0):
        raise GroupError(
            "demonstration_too_long",
            f"an answer has {shows.num_tokens} tokens, but only {room} fit after its prompt of "
            f"{len(shows.prompt_ids)} tokens (rollout.max_response_tokens is {spec.max_response_tokens}, the "
            f"model's context {engine.max_tokens}); raise it, set data.demonstration.too_long to 'cut', or "
            "remove the row",
            retryable=False,
        )
    shows = shows.cut(room)
    turns = [shown(stretch.token_ids, is_answer=stretch.is_answer) for stretch in shows.stretches]
    # The first answer of a pair is the preferred one.
    score = Score(float(member == 0))
    if not is_training:
        score = await _likelihood([shows, *prompt.demonstrations[1:]], prompt, engine)
    sample = Sample(
        member=member,
        prompt_ids=shows.prompt_ids,
        prompt_inputs=prompt.model_inputs,
        turns=tuple(turns),
        score=score,
        finish_reason="length" if is_cut else "stop",
        is_greedy=not is_training,
        answer="" if is_training else answer_digest(shows.text, ""),
    )
    metrics.SAMPLES.labels(finish_reason=sample.finish_reason).inc()
    metrics.RESPONSE_TOKENS.observe(shows.num_tokens)
    return sample


async def _likelihood(every: Sequence[Demonstration], prompt: Prompt, engine: Engine) -> Score:
    first, *other_logprobs = [await _logprobs(shows, prompt, engine) for shows in every]
    mean = sum(first) / len(first)
    terms = {"loss": -mean}
    if other_logprobs:
        terms["preferred"] = float(sum(first) > sum(other_logprobs[0]))
    return Score(mean, terms)


async def _logprobs(shows: Demonstration, prompt: Prompt, engine: Engine) -> list[float]:
    """Returns the log-probabilities of the tokens that belong to the answer."""
    response = [token for stretch in shows.stretches for token in stretch.token_ids]
    trains = [stretch.is_answer for stretch in shows.stretches for _ in stretch.token_ids]
    try:
        logprobs = await engine.score([*shows.prompt_ids, *response], prompt.model_inputs)
    except ValueError as error:
        raise GroupError("request_refused", str(error), retryable=False) from error
    rest = logprobs[len(shows.prompt_ids) - 1 :]
    return [value for value, is_answer in zip(rest, trains, strict=True) if is_answer]
