"""From rewards to token advantages: the estimator of the specification, over all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.spec.algorithm import AlgorithmSpec
from services.trainer.algorithm import advantages
from services.trainer.algorithm.loss import kl_penalty
from services.trainer.batch.samples import Cohort, IncompleteBatchError, Samples
from services.trainer.ranks.collectives import Ranks


@dataclass(frozen=True, slots=True)
class Credit:
    """What each response token is to be reinforced by."""

    advantages: Tensor
    """``[R]`` float32, 0 outside the response mask."""
    returns: Tensor | None = None
    """``[R]`` float32 targets of the critic (GAE only)."""
    shaped_scores: Tensor | None = None
    """``[n]`` float32 sum of each sample's token rewards, penalties included."""


def assign_credit(
    samples: Samples,
    cohort: Cohort,
    spec: AlgorithmSpec,
    ranks: Ranks,
    *,
    max_response_tokens: int,
    kl_coefficient: float,
) -> Credit:
    """Advantages of this rank's tokens; group statistics and whitening see the whole batch.

    Args:
        samples: This rank's samples. Needs the columns ``proximal_logprobs`` and ``ref_logprobs``
            with a KL penalty in the reward, and ``values`` with GAE.
        cohort: The whole batch.
        spec: The algorithm.
        ranks: All data-parallel ranks; each must call this.
        max_response_tokens: Length limit of a response.
        kl_coefficient: Present weight of the KL penalty in the reward; 0 for none.

    Raises:
        IncompleteBatchError: If ReMax finds a group without a greedy response.
    """
    scores = _task_scores(samples, spec, max_response_tokens)
    penalty = _penalty(samples, spec, kl_coefficient)
    segments, mask = samples.segments, samples.tokens["response_mask"]
    # The score sits on the last token that the policy sampled.
    rewards = torch.where(segments.last(mask), segments.spread(scores), 0.0) - penalty
    # A response without such a token counts in its group all the same.
    scores = scores - segments.sum(penalty)
    if spec.advantage == "gae":
        return _gae(samples, rewards, scores, spec, ranks)
    if spec.advantage in ("reinforce_pp", "remax"):
        values = _return_based(samples, rewards, scores, cohort, spec, ranks)
    else:
        values = _group_based(samples, scores, cohort, spec, ranks)
    return Credit(torch.where(mask, values, 0.0).float(), shaped_scores=scores.float())


def _task_scores(samples: Samples, spec: AlgorithmSpec, max_response_tokens: int) -> Tensor:
    """``[n]`` float64 rewards with the penalty of long responses."""
    scores = samples.rewards.to(torch.float64)
    if spec.overlong.buffer_tokens > 0:
        scores = scores + advantages.overlong_penalty(
            samples.responses.lengths,
            max_tokens=max_response_tokens,
            buffer_tokens=spec.overlong.buffer_tokens,
            factor=spec.overlong.penalty,
        )
    return scores


def _penalty(samples: Samples, spec: AlgorithmSpec, kl_coefficient: float) -> Tensor:
    """``[R]`` float64 taken from the rewards for leaving the reference policy."""
    mask = samples.tokens["response_mask"]
    if kl_coefficient == 0:
        return torch.zeros(mask.shape, dtype=torch.float64)
    penalty = kl_penalty(
        samples.tokens["proximal_logprobs"].double(),
        samples.tokens["ref_logprobs"].double(),
        estimator=spec.kl.estimator,
    )
    return kl_coefficient * torch.where(mask, penalty, 0.0)


def _gathered(values: Tensor, samples: Samples, cohort: Cohort, ranks: Ranks) -> Tensor:
    """``[N]`` values of the whole batch, from the ``[n]`` of each rank."""
    whole = torch.zeros(len(cohort.groups), dtype=torch.float64)
    whole[samples.rows] = values.to(torch.float64)
    return ranks.sum(whole)


def _group_based(
    samples: Samples, scores: Tensor, cohort: Cohort, spec: AlgorithmSpec, ranks: Ranks
) -> Tensor:
    whole = _gathered(scores, samples, cohort, ranks)
    lengths = samples.segments.count(samples.tokens["response_mask"])
    all_lengths = _gathered(lengths, samples, cohort, ranks)
    member = cohort.is_member
    _, groups = torch.unique(cohort.groups[member], return_inverse=True)
    result = torch.zeros_like(whole)
    match spec.advantage:
        case "grpo" | "dr_grpo":
            divide = spec.advantage == "grpo"
            values = advantages.grpo(whole[member], groups, divide_by_std=divide)
        case "rloo":
            values = advantages.rloo(whole[member], groups)
        case "opo":
            values = advantages.opo(whole[member], groups, all_lengths[member])
        case "pass_at_k":
            values = advantages.pass_at_k(whole[member], groups)
        case _:
            values = advantages.group_baseline(whole[member], groups)
    result[member] = values
    spread = samples.segments.spread(result[samples.rows])
    if spec.advantage == "reinforce_pp_baseline":
        return _whitened(spread, samples, ranks)
    return spread


def _return_based(
    samples: Samples,
    rewards: Tensor,
    scores: Tensor,
    cohort: Cohort,
    spec: AlgorithmSpec,
    ranks: Ranks,
) -> Tensor:
    mask, segments = samples.tokens["response_mask"], samples.segments
    returns = advantages.returns_to_go(rewards, mask, segments, gamma=spec.gamma)
    if spec.advantage == "reinforce_pp":
        return _whitened(returns, samples, ranks)
    whole = _gathered(scores, samples, cohort, ranks)
    baseline = whole.new_full((int(cohort.groups.max()) + 1,), torch.nan)
    baseline[cohort.groups[cohort.is_greedy]] = whole[cohort.is_greedy]
    if bool(baseline.isnan().any()):
        raise IncompleteBatchError(
            "algorithm.advantage 'remax' needs one greedy response in each group, but "
            f"{int(baseline.isnan().sum())} groups have none; let the rollouts add it"
        )
    return returns - segments.spread(baseline[cohort.groups][samples.rows])


def _gae(
    samples: Samples, rewards: Tensor, scores: Tensor, spec: AlgorithmSpec, ranks: Ranks
) -> Credit:
    raw, returns = advantages.gae(
        rewards,
        samples.tokens["values"].to(torch.float64),
        samples.tokens["response_mask"],
        samples.segments,
        gamma=spec.gamma,
        decay=spec.gae_lambda,
    )
    return Credit(_whitened(raw, samples, ranks).float(), returns.float(), scores.float())


def _whitened(values: Tensor, samples: Samples, ranks: Ranks) -> Tensor:
    mask = samples.tokens["loss_mask"]
    return advantages.whiten(values, mask, add_up=ranks.sum)
