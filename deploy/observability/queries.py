"""PromQL expressions that panels share, each with the legend of its lines."""

from collections.abc import Sequence

RUN = 'run=~"$run"'
RATE = "$__rate_interval"
Query = tuple[str, str]


def newest(metric: str, *by: str, legend: str = "") -> list[Query]:
    """Returns the newest value of a metric for each run and each value of the labels ``by``."""
    labels = ("run", *by)
    text = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [(f"max by ({', '.join(labels)}) ({metric}{{{RUN}}})", legend or text)]


def each(**metrics: str) -> list[Query]:
    """Returns the newest value of several metrics for each run; the keywords are the legends."""
    return [
        query
        for name, metric in metrics.items()
        for query in newest(metric, legend=f"{{{{run}}}} {name.replace('_', ' ')}")
    ]


def rate(metric: str, by: str, *, matcher: str = RUN) -> list[Query]:
    """Returns the growth of a counter per second, by a label."""
    return [(f"sum by ({by}) (rate({metric}{{{matcher}}}[{RATE}]))", f"{{{{{by}}}}}")]


def total(metric: str, by: str) -> list[Query]:
    """Returns the sum over all reporting processes, by a label."""
    labels = by.split(", ")
    text = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [(f"sum by ({by}) ({metric}{{{RUN}}})", text)]


def share(part: str, whole: str) -> list[Query]:
    """Returns the quotient of two metrics of each run."""
    return [(f"max by (run) ({part}{{{RUN}}}) / max by (run) ({whole}{{{RUN}}})", "{{run}}")]


def mean_seconds(metric: str) -> list[Query]:
    """Returns the mean time of each phase except the total."""
    matcher = f'{{{RUN},phase!="total"}}'
    parts = [
        f"sum by (phase) (rate({metric}_{part}{matcher}[{RATE}]))" for part in ("sum", "count")
    ]
    return [(" / ".join(parts), "{{phase}}")]


def mean(metric: str, legend: str) -> list[Query]:
    """Returns the mean of a histogram's observations."""
    parts = [f"sum(rate({metric}_{part}{{{RUN}}}[{RATE}]))" for part in ("sum", "count")]
    return [(" / ".join(parts), legend)]


def buckets(metric: str) -> list[Query]:
    """Returns the observations in each bucket of a histogram, for a heatmap."""
    return [(f"sum by (le) (increase({metric}_bucket{{{RUN}}}[{RATE}]))", "{{le}}")]


def quantiles(
    metric: str, levels: Sequence[float], *, by: str = "", matcher: str = RUN, legend: str = ""
) -> list[Query]:
    """Returns quantiles of a histogram's observations."""
    labels = f"le, {by}" if by else "le"
    prefix = legend or (f"{{{{{by}}}}}" if by else "")
    return [
        (
            f"histogram_quantile({level}, sum by ({labels}) (rate({metric}_bucket{{{matcher}}}[{RATE}])))",
            f"{prefix} p{100 * level:.0f}".strip(),
        )
        for level in levels
    ]
