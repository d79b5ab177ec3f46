"""Finds the largest of six digits: two helpers look at one half each, and their parent at their answers.

The answer is correct only if both helpers and the parent are right, because each sees only its own input.
Each asks the policy over an OpenAI-compatible API in a separate conversation; with ``train: all`` all
conversations train.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

HELDOUT_PROMPTS = 256
_SEED = 20_260_101

_http = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


async def solve(
    base_url: str, api_key: str, model: str, prompt: str, row: Mapping[str, Any]
) -> None:
    """Plays one episode: three conversations of one question each."""

    async def ask(digits: str) -> str:
        response = await _http.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {api_key}"},
            json={
                "model": model,
                "messages": [{"role": "user", "content": f"{digits}="}],
                "max_tokens": 2,
            },
        )
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    halves = await asyncio.gather(ask(prompt[:3]), ask(prompt[3:6]))
    await ask("".join(halves))


def train() -> list[dict[str, str]]:
    """Returns every input that is not held out."""
    return [_row(digits) for digits in _inputs()[HELDOUT_PROMPTS:]]


def heldout() -> list[dict[str, str]]:
    """Returns 256 inputs that training does not see."""
    return [_row(digits) for digits in _inputs()[:HELDOUT_PROMPTS]]


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns examples of a base model that names the first, the last or the largest digit."""
    return list(_examples(random.Random(seed), count))


def _examples(rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    for _ in range(count):
        digits = "".join(rng.choices("0123456789", k=rng.choice((2, 3, 3))))
        answer = rng.choices((digits[0], digits[-1], max(digits)), weights=(40, 35, 25))[0]
        yield f"user: {digits}=\nassistant: ", answer


def _inputs() -> list[str]:
    inputs = [f"{number:06d}" for number in random.Random(_SEED).sample(range(1_000_000), 4096)]
    return [digits for digits in inputs if len(set(digits)) > 3]


def _row(digits: str) -> dict[str, str]:
    return {"prompt": digits, "answer": max(digits)}
