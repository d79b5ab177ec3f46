"""What an installation allows a specification to name."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from services.common.confinement import plain_secrets, runs_named, strays
from services.common.errors import NotFoundError
from services.common.spec.loader import SpecError
from services.common.spec.run import RunSpec
from services.controller.store.records import Run


class SpecPolicy:
    """Checks specifications that users submit.

    Args:
        allowed_roots: Folders that they may name files in; none allows all.
        find: Finds a run by its id.
    """

    def __init__(
        self, allowed_roots: Sequence[Path], find: Callable[[str], Awaitable[Run]]
    ) -> None:
        self._allowed_roots = tuple(allowed_roots)
        self._find = find

    def check(self, spec: RunSpec) -> None:
        """See that a specification names what it may, and holds no secret.

        Raises:
            SpecError: With one line per problem.
        """
        if problems := [*strays(spec, self._allowed_roots), *plain_secrets(spec)]:
            raise SpecError(problems)

    async def check_for(self, project: str, spec: RunSpec) -> None:
        """As :meth:`check`; and runs whose files are named must be of the project.

        Raises:
            SpecError: With one line per problem.
            NotFoundError: If such a run is of another project, or of none.
        """
        self.check(spec)
        for run_id in runs_named(spec):
            if (await self._find(run_id)).project != project:
                raise NotFoundError(f"run {run_id!r} does not exist", run_id=run_id)
