"""Extension of vLLM's workers for a server of a fleet (``--worker-extension-cls``)."""

import json
from typing import Any

import torch
from torch import Tensor

from services.extras.external_engine.layout import differing_sources
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.adapter_worker import AdapterLoader
from services.extras.fleets.direct.member import ServerMember
from services.extras.vllm.worker import WeightLoader, tensor_place


class FleetWorker(AdapterLoader, WeightLoader):
    """Loads the versions and adapters that its server has received, and compares its parameters with them."""

    rank: int
    """Number of the worker, as vLLM sets it."""
    _member: ServerMember | None = None

    def load_fleet_weights(self, description: str) -> dict[str, Any]:
        """Replaces all weights; returns how, and which tensors the parameters do not hold afterwards.

        vLLM runs this call between two steps, so that no step uses two versions.

        Args:
            description: Result of ``StagedWeights.description``.
        """
        return self._compared(open_shared(description))

    def join_weight_group(self, described: str) -> dict[str, Any]:
        """Starts the member that receives weights from the trainer; returns its number and its device.

        Args:
            described: JSON object with the ``path`` and the ``secret`` of the middleware's socket.
        """
        middleware = json.loads(described)
        if self._member is not None:
            self._member.close()
        self._member = ServerMember(
            middleware["path"],
            bytes.fromhex(middleware["secret"]),
            number=self.rank,
            device=self.device,
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
        with self._member.held(version, digest) as tensors:
            return self._compared(dict(tensors))

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
