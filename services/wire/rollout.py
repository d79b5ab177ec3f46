"""Client of the rollout service, with which the controller starts and ends groups.

This module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from services.common.messages import to_message
from services.common.rpc.client import call
from slipstream.rollout.v1 import rollout_pb2 as pb
from slipstream.rollout.v1 import rollout_pb2_grpc

DEFERRED: Final = "deferred"
"""Failure reason of groups that were not started because the curriculum's function deferred their prompts."""

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHistory:
    """History of a prompt, on which the curriculum's function decides."""

    step: int
    """Step whose weights are served."""
    tries: int
    """Number of the prompt's groups with a reward."""
    mean_reward: float
    """Running mean of those groups' mean rewards; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssignment:
    """A group, or a shard of it, that one replica generates; the prompt is identified by its row."""

    group_id: str
    """The group's id; its samples get the keys ``{group_id}.{member}``."""
    attempt: int
    """Number of this attempt, from 1."""
    split: str
    """Set of prompts: ``train`` or ``heldout``; if there are several, ``train.NAME`` or ``heldout.NAME``."""
    row: int
    """Row in the set, from 0."""
    partition_id: str
    """Partition that stores the samples."""
    members: tuple[int, ...]
    """Indices of the samples in the group, from 0."""
    seeds: tuple[int, ...]
    """Sampling seed of each sample."""
    temperatures: tuple[float, ...]
    """Temperature of each sample; 0 is greedy."""
    tried: PromptHistory | None = None
    """History that the curriculum's function receives before sampling; None skips the function."""
    first_attempt: int = 1
    """First attempt whose cached tokens may be resumed; tokens of earlier attempts are discarded."""


class RolloutClient:
    """Client of one rollout worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    async def start_groups(self, groups: Sequence[GroupAssignment]) -> None:
        """Starts groups and returns at once. Safe to repeat.

        Raises:
            InvalidArgumentError: If a group is invalid; then no group was started.
            UnavailableError: If the worker is still loading.
        """
        await call(
            self._stub.StartGroups,
            pb.StartGroupsRequest(
                groups=[
                    to_message(
                        each,
                        pb.GroupAssignment,
                        tried=each.tried and to_message(each.tried, pb.PromptHistory),
                    )
                    for each in groups
                ]
            ),
            timeout_s=_TIMEOUT_S,
            idempotent=True,
        )

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        """Ends groups without results. Safe to repeat."""
        await call(
            self._stub.CancelGroups,
            pb.CancelGroupsRequest(group_ids=group_ids),
            timeout_s=_TIMEOUT_S,
            idempotent=True,
        )

    async def interrupt_groups(self, group_ids: Sequence[str] = ()) -> None:
        """Stops groups (none named: all) and caches their tokens, so that any worker can resume them.

        The worker reports them as failed with reason ``interrupted`` before the call returns. Safe
        to repeat.
        """
        await call(
            self._stub.InterruptGroups,
            pb.InterruptGroupsRequest(group_ids=group_ids),
            timeout_s=_TIMEOUT_S,
            idempotent=True,
        )

    async def sleep(self, *, timeout_s: float) -> None:
        """Releases the engine's GPU memory; groups are parked meanwhile. Safe to repeat."""
        await call(self._stub.Sleep, pb.SleepRequest(), timeout_s=timeout_s, idempotent=True)

    async def wake(self, *, timeout_s: float) -> None:
        """Takes the engine's GPU memory back; groups continue after the next weights. Safe to repeat."""
        await call(self._stub.Wake, pb.WakeRequest(), timeout_s=timeout_s, idempotent=True)
