"""Tests that importance weights, rejection masks and off-policy diagnostics equal the golden vectors."""

from typing import Any

import pytest
import torch

from services.trainer.algorithm import correction, diagnostics
from tests.unit.trainer.vectors import assert_close, case, cases, flat, mask_of, segments_of


@pytest.mark.parametrize("item", cases("is_weights"), ids=lambda item: item["name"])
def test_weights_match(item: dict[str, Any]) -> None:
    inputs, expected = item["inputs"], item["expected"]
    mask, segments = mask_of(inputs["mask"]), segments_of(inputs["mask"])
    log_ratio = flat(inputs["log_ratio"])
    raw = correction.raw_weights(log_ratio, mask, segments, level=inputs["level"])
    assert_close(raw, expected["raw"])
    weights = correction.importance_weights(
        log_ratio,
        mask,
        segments,
        level=inputs["level"],
        cap=inputs.get("cap"),
        floor=inputs.get("lower", 0.0),
        cap_mode="mask" if inputs.get("icepop") else "truncate",
    )
    if inputs.get("norm", False):
        total, count = correction.mean_terms(weights, mask, segments, level=inputs["level"])
        weights = weights / (total / count)
    assert_close(weights, expected["weights"])
    assert_close(weights[mask].mean(), expected["mean"])
    if expected["frac_above_cap"] is not None:
        above = (raw > inputs["cap"])[mask].double().mean()
        assert_close(above, expected["frac_above_cap"])


@pytest.mark.parametrize("item", cases("proximal_interpolation"), ids=lambda item: item["name"])
def test_interpolated_proximal_logprobs_match(item: dict[str, Any]) -> None:
    inputs = item["inputs"]
    versions = torch.cat([torch.tensor(row) for row in inputs["token_version"]])
    actual = correction.interpolated_proximal(
        torch.cat([torch.tensor(row) for row in inputs["logprob"]]).requires_grad_(),
        torch.cat([torch.tensor(row) for row in inputs["behave_logprob"]]),
        inputs["weight_version"] - versions.float(),
    )
    expected = torch.cat([torch.tensor(row) for row in item["expected"]["prox_logprob"]])
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("item", cases("rejection_masks"), ids=lambda item: item["name"])
def test_rejection_masks_match(item: dict[str, Any]) -> None:
    inputs, expected = item["inputs"], item["expected"]
    mask, segments = mask_of(inputs["mask"]), segments_of(inputs["mask"])
    level, statistic = inputs["option"].rsplit("_", 1)
    log_ratio = flat(inputs["log_ratio"])
    accepted = correction.rejection_mask(
        log_ratio,
        mask,
        segments,
        level=level,
        statistic=statistic,
        lower=inputs["lower"],
        upper=inputs["upper"],
    )
    assert_close(accepted, expected["mask"])
    values = correction.rejection_statistic(
        log_ratio, mask, segments, level=level, statistic=statistic
    )
    # Outside the mask the golden vectors contain the sequence's statistic, which is unused.
    assert_close(values, expected["statistic"], mask)
    accepted_share = accepted.sum().double() / mask.sum()
    assert_close(accepted_share, expected["kept_token_fraction"])
    dropped = (segments.count(accepted) < segments.count(mask)).double().mean()
    assert_close(dropped, expected["dropped_sequence_fraction"])


def test_off_policy_metrics_match() -> None:
    inputs, expected = case("offpolicy_metrics", "basic")
    mask, segments = mask_of(inputs["mask"]), segments_of(inputs["mask"])
    proximal, rollout = flat(inputs["prox_logprob"]), flat(inputs["behave_logprob"])
    tokens = diagnostics.token_terms(proximal, rollout)
    sequences = diagnostics.sequence_terms(proximal, rollout, mask, segments)
    for metric, their_metric in (
        ("kl_rollout_k1", "kl_k1"),
        ("kl_rollout", "kl_k3"),
        ("chi2_token", "chi2_token"),
        ("prob_diff", "prob_diff_mean"),
    ):
        assert_close(tokens[metric][mask].mean(), expected[their_metric])
    assert_close(tokens["prob_diff"][mask].max(), expected["prob_diff_max"])
    for metric, their_metric in (
        ("proximal_ppl", "train_ppl"),
        ("rollout_ppl", "behave_ppl"),
        ("ppl_ratio", "ppl_ratio"),
        ("log_ppl_diff", "log_ppl_diff"),
        ("log_ppl_abs_diff", "log_ppl_abs_diff"),
        ("chi2_seq", "chi2_seq"),
    ):
        assert_close(sequences[metric].mean(), expected[their_metric])


def test_staleness_matches() -> None:
    inputs, expected = case("staleness", "per_token_versions")
    mask, segments = mask_of(inputs["mask"]), segments_of(inputs["mask"])
    versions = torch.tensor(inputs["token_versions"]).flatten()
    tokens, sequences = diagnostics.staleness_terms(
        versions, mask, segments, weight_version=inputs["trainer_version"]
    )
    rows = expected["per_sequence"]
    for metric, their_metric in (
        ("staleness_head", "staleness_head"),
        ("staleness_tail", "staleness_tail"),
        ("span", "span"),
    ):
        assert_close(sequences[metric], [float(row[their_metric]) for row in rows])
    for metric, their_metric in (
        ("staleness_token", "staleness_token_mean"),
        ("off_policy_token_fraction", "off_policy_token_fraction"),
    ):
        assert_close(segments.mean(tokens[metric], mask), [row[their_metric] for row in rows])
    batch = expected["batch"]
    assert_close(sequences["staleness_head"].max(), batch["staleness_head_max"])
    assert_close(sequences["staleness_head"].mean(), batch["staleness_head_mean"])
    assert_close(sequences["staleness_tail"].mean(), batch["staleness_tail_mean"])
    assert_close(sequences["span"].max(), batch["span_max"])
    assert_close(sequences["partial_ratio"].mean(), batch["partial_ratio"])
