"""Which run a blob belongs to, so that a worker reads and writes the blobs of its own run only."""

from collections.abc import Iterable

from services.common.errors import PermissionDeniedError


class Ownership:
    """Runs of the blobs of one shard."""

    def __init__(self) -> None:
        self._runs: dict[int, str] = {}

    def give(self, blob_ids: Iterable[int], run_id: str) -> None:
        """Blobs were made for a run."""
        self._runs.update(dict.fromkeys(blob_ids, run_id))

    def forget(self, blob_ids: Iterable[int]) -> None:
        """Blobs are gone."""
        for blob_id in blob_ids:
            self._runs.pop(blob_id, None)

    def demand(self, run_id: str, blob_ids: Iterable[int]) -> None:
        """See that blobs belong to a run; those that are gone belong to nobody.

        Raises:
            PermissionDeniedError: If one belongs to another run.
        """
        for blob_id in blob_ids:
            demand_run(run_id, self._runs.get(blob_id, run_id))


def demand_run(run_id: str, owner: str) -> None:
    """See that what a worker asks for belongs to its run.

    Raises:
        PermissionDeniedError: If it does not.
    """
    if owner != run_id:
        raise PermissionDeniedError(f"a worker of {run_id} may not use data of another run")
