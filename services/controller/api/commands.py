"""REST routes that create and change runs."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.common.spec.loader import canonical_json, parse_spec, spec_digest
from services.common.spec.run import RunSpec
from services.controller.api.errors import BodyError
from services.controller.api.models import (
    LabelPair,
    Priority,
    RunPage,
    RunPatch,
    RunView,
    SubmitOptions,
    ValidatedView,
)
from services.controller.api.page_tokens import PageTokens
from services.controller.api.principals import Principal
from services.controller.api.roles import Role
from services.controller.api.views import view_run
from services.controller.run.run_state import RunState
from services.controller.runs import RunManager
from services.controller.store.records import RequestKey, Run, RunFilter, Submission

RunId = Annotated[str, Path(pattern="^run_[0-9a-f]{32}$")]
IfMatch = Annotated[str, Header(json_schema_extra={"pattern": '^"[0-9]{1,18}"$'})]
Authenticate = Callable[..., Awaitable[Principal]]


def submission_of(
    spec: RunSpec, options: SubmitOptions, who: Principal, *, scope: str, key: str
) -> Submission:
    """What a principal asks for; with a key the same request returns the same run."""
    body = canonical_json(spec) + options.model_dump_json()
    return Submission(
        spec=spec,
        project=who.project,
        priority=options.priority,
        labels=options.labels,
        actor=who.name,
        request=RequestKey.of(scope, key, body),
    )


class PreconditionRequiredError(FailedPreconditionError):
    """The request must say which revision it changes."""

    reason = "PRECONDITION_REQUIRED"


class Access:
    """Finds runs for principals.

    Args:
        manager: The runs.
    """

    def __init__(self, manager: RunManager) -> None:
        self._manager = manager

    async def run(self, principal: Principal, run_id: str, role: Role = "viewer") -> Run:
        """A run that the principal may see, once it has the role for what it wants."""
        run = principal.demand_run(await self._manager.get(run_id))
        principal.demand(role)
        return run

    def view(self, run: Run, response: Response | None = None) -> RunView:
        """A run with what it is doing now."""
        return view_run(run, response, activities=self._manager.drivers.activities(run.run_id))


def add_run_routes(app: FastAPI, manager: RunManager, authenticate: Authenticate) -> None:
    """Add the routes."""
    access = Access(manager)
    _add_collection(app, manager, access, authenticate)
    _add_resource(app, manager, access, authenticate)


def _add_collection(
    app: FastAPI, manager: RunManager, access: Access, authenticate: Authenticate
) -> None:
    pages = PageTokens()

    @app.post(
        "/v1/runs",
        status_code=HTTPStatus.CREATED,
        responses={200: {"description": "The run of an earlier request, or what was validated."}},
    )
    async def create_run(
        request: Request,
        response: Response,
        who: Annotated[Principal, Depends(authenticate)],
        validate_only: bool = False,
        priority: Annotated[Priority, Query()] = 0,
        label: Annotated[list[LabelPair], Query(max_length=32)] = [],  # noqa: B006
        idempotency_key: Annotated[str, Header(max_length=64, pattern=r"^[\x21-\x7e]*$")] = "",
    ) -> RunView | ValidatedView:
        """Submit a run; the body is its specification. It starts when its turn comes.

        Of several values of ``label`` with the same key the last one counts.
        """
        document = await _json(request)
        if not isinstance(document, dict):
            raise InvalidArgumentError("the body must be a JSON object: the run's specification")
        who.demand("operator")
        spec = parse_spec(document)
        who.demand_submit(spec)
        if validate_only:
            manager.policy.check(spec)
            response.status_code = HTTPStatus.OK
            return ValidatedView(spec=spec.model_dump(mode="json"), spec_digest=spec_digest(spec))
        labels = dict(pair.split("=", 1) for pair in label)
        options = SubmitOptions(priority=priority, labels=labels)
        scope = f"{who.project}/{who.name} POST /v1/runs"
        run, is_new = await manager.create(
            submission_of(spec, options, who, scope=scope, key=idempotency_key)
        )
        if not is_new:
            response.status_code = HTTPStatus.OK
        response.headers["Location"] = f"/v1/runs/{run.run_id}"
        return access.view(run, response)

    @app.get("/v1/runs")
    async def list_runs(
        who: Annotated[Principal, Depends(authenticate)],
        state: RunState | None = None,
        name: Annotated[str, Query(max_length=63)] = "",
        label: Annotated[str, Query(pattern="^([^=]+=.*)?$", max_length=128)] = "",
        order_by: Literal["-create_time", "create_time"] = "-create_time",
        page_size: Annotated[int, Query(ge=1, le=500)] = 50,
        page_token: Annotated[str, Query(max_length=256)] = "",
    ) -> RunPage:
        """List the runs of the project, newest first unless ``order_by`` says otherwise."""
        key, _, value = label.partition("=")
        only = RunFilter(
            project=who.project,
            state=state,
            name=name or None,
            label=(key, value) if label else None,
            is_oldest_first=order_by == "create_time",
        )
        scope = f"{who.project} {state} {name} {label} {order_by}"
        runs = await manager.list_runs(
            limit=page_size + 1, after=pages.read(page_token, scope), only=only
        )
        page = runs[:page_size]
        more = len(runs) > page_size
        return RunPage(
            items=[access.view(run) for run in page],
            next_page_token=pages.make(page[-1].run_id, scope) if more else "",
        )


def _add_resource(
    app: FastAPI, manager: RunManager, access: Access, authenticate: Authenticate
) -> None:
    @app.get("/v1/runs/{run_id}", responses={304: {"description": "Not changed."}})
    async def get_run(
        run_id: RunId,
        response: Response,
        who: Annotated[Principal, Depends(authenticate)],
        if_none_match: Annotated[str, Header()] = "",
    ) -> RunView | None:
        """One run."""
        run = await access.run(who, run_id)
        if if_none_match == f'"{run.revision}"':
            return Response(status_code=HTTPStatus.NOT_MODIFIED)  # type: ignore[return-value]
        return access.view(run, response)

    @app.patch("/v1/runs/{run_id}")
    async def patch_run(
        run_id: RunId,
        patch: RunPatch,
        response: Response,
        who: Annotated[Principal, Depends(authenticate)],
        if_match: IfMatch = "",
    ) -> RunView:
        """Change a run; ``If-Match`` names the revision that was read."""
        await access.run(who, run_id, "operator")
        run = await manager.patch(run_id, patch, revision=revision_of(if_match), actor=who.name)
        return access.view(run, response)

    @app.delete("/v1/runs/{run_id}", status_code=HTTPStatus.NO_CONTENT)
    async def delete_run(
        run_id: RunId,
        who: Annotated[Principal, Depends(authenticate)],
        if_match: IfMatch = "",
        delete_checkpoints: bool = False,
    ) -> None:
        """Forget a run that has ended. Its checkpoints stay on disk unless they are to go too."""
        await access.run(who, run_id, "admin")
        await manager.delete(
            run_id, revision=revision_of(if_match), delete_checkpoints=delete_checkpoints
        )


async def _json(request: Request) -> Any:
    """The body of a request.

    Raises:
        BodyError: If it is not JSON, or nothing that can be read.
    """
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise BodyError(str(error)) from error


def revision_of(if_match: str) -> int:
    """The revision in an ``If-Match`` header.

    Raises:
        PreconditionRequiredError: If there is none.
    """
    if not if_match:
        raise PreconditionRequiredError(
            "If-Match is needed: send the ETag of the run as you read it"
        )
    text = if_match.strip().removeprefix('"').removesuffix('"')
    # What is no revision of ours matches none.
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else -1
