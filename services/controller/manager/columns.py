"""Numbers of steps as columns: what charts are drawn from."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from services.controller.models import Metric, MetricHistogram, MetricPage
from services.controller.store.ledgers import StepMetrics

_HISTOGRAMS = "histograms"


def as_columns(steps: Sequence[StepMetrics], names: Collection[str]) -> MetricPage:
    """Columns of some steps.

    Args:
        steps: In order.
        names: Numbers and histograms that are wanted; none for all. ``NAME*`` means all that begin so.
    """
    numbers = {name for step in steps for name in step.metrics} - {_HISTOGRAMS}
    spreads = [step.metrics.get(_HISTOGRAMS, {}) for step in steps]
    spread = {name for one in spreads for name in one}
    return MetricPage(
        steps=[step.step for step in steps],
        times=[datetime.fromtimestamp(step.time, UTC) for step in steps],
        items=[
            Metric(name=name, values=[step.metrics.get(name) for step in steps])
            for name in _wanted(numbers, names)
        ],
        histograms=[
            _histogram(name, [one.get(name, {}) for one in spreads])
            for name in _wanted(spread, names)
        ],
    )


def _wanted(known: Collection[str], names: Collection[str]) -> list[str]:
    beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
    return sorted(
        name for name in known if not names or name in names or name.startswith(beginnings)
    )


def _histogram(name: str, spreads: Sequence[dict[str, int]]) -> MetricHistogram:
    bounds = sorted({int(bound) for one in spreads for bound in one})
    counts = [[one.get(str(bound), 0) for bound in bounds] for one in spreads]
    return MetricHistogram(name=name, bounds=bounds, counts=counts)
