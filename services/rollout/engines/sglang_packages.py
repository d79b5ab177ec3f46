"""What SGLang can do with the packages and the hardware of this machine."""

import importlib.util
from pathlib import Path

import torch

from services.rollout.engines.backend import EngineDiedError
from services.rollout.engines.order import EngineOrder


def kernels(order: EngineOrder) -> dict[str, str]:
    """Arguments that keep SGLang from kernels whose packages are not installed or were cut down."""
    if order.device.type == "cpu":
        return {}
    found = importlib.util.find_spec("sgl_kernel")
    folders = (found and found.submodule_search_locations) or ()
    chosen: dict[str, str] = {}
    if not any(True for folder in folders for _ in Path(folder).glob("**/flash_ops*")):
        chosen["attention_backend"] = "triton"
    if importlib.util.find_spec("flashinfer") is None:
        chosen["sampling_backend"] = "pytorch"
    return chosen


def pins_memory() -> bool:
    """Whether SGLang can pin the memory where it keeps chosen experts, which it does on a CPU too."""
    try:
        torch.cuda.cudart()
    except (AssertionError, RuntimeError):  # torch without CUDA; no driver
        return False
    return True


def memory_saver(order: EngineOrder) -> dict[str, bool]:
    """Arguments of an engine that gives its GPU memory up from time to time."""
    if not order.sleeps or order.device.type == "cpu":
        return {}
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise EngineDiedError(
            "SGLang gives its GPU memory up (topology.placement) with a package that is not installed here; "
            "install torch-memory-saver"
        )
    return {"enable_memory_saver": True}
