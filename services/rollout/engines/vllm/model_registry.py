"""Registers models that a version of vLLM has but does not serve. All processes of an engine import it."""

from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

_CLASSES = "services.rollout.engines.vllm.language_models"

for _kind in ("", "Moe"):
    _name, _wrapper = f"Qwen3_5{_kind}ForCausalLM", f"Qwen3_5{_kind}ForConditionalGeneration"
    _served = ModelRegistry.get_supported_archs()
    # Versions that know neither refuse the model by themselves.
    if _name not in _served and _wrapper in _served:
        ModelRegistry.register_model(_name, f"{_CLASSES}:Qwen35{_kind}ForCausalLM")
        MODELS_CONFIG_MAP[_name] = MODELS_CONFIG_MAP[_wrapper]
