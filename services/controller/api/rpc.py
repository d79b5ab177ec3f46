"""gRPC service of the run API: one method per operation, on the same runs and for the same principals."""

import json
import math
import re
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from annotated_types import Le
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel, ValidationError

from services.common.errors import InvalidArgumentError, NotFoundError
from services.common.rpc.server import Know
from services.common.runspec.loader import MAX_DOCUMENT_BYTES, SpecError
from services.common.task_group import uninterrupted
from services.controller.api.errors import (
    InvalidRequestError,
    InvalidSpecError,
    describe_field_error,
)
from services.controller.api.operations import OPERATIONS, Operation
from services.controller.api.principals import Principal
from services.controller.api.run_api import RunApi
from services.controller.schemas import (
    CheckpointView,
    EventView,
    GroupView,
    ListedRun,
    LogLine,
    Metric,
    QuotaView,
    RunPatch,
    RunView,
    ValidatedView,
)
from services.controller.store.records import Event
from slipstream.controller.v1 import run_pb2 as pb
from slipstream.controller.v1 import run_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
# Fields that bound a response; larger values are lowered to the maximum.
_BOUNDED = {"page_size", "limit", "tail_lines", "max_points", "steps"}
_RUN_ID = re.compile("run_[0-9a-f]{32}")
# Stands for the caller's address, which is unknown before the request is read.
_GRPC = "gRPC"

_REQUEST_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "name": lambda name: {"run_id": run_id_of(name)},
    "run_name": lambda name: {"name": name},
    "metric": lambda name: {"name": [name]},
    "type": lambda type_: {"type": [type_]},
    "state": lambda state: {"state": _state_name(state)},
    "oldest_first": lambda is_oldest: {"order_by": "create_time" if is_oldest else "-create_time"},
    "after_time": lambda moment: {"last_event_id": repr(moment)},
    "step_count": lambda count: {"steps": count},
    "grace_s": lambda grace_s: {"grace_seconds": grace_s},
    "skip_checkpoint": lambda skips: {"checkpoint": not skips},
    "labels": lambda labels: {"label": [f"{key}={value}" for key, value in labels.items()]},
    "request_id": lambda key: {"idempotency_key": key},
    "spec_json": lambda text: {"spec": _object("spec_json", text)},
    "overrides_json": lambda text: {"overrides": _object("overrides_json", text)},
    "patch_json": lambda text: RunPatch.model_validate_json(text).model_dump(exclude_unset=True),
    "revision": lambda revision: {"if_match": f'"{revision}"'},
    "follow": lambda _: {},
}
"""Request fields with another name or format in gRPC than in the operations."""

_RESPONSE_FIELDS: dict[type[BaseModel], Callable[[Any], dict[str, Any]]] = {
    ListedRun: lambda run: {
        "name": f"runs/{run.id}",
        "state": f"STATE_{run.state}",
        "summary_json": json.dumps(run.summary),
    },
    RunView: lambda run: {**_RESPONSE_FIELDS[ListedRun](run), "spec_json": _canonical(run.spec)},
    ValidatedView: lambda validated: {"spec_json": _canonical(validated.spec)},
    EventView: lambda event: {
        "run": f"runs/{event.run_id}",
        "data_json": json.dumps(event.data),
    },
    CheckpointView: lambda checkpoint: {"checkpoint_id": checkpoint.id},
    Metric: lambda metric: {
        "values": [math.nan if value is None else value for value in metric.values]
    },
    GroupView: lambda group: {
        "oldest_version": -1 if group.oldest_version is None else group.oldest_version
    },
    QuotaView: lambda quota: {
        **{_counted(name): value for name, value in quota if isinstance(value, int)},
        "request_rate_limit": quota.max_requests_per_second,
    },
}
"""Response fields with another name or format in gRPC than in the models."""


RUN_SERVICE = pb.DESCRIPTOR.services_by_name["RunService"].full_name
"""Full name of the service whose callers are users with API tokens."""

_user: ContextVar[Principal] = ContextVar("user")


def run_users(api: RunApi) -> dict[str, Know]:
    """Returns the authenticator of the service; it runs before a request is read."""

    async def know(authorization: str) -> None:
        _user.set(await api.authenticate(authorization, _GRPC))

    return {RUN_SERVICE: know}


def run_servicer(api: RunApi) -> run_pb2_grpc.RunServiceServicer:
    """Builds the servicer, with a method for each operation; its server needs :func:`run_users`."""
    methods = {
        method.name: _method(api, method)
        for method in pb.DESCRIPTOR.services_by_name["RunService"].methods
    }
    servicer: run_pb2_grpc.RunServiceServicer = type(
        "RunServicer", (run_pb2_grpc.RunServiceServicer,), methods
    )()
    return servicer


def _method(api: RunApi, method: MethodDescriptor) -> Callable[..., Any]:
    operations = [entry for entry in OPERATIONS if method.name in (entry.rpc, entry.__name__)]
    kind = GetMessageClass(method.output_type)

    async def answer(self: Any, request: Any, context: _Context) -> Message:
        # gRPC cancels a method when its caller disconnects. If that happened between the database record
        # of a command and its effect, no task would train the run, or the run would never pause.
        answering = _answer(api, _user.get(), operations[0], request)
        return message_of(await uninterrupted(answering), kind)

    async def stream(self: Any, request: Any, context: _Context) -> AsyncIterator[Message]:
        who = _user.get()
        operation = operations[-1] if len(operations) == 1 or request.follow else operations[0]
        if operation.form == "lines":
            async for lines in await _answer(api, who, operation, request):
                for line in lines:
                    yield message_of(line, kind)
            return
        with api.limits.stream(who.project):
            async for items in await _answer(api, who, operation, request):
                for _, item in items:
                    if isinstance(item, (Event, LogLine)):
                        yield message_of(item, kind)

    return stream if method.server_streaming else answer


async def _answer(
    api: RunApi, who: Principal, operation: type[Operation[Any]], request: Message
) -> Any:
    if request.ByteSize() > MAX_DOCUMENT_BYTES:
        raise InvalidArgumentError(
            f"a request must have at most {MAX_DOCUMENT_BYTES} bytes, got {request.ByteSize()}"
        )
    try:
        parsed = operation.model_validate(_fields(operation, request))
    except ValidationError as error:
        texts = (
            f"{'.'.join(map(str, item['loc'])) or 'the request'}: {describe_field_error(item)}"
            for item in error.errors()
        )
        raise InvalidRequestError("\n".join(texts)) from error
    try:
        return (await api.answer(who, parsed))[0]
    except SpecError as error:
        raise InvalidSpecError(str(error)) from error


def _fields(operation: type[Operation[Any]], request: Message) -> dict[str, Any]:
    """Returns the fields of an operation from a message; zero or empty fields keep their defaults."""
    fields: dict[str, Any] = {"if_match": '"0"'} if "if_match" in operation.model_fields else {}
    for field, value in request.ListFields():
        fields |= (
            _REQUEST_FIELDS[field.name](value)
            if field.name in _REQUEST_FIELDS
            else {field.name: value}
        )
    for name in _BOUNDED & fields.keys():
        bounds = operation.model_fields[name].metadata
        fields[name] = min(fields[name], *(bound.le for bound in bounds if isinstance(bound, Le)))
    return fields


def message_of(answer: Any, kind: type[Message]) -> Message:
    """Converts a response into a message; omits fields that the message lacks."""
    if isinstance(answer, Event):
        answer = EventView.model_validate(answer)
    fields = {} if answer is None else dict(answer)
    if type(answer) in _RESPONSE_FIELDS:
        fields |= _RESPONSE_FIELDS[type(answer)](answer)
    values: dict[str, Any] = {}
    for field in kind.DESCRIPTOR.fields:
        # A page has one list, under a different name in each message.
        value = fields.get(field.name, fields.get("items") if field.message_type else None)
        if value is not None:
            values[field.name] = _value(value, field)
    return kind(**values)


def _value(value: Any, field: Any) -> Any:
    if isinstance(value, BaseModel):
        return message_of(value, GetMessageClass(field.message_type))
    if isinstance(value, list):
        return [_value(item, field) for item in value]
    return value


def run_id_of(name: str) -> str:
    """Returns the id in a run's resource name.

    Raises:
        InvalidArgumentError: If the name is not ``runs/`` and an id.
        NotFoundError: If no run can have this id.
    """
    prefix, _, run_id = name.partition("/")
    if prefix != "runs" or not run_id:
        raise InvalidArgumentError(f"the name of a run must be 'runs/RUN_ID', got {name!r}")
    if not _RUN_ID.fullmatch(run_id):
        raise NotFoundError(f"run {run_id!r} does not exist; list the runs of the project")
    return run_id


def _state_name(number: int) -> str:
    """Returns the name of a state; for an unknown state, its number as text, which no filter accepts."""
    descriptor = pb.Run.State.DESCRIPTOR.values_by_number.get(number)
    return descriptor.name.removeprefix("STATE_") if descriptor else str(number)


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} must be JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"{name} must be a JSON object, got {type(document).__name__}")
    return document


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _counted(name: str) -> str:
    """Converts a quota field's name: ``gpu_limit`` for ``max_gpus``, ``gpu_count`` for ``gpus``."""
    singular = name.removeprefix("max_").removesuffix("s")
    return f"{singular}_limit" if name.startswith("max_") else f"{singular}_count"
