"""Advantage, loss, off-policy correction and staleness of a run."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.runspec.base import MAX_SECONDS, SpecPart
from services.common.runspec.formulas import (
    ADVANTAGES,
    LOSSES,
    AdvantageKind,
    Formula,
    LossKind,
)


class KlSpec(SpecPart):
    """Penalty for divergence from the reference policy: the frozen base model, or the run's teacher."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty. 0 disables it; no reference model is loaded then, unless the loss
    needs one."""
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3+"
    """Estimator of the divergence. A ``+`` keeps the estimator's value and uses the gradient of
    ``k2``, which grows with the distance. ``k3`` (``low_var_kl`` in other libraries) is clamped
    at 10: it has no gradient for a token whose logprob is more than 2.6 nats below the
    reference's."""
    placement: Literal["loss", "reward"] = "loss"
    """``loss`` adds the penalty to the loss; ``reward`` subtracts it from the token rewards."""
    importance_weighted: bool = True
    """If true, the penalty in the loss is multiplied by the importance weight of its token, so that
    its expectation is over the current policy. If false, it is over the policies that sampled the
    tokens, as in GRPO (arXiv:2402.03300) and most libraries. No difference without a correction."""
    target: float | None = Field(None, gt=0)
    """Target divergence towards which the coefficient adapts. None keeps the coefficient fixed."""
    horizon: int = Field(10_000, ge=1)
    """Number of samples over which the adaptive coefficient changes."""


class OverlongSpec(SpecPart):
    """Treatment of responses that reach the length limit (DAPO, arXiv:2503.14476)."""

    buffer_tokens: int = Field(0, ge=0)
    """Number of tokens before the limit over which a soft penalty grows. 0 disables the penalty."""
    penalty: float = Field(1.0, ge=0)
    """Max penalty, which is subtracted from the reward of a response at the limit."""
    mask_truncated: bool = False
    """If true, truncated responses are excluded from the loss; the group's statistics include them."""


class RejectionSpec(SpecPart):
    """Mask that excludes tokens or sequences from the loss if the policies disagree too much."""

    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    """Unit over which the statistic is computed: each token, or the sum, mean or maximum over a
    sequence."""
    statistic: Literal["k1", "k2", "k3"] = "k1"
    """Statistic that is bounded. ``k1`` bounds the ratio itself; ``k2`` and ``k3`` bound the
    divergence from above."""
    lower: float | None = None
    """Min accepted value; None sets no bound."""
    upper: float | None = None
    """Max accepted value; None sets no bound."""
    negative_only: bool = False
    """If true, only tokens with a negative advantage can be rejected."""


class AlgorithmSpec(SpecPart):
    """Advantage, loss, off-policy correction and staleness."""

    advantage: str = Field("grpo", json_schema_extra={"examples": [*ADVANTAGES]})
    """Advantage estimator: ``grpo``, ``dr_grpo``, ``rloo``, ``maxrl``, ``gdpo``, ``opo``, ``pass_at_k``,
    ``reinforce_pp``, ``reinforce_pp_baseline``, ``remax``, ``gae``, ``uniform`` (1 for every
    token), ``none`` (0 for every token; the default with a teacher), or your own function
    ``module:function`` / ``file.py:function``, which receives a ``ScoredBatch``."""
    advantage_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own advantage function, or of a built-in one: ``gae`` takes
    ``length_adaptive`` (alpha of VAPO's lambda by length, arXiv:2504.05118; paper: 0.05), ``gdpo``
    ``weights`` (weight of each reward term by name)."""
    loss: str = Field("ppo", json_schema_extra={"examples": [*LOSSES]})
    """Policy loss: ``ppo``, ``gspo``, ``cispo``, ``aipo``, ``sapo``, ``dppo``, ``gmpo``, ``vespo``,
    ``m2po``, ``clip_cov``, ``kl_cov``, ``reinforce``, or your own function ``module:function`` /
    ``file.py:function``, which receives ``LossTokens``. ``gspo`` (with default clip distances of
    3e-4 and 4e-4), ``gmpo`` (.4 and .4, of log-ratios) and ``sapo`` have the default aggregation
    ``seq-mean-token-mean``; ``dppo`` bounds a divergence, by default .15. ``distill`` is the
    divergence from the ``teacher``'s distribution of each token. Three losses train on
    answers in ``data.train`` and sample no responses: ``sft`` is their cross entropy, ``dpo``
    learns a preference between two answers, and ``reward_model`` trains a model that scores the
    preferred one higher."""
    loss_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own loss function, or of a built-in one. ``dppo``: ``divergence``
    (``tv`` or ``kl``) and ``ratio_max``; ``vespo``: ``k_positive``, ``lambda_positive``,
    ``k_negative`` and ``lambda_negative``; ``m2po``: ``second_moment``; ``clip_cov``: ``fraction``,
    ``low`` and ``high``; ``kl_cov``: ``fraction`` and ``coefficient``; ``distill``: ``divergence``
    (``forward_kl``, ``reverse_kl``, the default, or ``jsd``), ``beta`` (weight of the teacher in ``jsd``) and
    ``top_k`` (tokens of the teacher that are compared, by default 64; null compares the whole
    vocabulary); ``reward_model``: ``center``, the factor of the
    square of a pair's summed rewards. Other settings are keys of ``algorithm``."""
    aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "seq-mean-token-mean",
    ] = "token-mean"
    """Reduction of the token losses to one number. ``token-mean``: mean over all tokens.
    ``token-sum``: sum over all tokens. ``seq-mean-token-sum``, ``seq-mean-token-mean`` and
    ``seq-mean-token-sum-norm``: mean over sequences of each sequence's sum, mean, or sum divided
    by ``rollout.max_response_tokens``. Denominators are global over ranks and micro-batches."""
    clip_low: float = Field(0.2, ge=0)
    """Lower clip distance: the ratio is clipped at ``1 - clip_low``. The default for ``cispo`` is
    1, which sets no lower bound."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clip distance: the ratio is clipped at ``1 + clip_high`` (DAPO's clip-higher)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound on the loss of tokens with a negative advantage. None disables it."""
    ratio_max: float = Field(5.0, gt=0)
    """Max ratio in ``aipo``; larger ratios are truncated to it."""
    sapo_temperature_positive: float = Field(1.0, gt=0)
    """Gate temperature of ``sapo`` for positive advantages."""
    sapo_temperature_negative: float = Field(1.05, gt=0)
    """Gate temperature of ``sapo`` for negative advantages."""
    dpo_beta: float = Field(0.1, gt=0)
    """Factor of the log-ratios to the reference policy in ``dpo``; a larger value keeps the policy
    closer to the reference."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor per token (REINFORCE++, ReMax, GAE)."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """The lambda of GAE."""
    value_clip: float = Field(0.2, gt=0)
    """Clip distance of the critic's value loss (GAE)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; with ``entropy_target``, its value at the start."""
    entropy_target: float | None = Field(None, gt=0)
    """Entropy in nats per token below which the weight grows by ``entropy_step`` per step; above it,
    the weight shrinks and no bonus is added (Skywork-OR1, arXiv:2505.22312). None keeps the
    weight fixed."""
    entropy_step: float = Field(0.005, gt=0)
    """Change of the weight per step with ``entropy_target``."""
    kl: KlSpec = KlSpec()
    """Penalty for divergence from the reference policy."""

    correction: Literal["auto", "bypass", "decoupled", "none"] = "auto"
    """Off-policy correction. ``bypass``: the sampling policy is the baseline of the PPO ratio.
    ``decoupled``: tokens are weighted by the ratio of the proximal to the sampling policy, and
    the loss clips around the proximal policy. ``auto``: ``bypass`` with one update per batch and
    rollouts in the trainer's precision, otherwise ``decoupled``. ``none`` is rejected if training is
    asynchronous or rollouts are quantized."""
    proximal: Literal["computed", "interpolated"] = "computed"
    """Source of the proximal logprobs for ``decoupled``. ``computed``: a forward pass over the
    batch. ``interpolated``: an interpolation between the logprobs of the policy that sampled a
    token and of the current policy, without a forward pass (A-3PO, arXiv:2512.06547)."""
    correction_level: Literal["token", "sequence"] = "token"
    """Unit of the ``decoupled`` weight: one weight per token or per sequence."""
    correction_cap: float = Field(2.0, gt=0)
    """Max weight for ``decoupled``."""
    correction_floor: float = Field(0.0, ge=0)
    """Min weight if ``correction_cap_mode`` is ``mask`` (IcePop)."""
    correction_cap_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight above the cap: ``truncate`` reduces it to the cap (TIS), ``mask``
    excludes the token (IcePop)."""
    score_centering: int | None = Field(None, ge=1, le=1024)
    """Number of the sampler's most likely tokens that rollouts report for each token, for example 64, so
    that the expectation of the score under the sampler is subtracted from it (score centering,
    arXiv:2609.20807): a sampler that differs from the policy then does not attract it. Needs
    ``loss: reinforce`` and ``correction`` ``none``, which it makes possible in asynchronous training, or
    ``bypass`` (what ``auto`` is then), with whose weights it composes. Stores 8 bytes for each of these
    tokens and response token. null: off."""
    correction_normalize: bool = False
    """If true, ``decoupled`` weights are divided by their mean over the batch, so that they only
    redistribute weight between tokens. Requires the forward pass of ``proximal: computed``, also
    with one update per batch."""
    rejection: tuple[RejectionSpec, ...] = ()
    """Rejection masks. A token trains only if all of them accept it."""
    opsm: float | None = Field(None, gt=0)
    """Delta of DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556, section 3.1), in nats per
    token: sequences with a negative advantage do not train if the mean logprob of their tokens is
    lower by more than this under the proximal policy than under the one that sampled them. One more
    rejection mask; null uses none."""
    rejection_denominator: Literal["original", "kept"] = "original"
    """Denominator of the token losses. ``original`` counts all trained tokens. ``kept`` counts
    those that the rejection masks accept, which then weigh more; it requires a forward pass,
    like ``correction_normalize``."""

    overlong: OverlongSpec = OverlongSpec()
    """Treatment of responses at the length limit."""
    dynamic_sampling: bool = False
    """If true, groups whose advantages are all 0, such as those of equal rewards, are replaced by new
    ones (DAPO)."""
    max_refill_factor: float = Field(4.0, ge=1)
    """Max number of groups generated for one batch under dynamic sampling, as a multiple of the
    batch. When it is reached, the step trains with the groups that exist."""
    min_group_size: int = Field(2, ge=1)
    """Min number of finished members of a group. A group with fewer is replaced and does not train."""

    max_staleness: int = Field(1, ge=0, le=64)
    """Max number of weight versions between the sampling and the training of a token; older tokens are
    masked. 0 is synchronous, 1 is one step off-policy. The alias ``generate_ahead_steps`` is
    accepted here and under ``trainer``."""
    on_stale: Literal["wait", "mask", "restart", "drop"] = "wait"
    """Treatment of a group that becomes too stale before it is trained. ``wait``: the trainer waits
    for groups that are about to become too stale, up to ``stale_wait_timeout_s``, then masks
    stale tokens. ``mask``: stale tokens are masked without a wait. ``restart``: the group is
    generated again. ``drop``: the group is discarded, another prompt takes its place, and its
    prompt is issued again at the end of the epoch."""
    mask_older_tokens: bool = False
    """If true, only tokens that the newest weight version of a response sampled are trained; tokens
    that earlier versions sampled before an interruption are context only."""
    stale_wait_timeout_s: float = Field(180.0, gt=0, le=MAX_SECONDS)
    """Max seconds per step that ``on_stale: wait`` blocks the trainer before it falls back to
    ``mask``. A larger value masks fewer tokens of long responses and trains fewer samples per
    second."""
    max_nonfinite_steps: int = Field(3, ge=0)
    """Max consecutive steps that are skipped because a value was not finite. After one more, the
    run returns to the last checkpoint before them; it ends if there is none or if that did not
    help."""

    @property
    def loss_kind(self) -> LossKind:
        return LOSSES.get(self.loss) or LossKind(function=self.loss, is_own=True)

    @property
    def advantage_kind(self) -> AdvantageKind:
        kind = ADVANTAGES.get(self.advantage)
        return kind or AdvantageKind(function=self.advantage, is_own=True)

    @property
    def own_functions(self) -> tuple[str, ...]:
        """The user's own loss and advantage functions, each with its key."""
        kinds: dict[str, Formula] = {"loss": self.loss_kind, "advantage": self.advantage_kind}
        return tuple(
            f"algorithm.{key} {kind.function!r}" for key, kind in kinds.items() if kind.is_own
        )

    @property
    def num_demonstrations(self) -> int:
        """Answers that each row of ``data.train`` provides; 0 if responses are sampled."""
        return self.loss_kind.num_demonstrations

    @property
    def arguments_of_loss(self) -> dict[str, Any]:
        kind = self.loss_kind
        return {key: getattr(self, key) for key in kind.keys} | kind.resolve(self.loss_arguments)

    @property
    def arguments_of_advantage(self) -> dict[str, Any]:
        kind = self.advantage_kind
        keys = {key: getattr(self, key) for key in kind.keys}
        return keys | kind.resolve(self.advantage_arguments)

    @property
    def rejections(self) -> tuple[RejectionSpec, ...]:
        """All rejection masks, including ``opsm``."""
        if self.opsm is None:
            return self.rejection
        lower = math.exp(-self.opsm)
        mask = RejectionSpec(level="seq_mean", statistic="k1", lower=lower, negative_only=True)
        return (*self.rejection, mask)

    @property
    def looks_ahead(self) -> bool:
        """True if the loss depends on the divergence of the whole batch from the policies that sampled it."""
        return self.correction_normalize or self.rejection_denominator == "kept"

    def resolved_correction(
        self, *, updates_per_step: int, is_quantized: bool = False
    ) -> Literal["bypass", "decoupled", "none"]:
        """Returns the correction.

        ``auto`` is ``bypass`` with one update per batch, else ``decoupled``. With quantized rollouts it is
        always ``decoupled``: under ``bypass`` their rounding would use up the clip range, which is meant for
        the policy's own change. With score centering it is always ``bypass``, which has weights for all
        tokens that the rollouts report.
        """
        if self.correction == "auto" and self.score_centering is not None:
            return "bypass"
        if self.correction == "auto":
            return "bypass" if updates_per_step == 1 and not is_quantized else "decoupled"
        return self.correction

    @model_validator(mode="before")
    @classmethod
    def _apply_loss_defaults(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kind = LOSSES.get(str(values.get("loss")))
        return values if kind is None else {**kind.defaults, **values}
