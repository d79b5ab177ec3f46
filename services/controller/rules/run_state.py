"""State machine of a run: states, events and transitions. Pure."""

from enum import StrEnum
from typing import Final, Literal


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
    (_S.PAUSING, _E.LOSE): _S.RECOVERING,
    (_S.PAUSING, _E.FAIL): _S.FAILED,
    (_S.PAUSING, _E.CANCEL): _S.CANCELLING,
    (_S.PAUSED, _E.RESUME): _S.QUEUED,
    (_S.PAUSED, _E.CANCEL): _S.CANCELLING,
    (_S.PAUSED, _E.FAIL): _S.FAILED,
    (_S.RECOVERING, _E.RECOVER): _S.RUNNING,
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
    """Returns the state that ``event`` leads to, or None if it is not allowed in ``state``."""
    return TRANSITIONS.get((state, event))
