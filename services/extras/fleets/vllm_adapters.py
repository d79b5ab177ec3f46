"""Adapters of vLLM's engine, as the server of a fleet loads and removes them."""

import asyncio
import logging
from typing import Any

from services.extras.fleets.answers import RefusedError
from services.extras.fleets.base import BaseCheckpoint
from services.extras.fleets.hosts import EngineHosts
from services.extras.fleets.protocol import WORKERS_TIMEOUT_S

logger = logging.getLogger(__name__)


class VllmAdapters:
    """Loads adapters into the workers of vLLM, and lets requests name them.

    Args:
        state: State of vLLM's application.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._checking = asyncio.Lock()
        self._base_digest = ""

    @property
    def max_adapters(self) -> int:
        """Adapters that one step can use; 0 if the server was started without ``--enable-lora``."""
        lora = self._config.lora_config
        return 0 if lora is None else int(lora.max_loras)

    @property
    def max_rank(self) -> int:
        """Max rank of an adapter; 0 without ``--enable-lora``."""
        lora = self._config.lora_config
        return 0 if lora is None else int(lora.max_lora_rank)

    @property
    def slots(self) -> int:
        """Requests that the engine decodes at once."""
        return int(self._config.scheduler_config.max_num_seqs)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the cache holds."""
        cache = self._config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    @property
    def _config(self) -> Any:
        return self._state.engine_client.vllm_config

    async def base_digest(self) -> str:
        """Returns the digest of the base weights, which the workers' parameters equal; computed once.

        Raises:
            RefusedError: If the checkpoint cannot be read, or the parameters are other ones.
        """
        async with self._checking:
            if not self._base_digest:
                self._base_digest = await self._verified_digest()
        return self._base_digest

    async def _verified_digest(self) -> str:
        model = self._config.model_config
        if str(self._config.load_config.load_format) == "dummy":
            raise RefusedError(
                422,
                "this server has random base weights (--load-format dummy); start it with "
                "--load-format auto, so that adapters have their base",
            )
        dtype = str(model.dtype).removeprefix("torch.")
        hosts = EngineHosts.of(self._state)
        try:
            checkpoint = await asyncio.to_thread(
                BaseCheckpoint, str(model.model), revision=model.revision, dtype=dtype
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise RefusedError(422, f"the base weights cannot be verified: {error}") from error
        try:
            await hosts.prepare(checkpoint.memory)
            await hosts.copy(checkpoint.memory, 0, checkpoint.memory.buffer.nbytes)
            description = hosts.described(checkpoint.description())
            workers = await self._call("compare_fleet_base", description)
        finally:
            checkpoint.close()
        if differing := sorted({name for worker in workers for name in worker["differing"]}):
            raise RefusedError(
                422,
                f"the engine holds other weights than {model.model}: {len(differing)} tensors differ, such "
                f"as {', '.join(differing[:3])}; restart the server",
            )
        ways = sorted({str(worker["way"]) for worker in workers})
        logger.info("base verified", extra={"ways": ways, "digest": checkpoint.digest[:12]})
        return checkpoint.digest

    async def load(self, lora_id: int, name: str, description: str) -> list[str]:
        """Loads an adapter into all workers; returns the digests of what each of them keeps.

        Raises:
            RefusedError: If the engine cannot load it.
        """
        from vllm.lora.request import LoRARequest  # only a server has vLLM

        description = EngineHosts.of(self._state).described(description)
        workers = await self._call("load_fleet_adapter", lora_id, name, description)
        requests = self._state.openai_serving_models.lora_requests
        requests[name] = LoRARequest(
            lora_name=name, lora_int_id=lora_id, lora_path=f"slipstream:{lora_id}"
        )
        return [str(worker["digest"]) for worker in workers]

    async def remove(self, lora_id: int, name: str) -> None:
        """Removes an adapter that no request uses."""
        self._state.openai_serving_models.lora_requests.pop(name, None)
        try:
            await self._call("remove_fleet_adapter", lora_id)
        except RefusedError as error:
            logger.warning("an adapter was not removed", extra={"why": error.message})

    async def _call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        try:
            # An operation that ends half-way must end in the workers nevertheless.
            async with asyncio.timeout(WORKERS_TIMEOUT_S):
                answers: list[dict[str, Any]] = await asyncio.shield(
                    self._state.engine_client.collective_rpc(method, args=arguments)
                )
        except TimeoutError as error:
            raise RefusedError(
                500,
                f"the engine did not end {method} within {WORKERS_TIMEOUT_S:.0f} s; restart the server "
                "if this repeats",
            ) from error
        except Exception as error:
            logger.exception("the engine refused an adapter", extra={"method": method})
            raise RefusedError(422, f"the engine failed in {method}: {error}") from error
        return answers
