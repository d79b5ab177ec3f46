"""Tests that a failure of one rank is raised on all ranks, and of statistics over all ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from services.trainer.collectives import MetricTotals, Ranks


def beside(failed: int, gone: int, broken: int, away: int) -> Ranks:
    """Returns one of four ranks whose collectives report the given numbers of failures on other ranks."""

    class Beside(Ranks):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values + torch.tensor([failed, gone, broken, away])

        def gather(self, text: str) -> list[str]:
            return [text, "theirs"]

    return Beside(rank=0, size=4)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((1, 1, 0, 0), NotFoundError),
        ((2, 0, 2, 0), UnavailableError),
        ((1, 0, 0, 1), DeadlineExceededError),
        ((1, 0, 0, 0), DataLossError),
        ((2, 1, 1, 0), DataLossError),
    ],
)
def test_a_failure_that_all_of_the_others_share_is_this_ranks_too(
    others: tuple[int, int, int, int], expected: type[ServiceError]
) -> None:
    with (
        pytest.raises(expected, match="another rank could not fetch: theirs"),
        beside(*others).fail_together("fetch"),
    ):
        pass


def test_a_failure_of_a_rank_with_the_same_samples_is_this_ranks_too() -> None:
    with (
        pytest.raises(UnavailableError, match="another rank could not fetch"),
        Ranks(everyone=beside(1, 0, 1, 0)).fail_together("fetch"),
    ):
        pass


def test_a_ranks_own_failure_is_raised_as_it_is() -> None:
    ranks = beside(1, 1, 0, 0)
    with pytest.raises(UnavailableError, match="mine"), ranks.fail_together("fetch"):
        raise UnavailableError("mine")


def test_ranks_continue_if_none_failed() -> None:
    with beside(0, 0, 0, 0).fail_together("fetch"):
        pass


def beside_each_other(count: int) -> Ranks:
    """Returns ranks that sum in threads of this process."""
    barrier, addends = threading.Barrier(count, timeout=10), list[torch.Tensor]()

    class Together(Ranks):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            addends.append(values)
            barrier.wait()
            total = torch.stack(addends[-count:]).sum(0)
            barrier.wait()
            return total

    return Together(size=count)


@pytest.mark.parametrize("reward", [0.95, 0.35, 10.7, 1000.1, 1e6 + 0.5])
@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_deviations_are_exact_for_large_and_nearly_equal_values(
    reward: float, spread: float
) -> None:
    values = torch.full((250,), reward)
    values[::3] *= 1 + spread
    mask = torch.rand(250, generator=torch.Generator().manual_seed(0)) < 0.8
    whole, parts, ranks = MetricTotals(), MetricTotals(), [MetricTotals(), MetricTotals()]
    whole.mean("reward_mean", values, mask)
    for begin in range(0, 250, 50):
        rank_totals = MetricTotals()
        rank_totals.mean("reward_mean", values[begin : begin + 50], mask[begin : begin + 50])
        parts.merge(rank_totals)
        ranks[begin % 100 // 50].mean(
            "reward_mean", values[begin : begin + 50], mask[begin : begin + 50]
        )
    expected = float(values[mask].double().std(correction=0))
    for totals in (whole, parts):
        assert totals.reduce(Ranks())["reward_std"] == pytest.approx(expected, rel=1e-9, abs=0.0)
    with ThreadPoolExecutor(2) as pool:
        for metrics in pool.map(MetricTotals.reduce, ranks, [beside_each_other(2)] * 2):
            assert metrics["reward_std"] == pytest.approx(expected, rel=1e-9, abs=0.0)
