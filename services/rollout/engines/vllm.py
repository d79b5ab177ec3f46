"""vLLM's asynchronous engine behind our protocol.

A request may become several requests to vLLM: an update ends what runs, keeps the tokens, and submits the
rest again under the new weights. So each request to vLLM has exactly one weight version, its prefix is
computed by the weights that continue it, and prefix-cache blocks carry their version as a salt.
"""

import asyncio
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.common.weightsync.plan import TensorSpec
from services.rollout.engines.base import (
    EngineCapabilities,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    check_request,
    check_scorable,
    check_tensors,
)
from services.rollout.engines.gate import Gate
from services.rollout.engines.places import Places
from services.rollout.engines.request_parts import Progress, part_seed
from services.rollout.engines.weight_file import shared_memory, write_tensors

_WORKER = "services.rollout.engines.vllm_worker.WeightLoader"


class VllmEngine:
    """One vLLM engine, in a child process of this one."""

    capabilities = EngineCapabilities(
        name="vllm", kv_policies=frozenset({"recompute"}), stop_texts=False
    )

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        max_running: int,
        engine_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Describe the engine; :meth:`run` starts it.

        Args:
            config: Shape of the model; its weights arrive over the weight plane.
            dtype: Of the weights.
            max_running: Most requests decoded at once.
            engine_arguments: Further ``AsyncEngineArgs``, by vLLM's names.
        """
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        self._specs = [
            TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in model.named_parameters()
        ]
        self._config = config
        self._dtype = dtype
        self._arguments = dict(engine_arguments or {})
        self._max_running = max_running
        limit = int(config.max_position_embeddings)
        self._max_model_tokens = int(self._arguments.get("max_model_len", limit))
        self._llm: AsyncLLM | None = None
        self._started = asyncio.Event()
        self._died = asyncio.Event()
        self._places = Places(max_running)
        self._gate = Gate()
        self._results: dict[str, Progress] = {}
        self._weight_version = -1
        self._tokens_total = 0
        self._num_scored = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._started_at = time.monotonic()

    async def run(self) -> None:
        """Start vLLM and serve until cancelled.

        Raises:
            RuntimeError: If vLLM died.
        """
        with tempfile.TemporaryDirectory() as folder:
            self._config.save_pretrained(folder)
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, self._engine_args(folder))
        try:
            self._llm = llm
            self._started.set()
            await self._died.wait()
            raise RuntimeError("the vLLM engine died; its own log lines above say why")
        finally:
            llm.shutdown()

    async def wait_ready(self) -> None:
        """Return when vLLM is up."""
        await self._started.wait()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Decode one request."""
        check_request(
            request,
            vocab_size=int(self._config.vocab_size),
            max_model_tokens=self._max_model_tokens,
        )
        if request.stop_texts:
            raise ValueError("engine 'vllm' ends responses at tokens only, not at stop texts")
        await self._started.wait()
        progress = Progress(request)
        async with self._places.take(request) as is_admitted:
            if not is_admitted:
                return progress.result("aborted")
            self._note_busy()
            self._results[request.request_id] = progress
            try:
                return await self._decode(progress)
            finally:
                del self._results[request.request_id]
                self._note_idle()

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of given tokens, which vLLM reports for a prompt."""
        check_scorable(
            token_ids,
            vocab_size=int(self._config.vocab_size),
            max_model_tokens=self._max_model_tokens,
        )
        await self._started.wait()
        while True:
            self._num_scored += 1
            async with self._gate.passage():
                outputs = await self._vllm.add_request(
                    f"score {self._num_scored}",
                    {"prompt_token_ids": list(token_ids)},
                    SamplingParams(
                        max_tokens=1,
                        prompt_logprobs=0,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    ),
                )
            output = await outputs.get()
            # An adoption cuts what runs; then the tokens are scored under the new weights.
            if output.outputs[0].finish_reason != "abort":
                found = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
                return tuple(position[token].logprob for position, token in found)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests; their results keep the tokens so far."""
        self._places.turn_away(request_ids)
        ended = [
            progress
            for name, progress in self._results.items()
            if request_ids is None or name in request_ids
        ]
        for progress in ended:
            progress.is_aborted = True
        async with self._gate.closed():
            await self._vllm.abort([progress.part_id for progress in ended])
        await asyncio.gather(*[progress.ended.wait() for progress in ended])

    async def peek(self) -> dict[str, GenerationResult]:
        """What the running requests have so far."""
        return {name: progress.result("aborted") for name, progress in self._results.items()}

    async def pause(self, *, drain: bool = False) -> None:
        """Stop between two steps; with ``drain``, finish the running requests first."""
        self._places.close()
        if drain:
            await self._places.emptied()
        if self._llm is not None:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on after a pause."""
        if self._llm is not None:
            await self._llm.resume_generation()
        self._places.open()

    def weight_specs(self) -> list[TensorSpec]:
        """Parameters by checkpoint name, tied ones once."""
        return self._specs

    async def adopt_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Load new weights; what runs is cut, kept, and goes on under them."""
        check_tensors({spec.name: spec.shape for spec in self._specs}, tensors)
        await self._started.wait()
        with tempfile.NamedTemporaryFile(dir=shared_memory()) as file:
            path = Path(file.name)
            size, entries = await asyncio.to_thread(write_tensors, path, tensors)
            async with self._gate.closed():
                started_at = time.monotonic()
                was_paused = await self._vllm.is_paused()
                await self._vllm.pause_generation(mode="abort", clear_cache=True)
                await self._vllm.collective_rpc(
                    "load_slipstream_weights", args=(file.name, size, entries)
                )
                self._weight_version = version
                if not was_paused:
                    await self._vllm.resume_generation()
                return time.monotonic() - started_at

    def stats(self) -> EngineStats:
        """Gauges."""
        busy = self._busy_seconds
        if self._results:
            busy += time.monotonic() - self._busy_since
        return EngineStats(
            num_running=len(self._places.running),
            num_waiting=self._places.num_waiting,
            tokens_total=self._tokens_total,
            kv_used_fraction=len(self._places.running) / self._max_running,
            idle_seconds=time.monotonic() - self._started_at - busy,
            weight_version=self._weight_version,
        )

    @property
    def _vllm(self) -> AsyncLLM:
        assert self._llm is not None, "requests wait for the start"
        return self._llm

    def _engine_args(self, folder: str) -> AsyncEngineArgs:
        arguments: dict[str, Any] = {
            "dtype": str(self._dtype).removeprefix("torch."),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": self._max_running,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": _WORKER,
            "disable_log_stats": True,
        }
        if current_platform.is_cpu():
            # A seeded request whose prompt is prefilled in parts kills vLLM's engine on a CPU: it rewinds
            # the request's random generator, which CPU generators cannot do.
            arguments["enable_chunked_prefill"] = False
        return AsyncEngineArgs(model=folder, **(arguments | self._arguments))

    async def _decode(self, progress: Progress) -> GenerationResult:
        """Decode a request in one or more parts, each under one weight version."""
        try:
            while True:
                async with self._gate.passage():
                    if progress.is_aborted:
                        return progress.result("aborted")
                    version = self._weight_version
                    outputs = await self._submit(progress, version)
                reason = await self._collect(outputs, progress, version)
                if reason != "abort":
                    return progress.result("stop" if reason == "stop" else "length")
        except EngineDeadError:
            self._died.set()
            raise
        finally:
            progress.ended.set()

    async def _submit(self, progress: Progress, version: int) -> Any:
        request, num_done = progress.request, len(progress.token_ids)
        progress.part_id = f"{request.request_id}+{num_done}/{version}"
        return await self._vllm.add_request(
            progress.part_id,
            {
                "prompt_token_ids": [*request.context_ids, *progress.token_ids],
                "cache_salt": str(version),
            },
            SamplingParams(
                max_tokens=request.max_tokens - num_done,
                temperature=request.temperature,
                seed=part_seed(request.seed, request.draw_offset + num_done),
                logprobs=0,
                stop_token_ids=sorted(request.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    async def _collect(self, outputs: Any, progress: Progress, version: int) -> str | None:
        """Take in tokens until vLLM ends the part; returns its reason."""
        try:
            while True:
                output = await outputs.get()
                if not output.outputs:
                    continue
                (part,) = output.outputs
                self._tokens_total += len(part.token_ids)
                progress.extend(part, version)
                if output.finished:
                    reason: str | None = part.finish_reason
                    return reason
        except asyncio.CancelledError:
            await self._vllm.abort(progress.part_id)
            raise
        finally:
            outputs.close()

    def _note_busy(self) -> None:
        if not self._results:
            self._busy_since = time.monotonic()

    def _note_idle(self) -> None:
        if not self._results:
            self._busy_seconds += time.monotonic() - self._busy_since
