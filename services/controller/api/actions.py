"""REST routes that act on a run: end it, hold it, save it, evaluate it, fork it."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Path, Response

from services.controller.api.commands import Access, Authenticate, RunId
from services.controller.api.models import CancelOptions, ForkRequest, PauseOptions, RunView
from services.controller.api.principals import Principal
from services.controller.runs import RunManager
from services.controller.store.records import RequestKey

CheckpointId = Annotated[str, Path(max_length=40, pattern="^[A-Za-z0-9_-]+$")]


def add_action_routes(app: FastAPI, manager: RunManager, authenticate: Authenticate) -> None:
    """Add the routes."""
    access = Access(manager)
    _add_life(app, manager, access, authenticate)
    _add_checkpoints(app, manager, access, authenticate)


def _add_life(
    app: FastAPI, manager: RunManager, access: Access, authenticate: Authenticate
) -> None:
    @app.post("/v1/runs/{run_id}/cancel")
    async def cancel_run(
        run_id: RunId,
        response: Response,
        who: Annotated[Principal, Depends(authenticate)],
        options: CancelOptions | None = None,
    ) -> RunView:
        """End a run. Cancelling a cancelled run changes nothing; a second call may shorten the grace."""
        await access.run(who, run_id, "operator")
        run = await manager.cancel(run_id, options or CancelOptions(), actor=who.name)
        return access.view(run, response)

    @app.post("/v1/runs/{run_id}/pause")
    async def pause_run(
        run_id: RunId,
        response: Response,
        who: Annotated[Principal, Depends(authenticate)],
        options: PauseOptions | None = None,
    ) -> RunView:
        """Finish the current step, save a checkpoint if it is wanted, and stop the workers."""
        await access.run(who, run_id, "operator")
        run = await manager.pause(run_id, options or PauseOptions(), actor=who.name)
        return access.view(run, response)

    @app.post("/v1/runs/{run_id}/resume")
    async def resume_run(
        run_id: RunId, response: Response, who: Annotated[Principal, Depends(authenticate)]
    ) -> RunView:
        """Queue a paused run again; it goes on from its checkpoint."""
        await access.run(who, run_id, "operator")
        return access.view(await manager.resume(run_id, actor=who.name), response)

    @app.post("/v1/runs/{run_id}/validate", status_code=HTTPStatus.ACCEPTED)
    async def validate_run(
        run_id: RunId, response: Response, who: Annotated[Principal, Depends(authenticate)]
    ) -> RunView:
        """Evaluate the weights that are served now; event ``Validated`` tells of it."""
        run = await access.run(who, run_id, "operator")
        await manager.drivers.evaluate(run)
        return access.view(run, response)


def _add_checkpoints(
    app: FastAPI, manager: RunManager, access: Access, authenticate: Authenticate
) -> None:
    @app.post("/v1/runs/{run_id}/checkpoint", status_code=HTTPStatus.ACCEPTED)
    async def checkpoint_run(
        run_id: RunId, response: Response, who: Annotated[Principal, Depends(authenticate)]
    ) -> RunView:
        """Save a checkpoint at the end of the current step; event ``CheckpointSaved`` tells of it."""
        run = await access.run(who, run_id, "operator")
        manager.drivers.running(run).save_soon()
        response.headers["Location"] = f"/v1/runs/{run_id}/checkpoints"
        return access.view(run, response)

    @app.delete("/v1/runs/{run_id}/checkpoints/{checkpoint_id}", status_code=HTTPStatus.NO_CONTENT)
    async def delete_checkpoint(
        run_id: RunId,
        checkpoint_id: CheckpointId,
        who: Annotated[Principal, Depends(authenticate)],
    ) -> None:
        """Delete a checkpoint that no run needs any more."""
        await access.run(who, run_id, "operator")
        await manager.checkpoints.delete(run_id, checkpoint_id, actor=who.name)

    @app.post("/v1/runs/{run_id}/fork", status_code=HTTPStatus.CREATED)
    async def fork_run(
        run_id: RunId,
        fork: ForkRequest,
        response: Response,
        who: Annotated[Principal, Depends(authenticate)],
        idempotency_key: Annotated[str, Header(max_length=64, pattern=r"^[\x21-\x7e]*$")] = "",
    ) -> RunView:
        """Start a new run that goes on from a checkpoint, with the same prompts behind it."""
        parent = await access.run(who, run_id, fork.needed_role)
        scope = f"{who.project}/{who.name} POST {run_id}/fork"
        request = RequestKey.of(scope, idempotency_key, fork.model_dump_json())
        run = await manager.fork(parent, fork, actor=who.name, request=request)
        response.headers["Location"] = f"/v1/runs/{run.run_id}"
        return access.view(run, response)
