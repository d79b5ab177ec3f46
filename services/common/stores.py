"""Object stores that a specification names by URL, through the door ``slipstream.stores``.

The core works on local folders. Where a specification has a URL such as ``s3://bucket/folder`` instead of a
path, the core asks the entry of its scheme for a local copy (:func:`fetch`), or for the checkpoints below the
URL (:func:`open_checkpoints`). Does not import the packages of the stores.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Literal, Protocol
from urllib.parse import urlsplit

from services.common.doors import Door, DoorError
from services.common.errors import FailedPreconditionError

OBJECT_CACHE: Final = Path("~/.cache/slipstream/objects")
"""Default folder of local copies."""
FetchKind = Literal["file", "folder", "model", "model without weights", "checkpoint", "record"]
"""``model`` leaves out weights in other formats than safetensors."""
Report = Callable[[str], None]
"""Called with one line that describes a running transfer; with an empty text when it has ended."""

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_LIKE_URL = re.compile(r"\s*(?!file:)[A-Za-z][A-Za-z0-9+.-]*:/")  # mistakes too, which are no paths
_LOGIN = re.compile(r"^[^/]*:(?!\d+(?:/|$)).*", re.DOTALL)
_REWRITTEN = re.compile(r"[%\\\s\x00-\x20\x7f]")
"""Characters that the stores' libraries decode, strip or replace, so that they open another URL."""


class StoredCheckpoints(Protocol):
    """Checkpoints of one run in an object store; each exists once its manifest does.

    Methods block, except :meth:`submit`, :meth:`pending_steps` and :meth:`status`.
    """

    @property
    def url(self) -> str:
        """URL below which the checkpoints are."""

    def check(self) -> None:
        """Writes and deletes a small object, to find out early whether checkpoints can be written.

        Raises:
            ServiceError: If that fails.
        """

    def restore_newest(self, root: Path, *, before: int | None = None) -> None:
        """Downloads the newest complete checkpoint, unless the folder has it or a newer one of its history.

        Does nothing if the store has none.

        Args:
            root: Folder of the run's checkpoints on this host.
            before: Step that the checkpoint must precede; None for any.

        Raises:
            UnavailableError: If the store cannot be read before the deadline.
        """

    def submit(self, folder: Path, *, keep: int | None, keep_steps: Collection[int]) -> None:
        """Uploads a published checkpoint in the background, after those submitted before.

        Args:
            folder: The published folder; it must stay until its step is no longer in :meth:`pending_steps`.
            keep: Number of newest checkpoints that the store keeps; None to delete none.
            keep_steps: Steps that it keeps besides.
        """

    def pending_steps(self) -> set[int]:
        """Returns the steps whose upload is not confirmed; their folders must stay."""

    def report(self, session: Any) -> None:
        """Reports the state of the uploads, and as events what happened to them since the last call.

        After a restore, that includes what earlier processes stored: one may have ended before it
        reported its last upload.

        Args:
            session: The worker's ``services.wire.controller.WorkerSession``.
        """

    def wait(self, timeout_s: float) -> None:
        """Waits until everything that was submitted is confirmed.

        Raises:
            DeadlineExceededError: If it is not in time; the message has the first cause.
        """

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, its manifest first; does nothing if there is none.

        Args:
            name: Name of its folder, such as ``step-00000010``.
        """

    def close(self) -> None:
        """Ends the uploads; those that are not confirmed are repeated by the next process of the run."""


class StoreFolder(Protocol):
    """Objects below one URL. Methods block.

    Each raises NotFoundError if there is no such object, FailedPreconditionError if the store refuses the
    process's credentials, and UnavailableError for what may succeed later, with the cause.
    """

    @property
    def url(self) -> str:
        """The URL."""

    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes of each object by its name below the URL."""

    def read(self, name: str) -> bytes:
        """Returns the content of a small object."""

    def read_into(self, name: str, target: memoryview) -> int:
        """Reads an object into memory; returns its size, of which at most ``len(target)`` bytes are read.

        Args:
            target: Writable bytes.
        """

    def put(self, name: str, content: memoryview) -> None:
        """Writes an object; readers see all of it or nothing."""

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that do not exist are ignored."""


class StoredSamples(Protocol):
    """Samples of one run in an object store, as the file of its transferqueue has them."""

    @property
    def failing_s(self) -> float:
        """Seconds since a request of the uploads first failed; 0 if the last one succeeded."""

    @property
    def cause(self) -> str:
        """First cause of the present failure; empty if the last request succeeded."""

    def follow(self, path: Path, *, max_bytes: int, max_steps: int) -> None:
        """Uploads what a file has and gets, in the background; a further call only sets the limits."""

    def finish(self) -> None:
        """Lets the uploads end with what the file has now, in the background."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until the uploads have ended; after the time, logs the cause and returns False."""

    def restore(self, path: Path) -> None:
        """Writes the samples to a new file. Blocks."""

    def delete(self) -> None:
        """Ends the uploads and deletes the samples. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """Entry of the door ``slipstream.stores``: the functions for the URLs of one scheme, as references."""

    fetch: str
    """Function as :func:`fetch`."""
    checkpoints: str
    """Function of a URL that returns :class:`StoredCheckpoints`; further arguments as
    :func:`open_checkpoints`."""
    upload: str
    """Function as :func:`upload`."""
    folder: str = ""
    """Function of a URL that returns a :class:`StoreFolder`; empty if the store has none, so that it cannot
    have weight versions."""
    samples: str = ""
    """Function of a URL that returns :class:`StoredSamples`; empty if the store cannot have samples."""
    sample_reports: str = ""
    """Function of a URL, ``TransferQueueClient.sample_upload`` of the run and a function that records an
    event; its result has the coroutine functions ``watch()``, which runs until it is cancelled, and
    ``record_end()``, for the end of the run; empty if uploads record no events."""
    extra: str
    """Requirement for ``pip install``, for example ``slipstream[objects]``."""


STORES: Final = Door("stores", StoreKind)
"""Kinds of object stores, by the scheme of their URLs."""


def is_url(text: str | None) -> bool:
    """Returns True if a text is a URL, also a wrong one, instead of a path; ``file:`` URLs are paths."""
    return text is not None and _LIKE_URL.match(text) is not None


def plain_path(text: str) -> str:
    """Returns the path of a ``file://`` URL; other texts are not changed."""
    return text.removeprefix("file://") if text.startswith("file:///") else text


def join_url(url: str, *names: str) -> str:
    """Returns the URL of an object below another URL."""
    return "/".join((url.rstrip("/"), *names))


def without_secrets(url: str) -> str:
    """Returns a URL without login, query and fragment, for messages.

    A password may contain ``@``, ``/``, ``?`` and ``#``, so a login ends at the last ``@``.
    """
    scheme, _, rest = url.partition(":")
    rest = rest.lstrip("/")
    before, _, after = rest.rpartition("@")
    has_login = "@" in rest.partition("/")[0] or ":" in before
    location = re.split(r"[?#%]", f"...@{after}" if has_login else rest)[0]
    return f"{scheme}://{_LOGIN.sub('...', location)}"


def url_problem(url: str) -> str:
    """Returns why a URL cannot name a store's objects, with the fix; empty if it can."""
    matched = _URL.fullmatch(url)
    if matched is None or matched["scheme"] not in STORES:
        schemes = ", ".join(f"{name}://" for name in STORES.names()) or "none"
        return f"no installed package has a store for it; use {schemes}, as s3://bucket/folder, or a path"
    if (rewritten := _REWRITTEN.search(url)) is not None:
        return (
            f"has the character {rewritten.group()!r}; a store may read such a URL as another one, so use "
            "names without percent signs, backslashes, spaces and control characters"
        )
    try:
        parts = urlsplit(url)
        # A key with a slash ends what is parsed as the host, so a colon is enough: no bucket has one.
        has_login, bucket = "@" in parts.netloc or ":" in parts.netloc, parts.hostname
    except ValueError:  # its message may have the credentials
        return "is not a URL; use one such as s3://bucket/folder"
    if has_login or parts.query or parts.fragment or "?" in url or "#" in url:
        return (
            "has credentials, a query or a fragment; use a plain URL such as s3://bucket/folder, and give "
            "the credentials to the process (environment variables, or the identity of its pod)"
        )
    names = parts.path.split("/")[1:]
    if not bucket or any(name in (".", "..") for name in names) or "" in names[:-1]:
        return (
            "lacks a bucket, or has empty or relative parts; use a URL such as s3://bucket/folder"
        )
    return ""


def fetch(
    url: str, kind: FetchKind, *, cache: Path = OBJECT_CACHE, report: Report | None = None
) -> Path:
    """Returns a local copy of an object or of all objects below a URL, downloaded once per host.

    Blocks. A copy is used again while sizes and entity tags in the store are those of the copy.

    Args:
        cache: Folder of the copies.

    Raises:
        NotFoundError: If there is nothing at the URL.
        FailedPreconditionError: If the URL is refused, or its package is not installed.
        UnavailableError: If the store cannot be read before the deadline.
    """
    function = _resolved(url, lambda entry: entry.fetch)
    copy = function(url, kind, cache=cache.expanduser(), report=report or (lambda line: None))
    assert isinstance(copy, Path)
    return copy


def open_checkpoints(url: str, *, rank: int = 0, world_size: int = 1) -> StoredCheckpoints:
    """Returns the checkpoints below a URL. Connects to nothing.

    Args:
        rank: Rank of this process: rank 0 publishes; the others upload a part of the files.
        world_size: Number of ranks.

    Raises:
        FailedPreconditionError: If the URL is refused, or its package is not installed.
    """
    function = _resolved(url, lambda entry: entry.checkpoints)
    checkpoints: StoredCheckpoints = function(url, rank=rank, world_size=world_size)
    return checkpoints


def upload(folder: Path, url: str, *, report: Report | None = None) -> None:
    """Uploads the files of a folder to a URL below which there is nothing yet. Blocks.

    Readers see each file whole; ``config.json`` comes last, because a model without it cannot be loaded.

    Raises:
        FailedPreconditionError: If there are objects, the URL is refused, or its package is not installed.
        UnavailableError: If the store does not take them before the deadline.
    """
    function = _resolved(url, lambda entry: entry.upload)
    function(folder, url, report=report or (lambda line: None))


def open_folder(url: str) -> StoreFolder:
    """Returns the objects below a URL. Connects to nothing.

    Raises:
        FailedPreconditionError: If the URL is refused, its package is not installed, or its store has no
            folders.
    """
    function = _resolved(url, lambda entry: entry.folder)
    folder: StoreFolder = function(url)
    return folder


def open_samples(url: str) -> StoredSamples:
    """Returns the samples of a run below a URL. Connects to nothing; raises as :func:`open_folder`."""
    samples: StoredSamples = _resolved(url, lambda entry: entry.samples)(url)
    return samples


def sample_reports(url: str | None) -> Callable[..., Any] | None:
    """Returns :attr:`StoreKind.sample_reports` of a URL without its first argument; None for a path."""
    if url is None or not is_url(url):
        return None
    reference = STORES[url.partition("://")[0]].sample_reports
    return partial(resolve_name(reference), url) if reference else None


def _resolved(url: str, reference: Callable[[StoreKind], str]) -> Callable[..., Any]:
    """Returns the function of a URL's store."""
    if problem := url_problem(url):
        raise FailedPreconditionError(f"{without_secrets(url)!r} {problem}")
    try:
        entry = STORES[url.partition("://")[0]]
    except DoorError as error:
        raise FailedPreconditionError(str(error)) from error
    if not (name := reference(entry)):
        raise FailedPreconditionError(
            f"{without_secrets(url)!r} is in a store that cannot do this; use another store"
        )
    try:
        function: Callable[..., Any] = resolve_name(name)
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(
            f"{without_secrets(url)!r} needs the package {error.name}; pip install '{entry.extra}'"
        ) from error
    return function


_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_UNIT_STEP: Final = 1000


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes in the decimal unit that gives it one to three digits before the point."""
    size, power = float(num_bytes), 0
    # A size that would be rounded to 1,000 is given in the next unit.
    while round(size, 1) >= _UNIT_STEP and power < len(_UNITS) - 1:
        size, power = size / _UNIT_STEP, power + 1
    return f"{size:.1f} {_UNITS[power]}" if power else f"{size:.0f} {_UNITS[0]}"
