"""A group that simulated engines make, and its way from one that stands still to others."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.controller.planning.engine import SimulatedEngine
from services.controller.rules.groups import Group


@dataclass(slots=True)
class Made:
    """A group that is being generated."""

    group: Group
    lengths: tuple[int, ...]
    engines: tuple[int, ...]
    left: int
    version: int = -1
    """Under which its first token was made."""

    @property
    def tokens(self) -> int:
        """Of all its samples."""
        return sum(self.lengths)


@dataclass(slots=True)
class Aside:
    """What an engine that stands still had of a group, until another one takes it."""

    made: Made
    engine: int
    tokens: list[int]
    """That its samples lack."""

    def go_on(self, engines: Sequence[SimulatedEngine[Made]], number: int) -> None:
        """Give it to an engine, whose time must have been settled."""
        self.made.engines = tuple(number if n == self.engine else n for n in self.made.engines)
        engines[number].num_groups += 1
        for count in self.tokens:
            engines[number].put(self.made, count)


def put_aside(engines: Sequence[SimulatedEngine[Made]]) -> list[Aside]:
    """Take all groups from engines, whose time must have been settled; the oldest group comes first."""
    found: dict[tuple[int, int], Aside] = {}
    for number, engine in enumerate(engines):
        for made, tokens in engine.put_aside():
            key = made.group.sequence, number
            found.setdefault(key, Aside(made, number, [])).tokens.append(tokens)
        engine.num_groups = 0
    return [found[key] for key in sorted(found)]
