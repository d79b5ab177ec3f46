"""Local copies of what a specification names by URL: models, tokenizers and data files."""

from pathlib import Path

from services.common.errors import ServiceError
from services.common.runspec.run import RunSpec
from services.common.runspec.urls import url_keys
from services.common.stores import OBJECT_CACHE, Report, fetch


def with_local_copies(
    spec: RunSpec,
    *,
    cache: Path = OBJECT_CACHE,
    has_weights: bool = True,
    report: Report | None = None,
) -> RunSpec:
    """Returns a specification in which paths of local copies replace the URLs of models and data.

    Blocks while it downloads what this host has no copy of. URLs of checkpoints stay: the trainer reads
    these when it needs them.

    Args:
        cache: Folder of the copies.
        has_weights: If False, copies of models lack their weights.

    Raises:
        ValueError: If something cannot be downloaded; the message begins with its key.
    """
    document = spec.model_dump(mode="json")
    keys = [key for key in url_keys(document) if key.kind is not None]
    for key in keys:
        kind = key.kind or "file"
        if kind == "model" and not has_weights:
            kind = "model without weights"
        try:
            key.parent[key.name] = str(fetch(key.url, kind, cache=cache, report=report))
        except ServiceError as error:
            raise ValueError(f"{key.key}: {error.message}") from error
    return RunSpec.model_validate(document) if keys else spec
