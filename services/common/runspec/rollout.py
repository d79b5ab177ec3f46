"""How responses are generated and scored."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from services.common.runspec.base import SpecPart
from services.common.runspec.engines import ENGINES, engine_kind


class SamplingSpec(SpecPart):
    """How the next token is drawn."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Divides the logits, in the engine and in the trainer. 0 is greedy (evaluation only)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keeps the smallest set of tokens with this much probability. Training needs 1.0."""
    top_k: int = Field(0, ge=0)
    """Keeps this many tokens; 0 keeps all. Training needs 0."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the end-of-sequence tokens of the model. A special token of the
    tokenizer ends it as a token; a text that has one and something else is refused."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens that end a response, besides the end-of-sequence tokens of the model."""


class TermSpec(SpecPart):
    """One named term of a reward that has several."""

    weight: float = 1.0
    """Factor of this term in the reward's sum; 0 only measures it."""
    bounds: tuple[float, float] | None = None
    """Least and largest value that counts; anything outside fails as ``invalid_value``."""


class RewardSpec(SpecPart):
    """One reward; training sees the sum of all."""

    name: str
    """``exact_match``, ``math_verify``, ``reasoning_gym``, ``code_tests``, the URL of a reward service
    (``http://``, ``https://``, ``grpc://``, ``grpcs://``), or ``module:function`` / ``file.py:function``
    called with ``(prompt, response, answer, row)``. Gives a number, or named terms that are added up."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    timeout_s: float = Field(30.0, gt=0)
    """Deadline of one evaluation; past it the sample fails as ``timeout`` and is not scored 0."""
    bounds: tuple[float, float] | None = None
    """Least and largest value that counts as a score, of named terms their sum; anything outside fails as
    ``invalid_value``."""
    terms: dict[str, TermSpec] = Field(default_factory=dict)
    """Weights and bounds of named terms; a term that is not here has weight 1. A reward that leaves one of
    these out fails as ``invalid_value``."""
    sees: Literal["response", "group", "pairs"] = "response"
    """What a function of yours is called with. ``group``: ``(prompt, responses, answer, row)``, all responses
    of a group, for a list of numbers or terms. ``pairs``: ``(prompt, first, second, answer, row)``, for a
    preference of the first from 0 to 1; a response is worth its mean over all others, in both orders."""
    per: Literal["response", "turn", "token"] = "response"
    """What a number is for. ``turn`` and ``token``: a reward of yours gives a list with a number for each
    turn, or each token, that the policy sampled in the conversation that it judges. Token-level advantages
    credit them there, others by their sum."""
    sees_episode: bool = False
    """Whether it is also given the whole episode, as the keyword ``episode``: messages, tokens, versions and
    times. One that sees several responses gets the list ``episodes``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments handed to the reward. Of a reward service ``token`` alone, which it is shown as
    ``Authorization: Bearer``: ``{"secret": "NAME"}``."""


class RolloutSpec(SpecPart):
    """Engine, sampling and group handling."""

    engine: str = Field("torch", json_schema_extra={"enum": [*ENGINES]})
    """Generation engine. ``vllm`` and ``sglang`` must be installed; ``fake`` has no model. ``none``, for rows
    that bring their answers (``algorithm.loss: sft`` or ``dpo``) and their default if none are held out, has
    none either, and generates nothing."""
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine itself, by its own names."""
    replicas: int = Field(2, ge=1, le=4096)
    """Rollout processes or pods."""
    group_size: int = Field(8, ge=1, le=1024)
    """Responses per prompt."""
    max_response_tokens: int = Field(256, ge=1)
    """Longest response; a longer one is truncated and flagged. After a prompt that leaves less of the model's
    context, the longest one is what is left."""
    max_running_samples: int = Field(256, ge=1)
    """Samples decoded at once in one replica. A group of more than these is shared by several replicas.
    Default: its share of what ``algorithm.max_staleness`` lets in, from 64 to 1,024 (256 with ``torch``)."""
    reproducible: bool = False
    """Whether the same seed, weights and context draw the same tokens in ``vllm`` and ``sglang`` too, as they
    do in ``torch``. Each request then has random numbers of its own, which makes every step slower."""
    sampling: SamplingSpec = SamplingSpec()
    """How training responses are drawn."""
    kv_policy: Literal["recompute", "keep"] = "recompute"
    """Whether a weight update recomputes the KV cache of running responses or keeps the old one."""
    routing_replay: Literal["off", "compare", "replay"] = "off"
    """For mixtures of experts: ``replay`` lets the trainer choose the experts that the engine chose (R3,
    arXiv:2510.11370), ``compare`` only reports for how many tokens they differ."""
    partial_rollout: bool = False
    """Whether new weights are adopted between two decode steps, and running responses go on under them.
    Otherwise rollouts finish what they generate first, and nothing new starts meanwhile. Default: true, but
    false with ``algorithm.max_staleness`` 0."""
    segment_tokens: int | None = Field(None, ge=1)
    """With partial rollout, tokens after which a response is put aside, so that others get its place; any
    replica continues it, under the weights of then. Below ``max_response_tokens``; None interrupts only when
    it has to."""
    max_segments: int | None = Field(None, ge=1)
    """Most weight versions in one response; one with more fails. None leaves that to
    ``algorithm.max_staleness``."""
    workflow: str = "single_turn"
    """``single_turn``, ``multi_turn``, ``agent`` (your agent over an OpenAI-compatible endpoint), or
    ``module:Class`` of your own."""
    workflow_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the workflow."""
    rewards: tuple[RewardSpec, ...] = ()
    """What scores a response; training sees the weighted sum. Needed wherever responses are sampled to be
    reinforced. Under ``algorithm.loss: sft`` it scores held-out answers; without it their likelihood is
    measured."""
    reward_concurrency: int = Field(8, ge=1)
    """Reward evaluations at once in one replica."""
    answer_pattern: str = Field("", max_length=1000)
    """Regular expression whose last match in a response is its answer, or the match's first group; without a
    match, all of the response is. maj@k of an evaluation votes over answers."""
    on_reward_failure: Literal["regenerate", "mask"] = "regenerate"
    """What happens to a sample whose reward, or agent, failed: generated again, or kept out of the loss."""
    max_attempts: int = Field(3, ge=1)
    """Times a group is tried before its prompt is quarantined."""

    @field_validator("engine")
    @classmethod
    def _is_an_engine(cls, engine: str) -> str:
        engine_kind(engine)
        return engine

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"rollout.answer_pattern is no regular expression: {error}; try '#### (.*)'"
            ) from error
        return pattern
