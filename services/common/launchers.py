"""Kinds of launchers by name: what commands and the controller read of a launcher before it is opened."""

from dataclasses import dataclass
from typing import Final, Literal

from services.common.doors import Door

PodTopology = Literal["separate", "bundled"]
"""A pod per worker, or all workers of a run in one pod (``workers.topology`` of the chart)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Host on which ``slipstream run`` and ``slipstream up`` start the controller and the transferqueue."""

    host: str = "127.0.0.1"
    """Address of this host at which workers reach the services."""
    has_other_hosts: bool = False
    """True if workers are on other hosts too: services and workers then verify each other's certificates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKind:
    """A launcher by the name of its entry point in the group ``slipstream.launchers``."""

    opener: str
    """Reference ``module:function`` of an asynchronous context manager that takes ``LauncherArgs``
    (``services/controller/manager/launchers.py``) and yields a ``Launcher``."""
    problems: str = ""
    """Reference of a function that takes a ``RunSpec`` and yields reasons why the launcher can never start
    the run, each with its key and a fix; ``slipstream validate --launcher`` calls it. That of ``kubernetes``
    takes a ``PodTopology`` too (``slipstream validate --pods``). Empty without rules."""
    site: str = ""
    """Reference of a function without arguments that returns the ``Site`` of ``slipstream run --launcher``;
    it raises ``SpecError`` if this host cannot be one. Empty if these commands cannot start the launcher."""
    shares_files: bool = False
    """True if workers and the controller see the same files, such as the state directory."""


LAUNCHERS: Final = Door("launchers", LauncherKind)
"""The launchers by the value of ``SLIPSTREAM_CONTROLLER_LAUNCHER`` and of the option ``--launcher``."""

PROCESS: Final = LauncherKind(
    opener="services.controller.manager.launchers:open_processes",
    site="services.common.launchers:Site",
    shares_files=True,
)
"""Processes of this host."""
NONE: Final = LauncherKind(opener="services.controller.manager.launchers:open_none")
"""Workers that another system starts."""
