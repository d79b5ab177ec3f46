"""Entry point of the launcher."""

from typing import Final

from services.common.launchers import LauncherKind

KIND: Final = LauncherKind(
    opener="services.extras.slurm.launcher:open_steps",
    problems="services.extras.slurm.rules:problems",
    site="services.extras.slurm.allocation:site",
    shares_files=True,
)
