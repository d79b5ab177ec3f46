"""Properties of losses and advantage estimators by name. Imports no torch.

A new one needs a function in ``services/trainer/algorithm`` and an entry in one of these tables. A
user's own function, ``module:function``, needs no entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import Field

from services.common.runspec.base import SpecPart

_LOSSES: Final = "services.trainer.algorithm.loss"
_ESTIMATORS: Final = "services.trainer.algorithm.estimators"


IdleGroups = Literal["equal_scores", "no_single_best", "no_success", "equal_terms"]
"""Groups without advantages: of equal scores; without one best score; of equal scores or with a mean of 0 or
less; of terms that are equal or whose advantages cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A loss or advantage function that a run names."""

    function: str
    """Reference ``module:function``."""
    keys: tuple[str, ...] = ()
    """Keys of ``algorithm`` that are passed as arguments with the same names."""
    arguments: type[SpecPart] = SpecPart
    """Schema of ``loss_arguments`` or ``advantage_arguments``, with defaults. Empty for most."""
    is_own: bool = False
    """True if the function is the user's own, which may have any arguments."""

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns keyword arguments with defaults; those of a user's own function are unchanged.

        Raises:
            pydantic.ValidationError: If the built-in function has no such argument or rejects its value.
        """
        return dict(values) if self.is_own else self.arguments.model_validate(values).model_dump()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind(Formula):
    """A policy loss: takes ``LossTokens``, returns ``TokenLoss``."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other keys with this loss, as its definition requires."""
    weighted: Literal["decoupled", "corrected", "never"] = "decoupled"
    """Correction under which the correction's weight multiplies the loss: ``decoupled`` only, any
    correction, or never."""
    num_demonstrations: int = 0
    """Answers of each row that train instead of sampled responses; 0 if responses are sampled."""
    compares_members: bool = False
    """True if the loss compares the members of a group, which must then be in one micro-batch."""
    trains_values: bool = False
    """True if a reward model trains: a value head replaces the output head, and the loss receives the value
    before each token as its logprob."""
    needs_reference: bool = False
    """True if the loss needs the reference policy, even without a KL penalty."""
    distills: bool = False
    """True if the loss is the divergence from the run's teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageKind(Formula):
    """An advantage estimator: takes a ``ScoredBatch``, returns an advantage for each token."""

    needs_critic: bool = False
    """True if a critic provides values; the estimator then returns advantages and the critic's
    targets."""
    is_per_group: bool = False
    """True if a sample's advantage depends only on its own group."""
    needs_greedy: bool = False
    """True if each group has one additional greedy response."""
    compares_members: bool = False
    """True if the advantage of a response without others in its group is 0."""
    idle_groups: IdleGroups | None = None
    """Groups of several members whose advantages are all 0, which dynamic sampling replaces. None if this
    does not follow from a group's scores."""


class DppoArguments(SpecPart):
    """Arguments of the loss ``dppo``."""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence that ``clip_low`` and ``clip_high`` bound: total variation or Kullback-Leibler."""
    ratio_max: float = Field(20.0, gt=1)
    """Max importance weight of a token."""


class VespoArguments(SpecPart):
    """Arguments of the loss ``vespo``: its kernel is ``W**k * exp(lambda * (1 - W))``."""

    k_positive: float = Field(2.0, ge=0)
    """Exponent for advantages that are not negative."""
    lambda_positive: float = Field(3.0, gt=0)
    """Decay for advantages that are not negative."""
    k_negative: float = Field(3.0, ge=0)
    """Exponent for negative advantages."""
    lambda_negative: float = Field(2.0, gt=0)
    """Decay for negative advantages."""


class M2poArguments(SpecPart):
    """Arguments of the loss ``m2po``."""

    second_moment: float = Field(0.04, gt=0)
    """Max mean of the squared log-ratios of the tokens whose gradient leads away from the old policy."""


class ClipCovArguments(SpecPart):
    """Arguments of the loss ``clip_cov``."""

    fraction: float = Field(2e-4, gt=0, le=1)
    """Fraction of the trained tokens that are detached."""
    low: float = 1.0
    """Min covariance term of a token that may be detached."""
    high: float = 5.0
    """Max covariance term of a token that may be detached."""


class KlCovArguments(SpecPart):
    """Arguments of the loss ``kl_cov``."""

    fraction: float = Field(2e-3, gt=0, le=1)
    """Fraction of the trained tokens that get the penalty."""
    coefficient: float = Field(1.0, ge=0)
    """Factor of the penalty."""


class DistillArguments(SpecPart):
    """Arguments of the loss ``distill``."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """Divergence from the teacher: ``KL(teacher || policy)``, ``KL(policy || teacher)``, or the generalized
    Jensen-Shannon divergence (GKD, arXiv:2306.13649)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in ``jsd``."""
    top_k: int | None = Field(64, ge=1)
    """Number of the teacher's most likely tokens that are compared one by one; all others count as one
    event. null compares the whole vocabulary."""


class RewardModelArguments(SpecPart):
    """Arguments of the loss ``reward_model``."""

    center: float = Field(0.0, ge=0)
    """Factor of the square of a pair's summed rewards, which keeps rewards around 0
    (arXiv:2312.09244; there 0.01)."""


class GdpoArguments(SpecPart):
    """Arguments of the advantage ``gdpo``."""

    weights: dict[str, float] = Field(min_length=1)
    """Weight of each term that counts, by its name in the metrics ``reward/NAME``, for example
    ``{right: 1.0, polite: 0.2}``."""


class GaeArguments(SpecPart):
    """Arguments of the advantage ``gae``."""

    length_adaptive: float | None = Field(None, gt=0)
    """Alpha of VAPO's lambda ``1 - 1 / (alpha * length)`` for the advantages (paper: 0.05), while the
    critic's targets use ``gae_lambda``. None uses ``gae_lambda`` for both."""


LOSSES: Final[Mapping[str, LossKind]] = {
    "ppo": LossKind(function=f"{_LOSSES}:ppo", keys=("clip_low", "clip_high", "dual_clip")),
    "gspo": LossKind(
        function=f"{_LOSSES}:gspo",
        keys=("clip_low", "clip_high"),
        defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    ),
    # The paper has no lower bound: clip_low 1 allows ratios down to 0.
    "cispo": LossKind(
        function=f"{_LOSSES}:cispo", keys=("clip_low", "clip_high"), defaults={"clip_low": 1.0}
    ),
    # The ratio of aipo is already relative to the rollout policy.
    "aipo": LossKind(function=f"{_LOSSES}:aipo", keys=("ratio_max",), weighted="never"),
    "sapo": LossKind(
        function=f"{_LOSSES}:sapo",
        keys=("sapo_temperature_positive", "sapo_temperature_negative"),
        defaults={"aggregation": "seq-mean-token-mean"},
    ),
    # The paper's trust-region bounds for total variation; the ratio needs no clip.
    "dppo": LossKind(
        function=f"{_LOSSES}:dppo",
        keys=("clip_low", "clip_high"),
        arguments=DppoArguments,
        defaults={"clip_low": 0.15, "clip_high": 0.15},
    ),
    "gmpo": LossKind(
        function=f"{_LOSSES}:gmpo",
        keys=("clip_low", "clip_high"),
        defaults={"clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq-mean-token-mean"},
    ),
    # The weight of vespo is already relative to the rollout policy.
    "vespo": LossKind(function=f"{_LOSSES}:vespo", arguments=VespoArguments, weighted="never"),
    "m2po": LossKind(function=f"{_LOSSES}:m2po", arguments=M2poArguments),
    "clip_cov": LossKind(
        function=f"{_LOSSES}:clip_cov", keys=("clip_low", "clip_high"), arguments=ClipCovArguments
    ),
    "kl_cov": LossKind(function=f"{_LOSSES}:kl_cov", arguments=KlCovArguments),
    # reinforce has no ratio, so it needs the weight of the correction under bypass too.
    "reinforce": LossKind(function=f"{_LOSSES}:reinforce", weighted="corrected"),
    # With the correction's weights, the divergence is an expectation over the current policy's tokens.
    "distill": LossKind(
        function=f"{_LOSSES}:distill",
        arguments=DistillArguments,
        weighted="corrected",
        needs_reference=True,
        distills=True,
    ),
    # Cross entropy is the policy gradient of equally rewarded responses. Demonstrations never
    # become stale.
    "sft": LossKind(
        function=f"{_LOSSES}:reinforce",
        weighted="never",
        num_demonstrations=1,
        defaults={
            "advantage": "uniform",
            "correction": "none",
            "min_group_size": 1,
            "on_stale": "mask",
        },
    ),
    # The advantage over the other member of the pair marks the preferred one: 1 and -1.
    "dpo": LossKind(
        function=f"{_LOSSES}:dpo",
        keys=("dpo_beta",),
        weighted="never",
        num_demonstrations=2,
        compares_members=True,
        needs_reference=True,
        defaults={
            "advantage": "rloo",
            "correction": "none",
            "on_stale": "mask",
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "reward_model": LossKind(
        function=f"{_LOSSES}:reward_model",
        arguments=RewardModelArguments,
        weighted="never",
        num_demonstrations=2,
        compares_members=True,
        trains_values=True,
        defaults={
            "advantage": "rloo",
            "correction": "none",
            "on_stale": "mask",
            "aggregation": "seq-mean-token-sum",
        },
    ),
}

ADVANTAGES: Final[Mapping[str, AdvantageKind]] = {
    "grpo": AdvantageKind(
        function=f"{_ESTIMATORS}:grpo",
        is_per_group=True,
        compares_members=True,
        idle_groups="equal_scores",
    ),
    "dr_grpo": AdvantageKind(
        function=f"{_ESTIMATORS}:dr_grpo",
        is_per_group=True,
        compares_members=True,
        idle_groups="equal_scores",
    ),
    "rloo": AdvantageKind(
        function=f"{_ESTIMATORS}:rloo",
        is_per_group=True,
        compares_members=True,
        idle_groups="equal_scores",
    ),
    "maxrl": AdvantageKind(
        function=f"{_ESTIMATORS}:maxrl",
        is_per_group=True,
        compares_members=True,
        idle_groups="no_success",
    ),
    "gdpo": AdvantageKind(
        function=f"{_ESTIMATORS}:gdpo",
        arguments=GdpoArguments,
        compares_members=True,
        idle_groups="equal_terms",
    ),
    "opo": AdvantageKind(
        function=f"{_ESTIMATORS}:opo", is_per_group=True, idle_groups="equal_scores"
    ),
    "pass_at_k": AdvantageKind(
        function=f"{_ESTIMATORS}:pass_at_k",
        is_per_group=True,
        compares_members=True,
        idle_groups="no_single_best",
    ),
    "none": AdvantageKind(function=f"{_ESTIMATORS}:none", is_per_group=True),
    "uniform": AdvantageKind(function=f"{_ESTIMATORS}:uniform", is_per_group=True),
    "reinforce_pp": AdvantageKind(function=f"{_ESTIMATORS}:reinforce_pp", keys=("gamma",)),
    "reinforce_pp_baseline": AdvantageKind(function=f"{_ESTIMATORS}:reinforce_pp_baseline"),
    "remax": AdvantageKind(
        function=f"{_ESTIMATORS}:remax", keys=("gamma",), is_per_group=True, needs_greedy=True
    ),
    "gae": AdvantageKind(
        function=f"{_ESTIMATORS}:gae",
        keys=("gamma", "gae_lambda"),
        arguments=GaeArguments,
        needs_critic=True,
    ),
}
