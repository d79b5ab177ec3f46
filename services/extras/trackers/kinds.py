"""Properties of the built-in trackers. Imports no tracker."""

from typing import Final

from services.common.runspec.trackers import TrackerKind

_HERE: Final = "services.extras.trackers"

WANDB: Final = TrackerKind("wandb", f"{_HERE}.wandb_runs:open_run")
TENSORBOARD: Final = TrackerKind("tensorboard", f"{_HERE}.tensorboard_files:open_run")
MLFLOW: Final = TrackerKind("mlflow", f"{_HERE}.mlflow_runs:open_run")
TRACKIO: Final = TrackerKind("trackio", f"{_HERE}.trackio_runs:open_run")
