"""Weights that a rollout sends to a server: announced, then received bucket by bucket."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from services.extras.fleets.answers import RefusedError, read_body
from services.extras.fleets.hosts import EngineHosts
from services.extras.fleets.protocol import VERSION_HEADER
from services.extras.fleets.staging import StagedWeights
from services.weightsync.weight_plan import TensorSpec


class Upload:
    """The version that one owner sends now, or sent last.

    Args:
        check: Raises RefusedError if a request's session has ended.
    """

    def __init__(self, check: Callable[[Request], object]) -> None:
        self._check = check
        self._staged: StagedWeights | None = None

    def close(self) -> None:
        """Frees the memory."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.memory.close()

    async def announce(self, request: Request) -> dict[str, Any]:
        """Makes room for a version.

        Raises:
            RefusedError: If it has no layout, or there is no memory for it on a host of the engine.
        """
        body = await read_body(request)
        self._check(request)
        memory = None if self._staged is None else self._staged.memory
        self._staged = None
        try:
            tensors = [
                TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in body["tensors"]
            ]
            self._staged = await asyncio.to_thread(
                StagedWeights, int(body["version"]), tensors, int(body["bucket_bytes"]), memory
            )
        except (KeyError, TypeError, ValueError) as error:
            if memory is not None:
                memory.close()
            raise RefusedError(400, f"the announced weights have no layout: {error}") from error
        except (OSError, RuntimeError) as error:
            if memory is not None:
                memory.close()
            raise RefusedError(507, f"no memory for the announced weights: {error}") from error
        staged = self._staged
        await EngineHosts.of(request.app.state).prepare(staged.memory)
        return {"num_buckets": staged.num_buckets}

    async def receive(self, request: Request) -> dict[str, Any]:
        """Receives one bucket.

        Raises:
            RefusedError: If it is not expected, or did not arrive whole.
        """
        staged = self.version(request.headers.get(VERSION_HEADER))
        try:
            index = int(request.url.path.rpartition("/")[2])
        except ValueError as error:
            raise RefusedError(404, f"no such bucket: {error}") from error
        try:
            bucket = staged.begin(index).numpy()
        except IndexError as error:
            raise RefusedError(404, f"no such bucket: {error}") from error
        except ValueError as error:
            raise RefusedError(409, f"{error}; announce the version again") from error
        position = 0
        try:
            async for chunk in request.stream():
                # A later announcement reuses the memory.
                self._check(request)
                if staged is not self._staged:
                    raise RefusedError(409, f"version {staged.version} is no longer expected")
                end = position + len(chunk)
                if end > len(bucket):
                    raise RefusedError(413, f"bucket {index} has {len(bucket)} bytes, not more")
                bucket[position:end] = memoryview(chunk)
                position = end
        except ClientDisconnect as error:
            raise RefusedError(400, f"bucket {index} was interrupted") from error
        if position != len(bucket):
            raise RefusedError(400, f"bucket {index} has {len(bucket)} bytes, got {position}")
        await EngineHosts.of(request.app.state).copy(staged.memory, *staged.bounds(index))
        await asyncio.to_thread(staged.finish, index)
        return {}

    def version(self, version: object) -> StagedWeights:
        """Returns the announced version.

        Raises:
            RefusedError: If it is another one.
        """
        if self._staged is None or str(self._staged.version) != str(version):
            staged = None if self._staged is None else self._staged.version
            raise RefusedError(409, f"version {version} is not announced (announced: {staged})")
        return self._staged

    def complete(self, version: object, digest: object) -> StagedWeights:
        """Returns the announced version, which has arrived.

        Raises:
            RefusedError: If it is another one, has not arrived, or has another digest.
        """
        staged = self.version(version)
        if staged.missing:
            raise RefusedError(
                409, f"{staged.missing} of {staged.num_buckets} buckets have not arrived"
            )
        received_digest = staged.digest()
        if received_digest != digest:
            raise RefusedError(
                422,
                f"the digest of the received weights is {received_digest[:12]}, expected {str(digest)[:12]}",
            )
        return staged
