"""How responses are generated and scored."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.spec.base import SpecPart


class SamplingSpec(SpecPart):
    """How the next token is drawn."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Divides the logits, in the engine and in the trainer. 0 is greedy (evaluation only)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keeps the smallest set of tokens with this much probability. Training needs 1.0."""
    top_k: int = Field(0, ge=0)
    """Keeps this many tokens; 0 keeps all. Training needs 0."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the end-of-sequence token."""


class RewardSpec(SpecPart):
    """One term of the reward."""

    name: str
    """``exact_match``, ``math_verify``, ``reasoning_gym``, ``code_tests``, the URL of a reward service
    (``http://``, ``https://``, ``grpc://``, ``grpcs://``), or ``module:function`` / ``file.py:function``
    called with ``(prompt, response, answer, row)``."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    timeout_s: float = Field(30.0, gt=0)
    """Deadline of one evaluation; past it the sample fails as ``timeout`` and is not scored 0."""
    bounds: tuple[float, float] | None = None
    """Least and largest value that counts as a score; anything outside fails as ``invalid_value``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments handed to the reward."""


class RolloutSpec(SpecPart):
    """Engine, sampling and group handling."""

    engine: Literal["torch", "vllm", "sglang", "fake"] = "torch"
    """Generation engine."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine itself, by its own names."""
    replicas: int = Field(2, ge=1, le=4096)
    """Rollout processes or pods."""
    group_size: int = Field(8, ge=1, le=1024)
    """Responses per prompt."""
    max_response_tokens: int = Field(256, ge=1)
    """Longest response; a longer one is truncated and flagged."""
    max_running_samples: int = Field(256, ge=1)
    """Samples decoded at once in one replica. A group of more than these is shared by several replicas."""
    sampling: SamplingSpec = SamplingSpec()
    """How training responses are drawn."""
    kv_policy: Literal["recompute", "keep"] = "recompute"
    """Whether a weight update recomputes the KV cache of running responses or keeps the old one."""
    partial_rollout: bool = False
    """Whether a weight update interrupts responses and continues them under the new weights."""
    segment_tokens: int | None = Field(None, ge=1)
    """With partial rollout, tokens after which a response is put aside, so that others get its place; any
    replica continues it, under the weights of then. None interrupts only when it has to."""
    max_segments: int = Field(16, ge=1)
    """Most weight versions in one response before it is finished or dropped."""
    workflow: str = "single_turn"
    """``single_turn``, ``multi_turn``, ``agent`` (your agent over an OpenAI-compatible endpoint), or
    ``module:Class`` of your own."""
    workflow_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the workflow."""
    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    """Terms of the reward; the sum is what training sees."""
    reward_concurrency: int = Field(8, ge=1)
    """Reward evaluations at once in one replica."""
    answer_pattern: str = ""
    """Regular expression whose last match in a response is its answer, or the match's first group; without a
    match, all of the response is. maj@k of an evaluation votes over answers."""
    on_reward_failure: Literal["regenerate", "mask"] = "regenerate"
    """What happens to a sample whose reward, or agent, failed: generated again, or kept out of the loss."""
    max_attempts: int = Field(3, ge=1)
    """Times a group is tried before its prompt is quarantined."""

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"rollout.answer_pattern is no regular expression: {error}; try '#### (.*)'"
            ) from error
        return pattern

    @model_validator(mode="after")
    def _segments_need_partial_rollout(self) -> Self:
        if self.segment_tokens is not None and not self.partial_rollout:
            raise ValueError(
                f"rollout.segment_tokens is {self.segment_tokens} but rollout.partial_rollout is false; set "
                "it to true, or remove rollout.segment_tokens"
            )
        return self
