"""Sends weights from a serving rollout to joining rollouts on its host, if the trainer is elsewhere.

The sender has received and verified the version before. The receivers verify it like any other: by
the digest that the trainer's ranks reported, and by the trainer's canary.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import FailedPreconditionError, ServiceError
from services.controller.run.weights.members import WeightMembers
from services.weightsync.canary import Canary, canary_tolerance

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSource:
    """Version that all rollouts serve, with the facts that verify it."""

    version: int
    digest: str
    canary: Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPath:
    """Transport of a peer transfer, with deadlines in seconds."""

    backend: str
    run_id: str
    form_s: float
    transfer_s: float
    adopt_s: float


async def bring(
    members: WeightMembers,
    peers: Mapping[str, Sequence[str]],
    *,
    served: PeerSource,
    way: TransferPath,
    epoch: int,
) -> list[str]:
    """Sends the served version from peers to joining rollouts; returns those that serve it then.

    Args:
        members: Members of the weight group.
        peers: Receivers by sender.
        served: Version to send.
        way: Transport and deadlines.
        epoch: Epoch of the first group; each sender's group has its own.
    """
    brought: list[str] = []
    for number, (peer, near) in enumerate(peers.items(), epoch):
        try:
            await _send_on(members, peer, near, served=served, way=way, epoch=number)
        except ServiceError as error:
            logger.warning(
                "weights come from the trainer, as a peer did not send them",
                extra={"peer": peer, "to": str(near), "why": str(error)},
            )
            await members.abort(number, str(error))
        else:
            logger.info("weights came from a peer", extra={"peer": peer, "to": str(near)})
            brought += near
    return brought


async def _send_on(
    members: WeightMembers,
    peer: str,
    near: Sequence[str],
    *,
    served: PeerSource,
    way: TransferPath,
    epoch: int,
) -> None:
    numbers = {name: number for number, name in enumerate(near)}
    receivers = {name: members.rollouts[name] for name in near}
    all_ = {peer: members.rollouts[peer], **receivers}
    await members.ask(
        {
            name: member.form(
                epoch,
                receiver=numbers.get(name),
                num_receivers=len(near),
                backend=way.backend,
                scope=f"{way.run_id}/{epoch}",
                timeout_s=way.form_s,
            )
            for name, member in all_.items()
        }
    )
    version, plan = served.version, members.plan
    held = await members.ask(
        {
            name: member.prepare(epoch, version, plan.plan_hash, timeout_s=way.adopt_s)
            for name, member in all_.items()
        }
    )
    if held[peer] != version:
        raise FailedPreconditionError(f"{peer} holds version {held[peer]}, but {version} is served")
    await members.ask(
        {
            name: member.transfer(epoch, version, base_version=-1, timeout_s=way.transfer_s)
            for name, member in all_.items()
        }
    )
    await members.ask(
        {
            name: member.adopt(epoch, version, served.digest, timeout_s=way.adopt_s)
            for name, member in receivers.items()
        }
    )
    tolerance = canary_tolerance([spec.dtype for spec in plan.tensors])
    await members.ask(
        {
            name: member.check(version, served.canary, tolerance, timeout_s=way.adopt_s)
            for name, member in receivers.items()
        }
    )
