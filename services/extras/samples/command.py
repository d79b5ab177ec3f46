"""The ``samples`` command: prints kept samples of a run as text or JSON lines."""

import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from pydantic import ValidationError
from rich.text import Text

from services.cli.api import Api
from services.cli.api_calls import DEFAULT_STATE, StateDirectory, call_api, find_run
from services.cli.controller_address import CliSettings, Url
from services.cli.local import SAMPLE_FOLDER
from services.cli.output import console, errors, fail, printable, write
from services.common.errors import FailedPreconditionError, NotFoundError, ServiceError
from services.common.stores import (
    is_url,
    join_url,
    open_folder,
    open_samples,
    url_problem,
    without_secrets,
)
from services.controller.api.operations import ExportSamples
from services.transferqueue.records.store import SampleStore, store_path
from services.wire.transferqueue.types import SampleRecordQuery
from slipstream_client.request import no_controller

Show = Callable[[Mapping[str, Any]], None]

_ON_SCREEN = 5
_KEYS = frozenset(("id", "prompt", "reward"))


def samples(
    run: Annotated[
        str,
        typer.Argument(
            help="Name of a run, the start of its id, or the URL of samples in an object store. Default: the "
            "newest run."
        ),
    ] = "",
    step: Annotated[
        int | None,
        typer.Option(
            help="Step that trained the samples; for held-out samples, the weight version.", min=0
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    heldout: Annotated[
        bool, typer.Option("--heldout", help="Samples of evaluations instead of training.")
    ] = False,
    group: Annotated[str, typer.Option(help="Only samples of this group.")] = "",
    row: Annotated[int | None, typer.Option(help="Row of the prompt in the data.", min=0)] = None,
    min_reward: Annotated[float | None, typer.Option(help="Min reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Max reward.")] = None,
    finish: Annotated[str, typer.Option(help="Finish reason: stop, length or failed.")] = "",
    text: Annotated[str, typer.Option(help="Text that the prompt or the response contains.")] = "",
    limit: Annotated[
        int | None,
        typer.Option(
            help="Max number of samples; 0 for all. Default: 5, or all with --export.", min=0
        ),
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens", help="Print JSON with each token's text, logprobs and weight version."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(
            help="Write the samples with their tokens as JSON lines to this file, or to this URL of an "
            "object store."
        ),
    ] = None,
    state_directory: StateDirectory = DEFAULT_STATE,
    url: Url = None,
) -> None:
    """Show samples of a run: prompts, responses, rewards and their use in training."""
    if best and worst:
        raise typer.BadParameter("--best and --worst exclude each other; use one of them")
    only = {
        "split": "heldout" if heldout else None if export else "train",
        "step": step,
        "group_id": group,
        "row": row,
        "min_reward": min_reward,
        "max_reward": max_reward,
        "finish_reason": finish,
        "text": text,
        "order_by": "best" if best else "worst" if worst else "newest",
    }
    limit = limit if limit is not None else 0 if export else _ON_SCREEN
    with_tokens = tokens or export is not None
    with _written(export, as_json=as_json or tokens) as show:
        reader = Reader(only, limit, with_tokens, show)
        number = (
            reader.read_url(run) if is_url(run) else _read_run(run, reader, url, state_directory)
        )
    if export is not None:
        errors.print(f"wrote {number} samples to {export}")
    elif not number:
        errors.print("no stored sample matches")


def _read_run(run: str, reader: "Reader", url: str | None, state_directory: Path) -> int:
    """Shows samples of a run: from the file on this host, else from the controller, else from the store."""
    run_id = call_api(url, lambda api: find_run(api, run or None), state_directory=state_directory)
    path = _store_of(state_directory, run_id)
    if not (url or CliSettings().url) and path.exists():
        return reader.read_file(path)
    operation = reader.operation(run_id)
    number = call_api(url, lambda api: reader.ask(api, operation), state_directory=state_directory)
    if number:
        return number
    view = call_api(url, lambda api: api.get(run_id), state_directory=state_directory)
    directory = view.spec.get("samples", {}).get("directory")  # an older run has none
    return reader.read_url(join_url(directory, run_id), may_be_empty=True) if directory else 0


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads samples from one of the places where they are, and shows each."""

    only: Mapping[str, Any]
    limit: int
    tokens: bool
    show: Show

    def operation(self, run_id: str) -> ExportSamples:
        try:
            return ExportSamples(run_id=run_id, **self.only, limit=self.limit, tokens=self.tokens)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            raise typer.BadParameter(f"{wrong['loc'][0]}: {wrong['msg']}") from error

    async def ask(self, api: Api, operation: ExportSamples) -> int:
        number = 0
        async for sample in api.samples(operation):
            if 0 < operation.limit <= number:
                raise no_controller(api.url, f"it sent more than {operation.limit} samples")
            if missing_keys := _KEYS - sample.keys():
                raise no_controller(api.url, f"a sample has no {min(missing_keys)!r}")
            try:
                self.show(sample)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise no_controller(api.url, f"a sample cannot be shown ({error!r})") from error
            number += 1
        return number

    def read_file(self, path: Path) -> int:
        """Shows samples of a file, which needs no controller; otherwise like :meth:`ask`."""
        query = SampleRecordQuery(
            **{name: value for name, value in self.only.items() if value is not None},
            limit=self.limit,
            with_turns=True,
            with_tokens=self.tokens,
        )
        number = 0
        for lines in SampleStore(path).lines(query):
            for line in lines:
                self.show(json.loads(line))
            number += len(lines)
        return number

    def read_url(self, url: str, *, may_be_empty: bool = False) -> int:
        """Shows samples of an object store, which are downloaded to a file first."""
        with tempfile.TemporaryDirectory(prefix="slipstream-samples-") as folder:
            path = Path(folder) / "samples.db"
            with (
                _failing_as(without_secrets(url)),
                suppress(*([NotFoundError] if may_be_empty else [])),
            ):
                open_samples(url.rstrip("/")).restore(path)
            return self.read_file(path)


def _store_of(state_directory: Path, run_id: str) -> Path:
    """Returns the file with the samples of a run that was trained in a state directory."""
    return store_path(state_directory / SAMPLE_FOLDER, run_id)


@contextmanager
def _written(export: str | None, *, as_json: bool) -> Iterator[Show]:
    """Yields a function that writes a sample: to a file or an object, as a JSON line, or as text."""
    if export is not None and is_url(export):
        with _uploaded(export) as show:
            yield show
    elif export is not None:
        try:
            file = Path(export).open("wb")  # noqa: SIM115  it is closed below
        except OSError as error:
            raise typer.BadParameter(
                f"--export {export}: cannot be written ({error.strerror}); use another file"
            ) from error
        with file:
            yield lambda sample: _append(file, sample)
    elif as_json:
        yield lambda sample: write(_line(sample))
    else:
        yield _show


@contextmanager
def _uploaded(url: str) -> Iterator[Show]:
    """Yields a function that collects samples, which become one object at the end; none after an error."""
    parent, _, name = url.rpartition("/")
    with _failing_as(f"--export {without_secrets(url)}"):
        if problem := url_problem(url):
            raise FailedPreconditionError(problem)
        if not name or parent.endswith("/"):
            raise FailedPreconditionError(
                "names a bucket; add the name of a file, as s3://bucket/samples.jsonl"
            )
        folder = open_folder(parent)
    with tempfile.TemporaryFile("w+b") as file:
        yield lambda sample: _append(file, sample)
        file.flush()
        with _failing_as(f"--export {without_secrets(url)}"), _mapped(file) as content:
            folder.put(name, content)


@contextmanager
def _mapped(file: BinaryIO) -> Iterator[memoryview]:
    """Yields the content of a file without reading it into memory."""
    if not os.fstat(file.fileno()).st_size:
        yield memoryview(b"")
        return
    with (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
        memoryview(pages) as content,
    ):
        yield content


@contextmanager
def _failing_as(subject: str) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        fail(f"{subject}: {error.message}")
        raise typer.Exit(1) from error


def _append(file: BinaryIO, sample: Mapping[str, Any]) -> None:
    file.write(f"{printable(_line(sample))}\n".encode())


def _line(sample: Mapping[str, Any]) -> str:
    return json.dumps(sample, ensure_ascii=False)


def _show(sample: Mapping[str, Any]) -> None:
    """Prints one sample as text."""
    console.print(Text.assemble((sample["id"], "bold"), f"  {_facts(sample)}"), soft_wrap=True)
    for image in sample.get("images") or ():
        name = image["name"] or "without a name"
        _block("image", f"{name}, {image['width']} x {image['height']} pixels", "blue")
    _block("prompt", sample["prompt"], "blue")
    for turn in sample.get("turns") or ():
        _block(
            "policy" if turn["is_sampled"] else "observed",
            turn["text"],
            "" if turn["is_sampled"] else "dim",
        )
    if sample.get("answer") is not None:
        _block("answer", str(sample["answer"]), "green")
    console.print()


def _facts(sample: Mapping[str, Any]) -> str:
    """Returns the facts of a sample in one line."""
    reward = sample["reward"]
    terms = {name: f"{value:.4g}" for name, value in (sample.get("terms") or {}).items()}
    columns = [
        "no step yet" if sample.get("step") is None else f"step {sample['step']}",
        "no reward" if reward is None else f"reward {reward:.4g}",
    ]
    if len(terms) > 1:
        columns[-1] += f" ({', '.join(f'{name} {value}' for name, value in terms.items())})"
    for name, form in (("advantage", "+.3f"), ("ratio", ".3f"), ("staleness", "d")):
        if sample.get(name) is not None:
            columns.append(f"{name} {sample[name]:{form}}")
    oldest, newest = sample.get("oldest_version"), sample.get("newest_version")
    versions = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    columns += [
        f"version {versions}",
        sample["finish_reason"],
        f"{sample['response_tokens']} tokens",
    ]
    return ", ".join([*columns, "greedy"] if sample["is_greedy"] else columns)


def _block(name: str, text: str, style: str) -> None:
    """Prints a text with its name before the first line."""
    for number, line in enumerate(text.splitlines() or [""]):
        head = name if number == 0 else ""
        console.print(Text(f"  {head:<7} "), Text(line, style=style), sep="", soft_wrap=True)
