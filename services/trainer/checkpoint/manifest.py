"""Checkpoint folders: published atomically, verified before use, deleted by age. Does not import torch.

A folder is written under another name and renamed once it contains its manifest, with the digest of every
file. So a folder without a manifest never counts, and damage is detected before anything is loaded. It is
renamed again before it is deleted.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from services.common.errors import DataLossError, NotFoundError

logger = logging.getLogger(__name__)
_THREADS = 4
MANIFEST = "manifest.json"
STEP_PREFIX = "step-"
_UNFINISHED, _DELETED = ".unfinished-", ".deleted-"


class UnusableCheckpointError(DataLossError):
    """A worker cannot start, because its checkpoint is damaged or gone."""

    reason = "CheckpointUnusable"


def folder_of(root: Path, step: int) -> Path:
    return root / f"{STEP_PREFIX}{step:08d}"


def unfinished_of(root: Path, step: int) -> Path:
    """Returns the folder in which a step's checkpoint is written before it is published."""
    return root / f"{_UNFINISHED}{STEP_PREFIX}{step:08d}"


def remove_leftovers(root: Path) -> None:
    """Removes the folders that a trainer left when it was killed while it wrote or deleted a checkpoint."""
    for prefix in (_UNFINISHED, _DELETED):
        for leftover in root.glob(f"{prefix}{STEP_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def publish(
    root: Path,
    step: int,
    facts: dict[str, Any],
    *,
    keep: int,
    keep_steps: Collection[int] = (),
    upload: str = "",
) -> Path:
    """Adds the manifest to a written folder, renames it, and deletes the oldest checkpoints.

    Checkpoints of later steps are deleted, too: the run went back to a step before them.

    Args:
        root: Folder of all checkpoints of the run.
        step: Step that was saved.
        facts: Further JSON content of the manifest.
        keep: Number of newest checkpoints to keep.
        keep_steps: Steps whose checkpoints are kept besides the newest ones.
        upload: Unique name of this folder's upload to a store; empty without one.

    Returns:
        The published folder.
    """
    unfinished, folder = unfinished_of(root, step), folder_of(root, step)
    written_files = [file for file in sorted(unfinished.rglob("*")) if file.is_file()]
    files = {
        str(file.relative_to(unfinished)): {"size": file.stat().st_size, "sha256": digest}
        for file, digest in zip(written_files, _digests(written_files), strict=True)
    }
    document = {"step": step, "facts": facts, "files": files}
    if upload:
        document["upload"] = upload
    with (unfinished / MANIFEST).open("w", encoding="utf-8") as output:
        json.dump(document, output, indent=1)
        output.flush()
        os.fsync(output.fileno())
    install(unfinished, folder)
    kept_folders = {folder_of(root, step) for step in keep_steps}
    published = published_in(root)
    later = [path for path in published if path.name > folder.name]
    for outdated in (*later, *published[len(later) + keep :]):
        if outdated not in kept_folders:
            delete(outdated)
    return folder


def install(unfinished: Path, folder: Path) -> None:
    """Renames a complete folder to that of its step, in place of an older one."""
    replaced = _aside(folder)
    if folder.exists():
        folder.rename(replaced)
    unfinished.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def newest(root: Path, *, before: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Returns the newest complete checkpoint and the facts in its manifest.

    Damaged checkpoints are logged and skipped.

    Args:
        before: Step that the checkpoint must precede; None for any checkpoint.

    Raises:
        NotFoundError: If there is none.
    """
    refused = []
    for folder in published_in(root):
        if before is not None and folder.name >= folder_of(root, before).name:
            continue
        try:
            return folder, verify(folder)
        except DataLossError as error:
            logger.error("checkpoint refused", extra={"reason": str(error)})  # noqa: TRY400
            refused.append(folder.name)
    damaged = f"; damaged: {', '.join(refused)}" if refused else ""
    bound = "" if before is None else f" of a step before {before}"
    raise NotFoundError(
        f"there is no usable checkpoint{bound} in {root}{damaged}; restore one, or start without resuming",
        folder=root,
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """Returns the facts of a checkpoint, with its ``step``, without verifying its files.

    Raises:
        ValueError: If the folder is not a checkpoint.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {**manifest["facts"], "step": int(manifest["step"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(folder)!r} is not a checkpoint, because it has no readable {MANIFEST}; use a folder such "
            f"as checkpoints/{STEP_PREFIX}00000010 of a run"
        ) from error


def verify(folder: Path) -> dict[str, Any]:
    """Verifies every file of a checkpoint; returns the facts in its manifest.

    Raises:
        DataLossError: If a file is missing, or its size or digest is wrong.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        facts, files = dict(manifest["facts"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataLossError(
            f"checkpoint {folder} has no readable {MANIFEST}: {error}", folder=folder
        ) from error
    for name, entry in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["size"]:
            raise DataLossError(
                f"checkpoint {folder}: {name} is missing or not {entry['size']} bytes long",
                folder=folder,
                file=name,
            )
    digests = _digests([folder / name for name in files])
    for (name, entry), digest in zip(files.items(), digests, strict=True):
        if digest != entry["sha256"]:
            raise DataLossError(
                f"checkpoint {folder}: {name} does not have the digest in the manifest",
                folder=folder,
                file=name,
            )
    return facts


def delete(folder: Path) -> None:
    """Deletes a checkpoint; the next checkpoint deletes the files that cannot be deleted now."""
    aside = _aside(folder)
    try:
        folder.rename(aside)
    except OSError as error:
        logger.warning("checkpoint not deleted", extra={"folder": str(folder), "error": str(error)})
    shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{_DELETED}{folder.name}")


def published_in(root: Path) -> list[Path]:
    """Returns the published folders, newest first."""
    return sorted(root.glob(f"{STEP_PREFIX}*"), reverse=True)


def _digests(files: Sequence[Path]) -> list[str]:
    """Hashes several files at a time with SHA-256, because hashing is slower than a good disk."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_digest, files))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
