"""Records on one rank what each step depends on, while training goes on."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import services
from services.common.callables import is_reference, parse_reference
from services.common.errors import FailedPreconditionError
from services.common.runspec.keys import flat
from services.common.runspec.loader import canonical_json
from services.common.runspec.run import RunSpec
from services.common.settings import set_defaults
from services.extras.replay import files
from services.extras.replay.files import Columns, StepNumbers
from services.trainer.engines.base import TrainEngine
from services.trainer.ranks.rank import RecorderMaker
from services.trainer.steps.step import StepResult
from services.trainer.transfers import Fetch
from services.weightsync.checksum import write_tensor_checksums
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.step_command import StepCommand

_PACKAGES = ("torch", "triton", "transformers", "peft", "numpy", "flash-attn", "nvidia-nccl")
"""Beginnings of the names of packages that take part in a step, whose versions are recorded."""
_TIMES = ("seconds_", "idle_", "tokens_per_s", "mfu", "compilations", "gpu_memory_")
"""Beginnings of the names of metrics that differ between equal steps."""
_GPU_DIGESTS = "sums by row and column"
"""Kind of the digests that a GPU computes. Records with different kinds cannot be compared."""
_nondeterministic: dict[str, None] = {}


class StepRecorder:
    """Writes a file for each step: the samples that this rank fetched, and the result.

    A thread writes while training continues. :meth:`finish` computes the digests of the weights on a CPU. On
    a GPU it only starts the kernels, which the GPU executes before those of the next step.

    Args:
        folder: Folder of the record, visible to every rank.
        rank: This process among all of the trainer.
        keeps_samples: False if another process of this data-parallel rank records the same samples.
        trains_adapters: True if only adapters train, so that only these have digests.
    """

    def __init__(
        self, folder: Path, rank: int, *, keeps_samples: bool = True, trains_adapters: bool = False
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._keeps_samples = keeps_samples
        self._marker = "lora_" if trains_adapters else ""
        self._fetched: dict[str, list[tuple[tuple[str, ...], Jagged]]] = {}
        self._parts: list[KVBatchMeta] = []
        self._parts_version = -1
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self._writing: Future[None] | None = None
        self.written_s = 0.0
        """CPU seconds that the thread took to write the newest complete record of a step."""

    def begin(self, step: int, spec: RunSpec, engine: TrainEngine) -> None:
        """Records a start that continues after ``step``; forgets later steps, which are trained again."""
        if self._rank == 0:
            files.forget_after(self._folder, step)
            files.write_start(self._folder, step, start_facts(spec, engine.device))
        everyone = engine.ranks.everyone or engine.ranks
        everyone.sum(torch.zeros(1))  # no rank writes before rank 0 has deleted
        if not files.rank_file(self._folder, step, self._rank).exists():
            # Records the digests of the weights that the first step starts from.
            nothing = KVBatchMeta(partition_id="", keys=())
            command = StepCommand(step, nothing, weight_version=step)
            self._submit(*self._numbers(command, engine), (), {})

    def recorded(self, fetch: Fetch) -> Fetch:
        """Wraps ``fetch`` so that fetched samples become a part of the next step's record."""

        def fetch_and_record(meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
            columns = fetch(meta, fields)
            if self._keeps_samples:
                for name, values in columns.items():
                    self._fetched.setdefault(name, []).append((meta.keys, values))
            return columns

        return fetch_and_record

    def accumulated(self, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Records that the gradients of a part of the next batch were accumulated."""
        if self._parts_version != weight_version:
            self._parts, self._parts_version = [], weight_version
        self._parts.append(meta)

    def finish(self, command: StepCommand, result: StepResult, *, engine: TrainEngine) -> None:
        """Records a trained step; waits if the record of the step before is not written yet."""
        keys = set(command.batch.keys)
        early_metas = self._parts if self._parts_version == command.version else []
        # If a part does not belong to this batch, the gradients of all parts were dropped and had no effect.
        early_metas = (
            early_metas
            if all(keys.issuperset(early_meta.keys) for early_meta in early_metas)
            else []
        )
        numbers, weights = self._numbers(command, engine)
        numbers = replace(
            numbers,
            num_parts=len(early_metas),
            skipped=result.skipped,
            metrics=comparable(result.metrics),
        )
        columns, self._fetched, self._parts = self._fetched, {}, []
        self._submit(numbers, weights, (command.batch, *early_metas), columns)

    def wait(self) -> None:
        """Waits until the last step is safe on disk, before a checkpoint that continues after it.

        Raises:
            FailedPreconditionError: If it could not be written, as on a full disk.
        """
        try:
            if self._writing is not None:
                self._writing.result()
        except OSError as error:
            raise FailedPreconditionError(
                f"the record of a step cannot be written to {self._folder}: {error}; free space there, or "
                "set record to off"
            ) from error

    def _numbers(
        self, command: StepCommand, engine: TrainEngine
    ) -> tuple[StepNumbers, Callable[[], dict[str, str]]]:
        """Returns the numbers of a step without digests, and the function that waits for the digests."""
        numbers = StepNumbers(
            step=command.step,
            weight_version=command.version,
            num_steps=command.num_steps or 0,
            max_tokens=engine.bounds.max_tokens,
            nondeterministic=(*_nondeterministic,),
        )
        rows = engine.export_weights(rows=True)
        return numbers, start_digests((n, v) for n, v in rows if self._marker in n)

    def _submit(
        self,
        numbers: StepNumbers,
        weights: Callable[[], dict[str, str]],
        metas: Sequence[KVBatchMeta],
        columns: Mapping[str, Sequence[tuple[Sequence[str], Jagged]]],
    ) -> None:
        self.wait()
        self._writing = self._thread.submit(self._write, numbers, weights, metas, columns)

    def _write(
        self,
        numbers: StepNumbers,
        weights: Callable[[], dict[str, str]],
        metas: Sequence[KVBatchMeta],
        pieces: Mapping[str, Sequence[tuple[Sequence[str], Jagged]]],
    ) -> None:
        began = time.thread_time()
        columns: dict[str, Columns] = {}
        if metas:
            rows = {key: row for row, key in enumerate(metas[0].keys)}
            for name, columns_of_name in pieces.items():
                columns[name] = files.concat_columns(
                    ([rows.get(key, -1) for key in keys], values)
                    for keys, values in columns_of_name
                )
        rank_metas = metas if self._rank == 0 else ()
        numbers = replace(numbers, weights=weights())
        files.write_step(self._folder, self._rank, numbers, metas=rank_metas, columns=columns)
        self.written_s = time.thread_time() - began


def record_fully(spec: RunSpec) -> RecorderMaker:
    """Makes this process compute deterministically; returns what makes its recorder (``record: full``)."""
    compute_deterministically()

    def make(root: Path, rank: int, engine: TrainEngine) -> StepRecorder:
        return StepRecorder(
            root / files.FOLDER,
            rank,
            keeps_samples=engine.ranks.is_first_of_peers,
            trains_adapters=spec.trainer.lora is not None,
        )

    return make


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that are equal in equal steps: all but times and memory."""
    return {name: value for name, value in metrics.items() if not name.startswith(_TIMES)}


def start_digests(tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], dict[str, str]]:
    """Starts to compute a 128-bit digest of each tensor; changes that start later have no effect on it.

    Returns:
        Function that waits for the digests and returns them by name. Any thread may call it.
    """
    groups: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in tensors:
        groups.setdefault(value.device, {})[name] = value.detach()
    started_sums: list[tuple[list[str], Tensor, torch.cuda.Event | None]] = []
    for device, group in groups.items():
        sums = torch.zeros(len(group), 2, dtype=torch.int64, device=device)
        write_tensor_checksums([*group.values()], sums)
        host_sums = sums.to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(device).record_event() if sums.is_cuda else None
        started_sums.append(([*group], host_sums, event))

    def finished() -> dict[str, str]:
        digests: dict[str, str] = {}
        for names, host_sums, event in started_sums:
            if event is not None:
                event.synchronize()
            pairs = zip(names, host_sums.numpy(), strict=True)
            digests |= {name: digest.tobytes().hex() for name, digest in pairs}
        return digests

    return finished


def compute_deterministically() -> None:
    """Selects deterministic operators for this process; those that torch lacks are recorded by name."""
    # cuBLAS reads this variable at its first matrix product.
    set_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    show = warnings.showwarning

    def note(message: Warning | str, *args: Any, **options: Any) -> None:
        operator, separator, _ = str(message).partition(
            " does not have a deterministic implementation"
        )
        if separator:
            _nondeterministic[operator] = None
        show(message, *args, **options)

    warnings.showwarning = note


def start_facts(spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """Returns what a replay must have in common with the run, and the code that it ran."""
    return {
        "spec": json.loads(canonical_json(spec)),
        "hardware": hardware(device),
        "packages": packages(),
        "code": code_digests(spec),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """Returns the kind of device, its digests, and the number of threads among which sums are divided."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        kernels = torch.backends.cpu.get_cpu_capability()
        return {"device": "cpu", "kernels": kernels, "threads": threads}
    return {
        "device": torch.cuda.get_device_name(device),
        "kernels": torch.version.cuda,
        "threads": threads,
        "digests": _GPU_DIGESTS,
    }


@cache
def packages() -> dict[str, str]:
    """Returns the versions of the packages that take part in a step."""
    versions = {
        distribution.metadata["Name"]: distribution.version for distribution in distributions()
    }
    return {name: versions[name] for name in sorted(versions) if name.startswith(_PACKAGES)}


def code_digests(spec: RunSpec) -> dict[str, str]:
    """Returns the SHA-256 of Slipstream's code, and of each file of the user that the run names."""
    texts = [text for _, text in flat(spec.model_dump(mode="json")) if isinstance(text, str)]
    code_files = {parse_reference(text).file for text in texts if is_reference(text)}
    contents = {
        str(file): file.read_bytes() for file in code_files if file is not None and file.is_file()
    }
    return {"services": _services_digest(), **{k: _sha256(v) for k, v in sorted(contents.items())}}


@cache
def _services_digest() -> str:
    root = Path(services.__path__[0])
    return _sha256(b"".join(file.read_bytes() for file in sorted(root.rglob("*.py"))))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
