"""Runs in MLflow, identified by the tag ``slipstream.run``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from services.common.runspec.keys import flat
from services.common.runspec.trackers import TrackerSpec
from services.controller.schemas import RunView
from services.extras.trackers.tracker import COLUMNS, EventPosition, NewestSteps, Split

_TAG = "slipstream.run"
_STATUS = {"SUCCEEDED": "FINISHED", "CANCELLED": "KILLED", "FAILED": "FAILED"}
# Limits of MLflow's servers.
_PARAMS_A_CALL = 100
_MAX_VALUE = 6000


class MlflowRun:
    """One run in MLflow.

    Args:
        names: Names of the metrics that the run already has.
    """

    rereads = 0

    def __init__(self, client: MlflowClient, run_id: str, names: Sequence[str]) -> None:
        self._client = client
        self._run_id = run_id
        self._newest = NewestSteps()
        for name in names:
            for metric in client.get_metric_history(run_id, name):
                self._newest.record_step(name, metric.step)

    def numbers(self, moment: EventPosition, numbers: Mapping[str, float]) -> None:
        numbers_by_name = {_allowed(name): number for name, number in numbers.items()}
        new = self._newest.pop_new(moment.step, numbers_by_name)
        time_ms = round(1000 * moment.time)
        metrics = [Metric(name, number, time_ms, moment.step) for name, number in new.items()]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def samples(self, moment: EventPosition, split: Split, rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table as an artifact."""
        table = {"columns": list(COLUMNS), "data": [list(row) for row in rows]}
        self._client.log_dict(self._run_id, table, f"samples/{split}/{moment.step:06}.json")

    def close(self, state: str) -> None:
        """Sets the run's status if the run has ended."""
        if state:
            self._client.set_terminated(self._run_id, _STATUS.get(state, "FAILED"))


def open_run(run: RunView, spec: TrackerSpec, folder: Path) -> MlflowRun:
    """Opens a run in its project's experiment, with its specification as parameters."""
    client = MlflowClient()
    number = _experiment(client, spec.project, folder)
    runs = client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
    if runs:
        mlflow_id = runs[0].info.run_id
        client.update_run(mlflow_id, status="RUNNING")
        return MlflowRun(client, mlflow_id, list(runs[0].data.metrics))
    tags = {_TAG: run.id, **{f"slipstream.label.{key}": value for key, value in run.labels.items()}}
    begin_ms = round(1000 * run.create_time.timestamp())
    run_id = client.create_run(
        number, start_time=begin_ms, run_name=run.name, tags=tags
    ).info.run_id
    params = [Param(_allowed(key), str(value)[:_MAX_VALUE]) for key, value in flat(run.spec)]
    for begin in range(0, len(params), _PARAMS_A_CALL):
        client.log_batch(run_id, params=params[begin : begin + _PARAMS_A_CALL])
    client.log_batch(run_id, tags=[RunTag(f"slipstream.tag.{tag}", "true") for tag in spec.tags])
    return MlflowRun(client, run_id, [])


def _experiment(client: MlflowClient, name: str, folder: Path) -> str:
    """Returns the id of an experiment, which is created if necessary."""
    if (experiment := client.get_experiment_by_name(name)) is not None:
        return str(experiment.experiment_id)
    # A database has no artifact location; the default would be the current folder.
    is_here = client.tracking_uri.startswith("sqlite:")
    artifacts = (folder.absolute() / "mlflow-artifacts").as_uri() if is_here else None
    return str(client.create_experiment(name, artifact_location=artifacts))


def _allowed(name: str) -> str:
    """Returns the name with ``_`` in place of characters that MLflow does not allow."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)
