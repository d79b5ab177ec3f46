"""Protocols of environment servers other than Slipstream's own, by the scheme of their URLs."""

import re
from dataclasses import dataclass
from typing import Final

from services.common.doors import Door

_SCHEME: Final = re.compile(r"(?P<name>[\w.-]+)\+(?=https?://)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """Protocol of servers whose URLs are ``NAME+http://...`` and ``NAME+https://...``."""

    title: str
    """Name of the protocol in messages."""
    opens: str
    """Reference ``module:function`` of an
    :class:`~services.extras.environments.client.OpenEnvironment`."""
    passes_sandbox: bool = False
    """True if an environment gets the sandbox of its episode."""


ENVIRONMENTS: Final = Door("environments", EnvironmentKind)
"""The protocols by the name in the scheme."""


def environment_kind(environment: object) -> EnvironmentKind | None:
    """Returns the protocol of an environment's URL; None if the environment is no URL of such a protocol.

    Raises:
        DoorError: If the package that provides the protocol cannot be loaded.
    """
    scheme = _SCHEME.match(environment) if isinstance(environment, str) else None
    if scheme is None or scheme["name"] not in ENVIRONMENTS:
        return None
    return ENVIRONMENTS[scheme["name"]]


def plain_url(url: str) -> str:
    """Returns a URL without the name of a protocol in its scheme."""
    scheme = _SCHEME.match(url)
    return url if scheme is None else url[scheme.end() :]
