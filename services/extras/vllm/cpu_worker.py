"""Runs inside vLLM's CPU workers: unpacked weights for in-place updates, and chosen experts of each step.

vLLM packs most weights for its CPU kernels and keeps no unpacked copy, so received weights would have no
destination. Importing this module turns the packing off. Only the processes of vLLM's engine import it, by
name, and it changes vLLM's choice of kernels, not torch's: the torch engine and the trainer are unaffected.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm import _custom_ops
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    get_aux_output_connector,
)
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker

from services.extras.vllm.scheduler import BatchingScheduler
from services.extras.vllm.worker import WeightLoader

_custom_ops._supports_onednn = False  # noqa: SLF001 -- vLLM has no setting for it
utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


class PlainWeightLoader(WeightLoader):
    """Weight loader for workers whose weights are laid out as in checkpoints."""


class RoutingScheduler(BatchingScheduler):
    """Scheduler that sends chosen experts with the tokens."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM refuses a configuration with this flag, both before and after this call.
        vllm_config.aux_output_config.enable_return_routed_experts = True
        super().__init__(vllm_config, *args, **kwargs)
        vllm_config.aux_output_config.enable_return_routed_experts = False


class RoutingWorker(CPUWorker):  # type: ignore[misc]
    """Worker that outputs the experts chosen for each step's tokens."""

    _connector: AuxOutputWorkerConnector
    _batch: SimpleNamespace | None = None
    """Batch of the step that has run but whose tokens are not sampled yet."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocates the KV cache and starts to collect the routers' choices."""
        super().initialize_from_config(kv_cache_config)
        self._connector = get_aux_output_connector(
            self.model_runner.model, self.vllm_config, kv_cache_config
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs a step; returns None if its tokens are still to be sampled."""
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if output is None:
            batch = self.model_runner.input_batch
            counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
            self._batch = SimpleNamespace(
                req_ids=list(batch.req_ids),
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
            )
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples the tokens of the step and adds the chosen experts to the output."""
        output = super().sample_tokens(grammar_output)
        batch, self._batch = self._batch, None
        prepared = None if batch is None else self._connector.prepare_output(batch)
        if prepared is not None:
            num_drawn = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
            prepared.enqueue_cpu_copy(num_drawn, np.zeros_like(num_drawn))
            output.aux_output_connector_output = prepared.process_output()
        return output
