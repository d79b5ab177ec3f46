"""Following a run to its end."""

import asyncio
from types import SimpleNamespace

from rich.console import Console

from services.cli.follow import follow
from tests.helpers.tracked import RUN

ENDED = RUN.model_copy(
    update={
        "state": "SUCCEEDED",
        "start_time": RUN.create_time,
        "finish_time": RUN.create_time,
        "summary": {
            "steps": 3,
            "heldout": {"greedy": None, "sampled": None},
            "staleness": {"max": 1, "mean": 0.5, "bound": 1},
            "sync_ms": {"p50": None, "p95": None},
            "prompts": dict.fromkeys(
                ("issued", "consumed", "dropped", "quarantined", "outstanding"), 0
            ),
        },
    }
).model_dump(mode="json")


class Api:
    """A run whose last checkpoint was started again, because a controller was lost meanwhile."""

    async def get(self, run_id):
        return RUN

    async def watch(self, run_id):
        for _ in range(2):
            started = {"step": RUN.target_steps}
            yield "CheckpointStarted", {"message": "", "data": started, "time": ENDED["start_time"]}
            await asyncio.sleep(0)
        yield "end", ENDED

    async def call(self, operation):
        return SimpleNamespace(items=[])


async def test_a_last_checkpoint_that_is_started_twice_does_not_hold_the_command(tmp_path):
    async with asyncio.timeout(30):
        ended = await follow(Api(), RUN.id, state_directory=tmp_path, console=Console(quiet=True))
    assert ended["state"] == "SUCCEEDED"
