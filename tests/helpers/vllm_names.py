"""Stands for the package vLLM where a fleet's server runs around another engine."""

from types import ModuleType, SimpleNamespace


def vllm_modules() -> dict[str, ModuleType]:
    """Returns modules with the two names that a server imports from vLLM, for ``sys.modules``."""
    package, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.__dict__["SamplingParams"] = SimpleNamespace
    parameters.__dict__["RequestOutputKind"] = SimpleNamespace(DELTA=1)
    return {"vllm": package, "vllm.sampling_params": parameters}
