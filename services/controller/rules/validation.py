"""Which weight version is evaluated, and which one next: one at a time. Pure.

What is asked for during an evaluation waits; the newest wins, except that a final one is never replaced.
"""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["initial", "periodic", "final", "manual"]
Status = Literal["ok", "timeout", "missed"]


@dataclass(frozen=True, slots=True)
class BegunEvaluation:
    """An evaluation of one weight version, which is pinned from here to its report."""

    version: int
    reason: Reason


def is_periodic(version: int, every: int) -> bool:
    """Whether a version is evaluated because of its number: a resumed run picks the same ones."""
    return every > 0 and version > 0 and version % every == 0


class Turns:
    """The evaluation that has its turn, and the one behind it."""

    def __init__(self) -> None:
        self.current: BegunEvaluation | None = None
        self.next: BegunEvaluation | None = None

    def ask(self, evaluation: BegunEvaluation) -> None:
        """Have an evaluation made, now or behind the current one."""
        if self.current is None:
            self.current = evaluation
        elif self.next is None or self.next.reason != "final":
            self.next = evaluation

    def end(self) -> None:
        """The current one is reported."""
        self.current, self.next = self.next, None
