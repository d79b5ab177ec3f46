"""API models of recorded samples: prompt, response, reward and what training made of them.

The transferqueue stores their texts and tokens. REST streams them from there; gRPC returns facts
only.
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
    """Filter and order of a run's recorded samples."""

    split: Literal["train", "heldout"] | None = None
    """Training samples or evaluation samples."""
    step: Number | None = None
    """Step that trained the sample; for evaluations, the evaluated weight version."""
    weight_version: Number | None = None
    """Weight version that sampled one of its tokens."""
    group_id: Annotated[str, Field(max_length=64)] = ""
    row: Number | None = None
    """Row of its prompt in the data."""
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    finish_reason: Annotated[str, Field(max_length=16)] = ""
    text: Annotated[str, Field(max_length=200)] = ""
    """Part of the prompt or of the response, case-insensitive."""
    order_by: Literal["newest", "best", "worst"] = "newest"
    """By time or by reward; samples without a reward come last."""


class SampleView(View):
    """Recorded sample: its facts and excerpts of its texts."""

    id: str
    group_id: str
    member: int
    attempt: int
    split: Literal["train", "heldout"]
    row: int
    data_source: str
    step: int | None = None
    """Step that trained it, or None before; for evaluations, the weight version."""
    oldest_version: int | None = None
    """Oldest weight version that sampled one of its tokens."""
    newest_version: int | None = None
    staleness: int | None = None
    """Trainer's weight version minus that of its oldest trained token; None if no token trained."""
    reward: float | None = None
    """None if the sample failed."""
    terms: dict[str, float] = Field(default_factory=dict)
    """Named reward terms, before weighting."""
    advantage: float | None = None
    """Mean over its trained tokens."""
    ratio: float | None = None
    """Mean over its trained tokens of the probability under the trainer's weights divided by that
    under the rollout's."""
    finish_reason: str
    """``stop``, ``length`` or ``failed``."""
    is_greedy: bool
    prompt_tokens: int
    response_tokens: int
    num_turns: int
    num_segments: int
    time: datetime
    """Time at which it was finished."""
    prompt: str = ""
    """Prompt; in lists its beginning."""
    response: str = ""
    """All turns of the response; in lists their beginning."""


class SamplePage(BaseModel):
    """Page of a run's recorded samples."""

    items: list[SampleView]
    next_page_token: str


class TurnView(View):
    """Stretch of a response that the policy sampled or observed, for example from a tool."""

    is_sampled: bool
    text: str
    num_tokens: int
    finish_reason: str | None = None
    """Reason for which sampling ended."""
    seconds: float = 0.0
    tool_calls: tuple[dict[str, Any], ...] = ()
    """``name`` and ``arguments`` of each call in it."""


class TokenColumns(View):
    """Tokens of a response in columns of equal length; columns of training are empty before it.

    Values that are not finite are null.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    """Under the policy that sampled the token; 0 if none did."""
    weight_versions: tuple[int, ...]
    """Version that sampled the token; -1 if none did."""
    is_trained: tuple[bool, ...] = ()
    """True if the token was in the loss."""
    advantages: tuple[float | None, ...] = ()
    trained_logprobs: tuple[float | None, ...] = ()
    """Under the trainer's weights when the token was trained."""
    ratios: tuple[float | None, ...] = ()
    """``exp(trained_logprobs - logprobs)``; 1 for tokens that no policy sampled."""


class WholeSample(SampleView):
    """Recorded sample with its turns, tokens and expected answer."""

    answer: Any = None
    """Expected answer, if the data has one."""
    turns: tuple[TurnView, ...] = ()
    tokens: TokenColumns | None = None
