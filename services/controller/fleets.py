"""Fleets of engine servers that an administrator configures, as the API sees them."""

from collections.abc import Mapping
from typing import Any, Protocol

from services.common.errors import InvalidArgumentError, NotFoundError
from services.controller.schemas import FleetView


class Fleets(Protocol):
    """Fleets of an installation."""

    async def views(self) -> list[FleetView]:
        """Returns all fleets, with the state of each server. Raises InvalidArgumentError."""

    async def view(self, name: str) -> FleetView:
        """Returns one fleet. Raises NotFoundError."""

    async def resolve(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a specification in which a fleet's name is replaced by its servers.

        Raises:
            InvalidArgumentError: If it names an unknown fleet, or servers besides the fleet.
        """


class NoFleets:
    """An installation without fleets."""

    async def views(self) -> list[FleetView]:
        return []

    async def view(self, name: str) -> FleetView:
        raise NotFoundError(
            f"this installation has no fleet {name!r}; an administrator configures fleets in "
            "SLIPSTREAM_CONTROLLER_FLEETS_FILE"
        )

    async def resolve(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        if (name := named_fleet(spec)) is not None:
            raise InvalidArgumentError(
                f"rollout.engine_arguments.fleet is {name!r}, but this installation has no fleets; set "
                "addresses, or configure SLIPSTREAM_CONTROLLER_FLEETS_FILE"
            )
        return spec


async def resolve_changes(fleets: Fleets, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns changes of a specification in which a fleet's name is replaced by its servers.

    Null removes a token that the specification has for other servers, if the fleet has none.

    Raises:
        InvalidArgumentError: If they name an unknown fleet, or servers besides the fleet.
    """
    if named_fleet(changes) is None:
        return changes
    resolved = await fleets.resolve(changes)
    rollout = resolved["rollout"]
    arguments = {"token": None, **rollout["engine_arguments"]}
    return {**resolved, "rollout": {**rollout, "engine_arguments": arguments}}


def named_fleet(spec: Mapping[str, Any]) -> Any:
    """Returns the fleet that a specification names; None if it names none."""
    rollout = spec.get("rollout")
    arguments = rollout.get("engine_arguments") if isinstance(rollout, Mapping) else None
    return arguments.get("fleet") if isinstance(arguments, Mapping) else None
