"""Publication of finished groups to the transferqueue."""

import time
from collections.abc import Sequence

from torch import Tensor

from services.common.errors import AlreadyExistsError, InvalidArgumentError, ServiceError
from services.common.fields import MODEL_INPUTS, TURN_INPUTS, sample_key
from services.common.models.families import RoutingShape
from services.common.runspec.data import kind_of
from services.common.telemetry import tracing
from services.rollout import metrics
from services.rollout.data.prompts import Prompt
from services.rollout.failures import GroupError
from services.rollout.sampling.sample import Sample, prompt_fields, sample_fields, sample_tags
from services.rollout.sampling.sample_recorder import SampleRecorder
from services.rollout.sampling.teacher import Teacher
from services.wire.data.client import DataClient
from services.wire.data.model_inputs import ModelInputs, encode_bundles
from services.wire.workers import GroupAssignment


class GroupPublisher:
    """Stores each group with one call; a prompt that all samples share is stored once.

    Args:
        routing: Shape of the routers' choices, if the trainer replays them.
        has_token_rewards: True if a reward of the run scores turns or tokens.
        columns: Columns that rewards of the run fill.
        has_masks: True if sampling is truncated, so that samples have sampling masks.
        num_top: Number of most likely tokens that training samples have in place of each token.
        sees_turns: True if observations may have inputs besides tokens, such as images.
        teacher: Adds fields to training samples; None if the run needs none.
        sample_recorder: Records some of the samples for people to read; None if none are recorded.
    """

    def __init__(  # noqa: PLR0913 -- independent fields of a sample
        self,
        data: DataClient,
        routing: RoutingShape | None = None,
        *,
        has_token_rewards: bool = False,
        columns: Sequence[str] = (),
        has_masks: bool = False,
        num_top: int = 0,
        sees_turns: bool = False,
        teacher: Teacher | None = None,
        sample_recorder: SampleRecorder | None = None,
    ) -> None:
        self._data = data
        self._routing = routing
        self._has_token_rewards = has_token_rewards
        self._columns = tuple(columns)
        self._has_masks = has_masks
        self._num_top = num_top
        self._sees_turns = sees_turns
        self._teacher = teacher
        self._sample_recorder = sample_recorder
        self._waiting: dict[str, float] = {}

    @property
    def oldest_pending_s(self) -> float:
        """Age of the oldest unfinished publication; 0 if there is none."""
        return time.monotonic() - min(self._waiting.values()) if self._waiting else 0.0

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        """Stores a group, which is visible after the call returns; waits while the queue is full.

        Raises:
            GroupError: If the transferqueue does not accept the group, or its teacher fails; a retry may
                succeed.
        """
        group_id = assignment.group_id
        taught: dict[str, list[Tensor]] = {}
        is_training = kind_of(assignment.split) == "train"
        if self._teacher is not None and is_training:
            taught = await self._teacher.fields(assignment.split, prompt, samples)
        self._waiting[group_id] = time.monotonic()
        try:
            prompts = prompt_fields(samples)
            is_shared = len(prompts) < len(samples)
            columns = sample_fields(
                samples,
                self._routing,
                has_token_rewards=self._has_token_rewards,
                columns=self._columns,
                has_masks=self._has_masks,
                num_top=self._num_top if is_training else 0,
            )
            fields = columns | taught | ({} if is_shared else {"prompt_ids": prompts})
            shared = {"prompt_ids": prompts[0]} if is_shared else {}
            if self._sees_turns or prompt.model_inputs is not None:
                nothing = ModelInputs.from_values(None)
                bundles = [sample.prompt_inputs or nothing for sample in samples]
                if len(set(bundles)) == 1:
                    shared[MODEL_INPUTS] = bundles[0].encoded
                else:
                    fields[MODEL_INPUTS] = [bundle.encoded for bundle in bundles]
            if self._sees_turns:
                fields[TURN_INPUTS] = [encode_bundles(sample.turn_inputs) for sample in samples]
            with metrics.PUBLISH_SECONDS.time(), tracing.span("samples.put"):
                await self._data.put(
                    assignment.partition_id,
                    [sample_key(group_id, sample.member) for sample in samples],
                    fields,
                    tags=sample_tags(
                        samples, prompt, group_id=group_id, attempt=assignment.attempt
                    ),
                    shared=shared,
                )
            if self._sample_recorder is not None and self._sample_recorder.keeps(assignment):
                await self._sample_recorder.record_group(assignment, prompt, samples, columns)
        except AlreadyExistsError as error:
            # Either another replica that received the lease published first, or an earlier lease
            # published too late. The controller knows which; in the second case it generates the
            # group again.
            metrics.LATE_GROUPS.inc()
            raise GroupError("publish_failed", error.message, retryable=True) from error
        except InvalidArgumentError as error:
            # The group can never fit or breaks another rule. Unlike publish_failed, this reason
            # counts against the group, so that it is not retried forever.
            raise GroupError("publish_refused", error.message, retryable=True) from error
        except ServiceError as error:
            raise GroupError("publish_failed", error.message, retryable=True) from error
        finally:
            del self._waiting[group_id]
