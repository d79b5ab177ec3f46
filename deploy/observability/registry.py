"""All metrics that the services register: the single source of documents, dashboards and alerts."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from services.controller.manager.run_collector import RunCollector
from services.extras.fleets.share_metrics import SHARES

_MODULES = {
    "all": ("services.common.rpc.headers", "services.common.security.access"),
    "controller": ("services.controller.metrics",),
    "transferqueue": ("services.transferqueue.metrics",),
    "rollout": ("services.rollout.metrics",),
    "trainer": ("services.trainer.metrics",),
    "trainer and rollout": ("services.weightsync.member",),
    "vLLM server of a fleet": (),
}
_PREFIX = "slipstream_"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDoc:
    """One metric as Prometheus exposes it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    service: str


def registered() -> list[MetricDoc]:
    """Returns all metrics, by service and name."""
    found = [
        _doc(metric, tuple(collector._labelnames), service)  # noqa: SLF001  no public listing
        for service, modules in _MODULES.items()
        for module in modules
        for collector in _collectors(vars(importlib.import_module(module)).values())
        for metric in collector.describe()
        if metric.name.startswith(_PREFIX)
    ]
    runs = RunCollector(list, lambda run_id: [])
    collected = {"controller": runs.describe(), "vLLM server of a fleet": SHARES.collect()}
    found += [
        _doc(metric, tuple(metric._labelnames), service)  # type: ignore[attr-defined]  # noqa: SLF001
        for service, metrics in collected.items()
        for metric in metrics
    ]
    return sorted(found, key=lambda doc: (list(_MODULES).index(doc.service), doc.name))


def _collectors(values: Iterable[object]) -> Iterator[MetricWrapperBase]:
    """Yields the metrics among values and in nested dictionaries, without children of labelled metrics."""
    for value in values:
        if isinstance(value, MetricWrapperBase):
            if not value._labelvalues:  # noqa: SLF001  no public way to tell
                yield value
        elif isinstance(value, dict):
            yield from _collectors(value.values())


def exposed_names(docs: list[MetricDoc]) -> set[str]:
    """Returns the names of all series: histograms have three, and every process reports its memory."""
    return {name for doc in docs for name in _series(doc)} | {"process_resident_memory_bytes"}


def _series(doc: MetricDoc) -> Iterator[str]:
    if doc.kind == "histogram":
        yield from (f"{doc.name}_{part}" for part in ("bucket", "sum", "count"))
    else:
        yield doc.name


def _doc(metric: Metric, labels: tuple[str, ...], service: str) -> MetricDoc:
    suffix = "_total" if metric.type == "counter" else ""
    return MetricDoc(
        name=metric.name + suffix,
        kind=metric.type,
        labels=labels,
        text=metric.documentation.rstrip("."),
        service=service,
    )
