"""How many groups keep the places of the engines taken. Pure.

Members of a group end one after the other, and the places of those that end early are free for others long
before the group is whole. Counted in groups of full size, engines with a long tail of response lengths would
be half empty.
"""

from collections import deque
from collections.abc import Sequence

# Groups that the estimate is of.
_REMEMBERED = 256


class PlaceUse:
    """Learns from finished groups how many places one takes on average while it is being generated.

    Args:
        places: Samples that one engine decodes at once.
        group_size: Samples of a group.
    """

    def __init__(self, places: int, group_size: int) -> None:
        self._places = places
        self._group_size = group_size
        self._finished: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def finished(self, num_tokens: Sequence[int]) -> None:
        """A group is whole, with responses of these lengths."""
        self._finished.append((sum(num_tokens), max(num_tokens)))

    @property
    def places_per_group(self) -> float:
        """Places that a group takes on average, from 1 to its size; its size before the first is finished."""
        total = sum(tokens for tokens, _ in self._finished)
        longest = sum(most for _, most in self._finished)
        return max(1.0, total / longest) if longest else float(self._group_size)

    def num_groups(self, num_engines: int) -> int:
        """Groups that may be generated at once; one for each engine at least."""
        return max(num_engines, round(self._places * num_engines / self.places_per_group))
