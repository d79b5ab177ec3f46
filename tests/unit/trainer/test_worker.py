"""Tests of how the worker of a trainer ends."""

from dataclasses import dataclass, field

import pytest

from services.common.errors import UnavailableError
from services.trainer.worker import _stop


@dataclass
class EndingTrainer:
    """A leader with its store and session: an upload ends while the ranks end."""

    reported: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    is_controller_away: bool = False
    has_stopped: bool = False

    @property
    def store(self) -> "EndingTrainer":
        return self

    def report(self, session: "EndingTrainer") -> None:
        session.reported.append("after the end" if self.has_stopped else "before the end")

    async def send_events(self) -> None:
        if self.is_controller_away:
            raise UnavailableError("no controller")
        self.sent = [*self.reported]

    def stop(self) -> None:
        assert self.is_controller_away or self.sent == ["before the end"]
        self.has_stopped = True


@pytest.mark.parametrize("is_controller_away", [False, True])
async def test_uploads_that_end_as_the_trainer_ends_are_recorded(is_controller_away: bool) -> None:
    trainer = EndingTrainer(is_controller_away=is_controller_away)
    await _stop(trainer, trainer)  # type: ignore[arg-type]
    assert trainer.has_stopped
    assert trainer.sent == ([] if is_controller_away else ["before the end", "after the end"])
