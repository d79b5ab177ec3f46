"""Fixtures of all unit tests."""

from collections.abc import Iterator

import pytest

from services.common.models import configs
from services.common.models.evaluator import Evaluator


class _SharedEvaluator(Evaluator):
    """Stays open between configurations, because its start takes seconds."""

    def close(self) -> None:
        """Does nothing."""


@pytest.fixture(scope="session", autouse=True)
def _one_evaluator_of_configs() -> Iterator[None]:
    shared = _SharedEvaluator("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "Evaluator", lambda _: shared)
        yield
    Evaluator.close(shared)
