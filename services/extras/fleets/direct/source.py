"""The trainer's end of the transport ``servers``: sends weights to the groups that the rollout orders.

::

    rollout   order/N: form group G of W workers ---> source opens G's communicator, formed/G: no error
    trainer   broadcasts of a transfer  ------------> to the workers of the newest group
    rollout   order/M: send again to group H -------> source opens H, repeats its last broadcasts, closes H

A repetition takes no lock: if the trainer packs the next version meanwhile, the receiver's checksums differ
from those of the source's statement, and it drops what it received.
"""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.callables import load_callable
from services.common.runspec.weight_modes import TRANSPORTS
from services.weightsync.endpoints import on_device
from services.weightsync.group import Channel, RankAssignment, Work
from services.weightsync.shared_buffers import gpu_of

logger = logging.getLogger(__name__)

DEVICE_KEY: Final = "device"
ORDER_KEY: Final = "order/{}"
FORMED_KEY: Final = "formed/{}"
STATEMENT_KEY: Final = "statement/{}"
STORE_OF_GROUP: Final = "group{}"
_WAIT_S: Final = 5.0
"""Longest time of one question for the next order; an abort ends the thread after it."""
_RETRY_S: Final = 1.0
_MAX_FAILURES: Final = 60
"""Failed questions in a row after which no further order is expected: the run has ended."""
_GLOO_LEAST_S: Final = 5.0
_GLOO_RATE: Final = 100e6
"""Deadline of one broadcast over Gloo: these seconds and the time of its bytes. Receivers begin at the
rollout's order."""


class ServersSource:
    """Channel of one trainer rank, with the process-group methods that ``Channel`` uses.

    Args:
        store: Store of the channel, in which source and rollout meet.
    """

    def __init__(
        self,
        store: Any,
        assignment: RankAssignment,
        *,
        host: str,
        timeout_s: float,
        device: torch.device,
        folder: Path,
    ) -> None:
        self._store, self._assignment = store, assignment
        # Torch's prefix does not keep it alive, and groups of servers end after the group of the rollout.
        self._values = store.underlying_store
        self._host, self._timeout_s = host, timeout_s
        self._device, self._folder = device, folder
        self._channel: Channel | None = None
        self._pending: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._num_probes, self._num_unsent = 0, 0
        self._is_aborted = threading.Event()
        self._changing = threading.Lock()
        self._connecting: set[Channel] = set()
        """Channels that open, or to which a version is sent again."""
        self._number = -1
        """Number of the newest group."""
        store.set(DEVICE_KEY, "cpu" if device.type == "cpu" else gpu_of(device))
        threading.Thread(target=self._follow_orders, name="weights-orders", daemon=True).start()

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        """Starts to send a tensor; the first one is the probe of the group that the controller formed."""
        self._num_probes += 1
        if self._num_probes > 1:
            self._pending.append(tensors[0].detach())
        return _Pending(self)

    def finish(self) -> None:
        """Sends all started tensors. Blocks until the workers have them, on a GPU in the current stream.

        Raises:
            RuntimeError: If a worker was lost or the group aborted.
        """
        if not self._pending:
            return
        tensors, self._pending = self._pending, []
        if self._is_aborted.is_set():
            raise RuntimeError("the weight group was aborted")
        if self._channel is None:
            # No server is attached: the rollout learns the digest from the statement, the last tensor.
            statement = tensors[-1].cpu().numpy().tobytes()
            self._store.set(STATEMENT_KEY.format(self._num_unsent), statement.hex())
            self._num_unsent += 1
        else:
            _send(self._channel, tensors)
        self._sent = tensors

    def abort(self) -> None:
        """Ends the channel; pending and later work fails."""
        with self._changing:
            self._is_aborted.set()
            channels = {*self._connecting, self._channel}
        for channel in channels:
            if channel is not None:
                channel.abort()

    def _follow_orders(self) -> None:
        key = f"source{self._assignment.sources[0]}/{ORDER_KEY}"
        number, num_failures = 0, 0
        while not self._is_aborted.is_set() and num_failures < _MAX_FAILURES:
            try:
                text = waited(self._store, key.format(number), _WAIT_S)
            except Exception:
                logger.debug("the store did not answer", exc_info=True)
                num_failures += 1
                self._is_aborted.wait(_RETRY_S)
                continue
            num_failures = 0
            if text is not None:
                number += 1
                # A group whose members do not come must not delay the next one.
                threading.Thread(
                    target=self._follow, args=(json.loads(text),), name="weights-order", daemon=True
                ).start()

    def _follow(self, order: dict[str, Any]) -> None:
        why = ""
        try:
            # The default stream would wait for the training step.
            is_cuda = self._device.type == "cuda"
            stream = torch.cuda.Stream(self._device, priority=-1) if is_cuda else None
            with on_device(self._device), torch.cuda.stream(stream):
                if order["again"]:
                    self._repeat(order)
                else:
                    self._replace(order)
        except Exception as error:  # noqa: BLE001 -- the rollout reports it
            logger.warning("no weight group for servers", extra={"why": str(error)})
            why = f"{type(error).__name__}: {error}"
        try:
            self._store.set(FORMED_KEY.format(order["group"]), why)
        except Exception:
            logger.debug("nobody waits for the weight group", exc_info=True)

    def _replace(self, order: dict[str, Any]) -> None:
        """Opens the group to which later versions go."""
        channel = self._open(order) if order["workers"] else None
        with self._changing:
            is_outdated = self._is_aborted.is_set() or order["group"] < self._number
            if not is_outdated:
                self._number = order["group"]
                channel, self._channel = self._channel, channel
        if channel is not None:
            channel.abort()
        if is_outdated:
            raise RuntimeError("another group was formed, or the epoch has ended")

    def _repeat(self, order: dict[str, Any]) -> None:
        """Sends the last version to a further group."""
        channel = self._open(order)
        try:
            with self._limited(channel, order["timeout_s"]):
                _send(channel, self._sent)
                _settle(self._device)
        finally:
            channel.abort()

    def _open(self, order: dict[str, Any]) -> Channel:
        """Opens the communicator of a group and connects its members."""
        backend = load_callable(TRANSPORTS[order["backend"]].opener)(
            dist.PrefixStore(STORE_OF_GROUP.format(order["group"]), self._store),  # type: ignore[attr-defined]
            RankAssignment(
                sources=self._assignment.sources,
                num_sources=self._assignment.num_sources,
                rank=0,
                num_receivers=order["workers"],
            ),
            host=self._host,
            timeout_s=self._timeout_s,
            device=self._device,
            folder=self._folder,
        )
        channel = Channel(backend)
        try:
            with self._limited(channel, self._timeout_s):
                channel.broadcast(torch.zeros(1, device=self._device)).wait()
                _settle(self._device)
        except BaseException:
            channel.abort()
            raise
        return channel

    @contextmanager
    def _limited(self, channel: Channel, timeout_s: float) -> Iterator[None]:
        """Aborts a channel whose members do not come, or with which the epoch ends, while the block runs.

        NCCL would wait for them on the GPU without an end.

        Raises:
            RuntimeError: If the time-out or the epoch's end aborted the channel.
        """
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            channel.abort()

        with self._changing:
            if self._is_aborted.is_set():
                raise RuntimeError("the epoch has ended")
            self._connecting.add(channel)
        limit = threading.Timer(timeout_s, end)
        limit.daemon = True
        limit.start()
        cause: Exception | None = None
        try:
            yield
        except Exception as error:
            if not is_late.is_set():
                raise
            cause = error
        finally:
            limit.cancel()
            with self._changing:
                self._connecting.discard(channel)
        if is_late.is_set():
            raise RuntimeError(f"members did not take part within {timeout_s:.1f} s") from cause
        if self._is_aborted.is_set():
            raise RuntimeError("the epoch has ended")


def _send(channel: Channel, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise RuntimeError("no version was sent in this weight group")
    if not tensors[0].is_cuda:
        longest = max(tensor.nbytes for tensor in tensors)
        channel.set_timeout(_GLOO_LEAST_S + longest / _GLOO_RATE)
    works = [channel.broadcast(tensor) for tensor in tensors]
    for work in works:
        work.wait()


def waited(store: Any, key: str, timeout_s: float) -> bytes | None:
    """Returns a value of the store below the channel's; None if it was not set within ``timeout_s``.

    It waits in Python: a thread that waits in torch's bindings would end the process with an error.
    """
    values = store.underlying_store
    try:
        values.wait([key], timedelta(seconds=timeout_s))
    except Exception as error:
        if "was not set" in str(error):
            return None
        raise
    value: bytes = values.get(key)
    return value


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


class _Pending:
    """A started broadcast."""

    def __init__(self, source: ServersSource) -> None:
        self._source = source

    def wait(self) -> bool:
        """Sends what was started."""
        self._source.finish()
        return True
