"""Runs inside vLLM's workers on a CPU where weights are received in place.

There vLLM packs most weights for its kernels and keeps nothing else: they would have no place.
"""

from vllm import _custom_ops
from vllm.model_executor.layers import utils

from services.rollout.engines.vllm_worker import WeightLoader

_custom_ops._supports_onednn = False  # noqa: SLF001 -- no setting of vLLM's says it
utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


class PlainWeightLoader(WeightLoader):
    """The loader, and weights as checkpoints have them."""
