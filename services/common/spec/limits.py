"""How long a run may take and how often it may restart."""

from pydantic import Field

from services.common.spec.base import SpecPart


class LimitsSpec(SpecPart):
    """Deadlines and restarts of a run."""

    queue_timeout_s: float = Field(0.0, ge=0)
    """Longest wait for a place in the project's quota, from the submission or from a resume on; the run fails
    then. 0 waits for ever."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Deadline for all workers to be ready, warm start included."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one trainer step."""
    stall_timeout_s: float = Field(600.0, gt=0)
    """An episode that makes no token and no call for this long is stopped, and goes on from what is stored
    on any replica; an engine that makes no token is replaced. Age alone never ends a response."""
    max_restarts: int = Field(3, ge=0)
    """Times in a row, without a finished step between them, that a run goes on after it lost a worker or
    the transferqueue; one more loss fails it. A lost trainer goes on from the newest checkpoint."""
