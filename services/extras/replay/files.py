"""Files of a record: one per step and trainer process, checked before use.

    record/run.json                      specification, code, packages and hardware, once per start
    record/step-00000012/rank-0.safetensors
        header    numbers of the step (:class:`StepNumbers`), digests of the weights after it, checksums
        tensors   the batch's description (rank 0), and the fields that this rank fetched

A file gets its name only after it is complete. A step that is trained again replaces its file.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.common.errors import DataLossError, NotFoundError
from services.common.fields import MODEL_INPUTS
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged

FOLDER: Final = "record"
"""Folder of the record, next to the checkpoints of the run."""
_RUN: Final = "run.json"
_STEP: Final = "step-"
_NUMBERS: Final = "slipstream"
"""Key of the header with the step's numbers as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Numbers of a recorded step, as one rank knows them."""

    step: int
    weight_version: int
    """Version of the weights that the step started from."""
    num_steps: int
    """Steps of the whole run, over which the learning rate is scheduled."""
    num_parts: int = 0
    """Parts of the batch whose gradients were accumulated early, one after the other."""
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step, without times."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Digest of this rank's rows of each tensor after the step."""
    max_tokens: int = 0
    """Token budget of a micro-batch when the step ended; memory errors lower it."""
    nondeterministic: Sequence[str] = ()
    """Operators of the process that torch does not compute deterministically."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Values of one field for some samples of a batch."""

    rows: Tensor
    """``[n]`` int64: index of each sample in the batch."""
    values: Jagged
    """One row for each of these samples."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """Content of one file."""

    numbers: StepNumbers
    metas: tuple[KVBatchMeta, ...]
    """The whole batch, then its accumulated parts; empty except on rank 0."""
    columns: Mapping[str, Columns]
    """Fetched fields by name."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of all ranks."""

    ranks: Sequence[RankStep]

    @property
    def numbers(self) -> StepNumbers:
        """Numbers of rank 0."""
        return self.ranks[0].numbers

    @property
    def meta(self) -> KVBatchMeta:
        """Description of the whole batch."""
        return self.ranks[0].metas[0]

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        """Returns recorded fields of some samples of the batch, like a transferqueue.

        Raises:
            NotFoundError: If a field of a sample is not recorded.
        """
        return {name: self._column(meta, name) for name in fields}

    def _column(self, meta: KVBatchMeta, name: str) -> Jagged:
        by_sample: dict[Any, Tensor] = {}
        first: Jagged | None = None
        names = _places(self.meta, name)
        for rank in self.ranks:
            if (columns := rank.columns.get(name)) is not None:
                rows = zip(columns.rows.tolist(), columns.values.unbind(), strict=True)
                by_sample |= {names[row]: values for row, values in rows}
                first = columns.values
        names_by_key = dict(zip(self.meta.keys, names, strict=True))
        if first is None or (
            missing_keys := [k for k in meta.keys if names_by_key.get(k) not in by_sample]
        ):
            missing_keys = list(meta.keys) if first is None else missing_keys
            raise NotFoundError(
                f"step {self.numbers.step} has no record of {name} of {missing_keys[0]}; the recorded run "
                "did not use it",
                field=name,
            )
        return Jagged.from_list([by_sample[names_by_key[key]] for key in meta.keys])


def _places(meta: KVBatchMeta, name: str) -> list[Any]:
    """Returns an identifier of each sample's value: its key, or the location if samples share values."""
    if name != MODEL_INPUTS:
        return list(meta.keys)
    column = meta.column(name)
    return list(zip(column.blob_indexes, column.offsets, strict=True))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"{_STEP}{step:08d}"


def rank_file(folder: Path, step: int, rank: int) -> Path:
    return step_folder(folder, step) / f"rank-{rank}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, in order."""
    return sorted(int(path.name.removeprefix(_STEP)) for path in folder.glob(f"{_STEP}*"))


def has_all_steps(folder: Path, last: int) -> bool:
    """Returns True if a folder has a record of each step from the run's start to its last one."""
    starts = _starts(folder)
    return bool(starts) and {*range(starts[0]["step"], last + 1)} <= {*recorded_steps(folder)}


def joined_record(stored_folder: Path, local_folder: Path) -> Path:
    """Returns a folder with the steps of a stored record and those with which a local one continues it.

    It consists of links, and is deleted at the end of the process. Returns ``stored_folder`` if the local
    record does not continue it: another machine has gone on with the run.
    """
    # A link to a relative path would be one to a path in the folder of the link.
    stored_folder, local_folder = stored_folder.absolute(), local_folder.absolute()
    starts, continued = _starts(stored_folder), _starts(local_folder)
    local_steps, stored_steps = recorded_steps(local_folder), recorded_steps(stored_folder)
    if not starts or not local_steps or continued[: len(starts)] != starts:
        return stored_folder
    if continued == starts and {*local_steps} <= {*stored_steps}:
        return stored_folder
    folder = Path(tempfile.mkdtemp(prefix="slipstream-record-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    record = folder / FOLDER
    record.mkdir()
    (record / _RUN).symlink_to(local_folder / _RUN)
    # Later steps of the store are of a history that the run has left.
    sources = {step: stored_folder for step in stored_steps if step <= local_steps[-1]}
    sources |= dict.fromkeys(local_steps, local_folder)
    for step, source in sources.items():
        step_folder(record, step).symlink_to(step_folder(source, step))
    return record


def write_step(
    folder: Path,
    rank: int,
    numbers: StepNumbers,
    *,
    metas: Sequence[KVBatchMeta] = (),
    columns: Mapping[str, Columns],
) -> None:
    """Writes a rank's file of a step, safe on disk; replaces an earlier one."""
    tensors: dict[str, Tensor] = {}
    for index, meta in enumerate(metas):
        tensors[f"meta/{index}"] = torch.frombuffer(bytearray(meta.to_bytes()), dtype=torch.uint8)
    for name, column in columns.items():
        tensors[f"rows/{name}"] = column.rows
        tensors[f"lengths/{name}"] = column.values.lengths
        tensors[f"values/{name}"] = column.values.values.contiguous()
    scalars = [name for name, column in columns.items() if column.values.is_scalar]
    header = {**asdict(numbers), "scalars": scalars}
    header |= {"checksums": _checksums(header, tensors)}
    target = rank_file(folder, numbers.step, rank)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={_NUMBERS: json.dumps(header)})
    _sync(unfinished)
    unfinished.replace(target)


def read_step(folder: Path, step: int, *, num_ranks: int) -> RecordedStep:
    """Reads and verifies a step of all ranks.

    Raises:
        DataLossError: If a file is missing, was cut off or changed.
    """
    return RecordedStep([_read(rank_file(folder, step, rank)) for rank in range(num_ranks)])


def _read(file: Path) -> RankStep:
    try:
        with safe_open(file, framework="pt") as opened:
            header = json.loads(opened.metadata()[_NUMBERS])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        recorded = header.pop("checksums")
        contents = _checksums(header, tensors)
        changed_files = [
            name for name in {**recorded, **contents} if recorded.get(name) != contents.get(name)
        ]
        if changed_files:
            raise ValueError(  # noqa: TRY301
                f"{', '.join(sorted(changed_files))} of it differ from the recorded checksums"
            )
        scalars = set(header.pop("scalars"))
        metas = [name for name in tensors if name.startswith("meta/")]
        return RankStep(
            StepNumbers(**header),
            tuple(
                KVBatchMeta.from_bytes(tensors[f"meta/{index}"].numpy().tobytes())
                for index in range(len(metas))
            ),
            {
                name: Columns(
                    tensors[f"rows/{name}"],
                    Jagged(values, tensors[f"lengths/{name}"], is_scalar=name in scalars),
                )
                for where, values in tensors.items()
                if (name := where.removeprefix("values/")) != where
            },
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataLossError(
            f"{file} is not a whole record of a step: {error}; restore it, or leave out its step with "
            "--from or --to",
            file=file,
        ) from error


def _checksums(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the checksum of the header and of each tensor, with its dtype and shape, by name."""
    checksums = {"header": xxhash.xxh3_128_hexdigest(json.dumps(header, sort_keys=True).encode())}
    for name, tensor in tensors.items():
        total = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        checksums[name] = total.hexdigest()
    return checksums


def forget_after(folder: Path, step: int) -> None:
    """Deletes the records of later steps, which a resumed run trains again. Rank 0 calls it."""
    for later in recorded_steps(folder):
        if later > step:
            shutil.rmtree(step_folder(folder, later))


def write_start(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Adds the facts of a start after ``step``; replaces those of starts that were rolled back."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _RUN
    starts = [start for start in _starts(folder) if start["step"] < step] if step else []
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps([*starts, {"step": step, **facts}], indent=1), "utf-8")
    _sync(unfinished)
    unfinished.replace(file)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Returns the facts of each start of the run, oldest first, with the ``step`` that it continued after.

    Raises:
        NotFoundError: If there is no record.
        DataLossError: If it cannot be read.
    """
    if not folder.is_dir():
        raise NotFoundError(
            f"there is no record in {folder}; set 'record: full' in the specification of the run",
            folder=folder,
        )
    starts = _starts(folder)
    if not starts:
        raise DataLossError(
            f"{folder / _RUN} is missing or not readable; restore it", folder=folder
        )
    return starts


def _starts(folder: Path) -> list[dict[str, Any]]:
    try:
        starts: list[dict[str, Any]] = json.loads((folder / _RUN).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return starts


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def concat_columns(columns: Iterable[tuple[Sequence[int], Jagged]]) -> Columns:
    """Joins the values of several fetches.

    Args:
        columns: For each fetch, the row in the batch of each value (-1 for samples of another batch), and the
            values. If a sample was fetched several times, the newest value is kept.
    """
    column_rows = {
        row: value
        for rows, values in columns
        for row, value in zip(rows, values.unbind(), strict=True)
        if row >= 0
    }
    return Columns(
        torch.tensor([*column_rows], dtype=torch.int64), Jagged.from_list([*column_rows.values()])
    )
