"""Assembles one record per trained step from the events of a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class StepLog:
    """Collects the events of a run; a step's record is complete when its weights are published.

    ``metrics.jsonl`` has one line per step. Step 0 is the initial model.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    """Complete records, in order."""
    heldout: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations: ``version``, ``greedy``, ``sampled``, and ``sets`` with the scores of each."""
    _open: dict[str, Any] | None = None
    _num_written: int = 0

    def take(self, kind: str, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Processes an event; yields the records that it completes."""
        data = event.get("data", {})
        if kind == "StepCommitted":
            yield from self._close()
            # After the loss of a trainer, the run resumes from its checkpoint and trains later
            # steps again.
            kept = [record for record in self.records if record["step"] < data["step"]]
            if len(kept) < len(self.records):
                self.records, self._num_written = kept, 0
            self._open = {"time": event["time"], **data}
        elif kind == "WeightsPublished" and self._open is not None:
            self._open.update(
                {name: value for name, value in data.items() if name.endswith("_ms")},
                weight_version=data["version"],
            )
            yield from self._close()
        elif kind == "Validated" and data["num_samples"]:
            scores = {name: data[name] for name in ("version", "greedy", "sampled")}
            self.heldout.append({**scores, "sets": data.get("by_set", {})})
        elif kind == "end":
            yield from self._close()

    def append(self, path: Path) -> None:
        """Appends new records to the file; rewrites it if steps were trained again."""
        new = self.records[self._num_written :]
        if not new:
            return
        with path.open("a" if self._num_written else "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in new)
        self._num_written = len(self.records)

    def write(self, path: Path) -> None:
        """Writes all records as JSON lines, with held-out scores in the record of their step."""
        scores = {score["version"]: score for score in self.heldout}
        with path.open("w", encoding="utf-8") as file:
            for record in self.records:
                score = scores.get(record["step"])
                if score is not None:
                    record = {
                        **record,
                        "heldout_greedy": score["greedy"],
                        "heldout_sampled": score["sampled"],
                        "heldout_sets": score["sets"],
                    }
                file.write(json.dumps(record) + "\n")

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self.records.append(self._open)
            yield self._open
            self._open = None
