"""Doors: tables of alternatives that installed packages provide as entry points.

Each door is a group of entry points (``slipstream.rollout_engines``, ``slipstream.rewards``, ...), in which
Slipstream declares its own alternatives too (``pyproject.toml``). Packages of others are found where they are
installed. A specification selects a name; it cannot load what is not installed. An entry that cannot be
loaded is an error for runs that name it, and for no other.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Generic, TypeVar

OWN_PACKAGE: Final = "slipstream"
_PREFIX: Final = "slipstream."
_CHECKOUT: Final = Path(__file__).parents[2] / "pyproject.toml"
_Entry = TypeVar("_Entry")


class DoorError(ValueError):
    """An installed alternative cannot be loaded, or two packages provide the same name."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One entry point of a door."""

    group: str
    name: str
    reference: str
    """``module:object``."""
    package: str
    """Name of the distribution that provides it."""
    version: str

    def __str__(self) -> str:
        return f"{self.reference} of {self.package} {self.version}"


@cache
def providers() -> Mapping[str, Mapping[str, tuple[Provider, ...]]]:
    """Returns the entry points of all doors by group and name.

    Slipstream's own come first. A checkout reads them from its ``pyproject.toml``, because the metadata of an
    editable installation are those of the day on which it was installed.
    """
    groups: dict[str, dict[str, tuple[Provider, ...]]] = {}
    own_providers = list(_own())
    for provider in own_providers + list(_installed(with_own=not own_providers)):
        names = groups.setdefault(provider.group, {})
        names[provider.name] = (*names.get(provider.name, ()), provider)
    return groups


def _own() -> Iterator[Provider]:
    if not _CHECKOUT.is_file():
        return
    project = tomllib.loads(_CHECKOUT.read_text())["project"]
    for group, references in project.get("entry-points", {}).items():
        for name, reference in references.items():
            yield Provider(group, name, reference, OWN_PACKAGE, project["version"])


def _installed(*, with_own: bool) -> Iterator[Provider]:
    """Yields the entry points of installed distributions, Slipstream's first, then by name."""
    packages: dict[str, Distribution] = {}
    for package in distributions():
        if any(point.group.startswith(_PREFIX) for point in package.entry_points):
            # The first of two distributions with a name is the one that Python imports from.
            packages.setdefault(package.name, package)
    if not with_own:
        packages.pop(OWN_PACKAGE, None)
    for name in sorted(packages, key=lambda name: (name != OWN_PACKAGE, name)):
        for point in packages[name].entry_points:
            if point.group.startswith(_PREFIX):
                yield Provider(point.group, point.name, point.value, name, packages[name].version)


class _Names:
    """Finds the one provider of a name in a group."""

    def __init__(self, group: str) -> None:
        self.group = _PREFIX + group

    def names(self) -> list[str]:
        return list(providers().get(self.group, {}))

    def __contains__(self, name: object) -> bool:
        return name in providers().get(self.group, {})

    def own_names(self) -> list[str]:
        return [
            name
            for name, entries in providers().get(self.group, {}).items()
            if entries[0].package == OWN_PACKAGE
        ]

    def provider(self, name: str) -> Provider:
        """Returns the provider of a name.

        Raises:
            KeyError: If no package provides it.
            DoorError: If two other packages provide it. Slipstream's own entries cannot be replaced.
        """
        entries = providers().get(self.group, {})[name]
        if len(entries) > 1 and entries[0].package != OWN_PACKAGE:
            raise DoorError(
                f"{name!r} ({self.group}) is provided by {' and by '.join(map(str, entries))}; "
                "uninstall one of these packages"
            )
        return entries[0]

    def _resolved(self, provider: Provider) -> Any:
        try:
            return resolve_name(provider.reference)
        except Exception as error:
            raise DoorError(
                f"{provider.name!r} ({self.group}) cannot be loaded: {provider} raised "
                f"{type(error).__name__}: {error}; repair or uninstall {provider.package}"
            ) from error


class Door(_Names, Mapping[str, _Entry], Generic[_Entry]):
    """Table of the objects that packages provide in a group, by name; each is loaded when it is first used.

    Iteration skips entries that cannot be loaded; a lookup of one raises :class:`DoorError`.

    Args:
        group: The group without ``slipstream.``.
        entry_type: Class of the objects.
    """

    def __init__(self, group: str, entry_type: type[_Entry]) -> None:
        super().__init__(group)
        self._entry_type = entry_type
        self._loaded: dict[Provider, _Entry] = {}

    def __getitem__(self, name: str) -> _Entry:
        provider = self.provider(name)
        if provider not in self._loaded:
            self._loaded[provider] = self._load(provider)
        return self._loaded[provider]

    def __iter__(self) -> Iterator[str]:
        for name in self.names():
            try:
                self[name]
            except DoorError:
                continue
            yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _load(self, provider: Provider) -> _Entry:
        entry = self._resolved(provider)
        if not isinstance(entry, self._entry_type):
            raise DoorError(
                f"{provider.name!r} ({self.group}) must be {self._entry_type.__module__}."
                f"{self._entry_type.__name__}, but {provider} is {type(entry).__name__}; repair or uninstall "
                f"{provider.package}"
            )
        return entry


class References(_Names, Mapping[str, str]):
    """Table of the references ``module:object`` that packages provide in a group, by name.

    Nothing is imported before :meth:`load`.

    Args:
        group: The group without ``slipstream.``.
    """

    def __getitem__(self, name: str) -> str:
        return self.provider(name).reference

    def load(self, name: str) -> Any:
        """Returns the object of a name.

        Raises:
            KeyError: If no package provides it.
            DoorError: If it cannot be imported, or two other packages provide it.
        """
        return self._resolved(self.provider(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())
