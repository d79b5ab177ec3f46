"""What the trainer tells people of samples that are kept: when they were trained, and with what effect."""

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from services.common.batch import KVBatchMeta
from services.common.fields import group_of, partition_id, run_of
from services.common.runspec.run import RunSpec
from services.trainer.batch.samples import Samples
from services.trainer.transfers import Tell

_MAX_LOG_RATIO = 80.0


class TrainingRecorder:
    """Collects what a rank's step does with the samples that are kept, and tells of it.

    Which ones are kept follows from the names of their groups.

    Args:
        tell: Puts what is told, and waits for nobody.
        spec: The run.
    """

    def __init__(self, tell: Tell, spec: RunSpec) -> None:
        self._tell = tell
        self._spec = spec
        self._keys: dict[int, str] = {}
        self._taken: dict[str, dict[int, dict[str, Tensor]]] = {}

    def begin(self, meta: KVBatchMeta) -> None:
        """Watch the kept samples of what is trained next."""
        prompts = self._spec.trainer.prompts_per_step
        kept = {
            group: self._spec.samples.keeps_group(group, prompts_per_step=prompts)
            for group in set(map(group_of, meta.keys))
        }
        self._keys = {row: key for row, key in enumerate(meta.keys) if kept[group_of(key)]}

    def take(self, part: Samples, logprobs: Tensor) -> None:
        """Note a micro-batch with its logprobs ``[R]`` under the weights that it is trained with."""
        rows = part.rows.tolist()
        if self._keys.keys().isdisjoint(rows):
            return
        lengths = part.responses.lengths.tolist()
        tokens = {**part.tokens, "trained_logprobs": logprobs.detach().float().cpu()}
        columns = {name: values.split(lengths) for name, values in tokens.items()}
        for index, (row, number) in enumerate(zip(rows, part.numbers.tolist(), strict=True)):
            if row in self._keys:
                own = {name: values[index] for name, values in columns.items()}
                if number > 0:
                    own = _behind_prompt(own, int(part.prompts.lengths[index]))
                self._taken.setdefault(self._keys[row], {})[number] = own

    def forget(self) -> None:
        """Nothing of what was taken is trained."""
        self._taken = {}

    def tell(self, partition: str, *, step: int, weight_version: int) -> None:
        """Tell of everything that a step trained.

        Args:
            partition: Where the samples are.
            step: The step.
            weight_version: Number of the weights that it started from.
        """
        taken, self._taken = self._taken, {}
        if not taken:
            return
        rows = [_joined(sequences) for sequences in taken.values()]
        records = [{"step": step, **_facts(row, weight_version)} for row in rows]
        self._tell(
            partition_id(run_of(partition), "kept"),
            [f"{key}/trained" for key in taken],
            {
                "trained_record": [_as_bytes(record) for record in records],
                "advantages": [row["advantages"].float() for row in rows],
                "trained_logprobs": [row["trained_logprobs"] for row in rows],
                "loss_mask": [row["loss_mask"] for row in rows],
            },
        )


def _behind_prompt(columns: Mapping[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
    """Columns of a further sequence with zeros for its prompt, which is a part of the sample's response."""
    return {
        name: torch.cat([values.new_zeros(num_tokens), values]) for name, values in columns.items()
    }


def _joined(sequences: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Columns of a sample from those of its sequences."""
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
    """Mean where the mask is set; None if it is nowhere, or no number."""
    chosen = values[mask].double()
    mean = float(chosen.mean()) if len(chosen) else math.nan
    return mean if math.isfinite(mean) else None


def _as_bytes(record: Mapping[str, float | None]) -> Tensor:
    """JSON, uint8 ``[B]``."""
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
