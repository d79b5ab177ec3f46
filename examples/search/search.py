"""A text game with state: walk along a line to a treasure.

In each turn the game shows the player's position and the direction of the treasure (``<`` or ``>``), and the
player answers ``l`` or ``r``. The episode ends at the treasure, or when no moves are left.
"""

import random
from collections.abc import Mapping
from typing import Any


class Search:
    """One game.

    Args:
        length: Number of positions, at most 10.
        moves: Moves until the game is lost.
    """

    version = "1"

    def __init__(self, *, length: int = 6, moves: int = 8) -> None:
        self.length, self.moves_left = length, moves
        self.place = self.treasure = 0

    def reset(self, task: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        """Hides the treasure. Training and held-out games differ by their seeds."""
        places = random.Random(seed).sample(range(self.length), 2)
        self.place, self.treasure = places
        return {"messages": self._look()}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Moves the player; an invalid answer also costs a move."""
        move = {"l": -1, "r": 1}.get(message["content"].strip(), 0)
        self.place = min(max(self.place + move, 0), self.length - 1)
        self.moves_left -= 1
        is_found = self.place == self.treasure
        return {
            "messages": self._look(),
            "done": is_found or self.moves_left == 0,
            "reward": {"found": float(is_found), "moves": -0.05, "no_move": -0.1 * (move == 0)},
            "metrics": {"moves_left": self.moves_left},
        }

    def _look(self) -> str:
        return f"{self.place}{'<' if self.treasure < self.place else '>'}"
