"""Owners of blobs: restricts each worker to the blobs of its run."""

from collections.abc import Iterable

from services.common.errors import PermissionDeniedError


class Ownership:
    """Maps the blobs of one shard to the runs that own them."""

    def __init__(self) -> None:
        self._runs: dict[int, str] = {}

    def give(self, blob_ids: Iterable[int], run_id: str) -> None:
        """Records the run that owns new blobs."""
        self._runs.update(dict.fromkeys(blob_ids, run_id))

    def forget(self, blob_ids: Iterable[int]) -> None:
        """Drops deleted blobs."""
        for blob_id in blob_ids:
            self._runs.pop(blob_id, None)

    def check_owner(self, run_id: str, blob_ids: Iterable[int]) -> None:
        """Checks that blobs belong to a run; deleted blobs have no owner and pass.

        Raises:
            PermissionDeniedError: If one belongs to another run.
        """
        for blob_id in blob_ids:
            check_run(run_id, self._runs.get(blob_id, run_id))


def check_run(run_id: str, owner: str) -> None:
    """Checks that the data a worker requests belongs to its run.

    Raises:
        PermissionDeniedError: If it does not.
    """
    if owner != run_id:
        raise PermissionDeniedError(f"a worker of {run_id} may only use data of its own run")
