"""Extension of vLLM's workers for a server of a fleet (``--worker-extension-cls``)."""

from typing import Any

import torch

from services.extras.external_engine.layout import differing_sources
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.adapter_worker import AdapterLoader
from services.extras.vllm.worker import WeightLoader, tensor_place


class FleetWorker(AdapterLoader, WeightLoader):
    """Loads the versions and adapters that its server has received, and compares its parameters with them."""

    def load_fleet_weights(self, description: str) -> dict[str, Any]:
        """Replaces all weights; returns how, and which tensors the parameters do not hold afterwards.

        vLLM runs this call between two steps, so that no step uses two versions.

        Args:
            description: Result of ``StagedWeights.description``.
        """
        loaded = dict(self.load_slipstream_weights(description))
        if loaded["way"] == "copied":
            model = self.model_runner.model
            with torch.no_grad():
                loaded["differing"] = differing_sources(
                    open_shared(description), dict(model.named_parameters()), **tensor_place(model)
                )
            loaded["way"] = "compared"
        return loaded
