"""vLLM's asynchronous engine as a backend."""

import asyncio
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.rollout.engines.base import EngineCapabilities
from services.rollout.engines.parted import EngineDiedError
from services.rollout.engines.request_parts import Chunk, Part, part_seed

_WORKER = "services.rollout.engines.vllm_worker.WeightLoader"
_DIED = "the vLLM engine died; its own log lines above say why"


class VllmBackend:
    """One vLLM engine, in a child process of this one."""

    # With top_p and its like, vLLM reports logprobs of what is left of the distribution.
    capabilities = EngineCapabilities(
        name="vllm",
        kv_policies=frozenset({"recompute"}),
        stop_texts=True,
        truncation=False,
        seeds=True,
    )

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        max_running: int,
        engine_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Describe the engine; :meth:`serve` starts it.

        Args:
            config: Shape of the model; its weights arrive over the weight plane.
            dtype: Of the weights.
            max_running: Most requests decoded at once.
            engine_arguments: Further ``AsyncEngineArgs``, by vLLM's names.
        """
        self._config = config
        self._dtype = dtype
        self._max_running = max_running
        self._arguments = dict(engine_arguments or {})
        self._llm: AsyncLLM | None = None
        self._died = asyncio.Event()

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens in all blocks of the KV cache."""
        cache = self.llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def llm(self) -> AsyncLLM:
        """The engine itself, once it has started."""
        assert self._llm is not None, "requests wait for the start"
        return self._llm

    async def serve(self, started: Callable[[], None]) -> None:
        """Start vLLM and serve until cancelled."""
        with tempfile.TemporaryDirectory() as folder:
            self._config.save_pretrained(folder)
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, self._engine_args(folder))
        try:
            self._llm = llm
            started()
            await self._died.wait()
            raise EngineDiedError(_DIED)
        finally:
            llm.shutdown()

    async def submit(self, part: Part) -> "_Stream":
        """Hand over a part."""
        try:
            outputs = await self.llm.add_request(
                part.part_id,
                {"prompt_token_ids": part.context_ids, "cache_salt": part.cache_salt},
                _sampling(part),
            )
        except EngineDeadError as error:
            self._died.set()
            raise EngineDiedError(_DIED) from error
        return _Stream(self.llm, part.part_id, outputs, self._died)

    async def cut(self, part_ids: Collection[str]) -> None:
        """End parts; vLLM answers at once and forgets what the step under way would add."""
        await self.llm.abort(part_ids)

    async def load(self, description: str) -> None:
        """Copy weights into the workers' models."""
        await self.llm.collective_rpc("load_slipstream_weights", args=(description,))

    async def score(self, name: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Ask for the logprobs of a prompt; vLLM then reads no cached prefix."""
        parameters = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = await self.llm.add_request(
            name, {"prompt_token_ids": list(token_ids)}, parameters
        )
        output = await outputs.get()
        found = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        return tuple(position[token].logprob for position, token in found)

    def _engine_args(self, folder: str) -> AsyncEngineArgs:
        arguments: dict[str, Any] = {
            "model": folder,
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
        return AsyncEngineArgs(**(arguments | self._arguments))


class _Stream:
    """The tokens of one part."""

    def __init__(self, llm: AsyncLLM, part_id: str, outputs: Any, died: asyncio.Event) -> None:
        self._llm = llm
        self._part_id = part_id
        self._outputs = outputs
        self._died = died
        self._is_first = True
        self._is_over = False

    async def next(self) -> Chunk:
        """Return the tokens since the last call."""
        try:
            output = await self._outputs.get()
            while not output.outputs:
                output = await self._outputs.get()
        except EngineDeadError as error:
            self._is_over = True
            self._died.set()
            raise EngineDiedError(_DIED) from error
        (part,) = output.outputs
        self._is_over = output.finished
        cached = output.num_cached_tokens if self._is_first else 0
        self._is_first = False
        # The output of an abort has no tokens, but in some versions all logprobs so far.
        logprobs = (part.logprobs or ())[: len(part.token_ids)]
        return Chunk(
            token_ids=part.token_ids,
            logprobs=[
                position[token].logprob
                for position, token in zip(logprobs, part.token_ids, strict=True)
            ],
            cached_tokens=cached or 0,
            finish_reason=part.finish_reason if output.finished else None,
        )

    async def close(self) -> None:
        """End the part if it still runs."""
        if not self._is_over:
            self._is_over = True
            await self._llm.abort(self._part_id)
        self._outputs.close()


def _sampling(part: Part) -> SamplingParams:
    request = part.request
    return SamplingParams(
        max_tokens=part.max_tokens,
        temperature=request.temperature,
        seed=part_seed(request.seed, part.draw_offset),
        logprobs=0,
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
