"""Weight members in one process: sources that have the same weights, and sinks that adopt them."""

import asyncio
import threading

import torch

from services.weightsync.canary import Canary
from services.weightsync.member import WeightMember
from services.weightsync.modes.placing import live_placer
from services.weightsync.transfer import TransferRequest
from services.weightsync.weight_plan import TensorSpec, row_shards, version_digest

SPECS = (
    TensorSpec("embed", (333, 16), "float32"),
    TensorSpec("norm", (16,), "bfloat16"),
    TensorSpec("scale", (), "float64"),
)


class MemoryStore:
    """A key-value store for members in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise RuntimeError(f"{key} was not set in {timeout_s} s")
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            self._changed.notify_all()
            return value


class Source:
    """Fake trainer rank that sends its FSDP2 shard of the weights, which are the same on all ranks."""

    def __init__(self, number=0, num_sources=1, weights=None, specs=SPECS) -> None:
        self.specs = specs
        self.shards = row_shards(specs, num_sources)[number]
        self.num_reads = 0
        self.weights = weights or {
            spec.name: torch.randn(spec.shape, dtype=torch.float64).to(getattr(torch, spec.dtype))
            for spec in specs
        }

    def weight_specs(self):
        return self.specs

    def weight_tensors(self):
        self.num_reads += 1
        for shard in self.shards:
            name = self.specs[shard.tensor].name
            whole = self.weights[name]
            yield name, whole[shard.start : shard.stop] if whole.dim() else whole

    def score_canary(self):
        return Canary((0, 1, 2, 3), tuple(score(self.weights)))


class Sink:
    """Fake engine whose logprobs depend on all of its weights."""

    def __init__(self) -> None:
        self.live = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS
        }
        self.version = -1
        self.num_adoptions = 0
        self.adopted = {}
        self.is_paused = False
        self.refused = ""

    async def adopt_weights(self, version, tensors):
        for name, tensor in tensors.items():
            self.live[name].copy_(tensor)
        self.version = version
        self.num_adoptions += 1
        self.adopted = tensors
        self.is_paused = False
        return 0.001

    async def score(self, token_ids):
        return score(self.live)

    async def refuse_weights(self, reason):
        self.is_paused, self.refused = True, reason

    async def open_weights(self, plan, slots):
        self.is_paused = True
        return live_placer(plan, self.live)

    async def adopt_placed(self, version):
        return await self.adopt_weights(version, self.live)

    async def close_weights(self):
        self.is_paused = False


def score(weights):
    return [float(tensor.double().mean()) for tensor in weights.values()]


class Cluster:
    """Sources and two receivers, and the requests that a controller sends to them.

    Args:
        num_sources: Number of trainer ranks that send.
        mode: Value of ``weight_sync.mode``.
        bucket_bytes: Max bytes of one collective.
        specs: The tensors.
        sinks: Sinks of the receivers; None for two of :class:`Sink`.
        backend: The transport.
        timeout_s: Deadline of a transfer in seconds.
    """

    def __init__(
        self,
        num_sources=1,
        mode="shadow",
        bucket_bytes=8192,
        *,
        specs=SPECS,
        sinks=None,
        backend="gloo",
        timeout_s=10,
    ) -> None:
        stores: dict[str, MemoryStore] = {}
        first = Source(0, num_sources, specs=specs)
        rest = [
            Source(number, num_sources, first.weights, specs) for number in range(1, num_sources)
        ]
        self.sources = [first, *rest]
        self.weights = first.weights
        self.sinks = sinks or [Sink(), Sink()]
        self.ready: list[int] = []
        self.plan_hash = ""
        self.held_versions = [-1]
        self._mode, self._bucket_bytes, self._backend = mode, bucket_bytes, backend
        self._timeout_s = timeout_s
        self.senders, self.receivers = (
            [
                WeightMember(
                    **side,
                    device=torch.device("cpu"),
                    host="127.0.0.1",
                    rendezvous=lambda scope: stores.setdefault(scope, MemoryStore()),
                    on_ready=self.ready.append,
                )
                for side in sides
            ]
            for sides in (
                [{"source": source} for source in self.sources],
                [{"sink": sink} for sink in self.sinks],
            )
        )

    @property
    def members(self):
        return [*self.senders, *self.receivers]

    def agree(self):
        (self.plan_hash,) = {
            member.agree_plan(
                self.sources[0].specs,
                self._bucket_bytes,
                num_sources=len(self.senders),
                source=number if number < len(self.senders) else None,
                mode=self._mode,
            )
            for number, member in enumerate(self.members)
        }

    async def form_group(self, epoch=1):
        self.agree()
        await asyncio.gather(
            *(
                member.form_group(
                    epoch,
                    receiver=max(number - len(self.senders), 0),
                    num_receivers=len(self.receivers),
                    backend=self._backend,
                    scope=f"run/{epoch}",
                    timeout_s=10,
                )
                for number, member in enumerate(self.members)
            )
        )

    async def prepare(self, version, epoch=1):
        self.held_versions = await asyncio.gather(
            *(member.prepare(epoch, version, self.plan_hash) for member in self.members)
        )

    async def transfer(self, version, epoch=1, base_version=-1):
        """Returns the reports of all members, or their errors."""
        request = TransferRequest(
            epoch=epoch, version=version, timeout_s=self._timeout_s, base_version=base_version
        )
        return await asyncio.gather(
            *(member.transfer(request) for member in self.members), return_exceptions=True
        )

    async def send(self, version, epoch=1):
        """Sends to all receivers; returns the digest."""
        await self.prepare(version, epoch)
        base = (
            self.held_versions[0]
            if len(set(self.held_versions)) == 1 and self.held_versions[0] < version
            else -1
        )
        reports = await self.transfer(version, epoch, base)
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        digests = [digest for report in reports[: len(self.senders)] for digest in report.digests]
        assert all(list(report.digests) == digests for report in reports[len(self.senders) :])
        return version_digest(digests)

    async def publish(self, version, epoch=1):
        """Sends, adopts and checks on all receivers; returns the digest."""
        digest = await self.send(version, epoch)
        canary = await self.senders[0].score()
        for member in self.receivers:
            await member.adopt(version, digest)
            await member.check(version, canary, 1e-9)
        return digest

    def serves_what_was_sent(self):
        """Returns True if every live tensor equals the trainer's bit by bit."""
        return all(
            torch.equal(sink.live[name], tensor)
            for sink in self.sinks
            for name, tensor in self.weights.items()
        )
