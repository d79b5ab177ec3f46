"""The experiment trackers that a run's numbers also go to. No tracker is imported here.

Where a tracker lives and its keys are settings of the installation, never of a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from services.common.runspec.base import SpecPart


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """A tracker that a run may name."""

    package: str
    """What must be installed where it is written to; an extra of Slipstream has its name."""
    opens: str
    """``module:function`` of :class:`~services.cli.trackers.tracker.OpenTracker`."""


_WRITERS: Final = "services.cli.trackers"

TRACKERS: Final[Mapping[str, TrackerKind]] = {
    "wandb": TrackerKind("wandb", f"{_WRITERS}.wandb_runs:open_run"),
    "tensorboard": TrackerKind("tensorboard", f"{_WRITERS}.tensorboard_files:open_run"),
    "mlflow": TrackerKind("mlflow", f"{_WRITERS}.mlflow_runs:open_run"),
    "trackio": TrackerKind("trackio", f"{_WRITERS}.trackio_runs:open_run"),
}
"""By the value of ``trackers.N.kind``."""

_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


class TrackerSpec(SpecPart):
    """A tracker that the run's configuration, numbers, evaluations and some samples go to."""

    kind: Literal["wandb", "tensorboard", "mlflow", "trackio"]
    """Which one; its package must be installed where ``slipstream track`` runs (docs/trackers.md)."""
    project: str = Field("slipstream", pattern=f"^{_NAME}(/{_NAME})?$")
    """Its project (``TEAM/PROJECT`` for wandb), experiment (mlflow) or folder (tensorboard)."""
    tags: tuple[str, ...] = Field((), max_length=32)
    """Labels of the run there, where it knows such."""
    samples_every: int = Field(10, ge=0)
    """Steps from one table of kept samples to the next; evaluations bring one each. 0 sends no text."""
    samples: int = Field(8, ge=1, le=100)
    """Most samples of a table: the best and the worst of those that are kept."""

    @field_validator("project")
    @classmethod
    def _teams_are_wandbs(cls, project: str, info: ValidationInfo) -> str:
        if "/" in project and info.data.get("kind") != "wandb":
            raise ValueError(
                f"{project!r} names a team, but only wandb has teams; leave out what stands before '/'"
            )
        return project
