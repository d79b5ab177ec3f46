"""Tests that a failure of one rank is raised on all ranks."""

import pytest
import torch

from services.common.errors import (
    DataLossError,
    DeadlineExceededError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from services.trainer.collectives import Ranks


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
