"""Losses and advantages by name: what has to be known of each before it is computed. No torch.

A new one is a function in ``services/trainer/algorithm`` and a line in one of these tables. One of the user's
own, ``module:function``, needs no line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

_LOSSES: Final = "services.trainer.algorithm.loss"
_ESTIMATORS: Final = "services.trainer.algorithm.estimators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A function that a run names."""

    function: str
    """``module:function``."""
    keys: tuple[str, ...] = ()
    """Keys of ``algorithm`` that it takes as arguments of these names."""
    is_own: bool = False
    """Whether it is the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind(Formula):
    """A policy loss: takes ``LossTokens``, returns ``TokenLoss``."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other keys that it brings with it, because it was defined with them."""
    weighted: Literal["decoupled", "corrected", "never"] = "decoupled"
    """When the weight of the correction multiplies it: if that is ``decoupled``, if there is one, never."""
    num_demonstrations: int = 0
    """Responses that each row brings with it, trained in place of sampled ones; 0 where they are sampled."""
    compares_members: bool = False
    """Whether a group's members are compared with one another: they are then in one micro-batch."""
    needs_reference: bool = False
    """Whether it looks at the reference policy, with or without a penalty for leaving it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageKind(Formula):
    """An advantage estimator: takes a ``ScoredBatch``, returns an advantage for each token."""

    needs_critic: bool = False
    """Whether a critic gives values; then it returns advantages and the critic's targets."""
    is_per_group: bool = False
    """Whether a sample's advantage depends on its own group alone."""
    needs_greedy: bool = False
    """Whether each group has one greedy response more."""


LOSSES: Final[Mapping[str, LossKind]] = {
    "ppo": LossKind(function=f"{_LOSSES}:ppo", keys=("clip_low", "clip_high", "dual_clip")),
    "gspo": LossKind(
        function=f"{_LOSSES}:gspo",
        keys=("clip_low", "clip_high"),
        defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    ),
    # Its paper has no lower bound: a weight is never below 0.
    "cispo": LossKind(
        function=f"{_LOSSES}:cispo", keys=("clip_low", "clip_high"), defaults={"clip_low": 1.0}
    ),
    # Its own ratio is the one to the rollout policy already.
    "aipo": LossKind(function=f"{_LOSSES}:aipo", keys=("ratio_max",), weighted="never"),
    "sapo": LossKind(
        function=f"{_LOSSES}:sapo",
        keys=("sapo_temperature_positive", "sapo_temperature_negative"),
        defaults={"aggregation": "seq-mean-token-mean"},
    ),
    # It has no ratio at all, so the weight is its correction under bypass too.
    "reinforce": LossKind(function=f"{_LOSSES}:reinforce", weighted="corrected"),
    # Cross entropy is the policy gradient of responses that are all worth the same. They never grow stale.
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
    # Of a pair, the advantage over the other member says which is preferred: 1 and -1.
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
}

ADVANTAGES: Final[Mapping[str, AdvantageKind]] = {
    "grpo": AdvantageKind(function=f"{_ESTIMATORS}:grpo", is_per_group=True),
    "dr_grpo": AdvantageKind(function=f"{_ESTIMATORS}:dr_grpo", is_per_group=True),
    "rloo": AdvantageKind(function=f"{_ESTIMATORS}:rloo", is_per_group=True),
    "opo": AdvantageKind(function=f"{_ESTIMATORS}:opo", is_per_group=True),
    "pass_at_k": AdvantageKind(function=f"{_ESTIMATORS}:pass_at_k", is_per_group=True),
    "none": AdvantageKind(function=f"{_ESTIMATORS}:none", is_per_group=True),
    "uniform": AdvantageKind(function=f"{_ESTIMATORS}:uniform", is_per_group=True),
    "reinforce_pp": AdvantageKind(function=f"{_ESTIMATORS}:reinforce_pp", keys=("gamma",)),
    "reinforce_pp_baseline": AdvantageKind(function=f"{_ESTIMATORS}:reinforce_pp_baseline"),
    "remax": AdvantageKind(
        function=f"{_ESTIMATORS}:remax", keys=("gamma",), is_per_group=True, needs_greedy=True
    ),
    "gae": AdvantageKind(
        function=f"{_ESTIMATORS}:gae", keys=("gamma", "gae_lambda"), needs_critic=True
    ),
}
