"""Policy that decides what a specification may name, and for which role."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from services.common.errors import NotFoundError, PermissionDeniedError
from services.common.runspec.engines import engine_kind
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.common.security.confinement import CodePolicy, paths_named, runs_named
from services.common.security.secrets import find_plain_secrets
from services.common.telemetry.logging import RareLog
from services.controller.schemas import Role, covers
from services.controller.store.records import Run

logger = logging.getLogger(__name__)


LauncherProblems = Callable[[RunSpec], Iterable[str]]


def no_launcher_problems(spec: RunSpec) -> Iterable[str]:
    """Returns nothing: the launcher adds no rules."""
    return ()


class SpecPolicy:
    """Checks specifications that users submit, after they are resolved.

    Args:
        allowance: Code and paths that specifications may name.
        saved_at: Returns the runs that have checkpoints at some paths.
        launcher_problems: Returns the problems that a specification has with this installation's launcher.
    """

    def __init__(
        self,
        allowance: CodePolicy,
        find: Callable[[str], Awaitable[Run]],
        saved_at: Callable[[Collection[Path]], Awaitable[Collection[str]]],
        launcher_problems: LauncherProblems = no_launcher_problems,
    ) -> None:
        self._allowance = allowance
        self._find = find
        self._saved_at = saved_at
        self._launcher_problems = launcher_problems
        self._refusals = RareLog(logger)

    def check(self, spec: RunSpec, role: Role, *, base: RunSpec | None = None) -> None:
        """Checks that a specification names only what is allowed and contains no secret.

        Args:
            base: Specification that ``spec`` replaces; problems that it already has are accepted.

        Raises:
            SpecError: If it has problems, with one line for each.
            PermissionDeniedError: If it needs an admin.
        """
        old = [] if base is None else self._problems(base)
        if problems := [problem for problem in self._problems(spec) if problem not in old]:
            self._refusals.warning("specification refused", problems=problems)
            raise SpecError(problems)
        reasons = admin_reasons(spec) - (set() if base is None else admin_reasons(base))
        if reasons and not covers(role, "admin"):
            self._refusals.warning("specification refused", problems=sorted(reasons))
            raise PermissionDeniedError(
                f"{' and '.join(sorted(reasons))} may run code that this installation has not reviewed, "
                f"which requires the role admin; the caller has {role}"
            )

    def _problems(self, spec: RunSpec) -> list[str]:
        return [
            *self._allowance.problems(spec),
            *find_plain_secrets(spec),
            *self._launcher_problems(spec),
        ]

    async def check_for(self, project: str, spec: RunSpec, role: Role) -> None:
        """Checks a specification like :meth:`check`, and that it names only files of the project's runs.

        Raises:
            SpecError: If it has problems, with one line for each.
            PermissionDeniedError: If it needs an admin.
            NotFoundError: If a named run belongs to another project or does not exist.
        """
        self.check(spec, role)
        paths = await asyncio.to_thread(paths_named, spec)
        for run_id in runs_named(spec, paths):
            try:
                is_own = (await self._find(run_id)).project == project
            except NotFoundError:
                # The user of a single-user machine may name a run of another state directory.
                is_own = not self._allowance.roots
            if not is_own:
                raise NotFoundError(f"run {run_id!r} does not exist", run_id=run_id)
        # A checkpoint's folder need not contain the id of its run.
        for run_id in await self._saved_at(paths):
            if (await self._find(run_id)).project != project:
                raise NotFoundError(
                    "the specification names a folder that does not belong to this project; use a "
                    "checkpoint of one of its runs"
                )


def admin_reasons(spec: RunSpec) -> set[str]:
    """Returns the settings that need an admin, because they may run code from outside the installation."""
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
