"""The gate for specifications: what they may start and load, on one list of the installation.

Whatever a specification names passes here: data, models, tokenizers, checkpoints, code, commands. The
controller judges by the text what a user submits. Workers judge again where the files are, with links
followed, because only there links and modules can be seen.
"""

import importlib.util
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.common.spec.data import set_documents
from services.common.spec.run import RunSpec

Kind = Literal["path", "model", "code", "package", "command", "text"]
"""How a name is judged. ``model``: the id of a hub or a folder. ``package``: a plugin that is imported by its
name. ``text``: anything, which may be a path."""

# Free text, in which a slash means nothing.
_FREE = re.compile(
    r"name|rollout\.(answer_pattern|sampling\.stop\.\d+|workflow_arguments\.result_template)"
    r"|data\.((train|heldout)\.([\w-]+\.)?)?(prompt_template|prompt_column|answer_column)"
    r"|data\.rejected_column"
    r"|data\.(train|heldout)\.([\w-]+\.)?(split|subset|source|filters\.\d+\.(column|matches|one_of\.\d+))"
)
_CODE = re.compile(
    r"rollout\.(workflow|rewards\.\d+\.name|workflow_arguments\.(agent|environment|train|tools\.\d+))"
    r"|data\.(train|heldout)\.([\w-]+\.)?(rewards\.\d+\.name|filters\.\d+\.function)"
    r"|data\.curriculum\.function|(model|teacher)\.warm_start\.examples|algorithm\.(loss|advantage)"
)
_MODEL = re.compile(r"(model|teacher)\.(path|tokenizer)")
_PATH = re.compile(r"trainer\.checkpoint\.(directory|start_from)")
_DATA_KINDS: Mapping[str, Kind] = {
    "jsonl": "path",
    "parquet": "path",
    "huggingface": "model",
    "python": "code",
    "verifiers": "package",
}
_URLS = ("http://", "https://", "grpc://", "grpcs://", "openenv+http://", "openenv+https://")
# What is made on the spot: presets of models and of tokenizers.
_PRESETS = ("tiny:", "chars:")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PATH_STARTS = ("/", "~", "./", "../", "file:")
_RUN = re.compile(r"run_[0-9a-f]{32}")
_FILE_CALLABLE = re.compile(r"(?P<file>.+\.py):[A-Za-z_]\w*")
_MODULE_CALLABLE = re.compile(r"(?P<module>[A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")
_SECRET_KEY = re.compile(
    r"(api|access|auth|private|secret|hf)_?(key|token)$|passw|_secret$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What specifications may name. Without folders, everything: a machine that only its owner uses."""

    roots: tuple[Path, ...] = ()
    """Folders with data, models and checkpoints."""
    code_roots: tuple[Path, ...] = ()
    """Folders with Python code that may run."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Programs that may be started, each with all its arguments."""

    def problems(self, spec: RunSpec) -> list[str]:
        """What a specification names and may not, judged by its text.

        Returns:
            One line per name: its key, what it is, what is allowed.
        """
        judge = _Judge(self, lambda path: Path(os.path.normpath(path)), is_here=False)
        return judge.all_problems(spec)

    def problems_here(self, spec: RunSpec) -> list[str]:
        """As :meth:`problems`, on the host where the files are: links are followed, modules looked up."""
        return _Judge(self, Path.resolve, is_here=True).all_problems(spec)


@dataclass(frozen=True, slots=True)
class _Judge:
    allowance: Allowance
    resolved: Callable[[Path], Path]
    is_here: bool

    def all_problems(self, spec: RunSpec) -> list[str]:
        if not self.allowance.roots:
            return []
        return [
            f"{key}: {problem}"
            for key, kind, value in _names(spec)
            for problem in self._problems(kind, value)
        ]

    def _problems(self, kind: Kind, value: Any) -> Iterator[str]:
        made_elsewhere = {"model": _PRESETS, "code": _URLS, "text": _URLS}
        if kind == "command":
            yield from self._command(value)
        elif kind == "package":
            module = value.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
            yield from self._module(module.partition(".")[0], must_exist=True)
        elif value.startswith(made_elsewhere.get(kind, ())):
            return
        elif "\0" in value:
            yield "holds a zero byte; remove it"
        elif named := _FILE_CALLABLE.fullmatch(value):
            yield from self._path(named["file"], self.allowance.code_roots)
        elif kind != "path" and (named := _MODULE_CALLABLE.fullmatch(value)):
            yield from self._module(named["module"], must_exist=kind == "code" and self.is_here)
        elif kind == "path" or _is_path(value) or (kind == "model" and not self._is_hub_id(value)):
            yield from self._path(value, self.allowance.roots)

    def _path(self, text: str, roots: Sequence[Path]) -> Iterator[str]:
        path = self.resolved(_plain(text))
        if not _is_inside(path, [self.resolved(root) for root in roots]):
            leads = "" if str(path) == text else f" leads to {path}, which"
            yield f"{text!r}{leads} is outside of {_listed(roots)}; name something inside"

    def _module(self, module: str, *, must_exist: bool) -> Iterator[str]:
        # The outermost package only: to look inside it would be to run it.
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        places: Sequence[str] = []
        if found is not None:
            own = [found.origin] if found.has_location and found.origin else []
            places = found.submodule_search_locations or own
        roots = [root.resolve() for root in self.allowance.code_roots]
        is_inside = bool(places) and all(_is_inside(Path(p).resolve(), roots) for p in places)
        if not is_inside and (found is not None or must_exist):
            yield f"module {module!r} is outside of {_listed(roots)}; put the file there"

    def _command(self, command: Any) -> Iterator[str]:
        if not isinstance(command, list) or tuple(command) not in self.allowance.commands:
            allowed = [" ".join(known) for known in self.allowance.commands]
            yield (
                f"{command!r} is none of the commands of this installation ({', '.join(allowed) or 'none'}); "
                "ask for it to be added to allowed_commands"
            )

    def _is_hub_id(self, value: str) -> bool:
        """Whether it names something of a hub; a folder of that name would win."""
        if _HUB_ID.fullmatch(value) is None:
            return False
        return not (self.is_here and Path(value).exists())


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


def _names(spec: RunSpec) -> Iterator[tuple[str, Kind, Any]]:
    """What a specification names, by key, and how it is judged: what is not known to be free is looked at."""
    document = spec.model_dump(mode="json")
    servers = document["rollout"]["workflow_arguments"].pop("mcp_servers", [])
    for index, command in enumerate(servers if isinstance(servers, list) else [servers]):
        yield f"rollout.workflow_arguments.mcp_servers.{index}", "command", command
    yield from _data_names(document)
    for key, value in _texts(document):
        if _MODEL.fullmatch(key):
            yield key, "model", value
        elif _PATH.fullmatch(key):
            yield key, "path", value
        elif _CODE.fullmatch(key):
            yield key, "code", value
        elif not _FREE.fullmatch(key):
            yield key, "text", value


def _data_names(document: dict[str, Any]) -> Iterator[tuple[str, Kind, Any]]:
    """What the sources of data name; those names are taken out of the document."""
    is_played = document["rollout"]["workflow_arguments"].get("agent") == "verifiers"
    for key, source in set_documents(document["data"]):
        if source["source"] == "verifiers":
            yield from _verifiers_names(f"{key}.arguments", source.pop("arguments"))
        elif is_played:  # then rows say what runs
            yield f"{key}.source", "command", ["verifiers", source["source"]]
        if kind := _DATA_KINDS.get(source["source"]):
            yield f"{key}.path", kind, source.pop("path")


def _verifiers_names(key: str, arguments: Any) -> Iterator[tuple[str, Kind, Any]]:
    """What a configuration of verifiers names: plugins, functions, and where programs run."""
    for name, value in _texts(arguments, key):
        leaf = name.rpartition(".")[2]
        if leaf == "type":
            yield name, "command", ["verifiers", value]
        else:
            yield name, "package" if leaf in ("id", "fn") else "text", value


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts below a value, with their keys."""
    if isinstance(value, str):
        yield key.removeprefix("."), value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, Sequence):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{key}.{index}")


def _is_path(text: str) -> bool:
    return text.startswith(_PATH_STARTS) or ".." in text.split("/")


def _plain(path: str) -> Path:
    # Path.expanduser raises for a user that is not there.
    return Path(os.path.expanduser(path.removeprefix("file://").removeprefix("file:")))  # noqa: PTH111


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(str(root) for root in roots) or "any folder of this installation"
