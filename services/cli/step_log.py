"""Records of a run's steps and evaluations, in files that grow with the run."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


class JsonLines:
    """File of JSON objects, one a line. Its memory does not depend on the number of lines.

    While the disk is full, new lines wait in memory for a later call: training needs no such file.

    Args:
        path: The file; the first line replaces an older file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = 0
        self._num_lines = 0
        self._waiting: list[str] = []

    def __len__(self) -> int:
        return self._num_lines + len(self._waiting)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._num_bytes:
            with self._path.open("rb") as file:
                for _ in range(self._num_lines):
                    yield json.loads(file.readline())
        yield from map(json.loads, self._waiting)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line; :meth:`write` writes it."""
        self._waiting.append(json.dumps(line) + "\n")

    def write(self) -> None:
        """Writes the lines that wait."""
        if not self._waiting:
            return
        data = "".join(self._waiting).encode()
        try:
            with self._path.open("r+b" if self._num_bytes else "wb") as file:
                if file.seek(0, os.SEEK_END) > self._num_bytes:
                    # An earlier call wrote a part of its lines.
                    file.truncate(self._num_bytes)
                    file.seek(self._num_bytes)
                file.write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return
        self._num_bytes += len(data)
        self._num_lines += len(self._waiting)
        self._waiting.clear()

    def replace(self, change: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None:
        """Replaces each line by the result of a function; removes those for which it returns None."""
        replaced = JsonLines(self._path.with_suffix(".new"))
        for line in self:
            new = change(line)
            if new is not None:
                replaced.add(new)
                replaced.write()
        if replaced._num_bytes:
            replaced._path.replace(self._path)
        else:
            with suppress(FileNotFoundError):
                self._path.unlink()
        self._num_bytes, self._num_lines = replaced._num_bytes, replaced._num_lines
        self._waiting = replaced._waiting


class StepLog:
    """Collects the events of a run; a step's record is complete when its weights are published.

    ``metrics.jsonl`` has one line per step, ``evaluations.jsonl`` one per evaluation: ``version``,
    ``greedy``, ``sampled``, and ``sets`` with the scores of each.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.records = JsonLines(folder / METRICS)
        self.heldout = JsonLines(folder / EVALUATIONS)
        self.newest_score: Mapping[str, Any] | None = None
        """Newest evaluation; None before the first."""
        self._open: dict[str, Any] | None = None
        self._newest_step = 0

    def process(self, kind: str, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Processes an event; yields the records that it completes."""
        data = event.get("data", {})
        if kind == "StepCommitted":
            yield from self._close()
            step = data["step"]
            if step <= self._newest_step:
                # After the loss of a trainer, the run resumes from its checkpoint and trains later
                # steps again.
                self.records.replace(lambda line: line if line["step"] < step else None)
            self._newest_step = step
            self._open = {"time": event["time"], **data}
        elif kind == "WeightsPublished" and self._open is not None:
            self._open.update(
                {name: value for name, value in data.items() if name.endswith("_ms")},
                weight_version=data["version"],
            )
            yield from self._close()
        elif kind == "Validated" and data["num_samples"]:
            scores = {name: data[name] for name in ("version", "greedy", "sampled")}
            self.newest_score = {**scores, "sets": data.get("by_set", {})}
            self.heldout.add(self.newest_score)
        elif kind == "end":
            yield from self._close()

    def write(self) -> None:
        """Writes new records to the files."""
        self.records.write()
        self.heldout.write()

    def finish(self) -> None:
        """Writes all records, with held-out scores in the record of their step."""
        self.write()
        scores = {score["version"]: score for score in self.heldout}

        def with_scores(record: dict[str, Any]) -> dict[str, Any]:
            score = scores.get(record["step"])
            if score is None:
                return record
            names = ("greedy", "sampled", "sets")
            return record | {f"heldout_{name}": score[name] for name in names}

        self.records.replace(with_scores)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self.records.add(self._open)
            yield self._open
            self._open = None
