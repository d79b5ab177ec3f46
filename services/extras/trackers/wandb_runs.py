"""Runs in Weights & Biases under the run's own id, so that reopening resumes them.

W&B's step, which must increase, is the event's sequence number; charts use ``step`` as their axis. The
newest stored row of an offline run is read from wandb's own files, in LevelDB's log format, because
wandb's background process ends with its parent and drops unwritten records.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from services.common.runspec.trackers import TrackerSpec
from services.controller.schemas import RunView
from services.extras.trackers.tracker import COLUMNS, EventPosition, Split


class WandbRun:
    """One run in Weights & Biases.

    Args:
        newest: Sequence number of the last event that is stored locally; wandb itself knows the
            events on its server.
    """

    # Wandb writes and sends rows with a delay.
    rereads = 500

    def __init__(self, run: Any, newest: int) -> None:
        self._run = run
        self._newest = newest

    def numbers(self, moment: EventPosition, numbers: Mapping[str, float]) -> None:
        self._log(moment, numbers)

    def samples(self, moment: EventPosition, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=[list(map(_plain, row)) for row in rows])
        self._log(moment, {f"samples/{split}": table})

    def close(self, state: str) -> None:
        """Sends the remaining rows."""
        if state:
            self._run.summary["state"] = state
        self._run.finish(exit_code=int(state in ("FAILED", "CANCELLED")))

    def _log(self, moment: EventPosition, row: Mapping[str, Any]) -> None:
        if moment.seq > self._newest:
            self._run.log({**row, "step": moment.step}, step=moment.seq)


def open_run(run: RunView, spec: TrackerSpec, folder: Path) -> WandbRun:
    team, _, project = spec.project.rpartition("/")
    folder.mkdir(parents=True, exist_ok=True)
    newest = max((row.history.step.num for row in rows_of(folder, run.id)), default=-1)
    wandb_run = wandb.init(
        entity=team or None,
        project=project,
        id=run.id,
        name=run.name,
        tags=[*spec.tags, *(f"{key}={value}" for key, value in run.labels.items())],
        config=run.spec,
        resume="allow",
        dir=str(folder),
        settings=wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, silent=True
        ),
    )
    wandb_run.define_metric("step", hidden=True)
    wandb_run.define_metric("*", step_metric="step")
    return WandbRun(wandb_run, newest)


def _plain(value: Any) -> Any:
    # A column has one type; None would change it.
    return "" if value is None else value


_BLOCK = 1 << 15
_FILE_HEADER = 7
_HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a fragment of a record."""
_WHOLE, _LAST = 1, 4


def rows_of(folder: Path, run_id: str) -> Iterator[Any]:
    """Yields the rows of a run that are stored in local files, in order of the times that it was opened."""
    # If a run is opened twice within a second, the name of the second folder ends with "-1".
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield record


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the complete records of a log."""
    position, record = _FILE_HEADER, b""
    while position + _HEADER.size <= len(data):
        room = _BLOCK - position % _BLOCK
        if room < _HEADER.size:
            position += room
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        begin, position = position + _HEADER.size, position + _HEADER.size + length
        if position > len(data):
            return
        record += data[begin:position]
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
