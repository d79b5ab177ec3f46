"""Converts records of the controller into responses of the API, page by page."""

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from services.common.errors import InvalidArgumentError
from services.common.telemetry import tracing
from services.controller.manager.quotas import Quota
from services.controller.models import ListedRun, QuotaView, RunError, RunView
from services.controller.rules.run_state import RunState, desired_state
from services.controller.store.records import Run

_INFRA = frozenset(
    {"WorkerLost", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS", "DATABASE_UNAVAILABLE"}
)
_USER = frozenset(
    {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "GenerationError", "SpecError", "QueueTimeout"}
)

# The message begins with the lost worker or with the called service.
_COMPONENT = re.compile(r"([a-z_]+-\d+)\b|/slipstream\.([a-z]+)\.v1\.")


def view_run(run: Run, activities: Sequence[str] = ()) -> RunView:
    """Builds the view of a run with its activities."""
    return RunView(**_fields(run, activities), spec=json.loads(run.spec_json))


def view_listed(run: Run, activities: Sequence[str] = ()) -> ListedRun:
    """Builds the list view of a run with its activities."""
    return ListedRun(**_fields(run, activities))


def _fields(run: Run, activities: Sequence[str]) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in Run.__slots__},
        "id": run.run_id,
        "desired": desired_state(run.state),
        "activities": list(activities),
        "error": error_of(run),
    }


def view_quota(quota: Quota, *, event_streams: int) -> QuotaView:
    """Builds the view of a project's limits and use."""
    own = {name: getattr(quota, name) for name in Quota.__slots__}
    return QuotaView(**own, **asdict(quota.limits), event_streams=event_streams)


def error_of(run: Run) -> RunError | None:
    """Returns the error of a failed run; None for other runs."""
    if run.state is not RunState.FAILED:
        return None
    category: Literal["USER", "SYSTEM", "INFRA"] = "SYSTEM"
    if run.state_reason in _INFRA:
        category = "INFRA"
    elif run.state_reason in _USER:
        category = "USER"
    return RunError(
        code=run.state_reason,
        category=category,
        recoverable=category == "INFRA",
        message=run.message,
        component=_component_of(run),
        trace_id=tracing.of_step(run.run_id, run.step + 1).trace_id,
    )


def _component_of(run: Run) -> str:
    """Returns the part that failed: a worker, a service, or the controller if the message names no other."""
    if run.state_reason == "GenerationError":
        return "rollout"
    found = _COMPONENT.match(run.message)
    return found[1] or found[2] if found else "controller"


_MAC_BYTES = 12


class PageTokens:
    """Creates and reads page tokens; tokens of an earlier process are refused."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self, position: str, scope: str) -> str:
        """Returns the token that continues after ``position`` in the list named ``scope``."""
        return base64.urlsafe_b64encode(self._mac(position, scope) + position.encode()).decode()

    def read(self, token: str, scope: str) -> str | None:
        """Returns the position of a token; None for the first page.

        Raises:
            InvalidArgumentError: If this object did not create the token for this list.
        """
        if not token:
            return None
        try:
            raw = base64.urlsafe_b64decode(token.encode())
            position = raw[_MAC_BYTES:].decode()
        except ValueError:
            raw, position = b"", ""
        if not hmac.compare_digest(raw[:_MAC_BYTES], self._mac(position, scope)):
            raise InvalidArgumentError(
                "page_token must be the next_page_token of the same list; start again without it"
            )
        return position

    def _mac(self, position: str, scope: str) -> bytes:
        text = f"{scope}\0{position}".encode()
        return hmac.digest(self._key, text, hashlib.sha256)[:_MAC_BYTES]
