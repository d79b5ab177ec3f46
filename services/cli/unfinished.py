"""A run that was cut off with its whole machine: it goes on, or makes room."""

from rich.console import Console

from services.cli.api import Api
from services.common.spec.run import RunSpec
from services.controller.run.run_state import TERMINAL


async def submit_or_go_on(api: Api, spec: RunSpec, console: Console) -> str:
    """Submit a run, unless the same one was cut off before: then that one goes on.

    A run of the same name that was cut off with another specification is cancelled; its checkpoints stay.

    Args:
        api: The controller.
        spec: The run.
        console: Is told what becomes of a run that was cut off.

    Returns:
        Id of the run to follow.
    """
    wanted = spec.model_dump(mode="json")
    for left in (await api.list_runs(name=spec.name)).items:
        if left.state in TERMINAL:
            continue
        cut_off = f"{left.id} was cut off after step {left.step}"
        if left.spec == wanted:
            console.print(f"{cut_off}; it goes on", highlight=False, soft_wrap=True)
            if left.state == "PAUSED":
                await api.resume(left.id)
            return left.id
        console.print(
            f"{cut_off}, with another specification; it is cancelled",
            highlight=False,
            soft_wrap=True,
        )
        await api.cancel(left.id)
        async for _ in api.watch(left.id):
            pass
    return (await api.submit(wanted)).id
