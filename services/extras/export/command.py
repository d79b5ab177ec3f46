"""The ``export`` command: writes a run's weights as a Hugging Face folder."""

import warnings
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from services.cli.api import Api, ApiError
from services.cli.api_calls import DEFAULT_STATE, RunId, StateDirectory, of_run
from services.cli.controller_address import Url
from services.cli.output import console, errors, fail, print_line
from services.common.errors import ServiceError
from services.common.local_copies import with_local_copies
from services.common.models.weight_formats import FORMATS
from services.common.runspec.loader import parse_spec
from services.common.runspec.run import RunSpec
from services.common.stores import fetch, is_url, upload
from services.controller.api.operations import ListCheckpoints
from services.controller.schemas import RunView

_HUGGING_FACE = "hf"
# Another user may serve the model, but the umask of a run's files allows only their owner.
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755


def export(
    run_id: RunId,
    folder: Annotated[Path, typer.Argument(help="Target folder; new or empty.")],
    checkpoint_id: Annotated[
        str, typer.Option(help="Checkpoint to export. Default: the newest one.")
    ] = "",
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Export the best checkpoint, as trainer.checkpoint.best defines it."
        ),
    ] = False,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="Format of the weights: hf, or one that is installed, as dcp."
        ),
    ] = "hf",
    push: Annotated[
        str,
        typer.Option(
            help="Also upload it to this Hugging Face repository, such as me/model, or URL of a store."
        ),
    ] = "",
    url: Url = None,
    state_directory: StateDirectory = DEFAULT_STATE,
) -> None:
    """Write a run's weights as a Hugging Face or DCP folder, adapters merged, with its tokenizer."""
    try:
        is_used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise typer.BadParameter(
            f"{folder} cannot be read ({error.strerror}); use another one"
        ) from error
    if is_used:
        raise typer.BadParameter(f"{folder} exists and is not an empty folder; use another one")
    if format_ not in (_HUGGING_FACE, *FORMATS):
        choices = ", ".join((_HUGGING_FACE, *FORMATS))
        raise typer.BadParameter(f"--format {format_!r} is not installed; use one of {choices}")

    async def work(api: Api, full_id: str) -> tuple[str, RunSpec]:
        view = await api.get(full_id)
        best_step = _best(view) if best else None
        return await _checkpoint(api, full_id, checkpoint_id, step=best_step), parse_spec(view.spec)

    location, spec = of_run(url, run_id, work, state_directory=state_directory)
    try:
        checkpoint = fetch(location, "checkpoint") if is_url(location) else Path(location)
        spec = with_local_copies(spec)
    except (ServiceError, ValueError) as error:
        fail(str(error))
        raise typer.Exit(1) from None
    if not checkpoint.is_dir():
        fail(
            f"{checkpoint} is not on this machine; run the export on the machine with the run's checkpoints"
        )
        raise typer.Exit(1)
    print_line(errors, f"exporting {checkpoint}")
    try:
        _write(checkpoint, spec, folder, format_=format_)
        if push:
            _upload(folder, push)
    except (ServiceError, ValueError, OSError) as error:
        fail(str(error))
        raise typer.Exit(1) from None
    console.print(f"{folder}", highlight=False, soft_wrap=True)


def _best(run: RunView) -> int:
    """Returns the step of the checkpoint with the highest held-out score."""
    if (best := run.summary.get("best")) is None:
        raise ApiError(
            f"{run.name} has no best checkpoint: set trainer.checkpoint.best, and let the run evaluate and "
            "save at least one version"
        )
    return int(best["step"])


async def _checkpoint(api: Api, run_id: str, checkpoint_id: str, *, step: int | None) -> str:
    checkpoints = (await api.call(ListCheckpoints(run_id=run_id))).items
    ready_checkpoints = [item for item in checkpoints if item.state == "READY"]
    matching = [
        item
        for item in ready_checkpoints
        if checkpoint_id in ("", item.id) and step in (None, item.step)
    ]
    if not matching:
        ids = ", ".join(item.id for item in ready_checkpoints) or "none"
        raise ApiError(
            f"{run_id} has no ready checkpoint {checkpoint_id}; its ready checkpoints are {ids}"
            if checkpoint_id
            else f"{run_id} has no checkpoint; 'slipstream checkpoint' saves one if the run is active"
        )
    return str(matching[0].path)


def _write(checkpoint: Path, spec: RunSpec, folder: Path, *, format_: str) -> None:
    # This imports torch.
    from services.extras.export.checkpoint import export_checkpoint

    with warnings.catch_warnings():  # torch's, about the one process of an export
        warnings.simplefilter("ignore", UserWarning)
        if format_ == _HUGGING_FACE:
            export_checkpoint(checkpoint, spec, folder)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder.parent) as folder_name:
                export_checkpoint(checkpoint, spec, Path(folder_name))
                resolve_name(FORMATS[format_].writer)(Path(folder_name), folder)
    folder.chmod(_FOLDER_MODE)
    for path in folder.rglob("*"):
        path.chmod(_FOLDER_MODE if path.is_dir() else _FILE_MODE)


def _upload(folder: Path, repository: str) -> None:
    """Uploads the folder to a repository of Hugging Face or a URL of an object store."""
    if is_url(repository):
        upload(folder, repository, report=lambda line: print_line(errors, line) if line else None)
        print_line(errors, f"uploaded to {repository}")
        return
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of an HTTP library that differs between releases
        raise OSError(
            f"{folder} is written, but uploading it to {repository!r} failed ({error}); check the name and "
            f"HF_TOKEN, then run 'hf upload {repository} {folder}'"
        ) from error
    print_line(errors, f"uploaded to {repository}")
