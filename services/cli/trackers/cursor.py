"""Jobs of tracker processes, and the position up to which a run is written to a tracker, on disk."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

GONE = 3
"""Exit code of a tracker process if the controller is gone, which is not a failure of the tracker."""


class TrackerJob(BaseModel):
    """The job of one tracker process: one run, one tracker."""

    model_config = ConfigDict(frozen=True)

    url: str
    """REST address of the controller."""
    run_id: str
    kind: str
    """Key of ``TRACKERS``."""
    folder: Path
    """Folder of cursors and of files that trackers write."""
    deadline_s: float
    """Max seconds of one call of the tracker; after that, the process ends."""
    is_failing: bool = False
    """True if the controller has a report that the tracker fails, which must be withdrawn on
    recovery."""


CURSORS = "cursors"
"""Name of the cursors' folder in the trackers' folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position up to which a run is written to a tracker."""

    seq: int = 0
    """Sequence number of the last written event."""
    is_done: bool = False
    """True if the run has ended and all events are written."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the stored cursor; the beginning if there is none or its file is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, path: Path) -> None:
        """Stores the cursor atomically."""
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        unfinished.rename(path)


def cursor_path(folder: Path, run_id: str, kind: str) -> Path:
    """Returns the path of a cursor."""
    return folder / CURSORS / run_id / f"{kind}.json"
