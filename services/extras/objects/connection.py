"""Objects below one URL, through obstore: lists, reads, writes and deletes them. All calls block.

Credentials come from the process: environment variables, web identity tokens and metadata services, as the
library looks for them. A request has a time limit, and the library repeats it a few times; callers repeat
what still fails, for as long as they want to wait.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from services.common.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)

PIECE_BYTES: Final = 16 << 20
"""Bytes of one request. A file that is larger is uploaded in several parts, which become one object."""
CONCURRENCY: Final = 4
"""Files that are uploaded, or pieces that are downloaded, at a time."""
_PARTS_AT_A_TIME = 4
_CLIENT: Final[Any] = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=60),
    "pool_max_idle_per_host": "16",
    # Clouds are addressed by https://; only an endpoint that the administrator sets has http://.
    "allow_http": True,
}
_RETRIES: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
_CAUSE_CHARACTERS = 400

OnBytes = Callable[[int], None]
"""Called with the number of further bytes that were transferred; an exception ends the transfer."""


class Persist(Protocol):
    """Calls a request, and repeats it if that may help."""

    def __call__(self, request: Callable[[], int]) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a store."""

    name: str
    """Name below the URL."""
    num_bytes: int
    tag: str
    """Entity tag: changes with the content."""
    modified: datetime


class ObjectFolder:
    """Objects below a URL.

    Args:
        url: For example ``s3://bucket/folder``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with _explained(url):
            self._store = from_url(url, client_options=_CLIENT, retry_config=_RETRIES)

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Returns all objects whose names begin with a folder's name, in the order of their names."""
        with _explained(self.url):
            metas = obstore.list(self._store, prefix or None).collect()
        return sorted(map(_stored, metas), key=lambda stored_object: stored_object.name)

    def head(self, name: str) -> StoredObject:
        """Returns what the store knows of an object."""
        with _explained(self.url, name):
            return _stored(obstore.head(self._store, name))

    def read(self, name: str) -> bytes:
        with _explained(self.url, name):
            return bytes(obstore.get(self._store, name).bytes())

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object in one request: readers see all of it or nothing."""
        with _explained(self.url, name):
            obstore.put(self._store, name, content, use_multipart=False)

    def upload(self, file: Path, name: str, *, on_bytes: OnBytes) -> None:
        """Writes a file; readers see all of it or nothing."""
        size = file.stat().st_size
        with _explained(self.url, name):
            if size <= PIECE_BYTES:
                obstore.put(self._store, name, file.read_bytes(), use_multipart=False)
                on_bytes(size)
                return
            obstore.put(
                self._store,
                name,
                _pieces(file, on_bytes),
                chunk_size=PIECE_BYTES,
                max_concurrency=_PARTS_AT_A_TIME,
            )

    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes of each object by name."""
        return {stored_object.name: stored_object.num_bytes for stored_object in self.list()}

    def put(self, name: str, content: memoryview) -> None:
        """Writes an object from memory; readers see all of it or nothing."""
        with _explained(self.url, name):
            obstore.put(
                self._store,
                name,
                content,
                chunk_size=PIECE_BYTES,
                max_concurrency=_PARTS_AT_A_TIME,
            )

    def read_into(self, name: str, target: memoryview) -> int:
        """Reads an object into memory, piece by piece; returns the size that the store states.

        Raises:
            DataLossError: If fewer or more bytes arrive.
        """
        stored_object = self.head(name)
        end = min(stored_object.num_bytes, len(target))
        for start in range(0, end, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, end)
            target[start:stop] = self._piece(stored_object, start, stop)
        return stored_object.num_bytes

    def download(
        self, objects: Mapping[StoredObject, Path], *, on_bytes: OnBytes, persist: Persist
    ) -> None:
        """Downloads objects into new files, several pieces at a time.

        Args:
            persist: Calls a request, and repeats it if that may help.

        Raises:
            DataLossError: If an object changed meanwhile.
        """
        pieces = []
        for stored_object, file in objects.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as created:
                created.truncate(stored_object.num_bytes)
            starts = range(0, stored_object.num_bytes, PIECE_BYTES)
            pieces += [
                partial(self._download_piece, stored_object, file, start) for start in starts
            ]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            transfers = [pool.submit(persist, piece) for piece in pieces]
            try:
                for transfer in transfers:
                    on_bytes(transfer.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        for file in objects.values():
            with file.open("rb") as file_to_sync:
                os.fsync(file_to_sync.fileno())

    def _download_piece(self, stored_object: StoredObject, file: Path, start: int) -> int:
        content = self._piece(
            stored_object, start, min(start + PIECE_BYTES, stored_object.num_bytes)
        )
        with file.open("r+b") as output:
            output.seek(start)
            output.write(content)
        return len(content)

    def _piece(self, stored_object: StoredObject, start: int, end: int) -> bytes:
        options: Any = {"range": (start, end), "if_match": stored_object.tag or None}
        with _explained(self.url, stored_object.name):
            content = bytes(obstore.get(self._store, stored_object.name, options=options).bytes())
        if len(content) != end - start:
            raise DataLossError(
                f"{self.url}/{stored_object.name}: {len(content)} bytes arrived instead of {end - start}"
            )
        return content

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that do not exist are ignored."""
        if names:
            with _explained(self.url):
                try:
                    obstore.delete(self._store, list(names))
                except FileNotFoundError:
                    """Azure and local folders report a missing object; others do not."""


def _stored(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"])


def _pieces(file: Path, on_bytes: OnBytes) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while content := stream.read(PIECE_BYTES):
            yield content
            on_bytes(len(content))


@contextmanager
def _explained(url: str, name: str = "") -> Iterator[None]:
    """Raises errors of the library as errors of Slipstream, with the URL and the cause in one line.

    Raises:
        NotFoundError: If the object or its bucket does not exist.
        FailedPreconditionError: If the store refuses the credentials, or the URL.
        UnavailableError: If the request failed for another reason, and may succeed later.
    """
    where = f"{url}/{name}" if name else url
    try:
        yield
    except ServiceError:
        raise
    except FileNotFoundError as error:
        if error.filename is not None:  # a local file, not an object
            raise
        raise NotFoundError(f"{where} does not exist: {_cause(error)}", url=where) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise FailedPreconditionError(
            f"{where}: the store refuses this process's credentials: {_cause(error)}; give it credentials in "
            "environment variables, or an identity that may read and write there",
            url=where,
        ) from error
    except (BaseError, ValueError) as error:
        raise UnavailableError(f"{where}: {_cause(error)}", url=where) from error
    except BaseException as error:
        # A panic of the library is no Exception, and would end the thread that uploads.
        if type(error).__name__ != "PanicException":
            raise
        raise UnavailableError(f"{where}: {_cause(error)}", url=where) from error


def _cause(error: BaseException) -> str:
    """Returns the message of an error without the library's dump of its state."""
    text = str(error).partition("\n\nDebug source:")[0]
    return " ".join(text.split())[:_CAUSE_CHARACTERS]
