"""Kept samples as the API shows them: what was asked, what the model wrote, and what came of it.

Their texts and tokens are in the transferqueue's store. REST streams them from there; gRPC has facts only.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from services.controller.models import View

_MAX_NUMBER = 2**53
Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
Reward = Annotated[float, Field(allow_inf_nan=False)]
SampleId = Annotated[str, Field(max_length=80, pattern="^[A-Za-z0-9_-]+[.][0-9]+$")]


class SampleFilter(BaseModel):
    """Which of the kept samples of a run, and which of them first."""

    split: Literal["train", "heldout"] | None = None
    """Those for training, or those of evaluations."""
    step: Number | None = None
    """Step that trained them; of an evaluation, the weight version that it evaluated."""
    weight_version: Number | None = None
    """Weight version that sampled one of their tokens."""
    group_id: Annotated[str, Field(max_length=64)] = ""
    row: Number | None = None
    """Row of their prompt in the data."""
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    finish_reason: Annotated[str, Field(max_length=16)] = ""
    text: Annotated[str, Field(max_length=200)] = ""
    """Part of the prompt or of the response, in any case of its letters."""
    order_by: Literal["newest", "best", "worst"] = "newest"
    """By time or by reward; those without a reward come last."""


class SampleView(View):
    """One kept sample: its facts, and how its texts begin."""

    id: str
    group_id: str
    member: int
    attempt: int
    split: Literal["train", "heldout"]
    row: int
    data_source: str
    step: int | None = None
    """Step that trained it, or None while none has; of an evaluation, the weight version."""
    oldest_version: int | None = None
    """Oldest weight version that sampled one of its tokens."""
    newest_version: int | None = None
    staleness: int | None = None
    """Versions that the trainer was ahead of its oldest trained token; None if none of its tokens trained."""
    reward: float | None = None
    """None if it failed: then there is no reward."""
    terms: dict[str, float] = Field(default_factory=dict)
    """Its named terms, before weights."""
    advantage: float | None = None
    """Mean over its trained tokens."""
    ratio: float | None = None
    """Mean over its trained tokens: probability under the trainer's weights by that under the rollout's."""
    finish_reason: str
    """``stop``, ``length`` or ``failed``."""
    is_greedy: bool
    prompt_tokens: int
    response_tokens: int
    num_turns: int
    num_segments: int
    time: datetime
    """When it was finished."""
    prompt: str = ""
    """The prompt; in a list its beginning."""
    response: str = ""
    """All turns of the response; in a list their beginning."""


class SamplePage(BaseModel):
    """Kept samples of a run."""

    items: list[SampleView]
    next_page_token: str


class TurnView(View):
    """A stretch of a response that the policy sampled, or that it was told, as by a tool."""

    is_sampled: bool
    text: str
    num_tokens: int
    finish_reason: str | None = None
    """How sampling ended."""
    seconds: float = 0.0
    tool_calls: tuple[dict[str, Any], ...] = ()
    """``name`` and ``arguments`` of each call in it."""


class TokenColumns(View):
    """The tokens of a response, in columns: an entry for each, or none before it was trained.

    What is not finite is null.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    """Under the policy that sampled it; 0 if none did."""
    weight_versions: tuple[int, ...]
    """Version that sampled it; -1 if none did."""
    is_trained: tuple[bool, ...] = ()
    """Whether it was in the loss."""
    advantages: tuple[float | None, ...] = ()
    trained_logprobs: tuple[float | None, ...] = ()
    """Under the trainer's weights when it was trained."""
    ratios: tuple[float | None, ...] = ()
    """``exp(trained_logprobs - logprobs)``; 1 where no policy sampled it."""


class WholeSample(SampleView):
    """One kept sample with everything that is known of it."""

    answer: Any = None
    """Expected answer, if the data has one."""
    turns: tuple[TurnView, ...] = ()
    tokens: TokenColumns | None = None
