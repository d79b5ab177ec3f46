"""Entry of the door ``slipstream.weight_transports``. Imports no torch."""

from typing import Final

from services.common.runspec.weight_modes import Transport

STORAGE: Final = Transport(
    opener="services.extras.stored_weights.channel:open_storage",
    check="services.extras.stored_weights.folders:check_directory",
    reports="services.extras.stored_weights.reports:report_failures",
    least_rate=10e6,
    latency_s=30.0,
    ends_at_abort=True,
    is_stored=True,
)
