"""An agent that asks the policy to sort four digits, and asks again if the answer is not sorted.

It contains no code for training. It uses an OpenAI-compatible API; ``openai.AsyncOpenAI(base_url=...,
api_key=...)`` could replace the plain HTTP client.
"""

import importlib.util
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

Message = dict[str, Any]

_http = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


async def solve(
    base_url: str, api_key: str, model: str, prompt: str, row: Mapping[str, Any]
) -> None:
    """Plays one episode: at most two questions."""
    messages: list[Message] = [{"role": "user", "content": prompt}]
    answer = await _ask(base_url, api_key, model, messages)
    digits = answer["content"]
    if list(digits) != sorted(digits):
        messages += [answer, {"role": "user", "content": "again"}]
        await _ask(base_url, api_key, model, messages)


async def _ask(base_url: str, api_key: str, model: str, messages: list[Message]) -> Message:
    response = await _http.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"model": model, "messages": messages, "max_tokens": 6},
    )
    response.raise_for_status()
    message: Message = response.json()["choices"][0]["message"]
    return message


def warm_start(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns the examples of sort4 in the form of the chat, some of them as second questions."""
    rng = random.Random(seed)
    path = Path(__file__).parent.parent / "sort4.py"
    spec = importlib.util.spec_from_file_location("sort4", path)
    assert spec is not None
    assert spec.loader is not None
    sort4 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sort4)
    return [(_chat(prompt, rng), answer) for prompt, answer in sort4.warm_start(count, seed)]


def _chat(prompt: str, rng: random.Random) -> str:
    chat = f"user: {prompt}\nassistant: "
    if rng.random() < 0.3:
        chat += f"{prompt[:-1]}\nuser: again\nassistant: "
    return chat
