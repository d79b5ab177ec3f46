"""Use of a server by each run, in the server's own metrics endpoint."""

from collections.abc import Iterator
from typing import Any, Final, Protocol
from weakref import WeakSet

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class UsedServer(Protocol):
    """A server that runs share."""

    def usage(self) -> list[dict[str, Any]]:
        """Returns the use by each run."""


class ShareCollector(Collector):
    """Reads the numbers when they are asked for, so that a run that has ended has none."""

    def __init__(self) -> None:
        self._servers: WeakSet[UsedServer] = WeakSet()

    def add(self, server: UsedServer) -> None:
        self._servers.add(server)

    def collect(self) -> Iterator[Metric]:
        """Yields tokens, share, and running and waiting requests by run."""
        tokens = CounterMetricFamily(
            "slipstream_fleet_run_tokens",
            "Tokens that a run has sampled on this server.",
            labels=["run"],
        )
        share = GaugeMetricFamily(
            "slipstream_fleet_run_share", "Weight of a run on this server.", labels=["run"]
        )
        version = GaugeMetricFamily(
            "slipstream_fleet_run_weight_version", "Weight version in service.", labels=["run"]
        )
        requests = GaugeMetricFamily(
            "slipstream_fleet_run_requests",
            "Requests of a run on this server.",
            labels=["run", "state"],
        )
        for row in [row for server in self._servers for row in server.usage()]:
            tokens.add_metric([row["run"]], row["tokens"])
            share.add_metric([row["run"]], row["share"])
            version.add_metric([row["run"]], -1 if row["version"] is None else row["version"])
            for state in ("running", "waiting"):
                requests.add_metric([row["run"], state], row[state])
        yield from (tokens, share, version, requests)


SHARES: Final = ShareCollector()
REGISTRY.register(SHARES)
