"""Weight loader inside SGLang's scheduler processes: copies shared tensors into the model."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from torch import Tensor

from services.common.models.experts import checkpoint_names
from services.common.models.vision import TOWER
from services.extras.external_engine.in_place import handle_weight_command
from services.extras.external_engine.layout import UnknownLayoutError, copy_weights
from services.extras.external_engine.shared_tensors import open_shared

logger = logging.getLogger(__name__)


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Replaces all weights; SGLang calls this between two steps (``custom_weight_loader``).

    Args:
        named_tensors: One entry, whose name describes the shared tensors or is a command of
            :mod:`services.extras.external_engine.in_place`.
    """
    ((description, _),) = named_tensors
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if not handle_weight_command(description, model, rank=rank, ranks=ranks):
        _load_all(model, open_shared(description), rank=rank, ranks=ranks)
    _derive(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _load_all(model: Any, tensors: Mapping[str, Tensor], *, rank: int, ranks: int) -> None:
    with torch.no_grad():
        try:
            copy_weights(tensors, dict(model.named_parameters()), rank=rank, ranks=ranks)
        except UnknownLayoutError as error:
            logger.warning("using SGLang's loader for weights", extra={"why": str(error)})
            config = model.config.to_dict()
            model.load_weights(
                [
                    (part_name.replace(TOWER, "visual."), weight)
                    for name, tensor in tensors.items()
                    for part_name, weight in checkpoint_names(name, tensor, config)
                ]
            )


def _derive(model: Any) -> None:
    """Recomputes what SGLang derives from parameters at load time: Gemma's norms store weights plus 1."""
    for module in model.modules():
        if (derived := getattr(module, "gemma_weight", None)) is not None:
            torch.add(module.weight.data, 1.0, out=derived)
