"""Adapters inside vLLM's workers: loaded from memory instead of from a folder, and removed."""

import json
import logging
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from services.extras.external_engine.layout import UnknownLayoutError, differing_sources
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.hosts import HostMemory, description_for
from services.extras.fleets.staging import is_received_memory
from services.weightsync.adapters import frozen_digest
from services.weightsync.weight_plan import LORA_DOWN, LORA_UP

logger = logging.getLogger(__name__)


class AdapterLoader:
    """Mixin for vLLM's worker; vLLM runs each call between two steps.

    vLLM keeps the adapters of running requests in slots on the device, and loads one again if it was evicted
    meanwhile. It then finds the tensors here, by the adapter's number.
    """

    model_runner: Any
    local_rank: int
    parallel_config: Any
    _host_memory: HostMemory | None = None
    _fleet_adapters: dict[int, dict[str, Tensor]] | None = None

    def join_engine_hosts(self, described: str) -> None:
        """Lets the first worker of a further host receive what the server does; see ``hosts.EngineHosts``."""
        node = self._node()
        if node and not self.local_rank:
            self._host_memory = HostMemory(described, node)

    def opened(self, description: str) -> dict[str, Tensor]:
        """Opens tensors that the server received, in the memory of this worker's host.

        Args:
            description: Result of ``hosts.EngineHosts.described``.

        Raises:
            RuntimeError: If this worker's host is no host of the engine by vLLM's configuration.
        """
        of_host = description_for(description, self._node())
        if not is_received_memory(json.loads(of_host)["path"]):
            raise RuntimeError(
                "this worker is not on a host that received the weights; start vLLM on each host with "
                "--nnodes, --node-rank and, on the further ones, --headless, in place of Ray"
            )
        return open_shared(of_host)

    def _node(self) -> int:
        """Returns the number of this worker's host among those of the engine."""
        return int(getattr(self.parallel_config, "node_rank_within_dp", 0))

    def load_fleet_adapter(self, lora_id: int, name: str, description: str) -> dict[str, Any]:
        """Loads an adapter; returns the digest of the tensors that this worker keeps.

        Args:
            lora_id: Number of the adapter, never used before.
            name: Name that requests give.
            description: Result of ``EngineHosts.described``: pairs of ``[r, in]`` and ``[out, r]``, whose
                product is added to a weight.

        Raises:
            ValueError: If the engine cannot adapt one of the modules.
        """
        tensors = {key: value.clone() for key, value in self.opened(description).items()}
        self._check_fleet_modules(tensors)
        self._fleet_kept()[lora_id] = tensors
        try:
            self.model_runner.lora_manager.add_adapter(_request(lora_id, name))
        except BaseException:
            del self._fleet_kept()[lora_id]
            raise
        return {"digest": bytes(frozen_digest(tensors.items()).tolist()).hex()}

    def remove_fleet_adapter(self, lora_id: int) -> bool:
        """Removes an adapter that no request uses; returns False if it is unknown."""
        self.model_runner.lora_manager.remove_adapter(lora_id)
        return self._fleet_kept().pop(lora_id, None) is not None

    def compare_fleet_base(self, description: str) -> dict[str, Any]:
        """Compares the parameters with a checkpoint; returns the names of the tensors that differ.

        The way is ``unknown`` if kernels changed the layout, as on a CPU.
        """
        model = self.model_runner.model
        ranks = {
            "rank": get_tensor_model_parallel_rank(),
            "ranks": get_tensor_model_parallel_world_size(),
        }
        parameters = {
            name.replace(".base_layer.", "."): value for name, value in model.named_parameters()
        }
        try:
            with torch.no_grad():
                differing = differing_sources(self.opened(description), parameters, **ranks)
        except UnknownLayoutError as error:
            logger.warning("the base is verified by its files only", extra={"why": str(error)})
            return {"way": "unknown", "differing": []}
        return {"way": "compared", "differing": differing}

    def _fleet_kept(self) -> dict[int, dict[str, Tensor]]:
        """Returns the adapters by number, from which vLLM's manager loads from now on."""
        if self._fleet_adapters is None:
            self._fleet_adapters = {}
            manager = self.model_runner.lora_manager
            adapters, load_from_folder = self._fleet_adapters, manager._load_adapter  # noqa: SLF001 -- no other way

            def load(manager: Any, request: LoRARequest) -> Any:
                if not request.lora_path.startswith(_IN_MEMORY):
                    return load_from_folder(request)
                return _model(manager, request.lora_int_id, adapters.get(request.lora_int_id))

            manager._load_adapter = MethodType(load, manager)  # noqa: SLF001
        return self._fleet_adapters

    def _check_fleet_modules(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuses modules that vLLM would ignore.

        Raises:
            ValueError: With the modules.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # noqa: SLF001
        adapted = set()
        for module in manager.modules:
            owner, _, leaf = module.rpartition(".")
            leaves = manager.packed_modules_mapping.get(leaf, [leaf])
            adapted |= {f"{owner}.{source_leaf}" for source_leaf in leaves}
        names = {name.removesuffix(LORA_UP).removesuffix(LORA_DOWN) for name in tensors}
        # Engines put the language model of a model with a vision tower into a wrapper.
        unknown = [n for n in sorted(names) if not {n, f"language_model.{n}"} & adapted]
        if unknown:
            raise ValueError(
                f"the engine has no adapters for {len(unknown)} modules, such as "
                f"{', '.join(unknown[:3])}; start vLLM without --lora-target-modules, or name fewer modules "
                "in trainer.lora.target_modules"
            )


_IN_MEMORY = "slipstream:"
"""Begin of the path of an adapter that is in no folder."""


def _request(lora_id: int, name: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=f"{_IN_MEMORY}{lora_id}")


def _model(worker_manager: Any, lora_id: int, tensors: Mapping[str, Tensor] | None) -> Any:
    """Builds vLLM's adapter; an empty one for an adapter that was removed while a last step ran."""
    manager = worker_manager._adapter_manager  # noqa: SLF001
    if tensors is None:
        logger.warning("a step names an adapter that was removed", extra={"lora": lora_id})
        return worker_manager._lora_model_cls(lora_id, rank=1, loras={})  # noqa: SLF001
    rank = max(value.shape[0] for name, value in tensors.items() if name.endswith(LORA_DOWN))
    # The product is scaled already.
    helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    helper.validate_legal(worker_manager.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return worker_manager._lora_model_cls.from_lora_tensors(  # noqa: SLF001
        lora_id,
        dict(tensors),
        peft_helper=helper,
        device="cpu",
        dtype=worker_manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
