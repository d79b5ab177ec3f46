"""Tests that losses which compare tokens of a micro-batch select and weight tokens as in their papers."""

import math
from statistics import mean

import pytest
import torch

from services.trainer.algorithm import loss
from services.trainer.batch.segments import Segments

_LOGPROBS = [-0.1, -3.0, -0.5, -2.0, -1.0, -0.2, -4.0, -0.7]
_OLD = [-0.2, -2.9, -0.5, -2.6, -1.1, -0.1, -4.0, -0.6]
_ADVANTAGES = [1.5, -1.5, 0.5, 1.0, -0.5, 2.0, -2.0, 9.0]
_TRAINED = [0, 1, 2, 3, 4, 5, 6]  # the last token does not train


def _tokens() -> loss.LossTokens:
    old = torch.tensor(_OLD, dtype=torch.float64)
    return loss.LossTokens(
        logprobs=torch.tensor(_LOGPROBS, dtype=torch.float64, requires_grad=True),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(_ADVANTAGES, dtype=torch.float64),
        mask=torch.tensor([t in _TRAINED for t in range(len(_OLD))]),
        segments=Segments.from_lengths(torch.tensor([5, 3])),
    )


def _covariance(t: int) -> float:
    mean_advantage = mean(_ADVANTAGES[i] for i in _TRAINED)
    mean_logprob = mean(_LOGPROBS[i] for i in _TRAINED)
    return (_ADVANTAGES[t] - mean_advantage) * (_LOGPROBS[t] - mean_logprob)


def _gradient(result: loss.TokenLoss, tokens: loss.LossTokens) -> list[float]:
    total = result.values[tokens.mask].sum()
    return torch.autograd.grad(total, tokens.logprobs)[0].tolist()


def test_kl_cov_penalizes_the_tokens_with_the_largest_covariance() -> None:
    tokens = _tokens()
    result = loss.kl_cov(tokens, fraction=0.3, coefficient=0.5)
    selected = sorted(_TRAINED, key=_covariance)[-2:]  # 0.3 of 7 tokens
    assert result.indicators["covariance_fraction"].nonzero().squeeze(1).tolist() == sorted(
        selected
    )
    for t, slope in enumerate(_gradient(result, tokens)):
        log_ratio = _LOGPROBS[t] - _OLD[t]
        expected_slope = -_ADVANTAGES[t] * math.exp(log_ratio) if t in _TRAINED else 0.0
        if t in selected:
            expected_slope += 0.5 * math.copysign(1.0, log_ratio) if log_ratio else 0.0
        assert slope == pytest.approx(expected_slope, abs=1e-12)


def test_clip_cov_detaches_tokens_within_its_bounds_that_ppo_does_not_clip() -> None:
    tokens = _tokens()
    arguments = {"clip_low": 0.2, "clip_high": 0.2, "low": 1.0, "high": 4.0}
    plain = loss.ppo(tokens, clip_low=0.2, clip_high=0.2, dual_clip=None)
    clipped = plain.indicators["clip_fraction"].bool().tolist()
    candidates = [t for t in _TRAINED if 1.0 < _covariance(t) < 4.0 and not clipped[t]]
    assert len(candidates) == 3

    result = loss.clip_cov(tokens, fraction=1.0, **arguments)
    torch.testing.assert_close(result.values, plain.values)
    assert result.indicators["covariance_fraction"].nonzero().squeeze(1).tolist() == candidates
    unchanged = _gradient(plain, tokens)
    for t, slope in enumerate(_gradient(result, tokens)):
        assert slope == (0.0 if t in candidates else unchanged[t])

    for fraction, count in ((0.1, 1), (0.2, 2)):
        some = loss.clip_cov(tokens, fraction=fraction, **arguments)
        selected = some.indicators["covariance_fraction"].nonzero().squeeze(1).tolist()
        assert len(selected) == count
        assert set(selected) <= set(candidates)


@pytest.mark.parametrize("threshold", [1e-6, 0.005, 0.02, 0.2, 1.0])
def test_m2po_masks_the_largest_log_ratios_until_the_second_moment_fits(threshold: float) -> None:
    """Compares with a direct implementation of Algorithm 1 of arXiv:2510.01161."""
    tokens = _tokens()
    log_ratio = [new - old for new, old in zip(_LOGPROBS, _OLD, strict=True)]
    region = [t for t in _TRAINED if _ADVANTAGES[t] * log_ratio[t] > 0]
    masked = []
    while region and mean(log_ratio[t] ** 2 for t in region) > threshold:
        masked.append(max(region, key=lambda t: log_ratio[t] ** 2))
        region.remove(masked[-1])
    result = loss.m2po(tokens, second_moment=threshold)
    assert result.indicators["clip_fraction"].nonzero().squeeze(1).tolist() == sorted(masked)
    for t, (value, slope) in enumerate(
        zip(result.values.tolist(), _gradient(result, tokens), strict=True)
    ):
        expected_slope = 0.0 if t in masked else -_ADVANTAGES[t] * math.exp(log_ratio[t])
        assert value == pytest.approx(expected_slope, abs=1e-12)
        assert slope == pytest.approx(expected_slope if t in _TRAINED else 0.0, abs=1e-12)


def test_m2po_of_the_paper_s_threshold() -> None:
    """By hand: the squares .01, .36 and .04 move away; without .36 their mean is .025, below .04."""
    old = torch.zeros(5, dtype=torch.float64)
    tokens = loss.LossTokens(
        logprobs=torch.tensor([0.1, -0.6, 0.2, 0.9, -0.5], dtype=torch.float64, requires_grad=True),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor([1.0, -2.0, 0.5, -1.0, 1.0], dtype=torch.float64),
        mask=torch.ones(5, dtype=torch.bool),
        segments=Segments.from_lengths(torch.tensor([2, 3])),
    )
    result = loss.m2po(tokens, second_moment=0.04)
    expected = [
        -1.1051709180756477,
        0.0,
        -0.6107013790800849,
        2.45960311115695,
        -0.6065306597126334,
    ]
    assert result.values.tolist() == pytest.approx(expected, abs=1e-12)
    assert _gradient(result, tokens) == pytest.approx(expected, abs=1e-12)


def test_vespo_weighs_tokens_by_the_kernel_of_their_sequence() -> None:
    """By hand: sequence weights e^.2 and e^-.3; k 2 and lambda 3, or 3 and 2 if the advantage is negative."""
    rollout = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    change = torch.tensor([0.3, -0.1, -0.2, -0.1], dtype=torch.float64)
    tokens = loss.LossTokens(
        logprobs=(rollout + change).requires_grad_(),
        old_logprobs=rollout + 5.0,
        rollout_logprobs=rollout,
        advantages=torch.tensor([1.5, 1.5, -0.5, -0.5], dtype=torch.float64),
        mask=torch.ones(4, dtype=torch.bool),
        segments=Segments.from_lengths(torch.tensor([2, 2])),
    )
    arguments = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0}
    result = loss.vespo(tokens, **arguments, lambda_negative=2.0)
    kernels = [
        math.exp(0.4 + 3.0 * (1.0 - math.exp(0.2))),
        math.exp(-0.9 + 2.0 * (1 - math.exp(-0.3))),
    ]
    expected = [-1.5 * kernels[0]] * 2 + [0.5 * kernels[1]] * 2
    assert kernels == pytest.approx([0.767814, 0.682743], abs=1e-6)
    assert _gradient(result, tokens) == pytest.approx(expected, abs=1e-12)


def test_a_micro_batch_without_trained_tokens_has_no_covariance() -> None:
    tokens = _tokens()
    tokens.mask[:] = False
    for result in (
        loss.kl_cov(tokens, fraction=0.5, coefficient=1.0),
        loss.clip_cov(tokens, clip_low=0.2, clip_high=0.2, fraction=0.5, low=1.0, high=5.0),
        loss.m2po(tokens, second_moment=1e-9),
    ):
        assert not result.indicators.get("covariance_fraction", torch.zeros(1)).any()
        assert result.values.isfinite().all()
