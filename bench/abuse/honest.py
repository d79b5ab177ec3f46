"""The two honest projects, each with a run and clients that watch it."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from slipstream_client import AsyncClient
from slipstream_client.models import RunView

_LOOKS_EVERY_S = 0.2
_STEP_S = 1.5
"""Min seconds of a step, because the rewards of two batches take twice as long."""
_REWARD = f"""
import time

def slow(prompt, response, answer, row):
    time.sleep({2 * _STEP_S})
    return float(len(response))
"""
_AGENT = """
import httpx

http = httpx.AsyncClient(timeout=60)

async def talk(base_url, api_key, model, prompt, row):
    response = await http.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 4},
    )
    response.raise_for_status()
"""


def spec_for(folder: Path, name: str, *, seconds: float, has_agent: bool) -> dict[str, Any]:
    """Returns a run on a random model that takes about this long."""
    rows = (json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(64))
    (folder / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
    (folder / "agent.py").write_text(_AGENT, encoding="utf-8")
    agent = {"workflow": "agent", "workflow_arguments": {"agent": f"{folder}/agent.py:talk"}}
    return {
        "name": name,
        "model": {"path": "tiny:qwen2-0.4m"},
        "data": {
            "train": {"source": "jsonl", "path": f"{folder}/prompts.jsonl"},
            "answer_column": None,
        },
        "rollout": {
            "group_size": 4,
            "max_response_tokens": 4,
            "rewards": [{"name": f"{folder}/reward.py:slow"}],
            **(agent if has_agent else {}),
        },
        "trainer": {
            "steps": int(seconds / _STEP_S / 1.5) + 20,
            "prompts_per_step": 4,
            "checkpoint": {"every": 20},
        },
        "validation": {"every": 0, "before_train": False, "at_end": False},
    }


async def look(client: AsyncClient, run_id: str, waits_s: list[float]) -> None:
    """Sends the requests of a person's run page until cancelled; records each latency."""
    while True:
        for operation in (
            lambda: client.get_run(run_id),
            lambda: client.list_runs(),
            lambda: client.list_events(run_id, limit=100),
        ):
            begin = time.monotonic()
            await operation()
            waits_s.append(time.monotonic() - begin)
            await asyncio.sleep(_LOOKS_EVERY_S)


def is_closed(run: RunView) -> bool:
    """Returns True if every issued prompt is in exactly one place."""
    prompts = run.summary["prompts"]
    states = ("consumed", "dropped", "quarantined", "outstanding")
    return bool(prompts["issued"] == sum(prompts[state] for state in states))
