"""Gate for specifications: restricts the files, code and commands that they may name.

Every key of a specification that can hold text has a kind in :data:`KINDS`, which decides how its
values are judged. The controller judges a submitted specification by its text. Workers judge it
again on their hosts with links resolved, because only there links and modules are visible.
"""

import importlib.util
import json
import os.path
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from services.common.callables import Reference, parse_reference, real_path
from services.common.runspec.data import PromptSourceSpec
from services.common.runspec.rollout import SandboxSpec
from services.common.runspec.run import RunSpec
from services.common.security import addresses
from services.common.stores import is_url, url_problem, without_secrets

Kind = Literal[
    "free",
    "text",
    "path",
    "model",
    "code",
    "function",
    "package",
    "command",
    "rows",
    "row arguments",
    "workflow arguments",
    "image",
    "registry",
    "address",
    "target",
]
"""Kind of a value, which decides how it is judged.

``free``: not judged; a slash has no meaning in it. ``text``: anything, which may be a path or a reference to
code. ``path``: a file or a folder, or its URL in an object store. ``model``: a preset, a hub id, or a
``path``. ``code``: a reference for :func:`~services.common.callables.load_callable`, the name of something
built in, or an address, which workers judge when they connect (:mod:`services.rollout.calls.outside`).
``function``: a function that verifiers loads, also as ``package.module.name``. ``package``: a plugin that
verifiers imports by its name. ``command``: a program with its arguments. ``rows``: ``path`` of a prompt
source, whose kind depends on ``source``; the kinds of ``row arguments`` and ``workflow arguments`` depend on
their consumer. ``image``: content of a sandbox, a ``path`` if it is a folder on the rollout's host, else the
name of an image in a ``registry``, which must be public or listed. ``address``: a URL, which rollouts judge
when they connect, as those of rewards, agents and environments. ``target``: a ``path`` to which a run writes,
and therefore neither among code nor in the controller's folder.

Code may connect to an address in its ``text`` without asking :mod:`services.rollout.calls.outside`.
A ``text`` may therefore name only hosts that the installation lists.
"""

_MODELS: Final[Mapping[str, Kind]] = {
    "path": "model",
    "revision": "text",
    "tokenizer": "model",
    "warm_start.examples": "code",
}
_REWARDS: Final[Mapping[str, Kind]] = {"name": "code", "column": "free", "arguments": "text"}
_ROWS: Final[Mapping[str, Kind]] = {
    "source": "free",
    "path": "rows",
    "split": "text",
    "subset": "text",
    "arguments": "row arguments",
    "filters.N.column": "free",
    "filters.N.one_of": "free",
    "filters.N.matches": "free",
    "filters.N.function": "code",
    "filters.N.arguments": "text",
    "prompt_column": "free",
    "answer_column": "free",
    "prompt_template": "free",
    **{f"rewards.N.{key}": kind for key, kind in _REWARDS.items()},
}
_SETS = ("data.train", "data.train.NAME", "data.heldout", "data.heldout.NAME")

KINDS: Final[Mapping[str, Kind]] = {
    "name": "free",
    **{f"{model}.{key}": kind for model in ("model", "teacher") for key, kind in _MODELS.items()},
    "teacher.url": "address",
    "data.train.NAME.teacher_url": "address",
    "teacher.prompt_column": "free",
    "teacher.demonstration": "free",
    **{f"{rows}.{key}": kind for rows in _SETS for key, kind in _ROWS.items()},
    "data.curriculum.function": "code",
    "data.curriculum.arguments": "text",
    "data.prompt_column": "free",
    "data.answer_column": "free",
    "data.rejected_column": "free",
    "data.model_inputs_column": "free",
    "data.image_column": "free",
    "data.prompt_template": "free",
    "data.chat_template_arguments": "text",
    "rollout.engine": "free",
    "rollout.engine_arguments": "text",
    "rollout.speculation.model": "model",
    "rollout.sampling.stop": "free",
    "rollout.workflow": "code",
    "rollout.workflow_arguments": "workflow arguments",
    **{f"rollout.rewards.N.{key}": kind for key, kind in _REWARDS.items()},
    "rollout.sandbox.kind": "free",
    "rollout.sandbox.image": "image",
    "rollout.sandbox.image_column": "free",
    "rollout.sandbox.folders": "free",
    "rollout.sandbox.arguments": "text",
    "rollout.answer_pattern": "free",
    "algorithm.advantage": "code",
    "algorithm.advantage_arguments": "text",
    "algorithm.loss": "code",
    "algorithm.loss_arguments": "text",
    "trainer.engine": "free",
    "trainer.optimizer.kind": "free",
    "trainer.lora.target_modules": "text",
    "trainer.checkpoint.best.set": "free",
    "trainer.checkpoint.best.metric": "free",
    "trainer.checkpoint.directory": "target",
    "trainer.checkpoint.start_from": "path",
    "samples.directory": "target",
    "topology.task_groups": "text",
    "weight_sync.backend": "free",
    "weight_sync.mode": "free",
    "weight_sync.storage.directory": "target",
    "record": "free",
    "trackers.N.kind": "free",
    "trackers.N.project": "text",
    "trackers.N.tags": "free",
    # The installation lists what a run may name here (``workers.overrides`` of the chart).
    **{
        f"pods.NAME.{key}": "free"
        for key in (
            *(
                "cpu",
                "memory",
                "shared_memory",
                "ephemeral_storage",
                "node_selector",
                "annotations",
            ),
            *("priority_class", "templates", "tolerations.N.key", "tolerations.N.value"),
        )
    },
}
"""Kind of each key that can hold a user's text, named as by
``services.common.runspec.keys.fields_of``. Other keys are judged as ``text``.
"""

_WORKFLOW_ARGUMENTS: Final[Mapping[str, Kind]] = {
    "agent": "code",
    "environment": "code",
    "train": "code",
    "tools": "code",
    "mcp_servers": "command",
}
_DATA_KINDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("jsonl", "csv", "parquet"), "path"),
    "huggingface": "model",
    "python": "code",
    "verifiers": "package",
}
# Presets of models and tokenizers, which are generated without files.
_PRESETS = ("tiny:", "chars:")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PLUGIN = re.compile(r"(\w[\w.-]*/)?(?P<module>[A-Za-z_][\w-]*)(@[\w.-]+)?")
_PATH_STARTS = ("/", "~", "./", "../", "file:")
_RESTRICTED = ("ALLOWED_ROOTS", "ALLOWED_URLS", "CODE_ROOTS", "ALLOWED_COMMANDS")
_WORKER_SETTINGS = (*_RESTRICTED, "REWARD_HOSTS", "UNWRITABLE_ROOTS")
_RUN = re.compile(r"run_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePolicy:
    """Names that specifications may contain; without ``roots``, as for a single user, all are allowed."""

    roots: tuple[Path, ...] = ()
    """Folders with data, models and checkpoints."""
    urls: tuple[str, ...] = ()
    """Begins of URLs of data, models and checkpoints in object stores."""
    code_roots: tuple[Path, ...] = ()
    """Folders with Python code that may run."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Programs that may be started, each with all its arguments."""
    hosts: tuple[str, ...] = ()
    """Hosts, in lower case, that arguments may name."""
    unwritable: tuple[Path, ...] = ()
    """Further folders, besides those with code, to which runs may not write by their paths."""

    def settings(self) -> dict[str, str]:
        """Returns settings that give a worker this policy.

        It keeps its own where a field is empty; with ``roots``, only its own hosts and unwritable folders.
        """
        values = (
            self.roots,
            self.urls,
            self.code_roots,
            self.commands,
            self.hosts,
            self.unwritable,
        )
        pairs = zip(_WORKER_SETTINGS, values, strict=True)
        is_sent = {name for name in _RESTRICTED if self.roots}
        return {
            name: json.dumps(value, default=str)
            for name, value in pairs
            if value or name in is_sent
        }

    def problems(self, spec: RunSpec) -> list[str]:
        """Returns the forbidden names in a specification, judged by its text.

        Returns:
            One line per name: its key, its value, and the allowed ones.
        """
        judge = _Judge(self, lambda path: Path(os.path.normpath(path)), is_here=False)
        return judge.all_problems(spec)

    def path_problems(self, path: Path) -> list[str]:
        """Returns why a file that a row names may not be read, links resolved; empty if it may."""
        judge = _Judge(self, Path.resolve, is_here=True)
        return list(judge._path(str(path), self.roots, {path})) if self.roots else []  # noqa: SLF001

    def problems_here(self, spec: RunSpec) -> list[str]:
        """Does the same as :meth:`problems` on the host of the files: resolves links, looks up modules."""
        return _Judge(self, Path.resolve, is_here=True).all_problems(spec)


@dataclass(frozen=True, slots=True)
class _Judge:
    allowance: CodePolicy
    resolved: Callable[[Path], Path]
    is_here: bool

    def all_problems(self, spec: RunSpec) -> list[str]:
        if not self.allowance.roots:
            return []
        return [
            f"{key}: {problem}"
            for key, kind, value in _names(spec)
            for problem in (*self._problems(kind, value), *self._hosts(kind, key, value))
        ]

    def _problems(self, kind: Kind, value: Any) -> Iterator[str]:
        if kind == "command":
            yield from self._command(value)
        elif "\0" in value:
            yield "contains a zero byte; remove it"
        elif kind == "package":
            yield from self._package(value)
        elif kind == "function":
            yield from self._function(value)
        elif kind in ("address", "registry"):
            return
        elif kind in ("code", "text"):
            yield from self._code_or_text(value, is_code=kind == "code")
        elif kind == "model" and value.startswith(_PRESETS):
            return
        elif is_url(value):
            yield from self._url(value)
        elif kind in ("path", "target") or not self._is_hub_id(value):
            # Not every library that opens the path expands a leading ~ or file:.
            meanings = {Path(value), _plain(value)}
            problems = list(self._path(value, self.allowance.roots, meanings))
            yield from problems or (self._target(value, meanings) if kind == "target" else ())

    def _url(self, url: str) -> Iterator[str]:
        below = [allowed.rstrip("/") for allowed in self.allowance.urls]
        is_below = any(url == allowed or url.startswith(f"{allowed}/") for allowed in below)
        if is_below and not (problem := url_problem(url)):
            return
        if is_below:
            yield f"{without_secrets(url)!r} {problem}"
        else:
            allowed = ", ".join(below) or "none"
            yield (
                f"{without_secrets(url)!r} is not below the allowed URLs of this installation "
                f"({allowed}); ask the operator to add one to allowed_urls"
            )

    def _target(self, text: str, meanings: set[Path]) -> Iterator[str]:
        """Yields the folder with code or of the controller that has a path to write to."""
        for root in (*self.allowance.code_roots, *self.allowance.unwritable):
            if any(_is_inside(self.resolved(path), [self.resolved(root)]) for path in meanings):
                yield f"{text!r} is in {root}, to which runs may not write; use another folder"
                return

    def _code_or_text(self, value: str, *, is_code: bool) -> Iterator[str]:
        # In every key, judge each text that the loader would accept as a reference.
        if (reference := _reference(value)) is not None:
            yield from self._reference(reference, must_exist=is_code and self.is_here)
        elif value.startswith(_PATH_STARTS) or ".." in value.split("/"):
            yield from self._path(value, self.allowance.roots, {_plain(value)})

    def _reference(self, reference: Reference, *, must_exist: bool) -> Iterator[str]:
        location = reference.location
        if reference.is_file:
            yield from self._path(location, self.allowance.code_roots, {Path(location)})
        else:
            yield from self._module(location, must_exist=must_exist)

    def _package(self, value: str) -> Iterator[str]:
        if (reference := _PLUGIN.fullmatch(value)) is None:
            yield f"expected the id of a plugin, such as 'owner/name@version', got {value!r}"
        else:
            module = reference["module"].replace("-", "_").lower()
            yield from self._module(module, must_exist=True)

    def _function(self, value: str) -> Iterator[str]:
        module, separator, name = value.rpartition(":" if ":" in value else ".")
        reference = _reference(f"{module}:{name}") if separator else None
        if reference is None:
            yield f"expected 'module:function' or 'file.py:function', got {value!r}"
        else:
            yield from self._reference(reference, must_exist=True)

    def _path(self, text: str, roots: Sequence[Path], meanings: set[Path]) -> Iterator[str]:
        try:
            paths = sorted(map(self.resolved, meanings))
            inside = [self.resolved(root) for root in roots]
        except (OSError, RuntimeError, ValueError) as error:  # circular links, zero bytes
            yield f"{text!r} cannot be resolved ({error}); use a path inside {_listed(roots)}"
            return
        for path in paths:
            if not _is_inside(path, inside):
                leads = "" if str(path) == text else f" resolves to {path}, which"
                yield f"{text!r}{leads} is outside {_listed(roots)}; use a path inside"
                return

    def _module(self, module: str, *, must_exist: bool) -> Iterator[str]:
        roots = [root.resolve() for root in self.allowance.code_roots]
        specs = list(_module_specs(module))
        if any(not _is_within(spec, roots) for spec in specs) or (must_exist and not specs):
            yield f"module {module!r} is outside {_listed(roots)}; move the file there"

    def _command(self, command: Any) -> Iterator[str]:
        if not isinstance(command, list) or tuple(command) not in self.allowance.commands:
            allowed = [" ".join(words) for words in self.allowance.commands]
            yield (
                f"{command!r} is not an allowed command of this installation "
                f"({', '.join(allowed) or 'none'}); ask the operator to add it to allowed_commands"
            )

    def _hosts(self, kind: Kind, key: str, value: Any) -> Iterator[str]:
        """Yields the hosts of a text that the installation does not list."""
        if kind == "text":
            argument = next((name for name in reversed(key.split(".")) if not name.isdecimal()), "")
            hosts = addresses.hosts_in(value)
            # Names of arguments are judged, too, each below its own key.
            is_other = value in ("", argument) or (value == "0" and re.search("[^s]s$", argument))
            if not hosts and not is_other and addresses.names_address(argument):
                hosts = {addresses.host_of(value)}
        elif kind == "registry":
            registry = addresses.registry_of(value)
            hosts = {registry} if addresses.is_private(registry) else set()
        else:
            return
        for host in sorted(hosts - {*self.allowance.hosts}):
            yield (
                f"{value!r:.200} names the host {host!r}, which is not among the reward_hosts of this "
                "installation; ask the operator to add it"
            )

    def _is_hub_id(self, value: str) -> bool:
        """Returns True if a value is a hub id; an existing folder of that name takes precedence."""
        if _HUB_ID.fullmatch(value) is None:
            return False
        return not (self.is_here and os.path.exists(value))  # noqa: PTH110 -- accepts names of any length


def runs_named(spec: RunSpec, paths: Collection[Path]) -> set[str]:
    """Returns the runs whose folders a specification names, for example to start from a checkpoint.

    Args:
        paths: Result of :func:`paths_named`.
    """
    texts = [value for _, value in _texts(spec.model_dump(mode="json"), "")]
    return {run_id for text in (*texts, *map(str, paths)) for run_id in _RUN.findall(text)}


def paths_named(spec: RunSpec) -> set[Path]:
    """Returns the absolute paths that a specification names, without ``..``, and what they link to.

    URLs of object stores are among them, as ``Path`` writes them (``s3:/bucket/folder``).

    Blocks: symbolic links are resolved, where this process sees the files.
    """
    paths: set[Path] = set()
    for _, value in _texts(spec.model_dump(mode="json"), ""):
        if is_url(value):
            paths.add(Path(value))
            continue
        path = os.path.normpath(_plain(value))
        if os.path.isabs(path) and "\0" not in path:  # noqa: PTH117
            paths |= {Path(path), Path(real_path(path))}
    return paths


def _names(spec: RunSpec) -> Iterator[tuple[str, Kind, Any]]:
    """Yields the names in a specification: key, kind, value."""
    is_played = spec.rollout.workflow_arguments.get("agent") == "verifiers"
    for split, rows in spec.data.sets.items() if is_played else ():
        if rows.source != "verifiers":  # otherwise the rows decide what runs
            yield f"data.{split}.source", "command", ["verifiers", rows.source]
    for key, kind, value, section in _fields(spec, "", ""):
        if kind == "rows":
            assert isinstance(section, PromptSourceSpec)
            yield key, _DATA_KINDS.get(section.source, "text"), value
        elif kind == "row arguments" and getattr(section, "source", None) == "verifiers":
            yield from _verifiers_names(key, value)
        elif kind == "image":
            assert isinstance(section, SandboxSpec)
            if value:
                yield key, "path" if section.kind == "bubblewrap" else "registry", value
        elif kind == "workflow arguments":
            yield from _workflow_names(spec, key, value)
        elif kind != "free":
            judged: Kind = "text" if kind == "row arguments" else kind
            yield from ((name, judged, text) for name, text in _texts(value, key))


def _fields(
    section: BaseModel, key: str, pattern: str
) -> Iterator[tuple[str, Kind, Any, BaseModel]]:
    """Yields values of a specification: key, kind, value, and the part that holds it.

    Args:
        pattern: The same prefix in the notation of :data:`KINDS`.
    """
    for name, value in section:
        yield from _field(value, f"{key}{name}", f"{pattern}{name}", section)


def _field(
    value: Any, key: str, pattern: str, section: BaseModel
) -> Iterator[tuple[str, Kind, Any, BaseModel]]:
    if isinstance(value, BaseModel):
        yield from _fields(value, f"{key}.", f"{pattern}.")
    elif isinstance(value, tuple) and any(isinstance(inner, BaseModel) for inner in value):
        for index, inner in enumerate(value):
            yield from _field(inner, f"{key}.{index}", f"{pattern}.N", section)
    elif isinstance(value, dict) and any(isinstance(inner, BaseModel) for inner in value.values()):
        for name, inner in value.items():
            yield from _field(inner, f"{key}.{name}", f"{pattern}.NAME", section)
    else:
        yield key, KINDS.get(pattern, "text"), value, section


def _workflow_names(
    spec: RunSpec, key: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Kind, Any]]:
    """Yields the arguments of a workflow: code and commands by known keys, all others as text."""
    for name, value in arguments.items():
        yield f"{key}.{name}", "text", name
        kind = _WORKFLOW_ARGUMENTS.get(name, "text")
        if kind == "command":
            for index, command in enumerate(value if isinstance(value, list) else [value]):
                yield f"{key}.{name}.{index}", kind, command
        elif name != "result_template" or spec.rollout.workflow != "multi_turn":
            yield from ((inner, kind, text) for inner, text in _texts(value, f"{key}.{name}"))


def _verifiers_names(key: str, arguments: Any) -> Iterator[tuple[str, Kind, Any]]:
    """Yields the names in a configuration of verifiers: plugins, functions, and runtimes of programs."""
    kinds: Mapping[str, Kind] = {"id": "package", "fn": "function"}
    for name, value in _texts(arguments, key):
        leaf = name.rpartition(".")[2]
        if leaf == "type":
            yield name, "command", ["verifiers", value]
        else:
            yield name, kinds.get(leaf, "text"), value


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields all texts of a value with their keys, keys of mappings, and integers that may be addresses."""
    if isinstance(value, str):
        yield key, value
    elif type(value) is int and (value == 0 or value >= 1 << 24):
        yield key, str(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield key, str(name)
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, Sequence):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{key}.{index}")


def _reference(text: str) -> Reference | None:
    try:
        return parse_reference(text)
    except ValueError:
        return None


def _module_specs(module: str) -> Iterator[ModuleSpec]:
    """Yields the specs of a module and its parent packages, as far as known without executing them."""
    name, *below = module.split(".")
    try:
        module_spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        module_spec = None
    while module_spec is not None:
        yield module_spec
        search_paths = module_spec.submodule_search_locations
        if not below or search_paths is None:
            return
        name = f"{name}.{below.pop(0)}"
        module_spec = PathFinder.find_spec(name, list(search_paths))


def _is_within(module_spec: ModuleSpec, roots: Sequence[Path]) -> bool:
    """Returns True if all code of a module is in one of the folders."""
    paths = list(module_spec.submodule_search_locations or ())
    if module_spec.has_location and module_spec.origin:
        paths.append(module_spec.origin)
    return bool(paths) and all(_is_inside(Path(path).resolve(), roots) for path in paths)


def _plain(path: str) -> Path:
    # Path.expanduser raises for an unknown user.
    return Path(os.path.expanduser(path.removeprefix("file://").removeprefix("file:")))  # noqa: PTH111


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _listed(roots: Sequence[Path]) -> str:
    return ", ".join(str(root) for root in roots) or "the folders of this installation"
