"""Keeps what a specification names inside what an installation allows: its folders, and secrets by name.

The controller checks what a user submits by its text. Workers check it again where the files are, with links
followed, because only there links and modules can be seen.
"""

import importlib.util
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.spec.run import RunSpec

# Free text, in which a slash means nothing.
_TEXT = frozenset({"name", "stop"})
_PATH_STARTS = ("/", "~", "./", "../", "file:")
_RUN = re.compile(r"run_[0-9a-f]{32}")
# What is made on the spot: presets of models and of tokenizers.
_PRESETS = ("tiny:", "chars:")
_FILE_CALLABLE = re.compile(r"^(?P<file>.+\.py):[A-Za-z_]\w*$")
_MODULE_CALLABLE = re.compile(r"^(?P<module>[A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*$")
_SECRET_KEY = re.compile(
    r"(api|access|auth|private|secret|hf)_?(key|token)$|passw|_secret$", re.IGNORECASE
)


def strays(spec: RunSpec, roots: Sequence[Path]) -> list[str]:
    """Paths of a specification that lead out of the allowed folders, judged by their text.

    Args:
        spec: The specification.
        roots: The folders; none allows everything.

    Returns:
        One line per path: its key, what it is, what is allowed.
    """
    return [
        f"{key}: {path!r} is outside of {_listed(roots)}; name something inside"
        for key, path in _paths(spec).items()
        if roots and not _is_inside(Path(os.path.normpath(_plain(path))), roots)
    ]


def strays_here(spec: RunSpec, roots: Sequence[Path]) -> list[str]:
    """As :func:`strays`, with links followed, and with the modules whose functions are named."""
    if not roots:
        return []
    followed = [root.resolve() for root in roots]
    found = [
        f"{key}: {path!r} leads to {Path(_plain(path)).resolve()}, outside of {_listed(roots)}"
        for key, path in _paths(spec).items()
        if not _is_inside(Path(_plain(path)).resolve(), followed)
    ]
    for key, value in _texts(spec.model_dump(mode="json")):
        named = _MODULE_CALLABLE.match(value)
        if (
            named
            and not value.startswith(_PRESETS)
            and not _is_module_inside(named["module"], followed)
        ):
            found.append(
                f"{key}: module {named['module']!r} is outside of {_listed(roots)}; put the file there"
            )
    return found


def runs_named(spec: RunSpec) -> set[str]:
    """Runs whose folders a specification names, for example to start from a checkpoint."""
    texts = _texts(spec.model_dump(mode="json"))
    return {run_id for _, value in texts for run_id in _RUN.findall(value)}


def plain_secrets(spec: RunSpec) -> list[str]:
    """Values of a specification that look like secrets and would be stored as they are.

    Returns:
        One line per value: its key and the fix.
    """
    return [
        f'{key}: secrets are not stored in specifications; write {{"secret": "NAME"}}, where NAME is a file '
        "of the installation's secrets"
        for key, value in _texts(spec.model_dump(mode="json"))
        if value and _SECRET_KEY.search(key.rpartition(".")[2])
    ]


def _paths(spec: RunSpec) -> dict[str, str]:
    """Paths by key."""
    document = spec.model_dump(mode="json")
    found = {}
    for key, value in _texts(document):
        if named := _FILE_CALLABLE.match(value):
            found[key] = named["file"]
        elif value.startswith(_PATH_STARTS):
            found[key] = value
    for split in ("train", "heldout"):
        source = document["data"][split]
        if source and source["source"] in ("jsonl", "parquet"):
            found[f"data.{split}.path"] = source["path"]
    return found


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts below a value, with their keys."""
    if isinstance(value, str):
        yield key.removeprefix("."), value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _TEXT or isinstance(inner, Mapping) or _is_reward(key):
                yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, Sequence):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{key}.{index}")


def _is_reward(key: str) -> bool:
    """Rewards are called by their name, which is a reference to code."""
    return key.startswith(".rollout.rewards.")


def _plain(path: str) -> str:
    return os.path.expanduser(path.removeprefix("file://").removeprefix("file:"))  # noqa: PTH111


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _is_module_inside(module: str, roots: Sequence[Path]) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    files = [Path(place).resolve() for place in places if place]
    return bool(files) and all(_is_inside(file, roots) for file in files)


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(str(root) for root in roots)
