"""Step metrics as columns."""

from services.controller.manager.audit import as_columns
from services.controller.store.ledgers import StepMetrics


def test_a_step_without_a_number_has_none_in_its_column():
    steps = [
        StepMetrics(step=1, time=1.0, metrics={"loss": 0.5, "sync_ms": 3.0}),
        StepMetrics(step=2, time=2.0, metrics={"loss": 0.25}),
    ]
    page = as_columns(steps, ())
    assert [(metric.name, metric.values) for metric in page.items] == [
        ("loss", [0.5, 0.25]),
        ("sync_ms", [3.0, None]),
    ]
    assert [metric.name for metric in as_columns(steps, {"loss"}).items] == ["loss"]
    assert [metric.name for metric in as_columns(steps, {"lo*", "none*"}).items] == ["loss"]


def test_histograms_have_the_buckets_of_all_steps():
    spreads = [{"1": 8}, {"0": 2, "1": 6}, {}]
    steps = [
        StepMetrics(step=step, time=1.0, metrics={"histograms": {"staleness": spread}})
        for step, spread in enumerate(spreads, 1)
    ]
    (histogram,) = as_columns(steps, ()).histograms
    assert histogram.bounds == [0, 1]
    assert histogram.counts == [[0, 8], [2, 6], [0, 0]]
