"""Records on one rank what each step depends on, beside training."""

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

import services
from services.common.callables import is_reference, parse_reference
from services.common.errors import FailedPreconditionError
from services.common.runspec.keys import flat
from services.common.runspec.loader import canonical_json
from services.common.runspec.run import RunSpec
from services.common.settings import set_defaults
from services.trainer.engines.base import TrainEngine
from services.trainer.record import files
from services.trainer.record.files import Columns, StepNumbers
from services.trainer.steps.step import StepResult
from services.trainer.transfers import Fetch
from services.wire.batch import KVBatchMeta
from services.wire.data.jagged import Jagged

_PACKAGES = ("torch", "triton", "transformers", "peft", "numpy", "flash-attn", "nvidia-nccl")
"""Packages that take part in a step; all whose names begin with one of these are recorded."""
_TIMES = ("seconds_", "idle_", "tokens_per_s", "mfu", "compilations", "gpu_memory_")
"""Beginnings of the names of metrics that differ between equal steps."""
_CHUNK_BYTES = 64 << 20
_nondeterministic: dict[str, None] = {}


class StepRecorder:
    """Writes a file for each step: the samples that this rank fetched, and the result.

    A thread writes while training continues. The digests of the weights are computed before :meth:`finish`
    returns, because the next step changes them.

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
            # The weights that the first step starts from.
            self._submit(self._numbers(step, step, 0, engine), (), {})

    def recorded(self, fetch: Fetch) -> Fetch:
        """Wraps ``fetch`` so that fetched samples become a part of the next step's record."""

        def fetch_and_record(meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
            fetched = fetch(meta, fields)
            if self._keeps_samples:
                for name, values in fetched.items():
                    self._fetched.setdefault(name, []).append((meta.keys, values))
            return fetched

        return fetch_and_record

    def accumulated(self, meta: KVBatchMeta, *, weight_version: int) -> None:
        """Records that the gradients of a part of the next batch were accumulated."""
        if self._parts_version != weight_version:
            self._parts, self._parts_version = [], weight_version
        self._parts.append(meta)

    def finish(
        self,
        step: int,
        meta: KVBatchMeta,
        result: StepResult,
        *,
        weight_version: int,
        num_steps: int,
        engine: TrainEngine,
    ) -> None:
        """Records a trained step; waits if the record of the step before is not written yet."""
        keys = set(meta.keys)
        parts = self._parts if self._parts_version == weight_version else []
        # Parts that are not of this batch had no effect: their gradients were dropped.
        parts = parts if all(keys.issuperset(part.keys) for part in parts) else []
        numbers = replace(
            self._numbers(step, weight_version, num_steps, engine),
            num_parts=len(parts),
            skipped=result.skipped,
            metrics=comparable(result.metrics),
        )
        fetched, self._fetched, self._parts = self._fetched, {}, []
        self._submit(numbers, (meta, *parts), fetched)

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
        self, step: int, weight_version: int, num_steps: int, engine: TrainEngine
    ) -> StepNumbers:
        rows = engine.export_weights(rows=True)
        return StepNumbers(
            step=step,
            weight_version=weight_version,
            num_steps=num_steps,
            weights=digests((name, value) for name, value in rows if self._marker in name),
            max_tokens=engine.bounds.max_tokens,
            nondeterministic=(*_nondeterministic,),
        )

    def _submit(
        self,
        numbers: StepNumbers,
        metas: Sequence[KVBatchMeta],
        fetched: Mapping[str, Sequence[tuple[Sequence[str], Jagged]]],
    ) -> None:
        self.wait()
        self._writing = self._thread.submit(self._write, numbers, metas, fetched)

    def _write(
        self,
        numbers: StepNumbers,
        metas: Sequence[KVBatchMeta],
        fetched: Mapping[str, Sequence[tuple[Sequence[str], Jagged]]],
    ) -> None:
        began = time.thread_time()
        columns: dict[str, Columns] = {}
        if metas:
            rows = {key: row for row, key in enumerate(metas[0].keys)}
            for name, parts in fetched.items():
                columns[name] = files.joined(
                    ([rows.get(key, -1) for key in keys], values) for keys, values in parts
                )
        own = metas if self._rank == 0 else ()
        files.write_step(self._folder, self._rank, numbers, metas=own, columns=columns)
        self.written_s = time.thread_time() - began


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that are equal in equal steps: all but times and memory."""
    return {name: value for name, value in metrics.items() if not name.startswith(_TIMES)}


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns a 128-bit digest of each tensor, by name: XXH3 on a CPU, weighted sums on a GPU."""
    found: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    for name, value in tensors:
        data = value.detach().contiguous().view(-1).view(torch.uint8)
        if data.is_cuda:
            sums[name] = _weighted_sums(data)
        else:
            found[name] = xxhash.xxh3_128_hexdigest(data.numpy().data)
    if sums:
        words = torch.stack([*sums.values()]).cpu().numpy()
        found |= {name: words[index].tobytes().hex() for index, name in enumerate(sums)}
    return found


def _weighted_sums(data: Tensor) -> Tensor:
    """Returns ``[2]`` int64: sums of all words, each times an odd factor that depends on its place.

    Sums of integers do not depend on the order in which a GPU adds them.
    """
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for index, part in enumerate(data.split(_CHUNK_BYTES)):
        whole = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        places = 2 * torch.arange(len(whole), device=data.device) + 1
        total[0] += (whole * places).sum() * (2 * index + 1)
        total[1] += (whole * (places * places + 2 * index)).sum()
    return total


def compute_deterministically() -> None:
    """Selects deterministic operators for this process; those that torch lacks are recorded by name."""
    # cuBLAS reads it with its first product.
    set_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    show = warnings.showwarning

    def note(message: Warning | str, *args: Any, **options: Any) -> None:
        operator, found, _ = str(message).partition(" does not have a deterministic implementation")
        if found:
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
    """Returns the kind of device, and the number of threads among which sums are divided."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    kernels = (
        torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.version.cuda
    )
    return {"device": name, "kernels": kernels, "threads": torch.get_num_threads()}


@cache
def packages() -> dict[str, str]:
    """Returns the versions of the packages that take part in a step."""
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return {name: found[name] for name in sorted(found) if name.startswith(_PACKAGES)}


def code_digests(spec: RunSpec) -> dict[str, str]:
    """Returns the SHA-256 of Slipstream's code, and of each file of the user that the run names."""
    named = [text for _, text in flat(spec.model_dump(mode="json")) if isinstance(text, str)]
    own = {parse_reference(text).file for text in named if is_reference(text)}
    contents = {str(file): file.read_bytes() for file in own if file is not None and file.is_file()}
    return {"services": _services_digest(), **{k: _sha256(v) for k, v in sorted(contents.items())}}


@cache
def _services_digest() -> str:
    root = Path(services.__path__[0])
    return _sha256(b"".join(file.read_bytes() for file in sorted(root.rglob("*.py"))))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
