"""Tasks that take realistic work and teach nothing.

This module imports no package, because reward and tool processes import it.
"""

import asyncio
import random
from typing import Any

_NUM_PROMPTS = 4096


def prompts() -> list[dict[str, str]]:
    """Returns prompts of 100 bytes."""
    rng = random.Random(0)
    return [{"prompt": f"{rng.getrandbits(400):0100x}"} for _ in range(_NUM_PROMPTS)]


def reward(prompt: str, response: str, answer: str | None, row: dict[str, Any]) -> float:
    """Returns 1 for about half of the responses, so that groups have a spread and all are trained on."""
    return float(len(response) % 2)


class Lognormal:
    """Generates responses of log-normal length, whatever their tokens are.

    Args:
        least: Min tokens of a response.
        most: Max tokens of a response.
        median: Median of the length in tokens.
        sigma: Standard deviation of the length's logarithm.
    """

    def __init__(self, *, least: int, most: int, median: float, sigma: float) -> None:
        self._bounds = (least, most)
        self._median = median
        self._sigma = sigma

    async def run(self, episode: Any) -> None:
        """Samples up to the length that the sample's seed draws."""
        rng = random.Random(episode.limits.seed)
        unbounded = self._median * rng.lognormvariate(0.0, self._sigma)
        least, most = self._bounds
        length = min(max(round(unbounded), least), most)
        while (
            num_tokens := length - len(episode.response_ids)
        ) > 0 and episode.remaining_tokens > 0:
            await episode.generate(max_tokens=num_tokens)


class SlowTools:
    """Alternates turns and calls of a remote tool, which take time but no CPU.

    Args:
        turns: Sampled turns.
        turn_tokens: Max tokens of a turn.
        mean_seconds: Mean time of a call; times are exponential.
    """

    def __init__(self, *, turns: int, turn_tokens: int, mean_seconds: float) -> None:
        self._turns = turns
        self._turn_tokens = turn_tokens
        self._mean_seconds = mean_seconds

    async def run(self, episode: Any) -> None:
        """Alternates between a sampled turn and a call of the tool."""
        rng = random.Random(episode.limits.seed)

        async def call() -> str:
            await asyncio.sleep(seconds)
            return "\nresult: 42\n"

        for number in range(self._turns):
            if episode.remaining_tokens < 1:
                return
            await episode.generate(max_tokens=self._turn_tokens)
            seconds = rng.expovariate(1 / self._mean_seconds)
            if number + 1 < self._turns and await episode.observe(call) is None:
                return
