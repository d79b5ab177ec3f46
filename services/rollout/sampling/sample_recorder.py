"""Records some samples for people to read: texts, turns and properties, with the fields of their tokens."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from services.common.errors import ServiceError
from services.common.fields import partition_id, run_of, sample_key
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.data import kind_of
from services.common.runspec.run import RunSpec
from services.rollout import metrics
from services.rollout.calls.outside import json_text
from services.rollout.data.prompts import Prompt
from services.rollout.sampling.sample import Sample
from services.rollout.workflows.reply_formats import reply_format
from services.rollout.workflows.turns import Turn
from services.wire.data.client import DataClient
from services.wire.workers import GroupAssignment

logger = logging.getLogger(__name__)

_COLUMNS = ("response_ids", "rollout_logprobs", "version_runs")
# Training must not wait for records.
_TIMEOUT_S = 5.0


class SampleRecorder:
    """Stores the records of selected groups: training groups by id, held-out groups by row.

    Args:
        num_heldout: Number of held-out prompts of the run.
    """

    def __init__(
        self,
        data: DataClient,
        spec: RunSpec,
        tokenizer: Tokenizer,
        num_heldout: int,
    ) -> None:
        self._data = data
        self._spec = spec
        self._tokenizer = tokenizer
        self._num_heldout = num_heldout
        self._texts: dict[int, str] = {}
        tool_format = spec.rollout.workflow_arguments.get("tool_format", "auto")
        self._format = reply_format(tokenizer, str(tool_format))

    def keeps(self, assignment: GroupAssignment) -> bool:
        recording = self._spec.samples
        if kind_of(assignment.split) == "train":
            prompts = self._spec.trainer.prompts_per_step
            return recording.records_group(assignment.group_id, prompts_per_step=prompts)
        return recording.keeps_prompt(assignment.row, num_prompts=self._num_heldout)

    async def record_group(
        self,
        assignment: GroupAssignment,
        prompt: Prompt,
        samples: Sequence[Sample],
        fields: Mapping[str, Any],
    ) -> None:
        """Stores the records of a group; counts and logs a failure instead of raising an error.

        Args:
            fields: The samples' fields, as published for training.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                records = await asyncio.to_thread(self._records, assignment, prompt, samples)
                await self._data.put(
                    partition_id(run_of(assignment.partition_id), "records"),
                    [sample_key(assignment.group_id, sample.member) for sample in samples],
                    {"sample_record": records, **{name: fields[name] for name in _COLUMNS}},
                )
        except (ServiceError, TimeoutError) as error:
            metrics.SAMPLE_RECORD_FAILURES.inc()
            logger.warning("storing sample records failed", extra={"why": type(error).__name__})

    def _records(
        self, assignment: GroupAssignment, prompt: Prompt, samples: Sequence[Sample]
    ) -> list[Tensor]:
        """Returns each sample's record as JSON bytes, uint8 ``[B]``."""
        records = [self._record(assignment, prompt, sample) for sample in samples]
        texts = [json_text(record).encode() for record in records]
        return [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]

    def _tool_calls(self, turn: Turn) -> list[dict[str, Any]]:
        parsed = self._format.parse(self._format.decode(self._tokenizer, turn.token_ids))
        return [
            {"name": call.name, "arguments": call.arguments}
            for call in parsed.calls
            if not call.problem
        ]

    def _record(
        self, assignment: GroupAssignment, prompt: Prompt, sample: Sample
    ) -> dict[str, Any]:
        decode = self._tokenizer.decode
        turns = [
            {
                "is_sampled": turn.is_sampled,
                "text": decode(turn.token_ids),
                "num_tokens": len(turn.token_ids),
                "finish_reason": turn.finish_reason,
                "seconds": turn.seconds,
                "tool_calls": self._tool_calls(turn) if turn.is_sampled else [],
            }
            for turn in sample.turns
        ]
        return {
            "facts": self._facts(assignment, prompt, sample),
            "prompt": decode(sample.prompt_ids),
            "response": "".join(str(turn["text"]) for turn in turns),
            "answer": prompt.answer,
            "images": [
                {
                    "name": picture.name,
                    "width": picture.size[0],
                    "height": picture.size[1],
                    "thumbnail": picture.thumbnail,
                }
                for picture in sample.pictures
            ],
            "turns": turns,
            "vocabulary": self._vocabulary(sample.response_ids),
        }

    def _facts(self, assignment: GroupAssignment, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        versions = sample.sampled_versions
        oldest, is_training = min(versions, default=None), kind_of(assignment.split) == "train"
        return {
            "group_id": assignment.group_id,
            "member": sample.member,
            "attempt": assignment.attempt,
            "split": kind_of(assignment.split),
            "row": assignment.row,
            "data_source": prompt.data_source,
            # An evaluation has one weight version, which is the step.
            "step": None if is_training else oldest,
            "oldest_version": oldest,
            "newest_version": max(versions, default=None),
            "reward": None if sample.finish_reason == "failed" else sample.score.value,
            "terms": dict(sample.score.terms),
            "finish_reason": sample.finish_reason,
            "is_greedy": sample.is_greedy,
            "prompt_tokens": len(sample.prompt_ids),
            "response_tokens": len(sample.response_ids),
            "num_turns": len(sample.turns),
            "num_segments": len(versions),
            "time": time.time(),
        }

    def _vocabulary(self, token_ids: Sequence[int]) -> dict[int, str]:
        """Returns the text of each token that occurs; texts are cached, since tokens recur often."""
        texts = self._texts
        vocabulary: dict[int, str] = {}
        for token in set(token_ids):
            if token not in texts:
                end = self._tokenizer.eos_text if token == self._tokenizer.eos_id else ""
                texts[token] = self._tokenizer.decode([token]) or end
            vocabulary[token] = texts[token]
        return vocabulary
