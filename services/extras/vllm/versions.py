"""Adds features of later vLLM versions to the installed one. All processes of an engine import this module.

Models: registers those that the version implements but does not serve.

N-grams: versions before 0.32 decode with n-grams in their first model runner only. There they schedule no
step while another runs, and launch most kernels of a step one by one. Importing this module makes such a
version accept n-grams in its second runner, where :mod:`services.extras.vllm.ngram_worker` proposes
them.
"""

import inspect
from typing import Any, Literal

from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.config import vllm as config_module
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu.spec_decode import init_speculator

_unsupported: Any = getattr(VllmConfig, "_get_v2_model_runner_unsupported_features", None)
ADDS_NGRAMS = (
    HAS_TRITON
    and _unsupported is not None
    and "req_states" not in inspect.signature(init_speculator).parameters
)
"""True if vLLM has a second runner that does not propose n-grams by itself."""
_CLASSES = "services.extras.vllm.language_models"


def _unsupported_besides(config: VllmConfig) -> list[str]:
    return [reason for reason in _unsupported(config) if not reason.startswith("ngram")]


if ADDS_NGRAMS:
    VllmConfig._get_v2_model_runner_unsupported_features = _unsupported_besides  # noqa: SLF001 -- no setting
    # Methods that vLLM decodes with asynchronous scheduling.
    config_module.NgramGPUTypes = Literal["ngram", "ngram_gpu"]


def prepare_speculation(config: VllmConfig) -> None:
    """Prepares vLLM's configuration for speculative decoding that stops proposals where they do not pay."""
    speculation = config.speculative_config
    if speculation is None:
        return
    if not config.use_v2_model_runner:
        if speculation.method == "ngram":
            # The first model runner proposes n-grams between steps.
            config.scheduler_config.async_scheduling = False
        return
    # vLLM captures CUDA graphs for all numbers of proposals in this table, which our scheduler replaces.
    max_requests = config.scheduler_config.max_num_seqs
    speculation.num_speculative_tokens_per_batch_size = [
        (1, max_requests, speculation.num_speculative_tokens),
        (max_requests + 1, max_requests + 1, 0),
    ]


for _kind in ("", "Moe"):
    _name, _wrapper = f"Qwen3_5{_kind}ForCausalLM", f"Qwen3_5{_kind}ForConditionalGeneration"
    _served = ModelRegistry.get_supported_archs()
    # Versions that know neither refuse the model by themselves.
    if _name not in _served and _wrapper in _served:
        ModelRegistry.register_model(_name, f"{_CLASSES}:Qwen35{_kind}ForCausalLM")
        MODELS_CONFIG_MAP[_name] = MODELS_CONFIG_MAP[_wrapper]
