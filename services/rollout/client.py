"""Typed client of the rollout service; the controller starts and ends groups with it. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from services.common.messages import to_message
from services.common.rpc.client import call
from slipstream.rollout.v1 import rollout_pb2 as pb
from slipstream.rollout.v1 import rollout_pb2_grpc

PASSED_OVER: Final = "set_aside"
"""Reason of groups that were not begun, because the curriculum's function has their prompts wait."""

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPrompt:
    """How a prompt did so far."""

    step: int
    """Step whose weights are served."""
    tries: int
    """Its groups with a reward."""
    mean_reward: float
    """Running mean of their mean rewards; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssignment:
    """What to generate: a group, or those of its members that one replica takes. Prompts are named by row."""

    group_id: str
    """Its samples get the keys ``{group_id}.{member}``."""
    attempt: int
    """Try of the group, from 1."""
    split: str
    """The set of prompts: ``train`` or ``heldout``, or ``train.NAME`` and ``heldout.NAME`` of several."""
    row: int
    """Row inside the set, from 0."""
    partition_id: str
    """Partition that the samples go to."""
    members: tuple[int, ...]
    """Places of the samples in the group, from 0."""
    seeds: tuple[int, ...]
    """One sampling seed per sample."""
    temperatures: tuple[float, ...]
    """One temperature per sample; 0 is greedy."""
    tried: TriedPrompt | None = None
    """What the curriculum's function is told before anything is sampled; None does not ask it."""
    first_attempt: int = 1
    """First attempt whose cached tokens this one may resume; those of earlier attempts are discarded."""


def rows_gauge(split: str) -> str:
    """Name of the gauge by which a rollout tells how many rows a set has."""
    return f"prompts_{split}"


class RolloutClient:
    """Calls one rollout worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    async def start_groups(self, groups: Sequence[GroupAssignment]) -> None:
        """Start groups; returns at once. Safe to repeat.

        Raises:
            InvalidArgumentError: If a group is described wrongly; then none was started.
            UnavailableError: If the worker still loads.
        """
        await call(
            self._stub.StartGroups,
            pb.StartGroupsRequest(
                groups=[
                    to_message(
                        each,
                        pb.GroupAssignment,
                        tried=each.tried and to_message(each.tried, pb.TriedPrompt),
                    )
                    for each in groups
                ]
            ),
            timeout_s=_TIMEOUT_S,
            idempotent=True,
        )

    async def cancel_groups(self, group_ids: Sequence[str]) -> None:
        """End groups without results. Safe to repeat."""
        await call(
            self._stub.CancelGroups,
            pb.CancelGroupsRequest(group_ids=group_ids),
            timeout_s=_TIMEOUT_S,
            idempotent=True,
        )

    async def interrupt_groups(self, group_ids: Sequence[str] = ()) -> None:
        """Stop groups (none named: all) and cache their tokens, so that any worker can resume them.

        They are reported as failed with reason ``interrupted`` before this returns. Safe to repeat.
        """
        await call(
            self._stub.InterruptGroups,
            pb.InterruptGroupsRequest(group_ids=group_ids),
            timeout_s=_TIMEOUT_S,
            idempotent=True,
        )

    async def sleep(self, *, timeout_s: float) -> None:
        """Have the engine give its GPU memory up; groups wait where they are. Safe to repeat."""
        await call(self._stub.Sleep, pb.SleepRequest(), timeout_s=timeout_s, idempotent=True)

    async def wake(self, *, timeout_s: float) -> None:
        """Give the engine its memory back; groups go on with the next weights. Safe to repeat."""
        await call(self._stub.Wake, pb.WakeRequest(), timeout_s=timeout_s, idempotent=True)
