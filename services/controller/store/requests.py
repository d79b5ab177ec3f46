"""What users ask of a run and it has not done yet. Works inside the caller's transaction."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from services.controller.store.tables import REQUESTS

RequestKind = Literal["pause", "save", "evaluate", "resize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Something that a run is asked for."""

    kind: RequestKind
    request_id: str
    """Differs each time that the same is asked for."""
    options: Mapping[str, int]
    """Numbers and truths by name."""


def read_requests(connection: sa.Connection, run_id: str) -> list[Request]:
    """What a run has not done yet: one of a kind at most."""
    rows = connection.execute(sa.select(REQUESTS).where(REQUESTS.c.run_id == run_id))
    return [
        Request(kind=row.kind, request_id=row.request_id, options=json.loads(row.options_json))
        for row in rows
    ]


def write_request(connection: sa.Connection, run_id: str, request: Request) -> None:
    """Store a request in place of an earlier one of its kind."""
    forget_requests(connection, run_id, request.kind)
    connection.execute(
        REQUESTS.insert().values(
            run_id=run_id,
            kind=request.kind,
            request_id=request.request_id,
            options_json=json.dumps(dict(request.options)),
        )
    )


def forget_requests(
    connection: sa.Connection, run_id: str, kind: RequestKind | None = None, request_id: str = ""
) -> None:
    """Delete the requests of a run: all, those of a kind, or one unless it was replaced meanwhile."""
    query = REQUESTS.delete().where(REQUESTS.c.run_id == run_id)
    if kind is not None:
        query = query.where(REQUESTS.c.kind == kind)
    if request_id:
        query = query.where(REQUESTS.c.request_id == request_id)
    connection.execute(query)
