"""Time from a submission to the first generated token on this machine, as a user starts the run."""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from services.cli.local import local_services
from services.common.runspec.loader import load_spec
from slipstream_client import AsyncClient

_SPEC = """
name: first-token
model: {path: "tiny:qwen2-0.4m"}
data: {train: {source: jsonl, path: prompts.jsonl}, answer_column: null}
rollout: {group_size: 4, max_response_tokens: 16, rewards: [{name: "reward.py:length"}]}
trainer: {steps: 100000, prompts_per_step: 8}
validation: {every: 0, before_train: false}
"""


async def measure_first_token(*, rounds: int) -> dict[str, Any]:
    """Submits a run to running services and waits for the rollouts' first token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [json.dumps({"prompt": f"question {number}"}) for number in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        (folder / "reward.py").write_text(
            "def length(prompt, response, answer, row):\n    return float(len(response))\n"
        )
        (folder / "spec.yaml").write_text(_SPEC)
        spec = load_spec(folder / "spec.yaml").model_dump(mode="json")
        seconds: list[float] = []
        async with (
            local_services(folder / "runs") as services,
            AsyncClient(services.url, token=services.token) as client,
        ):
            for _ in range(rounds):
                begin = time.perf_counter()
                run = await client.submit(spec)
                while not await _has_token(client, run.id):
                    await asyncio.sleep(0.02)
                seconds.append(time.perf_counter() - begin)
                await run.cancel()
                while (await run.refresh()).state != "CANCELLED":
                    await asyncio.sleep(0.1)
    return {"seconds": seconds, "worst_s": max(seconds)}


async def _has_token(client: AsyncClient, run_id: str) -> bool:
    workers = (await client.get_topology(run_id)).items
    return any(worker.gauges.get("tokens_total", 0.0) > 0 for worker in workers)
