"""Memory of the images that agents send: a few bytes of a request may become a gigabyte of pixels."""

import asyncio
from collections.abc import Sequence
from typing import Final

from services.extras.agents.requests import ApiError
from services.rollout.workflows.base import Episode
from services.rollout.workflows.turns import Turn

_ENDPOINT_PART: Final = 4
"""The images of an endpoint may take 1 / 4 of the host's memory."""
_EPISODE_PART: Final = 4
"""The images of one episode may take 1 / 4 of the endpoint's part."""
_ROOM_S: Final = 60.0


class ImageMemory:
    """Memory of the images in all open episodes of an endpoint, given in the order of the requests.

    Args:
        host_bytes: Memory of the host.
    """

    def __init__(self, host_bytes: int) -> None:
        self.max_bytes = host_bytes // _ENDPOINT_PART
        self.max_episode_bytes = self.max_bytes // _EPISODE_PART
        self._free_bytes = self.max_bytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Waits until there is room.

        Raises:
            ApiError: If other requests and episodes leave none in time; the agent may try again.
        """
        try:
            async with asyncio.timeout(_ROOM_S), self._turn:
                while self._free_bytes < num_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self._free_bytes -= num_bytes
        except TimeoutError:
            raise ApiError(
                503,
                f"the images of other episodes left no memory within {_ROOM_S:.0f} s; try again",
                code="images_wait",
            ) from None

    def give(self, num_bytes: int) -> None:
        """Returns memory that was taken."""
        self._free_bytes += num_bytes
        self._freed.set()


class EpisodeImages:
    """Images of one episode, which are held until it ends."""

    def __init__(self, episode: Episode, memory: ImageMemory) -> None:
        self._episode = episode
        self._memory = memory
        self._num_bytes = 0
        self._is_closed = False

    async def look(
        self,
        token_ids: Sequence[int],
        images: Sequence[str],
        after: tuple[Turn, ...],
        *,
        keeps: bool,
    ) -> Turn:
        """Returns an observed turn with images as :meth:`Episode.look` does.

        Args:
            keeps: False if the caller does not keep the turn.

        Raises:
            ApiError: If this episode or the others leave no memory for the images.
            CallError: As :meth:`Episode.look`.
        """
        reader = self._episode.images
        if reader is None:
            return await self._episode.look(token_ids, images, after=after)
        max_bytes = self._memory.max_episode_bytes
        # What an image needs at most, until its size is known.
        num_bytes = min(len(images) * reader.max_decoded_bytes, max_bytes)
        await self._memory.take(num_bytes)
        num_kept = 0
        try:
            turn = await self._episode.look(token_ids, images, after=after)
            if keeps and not self._is_closed and turn.model_inputs is not None:
                num_added = sum(tensor.nbytes for tensor in turn.model_inputs.tensors.values())
                if self._num_bytes + num_added > max_bytes:
                    raise ApiError(
                        400,
                        f"the conversations of this episode have images of {self._num_bytes:,} bytes after "
                        f"decoding, and more than {max_bytes:,} with those of this request; send fewer or "
                        "smaller images, or lower data.max_image_pixels",
                        code="too_many_images",
                        param="messages",
                    )
                num_kept = num_added
        finally:
            self._num_bytes += num_kept
            self._memory.give(num_bytes - num_kept)
        return turn

    def close(self) -> None:
        """Returns the memory of all images; those of a request that ends later are not held."""
        self._is_closed = True
        self._memory.give(self._num_bytes)
        self._num_bytes = 0
