"""Entry points of the commands ``backup`` and ``restore``; imports none of them."""

from typing import Final

from services.cli.command import Command

BACKUP: Final = Command(
    panel="Controller",
    summary="Copy the database, also while a controller runs; checkpoints are separate files.",
    function="services.extras.backup.command:backup",
)
RESTORE: Final = Command(
    panel="Controller",
    summary="Restore the database from a copy, while no controller uses it.",
    function="services.extras.backup.command:restore",
)
