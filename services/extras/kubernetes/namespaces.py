"""Launchers of an installation whose projects have separate namespaces: one for each namespace."""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from services.common.errors import FailedPreconditionError, NotFoundError, UnavailableError
from services.common.runspec.run import RunSpec
from services.controller.launch.launcher import LauncherDefaults
from services.extras.kubernetes.drain import PlacedPod
from services.extras.kubernetes.launcher import KubernetesLauncher

logger = logging.getLogger(__name__)


class NamespaceLaunchers(LauncherDefaults):
    """Gives each run to the launcher of its project's namespace.

    A run whose project has another namespace since its last start leaves the former one first, so that it
    never has pods in two.

    Args:
        launchers: Launcher of each namespace.
        namespace_of: Returns the namespace of a run's pods.
    """

    def __init__(
        self,
        launchers: Mapping[str, KubernetesLauncher],
        namespace_of: Callable[[str], Awaitable[str]],
    ) -> None:
        self._launchers = launchers
        self._namespace_of = namespace_of
        self._homes: dict[str, KubernetesLauncher] = {}

    def problems(self, spec: RunSpec) -> Iterable[str]:
        """Returns the problems in any namespace: they have the same nodes and the same overrides."""
        return next(iter(self._launchers.values())).problems(spec)

    async def why_volatile(self, run_id: str, folder: str | None) -> str:
        return await (await self._home(run_id)).why_volatile(run_id, folder)

    async def start(self, run_id: str, spec: RunSpec, *, later: Collection[str] = ()) -> None:
        home = await self._home(run_id)
        for former in await self._former(run_id, home):
            await former.stop(run_id)
        self._homes[run_id] = home
        await home.start(run_id, spec, later=later)

    def queued(self, run_id: str) -> Collection[str]:
        home = self._homes.get(run_id)
        return () if home is None else home.queued(run_id)

    async def admitted(self, run_id: str, worker_ids: Collection[str]) -> Collection[str]:
        return await (await self._home(run_id)).admitted(run_id, worker_ids)

    async def end(self, run_id: str, worker_id: str) -> None:
        await (await self._home(run_id)).end(run_id, worker_id)

    async def release(self, run_id: str, worker_ids: Collection[str]) -> None:
        await (await self._home(run_id)).release(run_id, worker_ids)

    async def stop(self, run_id: str) -> None:
        home = self._homes.get(run_id) or self._launchers.get(await self._namespace_of(run_id))
        if home is not None:
            await home.stop(run_id)
        for former in await self._former(run_id, home):
            await former.stop(run_id)
        self._homes.pop(run_id, None)

    def gpus_for(self, run_id: str) -> None:
        """Returns None, as the launcher of each namespace does."""

    def placed_pods(self) -> list[PlacedPod]:
        """Returns the pods of all runs that are on nodes and have not ended."""
        return [pod for launcher in self._launchers.values() for pod in launcher.placed_pods()]

    async def _home(self, run_id: str) -> KubernetesLauncher:
        """Returns the launcher of the namespace in which a run has its pods, or will have them."""
        if (home := self._homes.get(run_id)) is not None:
            return home
        namespace = await self._namespace_of(run_id)
        try:
            return self._launchers[namespace]
        except KeyError:
            raise UnavailableError(
                f"the controller does not watch the namespace {namespace} of run {run_id}: wait a minute if "
                "it was added just now; otherwise create the chart's objects in it and restart the controller"
            ) from None

    async def _former(
        self, run_id: str, home: KubernetesLauncher | None
    ) -> list[KubernetesLauncher]:
        """Returns the launchers of other namespaces in which a run has pods.

        A namespace that refuses the controller, as after its deletion, holds up its own project only.
        """
        launchers = []
        for namespace, launcher in self._launchers.items():
            try:
                if launcher is not home and await launcher.has_pods(run_id):
                    launchers.append(launcher)
            except (FailedPreconditionError, NotFoundError) as error:
                why = {"namespace": namespace, "run_id": run_id, "error": error.message}
                logger.warning("cannot look for former pods of a run", extra=why)
        return launchers
