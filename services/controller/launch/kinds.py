"""Launchers that the core provides: processes of this host, and workers that another system starts."""

from typing import Final

from services.common.launchers import LauncherKind

PROCESS: Final = LauncherKind(
    opener="services.controller.manager.launchers:open_processes",
    site="services.common.launchers:Site",
    shares_files=True,
)
NONE: Final = LauncherKind(opener="services.controller.manager.launchers:open_none")
