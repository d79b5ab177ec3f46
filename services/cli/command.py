"""Commands of extras and of other packages, which ``slipstream`` offers beside its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from services.common.callables import load_callable
from services.common.doors import Door


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command by the name of its entry point in the group ``slipstream.commands``."""

    panel: str
    """Heading under which ``slipstream --help`` lists it."""
    summary: str
    """First line of its help."""
    function: str
    """Reference ``module:function`` of a function with typer's annotations; imported when it is called."""

    def load(self) -> Callable[..., Any]:
        return load_callable(self.function)


COMMANDS: Final = Door("commands", Command)
