"""Tests that losses and their gradients equal the golden vectors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.runspec.algorithm import AlgorithmSpec, KlSpec
from services.trainer.algorithm import correction, loss
from services.trainer.batch.segments import Segments
from tests.unit.trainer.vectors import assert_close, case, cases, flat, mask_of, segments_of


def _denominators(mask: Tensor, segments: Segments) -> loss.Denominators:
    return loss.Denominators(
        tokens=mask.sum(),
        sequences=(segments.count(mask) > 0).sum(),
        horizon=int(segments.lengths.max()),
    )


def _check(
    inputs: dict[str, Any],
    expected: dict[str, Any],
    compute: Callable[[loss.LossTokens], loss.TokenLoss],
    old: Tensor | None = None,
    mode: str = "token-mean",
) -> loss.TokenLoss:
    mask, segments = mask_of(inputs["mask"]), segments_of(inputs["mask"])
    logprobs = flat(inputs["logprob"]).requires_grad_()
    old = flat(inputs["old_logprob"]) if old is None else old
    result = compute(
        loss.LossTokens(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=old,
            advantages=flat(inputs["advantage"]),
            mask=mask,
            segments=segments,
        )
    )
    denominators = _denominators(mask, segments)
    total = loss.aggregate(result.values, mask, segments, mode=mode, denominators=denominators)
    total.backward()
    assert_close(total, expected["loss"])
    assert_close(result.values, expected["token_loss"], mask)
    if "grad_logprob" in expected:
        assert logprobs.grad is not None
        assert_close(logprobs.grad, expected["grad_logprob"])
    for name, vector_name in (
        ("clip_fraction", "clipfrac"),
        ("clip_fraction_lower", "clipfrac_lower"),
    ):
        if vector_name in expected and name in result.indicators:
            assert_close(result.indicators[name][mask].mean(), expected[vector_name])
    return result


@pytest.mark.parametrize("name", ["symmetric_0.2", "no_dual_clip"])
def test_ppo_matches(name: str) -> None:
    inputs, expected = case("ppo_dual_clip", name)
    _check(
        inputs,
        expected,
        lambda tokens: loss.ppo(
            tokens,
            clip_low=inputs["clip_low"],
            clip_high=inputs["clip_high"],
            dual_clip=inputs["dual_clip"],
        ),
    )
    ratio = loss.ratio_of(flat(inputs["logprob"]), flat(inputs["old_logprob"]))
    assert_close(ratio, expected["ratio"])


@pytest.mark.parametrize("name", [item["name"] for item in cases("decoupled_ppo")])
def test_decoupled_ppo_matches(name: str) -> None:
    inputs, expected = case("decoupled_ppo", name)
    proximal, rollout = flat(inputs["prox_logprob"]), flat(inputs["behave_logprob"])

    def compute(tokens: loss.LossTokens) -> loss.TokenLoss:
        weights = correction.importance_weights(
            proximal - rollout,
            tokens.mask,
            tokens.segments,
            level="token",
            cap=inputs.get("cap"),
            floor=inputs.get("lower", 0.0),
            cap_mode=inputs.get("action", "truncate"),
        )
        assert_close(weights, expected["weights"])
        plain = loss.ppo(
            tokens,
            clip_low=inputs["clip_low"],
            clip_high=inputs["clip_high"],
            dual_clip=inputs["dual_clip"],
        )
        return loss.TokenLoss(plain.values * weights)

    _check(inputs, expected, compute, old=proximal)


_Compute = Callable[[loss.LossTokens, dict[str, Any]], loss.TokenLoss]


@pytest.mark.parametrize(
    ("name", "compute", "mode"),
    [
        (
            "gspo_tight",
            lambda tokens, of: loss.gspo(
                tokens, clip_low=of["clip_low"], clip_high=of["clip_high"]
            ),
            "seq-mean-token-mean",
        ),
        (
            "cispo",
            lambda tokens, of: loss.cispo(
                tokens, clip_low=of["clip_low"], clip_high=of["clip_high"]
            ),
            "token-mean",
        ),
        ("aipo_rho_2", lambda tokens, of: loss.aipo(tokens, ratio_max=of["rho"]), "token-mean"),
        (
            "sapo",
            lambda tokens, of: loss.sapo(
                tokens,
                sapo_temperature_positive=of["tau_pos"],
                sapo_temperature_negative=of["tau_neg"],
            ),
            "seq-mean-token-mean",
        ),
    ],
)
def test_other_losses_match(name: str, compute: _Compute, mode: str) -> None:
    inputs, expected = case("other_losses", name)
    old = flat(inputs.get("old_logprob") or inputs["behave_logprob"])
    _check(inputs, expected, lambda tokens: compute(tokens, inputs), old=old, mode=mode)


def test_reinforce_matches() -> None:
    inputs, expected = case("other_losses", "reinforce_token_mean")
    _check(inputs, expected, loss.reinforce, old=flat(inputs["logprob"]))


@pytest.mark.parametrize("item", cases("dpo"), ids=lambda item: item["name"])
def test_the_preference_of_pairs_matches(item: dict[str, Any]) -> None:
    inputs, expected = item["inputs"], item["expected"]
    reference, groups = flat(inputs["ref_logprob"]), torch.tensor(inputs["groups"])

    def compute(tokens: loss.LossTokens) -> loss.TokenLoss:
        compared = replace(tokens, ref_logprobs=reference, groups=groups)
        return loss.dpo(compared, dpo_beta=inputs["dpo_beta"])

    result = _check(inputs, expected, compute, mode="seq-mean-token-sum")
    assert_close(result.of_sequences["preference_margin"], expected["margin"])
    assert_close(result.of_sequences["preference_accuracy"], expected["accuracy"])


def test_the_value_loss_matches() -> None:
    inputs, expected = case("other_losses", "value_loss_clipped")
    result = loss.value_loss(
        flat(inputs["vpred"]),
        flat(inputs["old_value"]),
        flat(inputs["returns"]),
        clip=inputs["cliprange"],
    )
    assert_close(result.values.mean(), expected["loss"])
    assert_close(result.indicators["value_clip_fraction"].mean(), expected["clipfrac"])


def test_kl_values_and_gradients_match() -> None:
    inputs, values = case("kl", "values")
    _, gradients = case("kl", "gradients_wrt_logprob")
    ref = flat(inputs["ref_logprob"])
    for estimator, value in (
        ("k1", "k1"),
        ("k2", "k2"),
        ("k3", "k3_low_var"),
        ("k1+", "k1"),
        ("k3+", "k3_low_var"),
    ):
        logprobs = flat(inputs["logprob"]).requires_grad_()
        penalty = loss.kl_penalty(logprobs, ref, estimator=estimator)
        penalty.sum().backward()
        assert logprobs.grad is not None
        assert_close(penalty, values[value])
        assert_close(logprobs.grad, gradients[estimator.replace("+", "_plus")])


def test_the_default_kl_pulls_harder_the_farther_a_token_is_from_the_reference() -> None:
    reference = torch.zeros(6, dtype=torch.float64)
    logprobs = torch.tensor([-0.5, -2.5, -2.7, -5.0, -30.0, -300.0], dtype=torch.float64)
    logprobs.requires_grad_()
    penalty = loss.kl_penalty(logprobs, reference, estimator=KlSpec().estimator)
    penalty.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, logprobs.detach())
    assert bool((penalty >= 0).all())
    assert bool((penalty <= 10).all())


@pytest.mark.parametrize("item", cases("loss_aggregation"), ids=lambda item: item["name"])
def test_shares_of_ranks_and_micro_batches_add_up(item: dict[str, Any]) -> None:
    rows, mask_rows, expected = item["inputs"]["loss"], item["inputs"]["mask"], item["expected"]
    mask = mask_of(mask_rows)
    denominators = _denominators(mask, segments_of(mask_rows))

    def share(start: int, stop: int) -> Tensor:
        return loss.aggregate(
            flat(rows[start:stop]),
            mask_of(mask_rows[start:stop]),
            segments_of(mask_rows[start:stop]),
            mode=item["name"],
            denominators=denominators,
        )

    assert_close(share(0, 4), expected["value"])
    for row, value in enumerate(expected["micro_batch_values"]):
        assert_close(share(row, row + 1), value)
    for rank, value in enumerate(expected["dp2_rank_values"]):
        assert_close(share(2 * rank, 2 * rank + 2) * 2, value)


def test_a_masked_token_may_hold_anything() -> None:
    mask = torch.tensor([True, False])
    segments = Segments.from_lengths(torch.tensor([2]))
    for mode in ("token-mean", "seq-mean-token-mean"):
        total = loss.aggregate(
            torch.tensor([1.0, torch.nan]),
            mask,
            segments,
            mode=mode,
            denominators=_denominators(mask, segments),
        )
        assert total == 1.0


def test_the_entropy_weight_follows_its_target() -> None:
    """The weight is ``w + d`` below the target, else ``w - d``; no bonus above it (arXiv:2505.22312)."""
    spec = AlgorithmSpec(entropy_target=0.3, entropy_step=0.01)
    weight, coefficients = 0.0, []
    for entropy in (0.2, 0.2, 0.4, math.nan, 0.3, 0.1, 0.5, 0.6, 0.7):
        weight, coefficient = loss.adapted_entropy(weight, spec, entropy=entropy)
        coefficients.append((round(weight, 6), round(coefficient, 6)))
    assert coefficients == [
        (0.01, 0.01), (0.02, 0.02), (0.01, 0.0), (0.01, 0.01), (0.0, 0.0), (0.01, 0.01),
        (0.0, 0.0), (0.0, 0.0), (0.0, 0.0),
    ]  # fmt: skip
    assert loss.adapted_entropy(0.2, AlgorithmSpec(), entropy=0.1) == (0.2, 0.2)
