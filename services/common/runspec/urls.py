"""Keys of a specification that may be URLs of object stores in place of paths."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.common.runspec.data import set_documents
from services.common.stores import FetchKind, is_url


@dataclass(frozen=True, slots=True)
class UrlKey:
    """A key whose value is a URL."""

    key: str
    parent: dict[str, Any]
    """Part of the document that has the value."""
    name: str
    """Name of the value there."""
    kind: FetchKind | None
    """Kind of a local copy in its place; None if workers use the URL itself."""

    @property
    def url(self) -> str:
        return str(self.parent[self.name])


def url_keys(document: dict[str, Any]) -> list[UrlKey]:
    """Returns the keys with URLs of a specification in JSON form."""
    return [key for key in _path_keys(document) if is_url(key.parent.get(key.name))]


def _path_keys(document: dict[str, Any]) -> Iterator[UrlKey]:
    for name in ("model", "teacher"):
        model = document.get(name)
        if isinstance(model, dict):
            yield UrlKey(f"{name}.path", model, "path", "model")
            yield UrlKey(f"{name}.tokenizer", model, "tokenizer", "model without weights")
    speculation = document["rollout"].get("speculation")
    if isinstance(speculation, dict):
        yield UrlKey("rollout.speculation.model", speculation, "model", "model")
    for split, source in set_documents(document["data"]):
        if source["source"] in ("jsonl", "csv", "parquet"):
            yield UrlKey(f"{split}.path", source, "path", "file")
        elif source["source"] == "huggingface":
            yield UrlKey(f"{split}.path", source, "path", "folder")
    checkpoint = document["trainer"]["checkpoint"]
    yield UrlKey("trainer.checkpoint.directory", checkpoint, "directory", None)
    yield UrlKey("trainer.checkpoint.start_from", checkpoint, "start_from", None)
    yield UrlKey("samples.directory", document["samples"], "directory", None)
    storage = document["weight_sync"].get("storage")
    if isinstance(storage, dict):
        yield UrlKey("weight_sync.storage.directory", storage, "directory", None)
