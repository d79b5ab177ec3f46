"""Extension of vLLM's workers for a server of a fleet (``--worker-extension-cls``)."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.extras.external_engine.layout import (
    PreparedCopy,
    UnknownLayoutError,
    differing_sources,
)
from services.extras.fleets.adapter_worker import AdapterLoader
from services.extras.fleets.direct.member import ServerMember
from services.extras.vllm.worker import WeightLoader, tensor_place

logger = logging.getLogger(__name__)


class FleetWorker(AdapterLoader, WeightLoader):
    """Loads the versions and adapters that its server has received, and compares its parameters with them."""

    rank: int
    """Number of the worker, as vLLM sets it."""
    _member: ServerMember | None = None
    _copy: PreparedCopy | None = None
    """Copy of the version that the member has received; None if only vLLM's loader can place it."""

    def load_fleet_weights(self, description: str) -> dict[str, Any]:
        """Replaces all weights; returns how, and which tensors the parameters do not hold afterwards.

        vLLM runs this call between two steps, so that no step uses two versions.

        Args:
            description: Result of ``EngineHosts.described``.
        """
        return self._compared(self.opened(description))

    def join_weight_group(self, described: str) -> dict[str, Any]:
        """Starts the member that receives weights from the trainer; returns its number and its device.

        Args:
            described: JSON object with the ``address`` and the ``secret`` of the middleware's listener.
        """
        middleware = json.loads(described)
        if self._member is not None:
            self._member.close()
        self._member = ServerMember(
            middleware["address"],
            bytes.fromhex(middleware["secret"]),
            number=self.rank,
            device=self.device,
            on_received=self._prepare_copy,
            on_dropped=self._drop_copy,
        )
        return {"number": self.rank, "device": self._member.device_name}

    def load_group_weights(self, described: str) -> dict[str, Any]:
        """Replaces all weights by a version that the member has received; see :meth:`load_fleet_weights`.

        Args:
            described: JSON list of version and digest.

        Raises:
            RuntimeError: If the member holds another version.
        """
        version, digest = json.loads(described)
        if self._member is None:
            raise RuntimeError("this worker has joined no weight group")
        began = time.perf_counter()
        with self._member.held(version, digest) as tensors:
            copy = self._copy
            if copy is None:
                loaded = self._compared(dict(tensors))
            else:
                self._reset_features()
                loaded = {"way": "compared", "differing": copy.run()}
        copy_ms = round(1e3 * (time.perf_counter() - began), 1)
        return {**loaded, "phases_ms": {**self._member.phases_ms, "copy": copy_ms}}

    def _drop_copy(self) -> None:
        """Frees the copy, whose views would keep the memory of the received version."""
        self._copy = None

    def _prepare_copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Prepares a load in the member's thread, while the engine decodes."""
        model = self.model_runner.model
        copy, self._copy = self._copy, None
        if self.quantizes_weights:
            return
        parameters = dict(model.named_parameters())
        try:
            if copy is None or not copy.fits(tensors, parameters):
                copy = PreparedCopy(tensors, parameters, **tensor_place(model))
        except UnknownLayoutError as error:
            logger.info("using vLLM's loader for weights", extra={"why": str(error)})
            return
        copy.measure()
        self._copy = copy

    def _compared(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        loaded: dict[str, Any] = dict(self.load_tensors(tensors))
        if loaded["way"] == "copied":
            model = self.model_runner.model
            with torch.no_grad():
                loaded["differing"] = differing_sources(
                    tensors, dict(model.named_parameters()), **tensor_place(model)
                )
            loaded["way"] = "compared"
        return loaded
