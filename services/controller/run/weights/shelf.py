"""Versions in a weight store: which exist, how a rollout gets from one to another, which are deleted.

A version is stored whole, or as the changes since an older one; both are *copies* of it. Pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCopy:
    """A complete copy of a version in the store."""

    name: str
    """Name in the store."""
    version: int
    """Weight version."""
    base_version: int
    """Version whose changes the copy has; -1 if it is whole."""
    manifests: tuple[str, ...]
    """Digest of each source's manifest, in order."""
    num_bytes: int
    """Bytes of all sources."""


@dataclass(slots=True)
class Shelf:
    """Complete copies in the store, oldest first."""

    copies: list[StoredCopy] = field(default_factory=list)

    def add(self, copy: StoredCopy) -> None:
        self.copies.append(copy)

    def drop(self, name: str) -> None:
        """Removes a copy that turned out to be damaged; its objects are deleted with the next version."""
        self.copies = [copy for copy in self.copies if copy.name != name]

    def find(self, version: int, base_version: int) -> StoredCopy | None:
        """Returns the newest copy of a version with that base; None if there is none."""
        copies = (c for c in reversed(self.copies) if c.version == version)
        return next((copy for copy in copies if copy.base_version == base_version), None)

    def path(self, held_version: int, version: int) -> Sequence[StoredCopy] | None:
        """Returns the copies that a rollout reads in order to get a version; None if there is no way.

        Changes since the version that it holds, step by step, or the whole version if that is smaller.

        Args:
            held_version: Version whose bytes the rollout holds; -1 for none.
        """
        changes = self._changes(held_version, version) if 0 <= held_version < version else None
        full_copy = self.find(version, -1)
        if full_copy is None or (
            changes is not None and sum(copy.num_bytes for copy in changes) <= full_copy.num_bytes
        ):
            return changes
        return (full_copy,)

    def retain(self, limit: int, *, newest: int, loading_names: Collection[str]) -> list[str]:
        """Removes copies beyond the limit; returns the names of all that stay, the least useful first.

        Args:
            limit: Number of copies that stay; newer versions and what is read stay in any case, and so
                does the most useful copy: of the newest version, the whole one.
            newest: Newest version whose older ones may go.
            loading_names: Names of the copies that rollouts read now.
        """
        self.copies.sort(key=lambda copy: (copy.version, copy.base_version < 0))
        for copy in [
            c for c in self.copies[:-1] if c.version < newest and c.name not in loading_names
        ]:
            if len(self.copies) <= limit:
                break
            self.copies.remove(copy)
        return [copy.name for copy in self.copies]

    def _changes(self, held_version: int, version: int) -> Sequence[StoredCopy] | None:
        copies: list[StoredCopy] = []
        while version > held_version:
            steps = [c for c in self.copies if c.version == version and c.base_version >= 0]
            if not steps:
                return None
            copies.insert(0, steps[-1])
            version = steps[-1].base_version
        return copies if version == held_version else None
