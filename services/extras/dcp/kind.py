"""Entry point of the format; imports no torch."""

from typing import Final

from services.common.models.weight_formats import WeightFormat

DCP: Final = WeightFormat(
    marker=".metadata",
    opener="services.extras.dcp.reading:open_weights",
    writer="services.extras.dcp.writing:write_weights",
)
