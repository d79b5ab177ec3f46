"""Tests of how the worker of a trainer ends."""

from dataclasses import dataclass, field

import pytest

from services.common.errors import FailedPreconditionError, ServiceError, UnavailableError
from services.trainer.worker import _stop


@dataclass
class EndingTrainer:
    """A leader with its store and session: an upload ends while the ranks end."""

    reported: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    error: ServiceError | None = None
    has_stopped: bool = False

    @property
    def store(self) -> "EndingTrainer":
        return self

    def report(self, session: "EndingTrainer") -> None:
        session.reported.append("after the end" if self.has_stopped else "before the end")

    async def send_events(self) -> None:
        if self.error is not None:
            raise self.error
        self.sent = [*self.reported]

    def stop(self) -> None:
        assert self.error is not None or self.sent == ["before the end"]
        self.has_stopped = True


@pytest.mark.parametrize(
    "error",
    [None, UnavailableError("no controller"), FailedPreconditionError("the run is not active")],
    ids=["recorded", "no controller", "a controller that does not know the run"],
)
async def test_uploads_that_end_as_the_trainer_ends_are_recorded(
    error: ServiceError | None,
) -> None:
    trainer = EndingTrainer(error=error)
    await _stop(trainer, trainer)  # type: ignore[arg-type]
    assert trainer.has_stopped
    assert trainer.sent == ([] if error is not None else ["before the end", "after the end"])
