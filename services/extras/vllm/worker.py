"""Weight loader inside vLLM's workers; also reloads parameters that a model fills without vLLM's loaders.

During a layerwise reload, parameters have no memory and direct copies into them are lost, because
only vLLM's wrapped loaders defer them. gpt-oss copies its experts and its sinks directly.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from services.common.models.experts import checkpoint_names, is_fused_on_hub
from services.common.models.vision import TOWER
from services.extras.external_engine.in_place import handle_weight_command
from services.extras.external_engine.layout import Shape, UnknownLayoutError, copy_weights
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.vllm import images as _images  # noqa: F401 -- replaces a function of vLLM
from services.extras.vllm import invariant as _invariant  # noqa: F401 -- replaces functions of vLLM
from services.extras.vllm import versions
from services.extras.vllm.quantized import QuantizedUpdate, QuantizedWriter, quantizes

if versions.ADDS_NGRAMS:
    from services.extras.vllm import ngram_worker as _ngram_worker  # noqa: F401 -- replaces classes of vLLM

_COPIED = ("w13_weight", "w2_weight", "w13_bias", "w2_bias", "sinks")


class DeferredCopies(TorchDispatchMode):
    """Redirects direct copies into parameters without memory to a loader that runs once the memory exists.

    Args:
        model: vLLM's model, between the two halves of its reload.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {
            _storage(parameter): (layer, name)
            for layer in model.modules()
            for name, parameter in layer.named_parameters(recurse=False)
            if name in _COPIED and parameter.is_meta
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercepts copies; executes all other operations."""
        location = None
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            location = self._places.get(_storage(args[0]))
        if location is None:
            return func(*args, **(kwargs or {}))
        layer, name = location
        parameter = getattr(layer, name)
        # The parameter's own loader of experts takes one expert at a time.
        parameter.weight_loader = default_weight_loader
        parameter.weight_loader = make_online_process_loader(layer, name)
        parameter.weight_loader(parameter, args[1])
        return args[0]


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory that a tensor and its views share, even if it is not allocated."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- tensors without memory have no address


logger = logging.getLogger(__name__)


class Loaded(TypedDict):
    """Outcome of a load in one worker, as plain data for vLLM's messages."""

    way: str
    """``copied`` or ``placed`` directly into the parameters, ``reloaded`` as a checkpoint, or ``verified``:
    quantized into them and compared."""
    differing: list[str]
    """Names of parameters that are not those of the received weights."""


class WeightLoader:
    """Mixin for vLLM's worker (``worker_extension_cls``); vLLM calls its method on every worker.

    vLLM runs such a call between two steps. The whole update is one call, so no step ever sees
    partially loaded parameters.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _quantized_writer: QuantizedWriter | None = None

    def load_slipstream_weights(self, description: str) -> Loaded:
        """Replaces all weights; returns how they were loaded, and which parameters differ from them.

        Args:
            description: Describes shared tensors, or a command of ``external_engine/in_place.py``.
        """
        model = self.model_runner.model
        if handle_weight_command(
            description,
            model,
            **tensor_place(model),
            make_writer=self._make_writer if quantizes(model) else None,
        ):
            self._reset_features()
            self._wait()
            writer = self._quantized_writer
            return Loaded(way="placed", differing=[] if writer is None else writer.differing)
        return self.load_tensors(open_shared(description))

    def load_tensors(self, tensors: dict[str, Tensor]) -> Loaded:
        """Replaces all weights by tensors of this process; see :meth:`load_slipstream_weights`."""
        model = self.model_runner.model
        self._reset_features()
        loaded = Loaded(way="copied", differing=[])
        with torch.no_grad():
            if quantizes(model):
                loaded = self._quantize(model, tensors)
            elif not _copy(model, tensors):
                self._reload(model, tensors)
                loaded = Loaded(way="reloaded", differing=[])
        self._wait()
        return loaded

    def _reset_features(self) -> None:
        """Empties the encoder cache, whose features the old weights computed.

        The scheduler resets its own record of them when decoding resumes.
        """
        self.model_runner.reset_encoder_cache()

    @property
    def quantizes_weights(self) -> bool:
        """True if the model holds other values than those of the received weights."""
        return quantizes(self.model_runner.model)

    def _make_writer(
        self, slots: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> QuantizedWriter:
        self._quantized_writer = QuantizedWriter(slots, shapes, self._begin_update(shapes))
        return self._quantized_writer

    def _begin_update(self, shapes: Mapping[str, Shape]) -> QuantizedUpdate:
        model = self.model_runner.model
        layout = tensor_place(model)
        return QuantizedUpdate(
            model, self.vllm_config, shapes, rank=layout["rank"], ranks=layout["ranks"]
        )

    def _quantize(self, model: Any, tensors: dict[str, Tensor]) -> Loaded:
        """Quantizes weights into the model's parameters, and verifies the result."""
        try:
            update = self._begin_update(
                {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            )
        except UnknownLayoutError as error:
            logger.warning(
                "quantized weights are verified by the canary only", extra={"why": str(error)}
            )
            self._reload(model, tensors)
            return Loaded(way="reloaded", differing=[])
        update.add((name, tensor.to(self.device)) for name, tensor in tensors.items())
        return Loaded(way="verified", differing=update.finish())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reload(self, model: Any, tensors: dict[str, Tensor]) -> None:
        """Loads weights as vLLM loads a checkpoint, so that vLLM lays out experts for its kernels."""
        config = self.vllm_config.model_config.hf_config.to_dict()
        loaded = (
            (name, weight.to(self.device))
            for fused, tensor in tensors.items()
            for name, weight in checkpoint_names(_checkpoint_name(fused, model), tensor, config)
        )
        if self.device.type == "cpu":
            _forget_kernels(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            with DeferredCopies(model) if is_fused_on_hub(config) else nullcontext():
                model.load_weights(loaded)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        if self.device.type == "cpu":
            _check_kernels(model)
            _repack_head(model)


def _checkpoint_name(name: str, model: Any) -> str:
    """Returns the name of a tensor in a checkpoint of the engine's model."""
    is_inner = hasattr(model, "language_model") and not name.startswith(TOWER)
    return name.replace("model.", "model.language_model.", 1) if is_inner else name


def _copy(model: Any, tensors: dict[str, Tensor]) -> bool:
    """Copies tensors into the parameters; returns False if their layout is unknown."""
    try:
        copy_weights(
            tensors,
            dict(model.named_parameters()),
            **tensor_place(model),
        )
    except UnknownLayoutError as error:
        logger.info("using vLLM's loader for weights", extra={"why": str(error)})
        return False
    return True


@lru_cache(maxsize=1)
def tensor_place(model: Any) -> dict[str, Any]:
    """Returns the arguments that determine which parts of the tensors this worker holds."""
    return {
        "rank": get_tensor_model_parallel_rank(),
        "ranks": get_tensor_model_parallel_world_size(),
        "has_plain_experts": _has_plain_experts(model),
    }


def _has_plain_experts(model: Any) -> bool:
    """Returns True if experts are stored in order, for vLLM's Triton kernels; other kernels reorder them."""
    return all(
        getattr(getattr(method, "unquantized_backend", None), "name", None) == "TRITON"
        and not method.moe.moe_parallel_config.enable_eplb
        for method in _methods_of_experts(model)
    )


def _forget_kernels(model: Any) -> None:
    """Resets the experts' kernels, so that vLLM pads and packs again, which it skips if a kernel exists."""
    for method in _methods_of_experts(model):
        method.moe_kernel = None


def _check_kernels(model: Any) -> None:
    """Refuses models whose experts would stay random because they bypass vLLM's reload."""
    if any(method.moe_kernel is None for method in _methods_of_experts(model)):
        raise NotImplementedError(
            f"vLLM cannot reload the experts of {type(model).__name__} on a CPU; use rollout.engine 'torch'"
        )


def _methods_of_experts(model: Any) -> Iterator[Any]:
    return (module.quant_method for module in model.modules() if hasattr(module, "w13_weight"))


def _repack_head(model: Any) -> None:
    """Packs tied embeddings again.

    On a CPU, the language-model head keeps a packed copy of the embedding. The layerwise reload
    leaves it at the old values because the two share one parameter.
    """
    head = getattr(getattr(model, "language_model", model), "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)
