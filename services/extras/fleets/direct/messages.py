"""Messages between a rollout and the members of a weight group in a server's workers: JSON objects.

The rollout gives jobs, ``ping``, ``form`` and ``receive``, each with a number; a member answers ``done`` or
``failed``. Meanwhile members meet the trainer in the store of the run's controller, which only the rollout
reaches: their ``get``, ``set`` and ``add`` pass through it, with values in base64.
"""

import base64
from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter

from services.weightsync.transfer import TransferRequest
from services.weightsync.weight_plan import WeightPlan

Message = dict[str, Any]
PING, FORM, RECEIVE, VALUE = "ping", "form", "receive", "value"
DONE, FAILED, GET, SET, ADD = "done", "failed", "get", "set", "add"
JOIN_METHOD: Final = "join_weight_group"
LOAD_METHOD: Final = "load_group_weights"
"""Methods of the worker extension that vLLM calls on every worker."""

_PLAN: Final = TypeAdapter(WeightPlan)


def encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


def plan_message(plan: WeightPlan) -> Mapping[str, Any]:
    described: Mapping[str, Any] = _PLAN.dump_python(plan, mode="json")
    return described


def receive_message(request: TransferRequest) -> Message:
    """Returns the job to receive a version."""
    return {
        "kind": RECEIVE,
        "epoch": request.epoch,
        "version": request.version,
        "timeout_s": request.timeout_s,
    }


def read_plan(described: Any) -> WeightPlan:
    """Reads a plan.

    Raises:
        ValueError: If it is no plan.
    """
    return _PLAN.validate_python(described)
