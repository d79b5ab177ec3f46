"""What a process that writes one run to one tracker is told."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

GONE = 3
"""It ends with this if the controller is gone, which is no fault of its tracker."""


class Order(BaseModel):
    """One run, one tracker."""

    model_config = ConfigDict(frozen=True)

    url: str
    """REST address of the controller."""
    run_id: str
    kind: str
    """Key of ``TRACKERS``."""
    folder: Path
    """What is kept here: cursors, and the files of trackers that write some."""
    deadline_s: float
    """A call of the tracker that takes longer ends the process."""
    is_failing: bool = False
    """Whether it was told that the tracker fails, so that it is told when it does not any more."""
