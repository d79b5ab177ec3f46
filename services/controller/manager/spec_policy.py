"""What an installation allows a specification to name, and to whom."""

import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from services.common.errors import NotFoundError, PermissionDeniedError
from services.common.runspec.engines import engine_kind
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.security.confinement import CodePolicy, paths_named, runs_named
from services.common.security.secrets import find_plain_secrets
from services.common.telemetry.logging import RareLog
from services.controller.models import Role, covers
from services.controller.store.records import Run

logger = logging.getLogger(__name__)


class SpecPolicy:
    """Checks specifications that users submit, as they are once they are resolved.

    Args:
        allowance: What they may name.
        find: Finds a run by its id.
        saved_at: Finds the runs that have checkpoints at some paths.
    """

    def __init__(
        self,
        allowance: CodePolicy,
        find: Callable[[str], Awaitable[Run]],
        saved_at: Callable[[Collection[Path]], Awaitable[Collection[str]]],
    ) -> None:
        self._allowance = allowance
        self._find = find
        self._saved_at = saved_at
        self._refusals = RareLog(logger)

    def check(self, spec: RunSpec, role: Role, *, known: RunSpec | None = None) -> None:
        """See that a specification names what it may, and holds no secret.

        Args:
            spec: The specification.
            role: Of who asks for it.
            known: What it changes: what that says is no news.

        Raises:
            SpecError: With one line per problem.
            PermissionDeniedError: If it needs an admin.
        """
        old = [] if known is None else self._problems(known)
        if problems := [problem for problem in self._problems(spec) if problem not in old]:
            self._refusals.warning("a specification was refused", problems=problems)
            raise SpecError(problems)
        reasons = admin_reasons(spec) - (set() if known is None else admin_reasons(known))
        if reasons and not covers(role, "admin"):
            self._refusals.warning("a specification was refused", problems=sorted(reasons))
            raise PermissionDeniedError(
                f"{' and '.join(sorted(reasons))} may run code that nobody here has read, which needs the "
                f"role admin; who asks has {role}"
            )

    def _problems(self, spec: RunSpec) -> list[str]:
        return [*self._allowance.problems(spec), *find_plain_secrets(spec)]

    async def check_for(self, project: str, spec: RunSpec, role: Role) -> None:
        """As :meth:`check`; and runs whose files are named must be of the project.

        Raises:
            SpecError: With one line per problem.
            PermissionDeniedError: If it needs an admin.
            NotFoundError: If such a run is of another project, or of none.
        """
        self.check(spec, role)
        for run_id in runs_named(spec):
            if (await self._find(run_id)).project != project:
                raise NotFoundError(f"run {run_id!r} does not exist", run_id=run_id)
        # Checkpoints may be in folders that no run's id is part of.
        for run_id in await self._saved_at(paths_named(spec)):
            if (await self._find(run_id)).project != project:
                raise NotFoundError(
                    "a folder that the specification names does not exist for this project; list the "
                    "checkpoints of its runs"
                )


def admin_reasons(spec: RunSpec) -> set[str]:
    """What only admins may say: it lets other code in than an installation's own."""
    harmless = engine_kind(spec.rollout.engine).harmless_arguments
    arguments = spec.rollout.engine_arguments
    reasons = {
        f"rollout.engine_arguments.{name}={arguments[name]!r}"
        for name in arguments.keys() - harmless
    }
    models = {"model": spec.model, "teacher": spec.teacher}
    reasons |= {
        f"{key}.trust_remote_code"
        for key, model in models.items()
        if model is not None and model.trust_remote_code
    }
    return reasons
