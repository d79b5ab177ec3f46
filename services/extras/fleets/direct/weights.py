"""One version of a run's weights that its servers receive from the trainer."""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from services.extras.fleets.direct.messages import Message


@runtime_checkable
class DirectServer(Protocol):
    """A server whose workers can be members of a weight group."""

    address: str
    received: Any
    worker_devices: Sequence[str]
    """Device of each worker, once :meth:`open_group` has started their members."""

    @property
    def session(self) -> str:
        """Id of the session; empty without one."""

    async def open_group(self) -> None:
        """Starts a member of weight groups in each worker."""

    async def exchange(
        self, messages: Sequence[tuple[int, Message]], *, wait_s: float
    ) -> list[tuple[int, Message]]:
        """Sends messages to workers; returns theirs, as soon as there is one."""


class DirectFleet(Protocol):
    """The servers of a run."""

    @property
    def attached(self) -> Sequence[Any]:
        """Servers that have attached and can serve the run."""

    def lose(self, server: Any, reason: str) -> None:
        """Gives a server no work until it has attached again."""


@dataclass(slots=True, eq=False)
class DirectWeights:
    """A version whose bytes are in the servers' workers, verified there.

    Attributes:
        digest: Digest of the sources' statements, which each worker compared with its bytes.
    """

    version: int
    digest: str
    num_bytes: int
    holders: Sequence[tuple[DirectServer, str]]
    """Servers that have received it, each with the session in which it did."""
    repeat: Callable[[DirectServer, "DirectWeights"], Awaitable[None]]
    """Makes the trainer send the version to another server."""
    is_repeatable: Callable[[], bool]
    """Returns False while the trainer cannot send it again, because no weight group is formed."""
    base: str = ""
    checksums: dict[Hashable, tuple[str, str]] = field(default_factory=dict)

    def mark_holders(self) -> None:
        """Notes on each server that has received the version that it can load it."""
        for server, session in self.holders:
            if server.session == session:
                server.received = self


class DirectVersion(dict[str, Tensor]):
    """Stands for the tensors of a version that servers have received: this process has none of them."""

    def __init__(self, weights: DirectWeights) -> None:
        super().__init__()
        self.weights = weights
