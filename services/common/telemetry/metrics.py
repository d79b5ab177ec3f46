"""Bucket bounds of Prometheus histograms."""

from typing import Final

# Upper bounds; the bound of 0.3 s in `SYNC` makes "syncs under 300 ms" a direct ratio.
SPANS: Final = (1, 2, 3, 4, 5, 8, 12, 16)
SYNC: Final = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 30, 60, 120, 300,
)  # fmt: skip
RPC: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
USER_CODE: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1200, 3600,
)  # fmt: skip
STEP: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
# As fine as the histograms of steps, so that quantiles of short answers are not a guess between 0
# and 16.
TOKENS: Final = (1, 2, *(size for power in range(2, 17) for size in (3 << power - 2, 1 << power)))
