"""Secrets of the pods of a run: a secret with the run's token and a certificate that is renewed.

put     a run starts                        -> secret
keep    half of a certificate's time is over -> another secret, whose files kubelets put into the pods
remove  the run has ended
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from services.common.errors import ServiceError
from services.common.host import Clock
from services.common.security.credentials import current_identity
from services.common.security.tls import Certificate
from services.controller.launch.pod_api import PodApi
from services.controller.launch.worker_pods import (
    TLS_FILES,
    TOKEN_KEY,
    run_metadata,
    secret_name,
)

logger = logging.getLogger(__name__)

_PERIOD_S = 60.0


class RunSecrets:
    """Writes, renews and deletes the secret of each run that has pods.

    Args:
        api: Writes and deletes secrets, without permission to read them.
    """

    def __init__(self, api: PodApi, *, owner: Mapping[str, str], clock: Clock = time) -> None:
        self._api = api
        self._owner = owner
        self._clock = clock
        self._renew_at: dict[str, float] = {}
        # Concurrent writes of one secret would collide, and a removed one would come back.
        self._writing = asyncio.Lock()

    async def put(self, run_id: str) -> None:
        """Writes a run's secret and replaces an existing one.

        Raises:
            FailedPreconditionError: If Kubernetes refuses it.
            UnavailableError: If Kubernetes does not answer.
        """
        async with self._writing:
            await self._put(run_id)

    def take_over(self, run_id: str) -> None:
        """Schedules a renewal of a secret that an earlier controller wrote at an unknown time."""
        if current_identity().issue is not None:
            self._renew_at.setdefault(run_id, 0.0)

    async def remove(self, run_id: str) -> None:
        """Deletes the secret of a run that has ended. Raises the errors of :meth:`put`."""
        async with self._writing:
            self._renew_at.pop(run_id, None)
            await self._api.delete_secret(secret_name(run_id))

    async def keep_renewed(self) -> None:
        """Renews certificates until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.renew()

    async def renew(self) -> None:
        """Renews the certificates that are due; failed ones are retried at the next call."""
        now = self._clock.time()
        for run_id in [run_id for run_id, at in self._renew_at.items() if at <= now]:
            try:
                async with self._writing:
                    if run_id in self._renew_at:
                        await self._put(run_id)
            except ServiceError as error:
                why = {"run": run_id, "error": str(error)}
                logger.warning("cannot renew the certificate", extra=why)

    async def _put(self, run_id: str) -> None:
        identity = current_identity()
        certificate = await asyncio.to_thread(identity.certificate_for, run_id)
        token = identity.token_for(run_id)
        await self._api.put_secret(run_secret(run_id, token, certificate, owner=self._owner))
        if certificate is not None:
            self._renew_at[run_id] = certificate.renew_at


def run_secret(
    run_id: str, token: str, certificate: Certificate | None, *, owner: Mapping[str, str]
) -> dict[str, Any]:
    """Builds the secret from which the pods of a run read its token and its certificate."""
    data = {TOKEN_KEY: token}
    if certificate is not None:
        parts = (certificate.chain, certificate.key, certificate.authority)
        data |= {name: part.decode() for name, part in zip(TLS_FILES, parts, strict=True)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": run_metadata(run_id, secret_name(run_id), owner=owner),
        "type": "Opaque",
        "stringData": data,
    }
