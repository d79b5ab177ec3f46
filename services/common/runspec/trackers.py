"""Experiment trackers that receive a run's metrics. Imports no tracker.

The address and the credentials of a tracker are settings of the installation, never of a run.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, ValidationInfo, field_validator

from services.common.doors import Door
from services.common.runspec.base import NameIn, SpecPart


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """A tracker that a run can name."""

    package: str
    """Package that must be installed where ``slipstream track`` runs; an extra of Slipstream has
    the same name."""
    opens: str
    """Reference ``module:function`` of a ``OpenTracker`` (``services/extras/trackers/tracker.py``)."""


TRACKERS: Final = Door("trackers", TrackerKind)
"""The trackers by the value of ``trackers.N.kind``."""

_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


class TrackerSpec(SpecPart):
    """A tracker that receives the run's configuration, metrics, evaluations and some samples."""

    kind: Annotated[str, NameIn(TRACKERS)]
    """The tracker; its package must be installed where ``slipstream track`` runs
    (docs/trackers.md)."""
    project: str = Field("slipstream", pattern=f"^{_NAME}(/{_NAME})?$")
    """Project (``TEAM/PROJECT`` for wandb), experiment (mlflow) or folder (tensorboard)."""
    tags: tuple[str, ...] = Field((), max_length=32)
    """Tags of the run, if the tracker supports them."""
    samples_every: int = Field(10, ge=0)
    """Steps between two tables of kept samples; each evaluation adds one table. 0 sends no texts."""
    samples: int = Field(8, ge=1, le=100)
    """Max samples of a table: the best and the worst of the kept samples."""

    @field_validator("project")
    @classmethod
    def _teams_are_wandbs(cls, project: str, info: ValidationInfo) -> str:
        if "/" in project and info.data.get("kind") != "wandb":
            raise ValueError(
                f"{project!r} has a team, but only wandb has teams; remove the part before '/'"
            )
        return project
