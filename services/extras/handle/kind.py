"""Properties of the weight transport ``handle``. Imports no torch."""

from typing import Final

from services.common.runspec.weight_modes import Transport

KIND: Final = Transport(
    opener="services.extras.handle.transport:open_handle",
    least_rate=1e9,
    ends_at_abort=True,
)
