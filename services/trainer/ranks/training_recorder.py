"""Records when and with what effect the trainer trained the samples that are kept for people to read."""

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from services.common.fields import group_of, partition_id, run_of
from services.common.runspec.run import RunSpec
from services.trainer.batch.samples import Samples
from services.trainer.transfers import StoreRecords
from services.wire.batch import KVBatchMeta

_MAX_LOG_RATIO = 80.0


class TrainingRecorder:
    """Collects what a rank's step does with recorded samples, and sends it to the transferqueue.

    The names of the groups determine which samples are recorded.

    Args:
        store_records: Stores records without waiting for the result.
    """

    def __init__(self, store_records: StoreRecords, spec: RunSpec) -> None:
        self._store_records = store_records
        self._spec = spec
        self._keys: dict[int, str] = {}
        self._collected: dict[str, dict[int, dict[str, Tensor]]] = {}

    def begin(self, meta: KVBatchMeta) -> None:
        """Selects the recorded samples of the next batch."""
        prompts = self._spec.trainer.prompts_per_step
        is_recorded = {
            group: self._spec.samples.records_group(group, prompts_per_step=prompts)
            for group in set(map(group_of, meta.keys))
        }
        self._keys = {row: key for row, key in enumerate(meta.keys) if is_recorded[group_of(key)]}

    def collect(self, samples: Samples, logprobs: Tensor) -> None:
        """Collects a micro-batch with its logprobs ``[R]`` under the weights that it is trained with."""
        rows = samples.rows.tolist()
        if self._keys.keys().isdisjoint(rows):
            return
        lengths = samples.responses.lengths.tolist()
        tokens = {**samples.tokens, "trained_logprobs": logprobs.detach().float().cpu()}
        columns = {name: values.split(lengths) for name, values in tokens.items()}
        for index, (row, number) in enumerate(zip(rows, samples.numbers.tolist(), strict=True)):
            if row in self._keys:
                fields = {name: values[index] for name, values in columns.items()}
                if number > 0:
                    fields = _after_prompt(fields, int(samples.prompts.lengths[index]))
                self._collected.setdefault(self._keys[row], {})[number] = fields

    def discard(self) -> None:
        """Drops everything collected, because it is not trained."""
        self._collected = {}

    def flush(self, partition: str, *, step: int, weight_version: int) -> None:
        """Sends the records of everything that a step trained.

        Args:
            weight_version: Version of the weights that the step started from.
        """
        collected, self._collected = self._collected, {}
        if not collected:
            return
        rows = [_concatenated(sequences) for sequences in collected.values()]
        records = [{"step": step, **_facts(row, weight_version)} for row in rows]
        self._store_records(
            partition_id(run_of(partition), "records"),
            [f"{key}/trained" for key in collected],
            {
                "training_record": [_as_bytes(record) for record in records],
                "advantages": [row["advantages"].float() for row in rows],
                "trained_logprobs": [row["trained_logprobs"] for row in rows],
                "loss_mask": [row["loss_mask"] for row in rows],
            },
        )


def _after_prompt(columns: Mapping[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
    """Prepends zeros for the prompt of a further sequence, which is a part of the sample's response."""
    return {
        name: torch.cat([values.new_zeros(num_tokens), values]) for name, values in columns.items()
    }


def _concatenated(sequences: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates the columns of a sample's sequences."""
    ordered = [sequences[number] for number in sorted(sequences)]
    return {name: torch.cat([columns[name] for columns in ordered]) for name in ordered[0]}


def _facts(row: Mapping[str, Tensor], weight_version: int) -> dict[str, float | None]:
    mask = row["loss_mask"]
    facts: dict[str, float | None] = {"advantage": _mean(row["advantages"], mask)}
    if "rollout_logprobs" in row:
        ratios = (row["trained_logprobs"] - row["rollout_logprobs"]).clamp(max=_MAX_LOG_RATIO)
        facts["ratio"] = _mean(ratios.exp(), mask)
    if "token_versions" in row and bool(mask.any()):
        facts["staleness"] = weight_version - int(row["token_versions"][mask].min())
    return facts


def _mean(values: Tensor, mask: Tensor) -> float | None:
    """Returns the mean of the masked values; None if the mask is empty or the mean is not finite."""
    values_trained = values[mask].double()
    mean = float(values_trained.mean()) if len(values_trained) else math.nan
    return mean if math.isfinite(mean) else None


def _as_bytes(record: Mapping[str, float | None]) -> Tensor:
    """Encodes a record as JSON in a uint8 tensor ``[B]``."""
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
