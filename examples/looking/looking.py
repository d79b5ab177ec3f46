"""A task with a tool that returns a picture: the policy must look to know which square is red.

The policy says ``l`` to look. The tool returns a picture of four squares, one of which is red. The policy
names the red square by its letter:

    A B
    C D

An answer without a look is a guess.
"""

import random
from collections.abc import Mapping
from typing import Any

from PIL import Image

SIDE = 8
LETTERS = "ABCD"
LOOK = "l"
QUESTION, AFTER_LOOK = "?", ":"


def picture(rng: random.Random, letter: str) -> Image.Image:
    """Draws four squares; the square with this letter is red."""
    image = Image.new("RGB", (2 * SIDE, 2 * SIDE))
    for number, each in enumerate(LETTERS):
        low, high = rng.randrange(0, 80), rng.randrange(160, 256)
        # The others are green, blue or both, so that brightness does not identify the red square.
        green, blue = rng.choice([(high, low), (low, high), (high, high)])
        color = (high, low, low) if each == letter else (low, green, blue)
        place = (number % 2 * SIDE, number // 2 * SIDE)
        image.paste(color, (*place, place[0] + SIDE, place[1] + SIDE))
    return image


class Looking:
    """One episode: a look, or none, and an answer."""

    def reset(self, task: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        """Chooses the picture, which is the same for all members of a group."""
        rng = random.Random(seed)
        self.letter = rng.choice(LETTERS)
        self.picture: Image.Image | None = picture(rng, self.letter)
        return {"messages": QUESTION}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Shows the picture once, or scores the answer."""
        said = message["content"].strip()
        if said == LOOK and self.picture is not None:
            parts = [{"type": "image", "image": self.picture}, {"type": "text", "text": AFTER_LOOK}]
            self.picture = None
            return {"messages": [{"role": "user", "content": parts}], "reward": {"looked": 0.2}}
        return {"done": True, "reward": {"right": float(said == self.letter)}}


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples without pictures: the policy looks or guesses, and guesses after a look."""
    rng = random.Random(seed)
    first = [(QUESTION, rng.choice([LOOK * 4, LETTERS])) for _ in range(count // 2)]
    pairs = [*first, *[(AFTER_LOOK, LETTERS)] * (count - len(first))]
    return [(prompt, rng.choice(choices)) for prompt, choices in pairs]
