"""Lets vLLM propose n-grams in its second model runner, where decoding steps are scheduled ahead.

Versions before 0.32 decode with n-grams in their first runner only: they schedule no step while another runs,
and launch most kernels of a step one by one. Importing this module makes such a version accept n-grams in the
second one, where :mod:`services.rollout.engines.vllm.ngram_worker` proposes them. All processes of an engine
import it.
"""

import inspect
from typing import Any, Literal

from vllm.config import VllmConfig
from vllm.config import vllm as config_module
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu.spec_decode import init_speculator

_unsupported: Any = getattr(VllmConfig, "_get_v2_model_runner_unsupported_features", None)
IS_ADDED = (
    HAS_TRITON
    and _unsupported is not None
    and "req_states" not in inspect.signature(init_speculator).parameters
)
"""True if vLLM has a second runner that does not propose n-grams by itself."""


def _unsupported_besides(config: VllmConfig) -> list[str]:
    return [each for each in _unsupported(config) if not each.startswith("ngram")]


if IS_ADDED:
    VllmConfig._get_v2_model_runner_unsupported_features = _unsupported_besides  # noqa: SLF001 -- no setting
    # The methods whose steps are scheduled ahead.
    config_module.NgramGPUTypes = Literal["ngram", "ngram_gpu"]


def prepare_speculation(config: VllmConfig) -> None:
    """Prepares vLLM's configuration for speculative decoding whose proposals end where they do not pay."""
    speculation = config.speculative_config
    if speculation is None:
        return
    if not config.use_v2_model_runner:
        if speculation.method == "ngram":
            # The first model runner proposes n-grams between steps.
            config.scheduler_config.async_scheduling = False
        return
    # CUDA graphs are captured for all numbers of proposals in this table. Our scheduler replaces it.
    most = config.scheduler_config.max_num_seqs
    speculation.num_speculative_tokens_per_batch_size = [
        (1, most, speculation.num_speculative_tokens),
        (most + 1, most + 1, 0),
    ]
