"""Uploads of folders, such as exported models."""

from functools import partial
from pathlib import Path
from typing import Final

from services.common.errors import FailedPreconditionError
from services.common.stores import Report
from services.extras.objects.connection import ObjectFolder
from services.extras.objects.transfers import Patience, TransferProgress

_LAST: Final = "config.json"


def upload(folder: Path, url: str, *, report: Report) -> None:
    """Uploads the files of a folder, as :func:`services.common.stores.upload` describes."""
    url = url.rstrip("/")
    store, patience = ObjectFolder(url), Patience(url, report=report)
    if present := patience(store.list):
        raise FailedPreconditionError(
            f"{url} has {len(present)} objects already, such as {present[0].name}; use another URL",
            url=url,
        )
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == _LAST
    )
    total = sum(file.stat().st_size for file in files)
    progress = TransferProgress(f"uploading to {url}", total, report)
    for file in files:
        name = file.relative_to(folder).as_posix()
        patience(partial(store.upload, file, name, on_bytes=progress.add))
    report("")
