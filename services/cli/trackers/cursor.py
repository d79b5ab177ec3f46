"""How far a run was written to a tracker, on disk."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

GONE = 3
"""It ends with this if the controller is gone, which is no fault of its tracker."""


class TrackerJob(BaseModel):
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


CURSORS = "cursors"
"""Their folder in that of the trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What a tracker has of a run."""

    seq: int = 0
    """Number of the last event that was written."""
    is_done: bool = False
    """Whether that was all of them: the run has ended."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Where an earlier process stopped; the beginning if there was none, or its file is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, path: Path) -> None:
        """Keep it; readers see the old one or the new one."""
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        unfinished.rename(path)


def cursor_path(folder: Path, run_id: str, kind: str) -> Path:
    """Where it is kept."""
    return folder / CURSORS / run_id / f"{kind}.json"
