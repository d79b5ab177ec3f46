"""How rewards become a gradient, and how stale a sample may be."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.runspec.base import SpecPart
from services.common.runspec.formulas import (
    ADVANTAGES,
    LOSSES,
    AdvantageKind,
    Formula,
    LossKind,
)


class KlSpec(SpecPart):
    """Penalty for leaving the reference policy: the frozen base model, or the run's teacher."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty. 0 switches it off, and then no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3+"
    """Estimator of the divergence. A ``+`` keeps its value and takes the gradient of ``k2``, which grows with
    the distance. ``k3`` (``low_var_kl`` elsewhere) is clamped at 10: it has no gradient for a token whose
    logprob is more than 2.6 nats below the reference."""
    placement: Literal["loss", "reward"] = "loss"
    """Whether the penalty is added to the loss or taken from the token rewards."""
    target: float | None = Field(None, gt=0)
    """With a target the coefficient adapts towards it; None keeps it fixed."""
    horizon: int = Field(10_000, ge=1)
    """Samples over which the adaptive coefficient moves."""


class OverlongSpec(SpecPart):
    """What happens to responses that ran into the length limit (DAPO, arXiv:2503.14476)."""

    buffer_tokens: int = Field(0, ge=0)
    """Tokens before the limit over which a soft penalty grows. 0 switches it off."""
    penalty: float = Field(1.0, ge=0)
    """Largest penalty, taken from the reward at the limit."""
    mask_truncated: bool = False
    """Whether truncated responses leave the loss (group statistics keep them)."""


class RejectionSpec(SpecPart):
    """Tokens or sequences that leave the loss because the policies disagree too much."""

    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    """What the statistic is taken over."""
    statistic: Literal["k1", "k2", "k3"] = "k1"
    """``k1`` bounds the ratio itself; ``k2`` and ``k3`` bound the divergence from above."""
    lower: float | None = None
    """Least accepted value; None is no bound."""
    upper: float | None = None
    """Largest accepted value; None is no bound."""
    negative_only: bool = False
    """Whether only tokens with a negative advantage may be rejected."""


class AlgorithmSpec(SpecPart):
    """Advantage, loss, off-policy correction and staleness."""

    advantage: str = Field("grpo", json_schema_extra={"examples": [*ADVANTAGES]})
    """Advantage estimator: ``grpo``, ``dr_grpo``, ``rloo``, ``opo``, ``pass_at_k``, ``reinforce_pp``,
    ``reinforce_pp_baseline``, ``remax``, ``gae``, ``uniform`` (1 for every token), ``none`` (0: the
    default with a teacher), or ``module:function`` / ``file.py:function`` called with a ``ScoredBatch``."""
    advantage_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an advantage of your own; the others have keys here."""
    loss: str = Field("ppo", json_schema_extra={"examples": [*LOSSES]})
    """Policy loss: ``ppo``, ``gspo``, ``cispo``, ``aipo``, ``sapo``, ``reinforce``, or ``module:function`` /
    ``file.py:function`` called with ``LossTokens``. ``gspo`` (whose clip distances default to 3e-4 and 4e-4)
    and ``sapo`` default to the aggregation ``seq-mean-token-mean``. Two sample nothing: ``sft`` is the cross
    entropy of the answers in ``data.train``, ``dpo`` prefers one of two answers."""
    loss_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss of your own; the others have keys here."""
    aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "seq-mean-token-mean",
    ] = "token-mean"
    """How token losses become one number; denominators are global over ranks and micro-batches."""
    clip_low: float = Field(0.2, ge=0)
    """Lower clip distance: the ratio is clipped at ``1 - clip_low``. ``cispo`` has none: its default is 1."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clip distance: the ratio is clipped at ``1 + clip_high`` (DAPO's clip-higher)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound on the loss of tokens with a negative advantage; None switches it off."""
    ratio_max: float = Field(5.0, gt=0)
    """Truncation of the ratio in ``aipo``."""
    sapo_temperature_positive: float = Field(1.0, gt=0)
    """Gate temperature of ``sapo`` for positive advantages."""
    sapo_temperature_negative: float = Field(1.05, gt=0)
    """Gate temperature of ``sapo`` for negative advantages."""
    dpo_beta: float = Field(0.1, gt=0)
    """How closely ``dpo`` stays at the reference policy: what log-ratios to it are multiplied by."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token (REINFORCE++, ReMax, GAE)."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Decay of the advantage estimate (GAE)."""
    value_clip: float = Field(0.2, gt=0)
    """Clip distance of the critic's value loss (GAE)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: KlSpec = KlSpec()
    """Penalty for leaving the reference policy."""

    correction: Literal["auto", "bypass", "decoupled", "none"] = "auto"
    """Off-policy correction. ``bypass``: the sampling policy is the PPO baseline. ``decoupled``: weight
    from sampling to proximal policy, clip around the proximal one. ``auto``: ``bypass`` with one update
    per batch, else ``decoupled``. ``none`` is refused when training is asynchronous."""
    proximal: Literal["computed", "interpolated"] = "computed"
    """Logprobs of the proximal policy under ``decoupled``: a forward pass over the batch, or, for nothing, on
    the line between the policy that sampled a token and the current one (A-3PO, arXiv:2512.06547)."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether the weight of ``decoupled`` is taken per token or per sequence."""
    correction_cap: float = Field(2.0, gt=0)
    """Largest weight of ``decoupled``."""
    correction_floor: float = Field(0.0, ge=0)
    """Least weight when ``correction_cap_mode`` is ``mask`` (IcePop)."""
    correction_cap_mode: Literal["truncate", "mask"] = "truncate"
    """Whether a weight beyond the cap is cut down to it (TIS) or its token is dropped (IcePop)."""
    correction_normalize: bool = False
    """Whether weights of ``decoupled`` are divided by their mean over the batch: they then only shift weight
    between tokens. Takes the forward pass of ``proximal: computed`` with one update per batch too."""
    rejection: tuple[RejectionSpec, ...] = ()
    """Masks that all have to accept a token."""
    rejection_denominator: Literal["original", "kept"] = "original"
    """What token losses are divided by: counts of all trained tokens, or of those that the masks leave, which
    then weigh more. ``kept`` takes a forward pass as ``correction_normalize`` does."""

    overlong: OverlongSpec = OverlongSpec()
    """Treatment of responses at the length limit."""
    dynamic_sampling: bool = False
    """Whether groups whose rewards are all equal are replaced by fresh ones (DAPO)."""
    max_refill_factor: float = Field(4.0, ge=1)
    """Most groups generated for one batch under dynamic sampling, in batches; then it trains with what
    there is."""
    min_group_size: int = Field(2, ge=1)
    """Groups with fewer finished members are replaced, not trained."""

    max_staleness: int = Field(1, ge=0, le=64)
    """Max weight versions that a trained token may lag behind; older tokens are masked. 0 is synchronous,
    1 is one step off. ``generate_ahead_steps`` is accepted as another name, under ``trainer`` too."""
    on_stale: Literal["wait", "mask", "restart", "drop"] = "wait"
    """What happens to a group that grew too stale before it was trained."""
    mask_older_tokens: bool = False
    """Whether only those tokens of a response train that its newest weight version sampled; what an earlier
    version sampled before an interruption is then context."""
    stale_wait_timeout_s: float = Field(180.0, gt=0)
    """Seconds that ``wait`` holds the trainer in a step before it falls back to ``mask``: longer masks fewer
    tokens of long responses and trains fewer samples per second."""
    max_nonfinite_steps: int = Field(3, ge=0)
    """Steps in a row that may be skipped because a number was not finite; one more goes back to the newest
    checkpoint, or ends the run if there is none or that did not help."""

    @property
    def loss_kind(self) -> LossKind:
        """What is known of the loss."""
        return LOSSES.get(self.loss) or LossKind(function=self.loss, is_own=True)

    @property
    def advantage_kind(self) -> AdvantageKind:
        """What is known of the advantage."""
        kind = ADVANTAGES.get(self.advantage)
        return kind or AdvantageKind(function=self.advantage, is_own=True)

    @property
    def own_functions(self) -> tuple[str, ...]:
        """Loss and advantage where they are the user's, with their keys."""
        kinds: dict[str, Formula] = {"loss": self.loss_kind, "advantage": self.advantage_kind}
        return tuple(
            f"algorithm.{key} {kind.function!r}" for key, kind in kinds.items() if kind.is_own
        )

    @property
    def num_demonstrations(self) -> int:
        """Responses that each row of ``data.train`` brings with it; 0 if they are sampled."""
        return self.loss_kind.num_demonstrations

    @property
    def arguments_of_loss(self) -> dict[str, Any]:
        """Keyword arguments of the loss."""
        return {**{key: getattr(self, key) for key in self.loss_kind.keys}, **self.loss_arguments}

    @property
    def arguments_of_advantage(self) -> dict[str, Any]:
        """Keyword arguments of the advantage."""
        given = {key: getattr(self, key) for key in self.advantage_kind.keys}
        return {**given, **self.advantage_arguments}

    @property
    def looks_ahead(self) -> bool:
        """Whether a loss follows from how far the whole batch is from the policies that sampled it."""
        return self.correction_normalize or self.rejection_denominator == "kept"

    def resolved_correction(
        self, *, updates_per_step: int
    ) -> Literal["bypass", "decoupled", "none"]:
        """What ``auto`` means: ``bypass`` with one update per batch, else ``decoupled``."""
        if self.correction == "auto":
            return "bypass" if updates_per_step == 1 else "decoupled"
        return self.correction

    @model_validator(mode="before")
    @classmethod
    def _loss_brings_its_defaults(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kind = LOSSES.get(str(values.get("loss")))
        return values if kind is None else {**kind.defaults, **values}
