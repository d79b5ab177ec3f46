"""Entry point of the launcher."""

from typing import Final

from services.common.launchers import LauncherKind

KIND: Final = LauncherKind(
    opener="services.extras.kubernetes.cluster:open_pods",
    problems="services.extras.kubernetes.pod_rules:pod_problems",
)
