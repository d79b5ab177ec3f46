"""Runs as TensorBoard event files, in ``tensorboard/PROJECT/NAME-ID`` of the trackers' folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.common.runspec.trackers import TrackerSpec
from services.controller.schemas import RunView
from services.extras.trackers.tracker import EventPosition, NewestSteps, Split, as_markdown


class EventFiles:
    """The event files of a run, with one record per step, which is written completely or not at all."""

    rereads = 0

    def __init__(self, folder: Path) -> None:
        self._newest = NewestSteps()
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    self._newest.record_step(value.tag, event.step)
        self._writer = EventFileWriter(str(folder))

    def numbers(self, moment: EventPosition, numbers: Mapping[str, float]) -> None:
        new = self._newest.pop_new(moment.step, numbers)
        self._write(moment, [Summary.Value(tag=name, simple_value=n) for name, n in new.items()])

    def samples(self, moment: EventPosition, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        """Writes a table as text."""
        self.text(moment, f"samples/{split}", as_markdown(rows))

    def text(self, moment: EventPosition, tag: str, text: str) -> None:
        if not self._newest.pop_new(moment.step, {tag: 0.0}):
            return
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        metadata = SummaryMetadata(plugin_data=plugin)
        self._write(moment, [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def close(self, state: str) -> None:
        self._writer.close()

    def _write(self, moment: EventPosition, values: Sequence[Any]) -> None:
        if values:
            summary = Summary(value=values)
            self._writer.add_event(Event(wall_time=moment.time, step=moment.step, summary=summary))
            self._writer.flush()


def open_run(run: RunView, spec: TrackerSpec, folder: Path) -> EventFiles:
    """Opens a run's files and writes its specification as text."""
    short = run.id.removeprefix("run_")[-8:]
    files = EventFiles(folder / "tensorboard" / spec.project / f"{run.name}-{short}")
    moment = EventPosition(seq=0, step=0, time=run.create_time.timestamp())
    text = json.dumps(run.spec, indent=2).replace("\n", "\n    ")
    files.text(moment, "specification", f"{run.id} {' '.join(spec.tags)}\n\n    {text}")
    return files
