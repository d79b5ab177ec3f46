"""State machine of a run: states, events and transitions. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal


class RunState(StrEnum):
    """State of a run."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class RunEvent(StrEnum):
    """Event that changes the state of a run."""

    ADMIT = "admit"
    READY = "ready"
    PAUSE = "pause"
    DRAINED = "drained"
    RESUME = "resume"
    LOSE = "lose"
    RECOVER = "recover"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    STOPPED = "stopped"


TERMINAL: Final = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})

_S, _E = RunState, RunEvent

TRANSITIONS: Final[dict[tuple[RunState, RunEvent], RunState]] = {
    (_S.QUEUED, _E.ADMIT): _S.STARTING,
    (_S.QUEUED, _E.PAUSE): _S.PAUSED,
    (_S.QUEUED, _E.FAIL): _S.FAILED,
    (_S.QUEUED, _E.CANCEL): _S.CANCELLED,
    (_S.STARTING, _E.READY): _S.RUNNING,
    (_S.STARTING, _E.DRAINED): _S.PAUSED,
    (_S.STARTING, _E.LOSE): _S.RECOVERING,
    (_S.STARTING, _E.FAIL): _S.FAILED,
    (_S.STARTING, _E.CANCEL): _S.CANCELLING,
    (_S.RUNNING, _E.PAUSE): _S.PAUSING,
    (_S.RUNNING, _E.LOSE): _S.RECOVERING,
    (_S.RUNNING, _E.FINISH): _S.SUCCEEDED,
    (_S.RUNNING, _E.FAIL): _S.FAILED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLING,
    (_S.PAUSING, _E.DRAINED): _S.PAUSED,
    (_S.PAUSING, _E.FINISH): _S.SUCCEEDED,
    (_S.PAUSING, _E.LOSE): _S.PAUSING,  # it lost workers while a user paused it
    (_S.PAUSING, _E.RECOVER): _S.PAUSING,  # it recovered while a user paused it
    (_S.PAUSING, _E.FAIL): _S.FAILED,
    (_S.PAUSING, _E.CANCEL): _S.CANCELLING,
    (_S.PAUSED, _E.RESUME): _S.QUEUED,
    (_S.PAUSED, _E.CANCEL): _S.CANCELLING,
    (_S.PAUSED, _E.FAIL): _S.FAILED,
    (_S.RECOVERING, _E.RECOVER): _S.RUNNING,
    (_S.RECOVERING, _E.PAUSE): _S.PAUSING,
    (_S.RECOVERING, _E.DRAINED): _S.PAUSED,
    (_S.RECOVERING, _E.FAIL): _S.FAILED,
    (_S.RECOVERING, _E.CANCEL): _S.CANCELLING,
    (_S.CANCELLING, _E.STOPPED): _S.CANCELLED,
}


Desired = Literal["RUNNING", "PAUSED", "CANCELLED"]


def desired_state(state: RunState) -> Desired:
    """Returns the state that the user's last command asked for, which the run reaches by itself."""
    if state in (_S.PAUSING, _S.PAUSED):
        return "PAUSED"
    return "CANCELLED" if state in (_S.CANCELLING, _S.CANCELLED) else "RUNNING"


def next_state(state: RunState, event: RunEvent) -> RunState | None:
    return TRANSITIONS.get((state, event))


ConditionType = Literal[
    "Admitted",
    "Placed",
    "WeightGroupReady",
    "DataPlaneReady",
    "Progressing",
    "Degraded",
    "CheckpointCurrent",
    "Draining",
]
ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """Status of one aspect of a run, with its cause and the time of its last change."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    """Stable code of the newest change, such as ``Unschedulable``."""
    message: str
    """Cause, for people."""
    observed_generation: int
    """Generation of the specification under which the change was observed."""
    last_transition_time: float
    """Time of the last change of the status, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Change:
    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


VOLATILE: Final = "Volatile"
"""Reason of an event ``CheckpointSaved`` whose files are lost with the trainer."""

_FALSE_UNTIL_STARTED: Final[tuple[ConditionType, ...]] = (
    "Admitted",
    "Placed",
    "WeightGroupReady",
    "DataPlaneReady",
    "Progressing",
)
_WAITS: Final = ("Queued", "Starting")
_TRAINS: Final = _Change("Progressing", "True", "Training", "the run trains steps")
_CONDITION_OF_EVENT: Final[dict[str, tuple[ConditionType, ConditionStatus]]] = {
    "Waiting": ("Admitted", "False"),
    "WorkerPending": ("Placed", "False"),
    "NoProgress": ("Progressing", "False"),
    "ResizeFailed": ("Degraded", "True"),
    "CheckpointSaved": ("CheckpointCurrent", "True"),
    "CheckpointFailed": ("CheckpointCurrent", "False"),
    "Draining": ("Draining", "True"),
    "Drained": ("Draining", "False"),
}
"""Events that change exactly one condition."""


def conditions_after(
    conditions: Sequence[Condition],
    event: str,
    message: str,
    data: Mapping[str, Any],
    *,
    generation: int,
    time: float,
) -> tuple[Condition, ...]:
    """Returns the conditions of a run after an event; conditions that it does not concern are unchanged.

    Args:
        time: Time of the event, in seconds since the epoch.
    """
    by_type = {condition.type: condition for condition in conditions}
    for change in _changes(event, message, data, conditions):
        old = by_type.get(change.type)
        by_type[change.type] = Condition(
            type=change.type,
            status=change.status,
            reason=change.reason,
            message=change.message,
            observed_generation=generation,
            last_transition_time=(
                old.last_transition_time if old and old.status == change.status else time
            ),
        )
    return tuple(by_type.values())


def _changes(
    event: str, message: str, data: Mapping[str, Any], conditions: Sequence[Condition]
) -> Iterable[_Change]:
    if event in _CONDITION_OF_EVENT:
        type_, status = _CONDITION_OF_EVENT[event]
        if data.get("reason") == VOLATILE:
            status = "False"
        yield _Change(type_, status, data.get("reason", event), message)
    elif event == "Submitted":
        yield from _submitted()
    elif event == "StateChanged":
        yield from _moved(RunState(data["to"]), data["reason"], message, conditions)
    elif event == "WorkersReady":
        yield from _ready(message, data["absent"])
    elif event in ("Resized", "Replaced"):
        yield from () if data["absent"] else _complete(message)
    elif event == "WorkerLost":
        yield from _lost(message.partition("\n")[0], data["workers"])
    elif event == "StepCommitted":
        yield _TRAINS


def _submitted() -> Iterable[_Change]:
    for type_ in _FALSE_UNTIL_STARTED:
        yield _Change(type_, "False", "Queued", "the run is queued")
    yield _Change("Degraded", "False", "AsExpected")
    yield _Change("CheckpointCurrent", "False", "NoCheckpoint", "no checkpoint is saved yet")


def _moved(
    state: RunState, reason: str, message: str, conditions: Sequence[Condition]
) -> Iterable[_Change]:
    if state is RunState.QUEUED:
        yield _Change("Admitted", "False", "Queued", "the run is queued")
    elif state is RunState.STARTING:
        yield _Change("Admitted", "True", reason, "the run is admitted")
        yield _Change("Placed", "Unknown", "Starting", "the workers are starting")
        yield _Change("Progressing", "False", "Starting", message)
    elif state is RunState.RUNNING:
        yield _TRAINS
    elif state is RunState.RECOVERING:
        yield _Change("Progressing", "False", reason, message)
        yield _Change("Degraded", "True", reason, message)
    elif state is RunState.PAUSED or state in TERMINAL:
        for condition in conditions:
            if condition.type != "CheckpointCurrent" and not (
                state is RunState.FAILED and _may_explain(condition)
            ):
                yield _Change(condition.type, "False", reason, message)


def _may_explain(condition: Condition) -> bool:
    """Returns True if a condition may be the cause of a failed run; mere waiting is not."""
    is_waiting = condition.type == "Progressing" or condition.reason in _WAITS
    return condition.status == "False" and not is_waiting


def _ready(message: str, absent: Sequence[str]) -> Iterable[_Change]:
    yield _Change("WeightGroupReady", "True", "Agreed", "all members agree on the weight plan")
    yield _Change("DataPlaneReady", "True", "Connected", "the transferqueue accepts samples")
    if absent:
        yield _Change("Placed", "False", "WorkersMissing", message)
        yield _Change("Degraded", "True", "WorkersMissing", message)
    else:
        yield from _complete(message)


def _complete(message: str) -> Iterable[_Change]:
    yield _Change("Placed", "True", "WorkersReady", message)
    yield _Change("Degraded", "False", "AsExpected")


def _lost(message: str, workers: Sequence[str]) -> Iterable[_Change]:
    yield _Change("Degraded", "True", "WorkerLost", message)
    yield _Change("WeightGroupReady", "False", "WorkerLost", message)
    if workers:
        yield _Change("Placed", "False", "WorkerLost", message)
    else:
        # A call failed although every worker is alive.
        yield _Change("DataPlaneReady", "Unknown", "CallFailed", message)
