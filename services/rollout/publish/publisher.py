"""Finished groups into the transferqueue."""

import time

from services.common.errors import AlreadyExistsError, InvalidArgumentError, ServiceError
from services.common.fields import sample_key
from services.common.models.routers import RoutingShape
from services.common.telemetry import tracing
from services.rollout import metrics
from services.rollout.client import GroupAssignment
from services.rollout.data.prompts import Prompt
from services.rollout.failures import GroupError
from services.rollout.publish.sample_recorder import SampleRecorder
from services.rollout.sampling.samples import Sample, prompt_fields, sample_fields, sample_tags
from services.transferqueue.dataclient import DataClient


class GroupPublisher:
    """Stores groups: one call a group, the prompt once.

    Args:
        data: Where to.
        routing: What routers choose, if the trainer is to know.
        has_token_rewards: Whether rewards of the run are for turns or tokens.
        teller: Tells people of some of them; None if nothing is kept.
    """

    def __init__(
        self,
        data: DataClient,
        routing: RoutingShape | None = None,
        *,
        has_token_rewards: bool = False,
        teller: SampleRecorder | None = None,
    ) -> None:
        self._data = data
        self._routing = routing
        self._has_token_rewards = has_token_rewards
        self._teller = teller
        self._waiting: dict[str, float] = {}

    @property
    def longest_wait_s(self) -> float:
        """How long the oldest unfinished publication has been waiting; 0 if there is none."""
        return time.monotonic() - min(self._waiting.values()) if self._waiting else 0.0

    async def publish(
        self, assignment: GroupAssignment, prompt: Prompt, samples: list[Sample]
    ) -> None:
        """Store a group; it is visible when this returns. A full queue makes this wait.

        Raises:
            GroupError: If the transferqueue does not take it; another try could succeed.
        """
        group_id = assignment.group_id
        self._waiting[group_id] = time.monotonic()
        try:
            prompts = prompt_fields(samples)
            is_shared = len(prompts) < len(samples)
            columns = sample_fields(
                samples, self._routing, has_token_rewards=self._has_token_rewards
            )
            fields = columns | ({} if is_shared else {"prompt_ids": prompts})
            with metrics.PUBLISH_SECONDS.time(), tracing.span("samples.put"):
                await self._data.put(
                    assignment.partition_id,
                    [sample_key(group_id, sample.member) for sample in samples],
                    fields,
                    tags=sample_tags(
                        samples, prompt, group_id=group_id, attempt=assignment.attempt
                    ),
                    shared={"prompt_ids": prompts[0]} if is_shared else None,
                )
            if self._teller is not None and self._teller.keeps(assignment):
                await self._teller.tell(assignment, prompt, samples, columns)
        except AlreadyExistsError as error:
            # A lease that was taken from this replica and given to another finished there first; or the one
            # before this lease did, too late. The controller knows which, and generates again in that case.
            metrics.LATE_GROUPS.inc()
            raise GroupError("publish_failed", error.message, retryable=True) from error
        except InvalidArgumentError as error:
            # There is never room for it, or it breaks another rule: nobody may try this for ever.
            raise GroupError("publish_refused", error.message, retryable=True) from error
        except ServiceError as error:
            raise GroupError("publish_failed", error.message, retryable=True) from error
        finally:
            del self._waiting[group_id]
