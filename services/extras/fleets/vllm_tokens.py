"""Tokens of vLLM's engine, as the server of a fleet sends them: in batches that name their weight versions.

Requests go to vLLM's engine process directly, and their outputs past vLLM's output processor, which handles
each token as several objects. Its scheduler (``scheduler.py``) sends the tokens of several steps together,
with the era of each. While weights change, the engine is paused between two steps. Requests then continue
under the new weights, with caches that are computed again.
"""

import asyncio
import itertools
import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from starlette.types import Receive, Send

from services.extras.fleets.answers import RefusedError
from services.extras.fleets.protocol import REQUESTS, SCHEDULER, TOKEN_LINES

logger = logging.getLogger(__name__)

_START: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", TOKEN_LINES.encode()), (b"cache-control", b"no-store")],
}
_NO_VERSION: Final = -1


class VllmTokens:
    """Samples responses that may cross changes of the weights.

    Args:
        engine: vLLM's ``AsyncLLM``, whose scheduler is that of ``protocol.SCHEDULER``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._streams: dict[str, _TokenStream] = {}
        self._numbers = itertools.count()
        self._versions = [_NO_VERSION]
        """Weight version of each era."""
        self._ending: set[asyncio.Future[None]] = set()
        processor = engine.output_processor
        self._process_others = processor.process_outputs
        self._fail_others = processor.propagate_error
        processor.process_outputs = self._process
        processor.propagate_error = self._fail

    @classmethod
    def of_engine(cls, engine: Any) -> Self | None:
        """Returns the tokens of an engine; None if it has another scheduler."""
        scheduler = getattr(engine.vllm_config.scheduler_config, "scheduler_cls", None)
        return cls(engine) if scheduler == SCHEDULER else None

    async def respond(self, body: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers a request with lines of tokens until it ends, or until its client has gone.

        Raises:
            RefusedError: If vLLM does not accept the request.
        """
        name = f"{REQUESTS}{next(self._numbers)}"
        request = self._request(name, body)
        stream = self._streams[name] = _TokenStream()
        leaving: asyncio.Future[None] | None = None
        try:
            await self._engine.engine_core.add_request_async(request)
            await send(_START)
            leaving = asyncio.ensure_future(_client_gone(receive))
            leaving.add_done_callback(lambda _: stream.end())
            is_last = False
            while not is_last:
                output = await stream.next()
                is_last = output is None or output.finish_reason is not None
                line = self._line(output)
                await send({"type": "http.response.body", "body": line, "more_body": not is_last})
        finally:
            if leaving is not None:
                leaving.cancel()
            if self._streams.pop(name, None) is not None:
                await self._engine.engine_core.abort_requests_async([name])

    async def freeze(self) -> None:
        """Stops between two steps; requests keep their tokens."""
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def thaw(self, version: int | None) -> None:
        """Continues; tokens sampled from now on have the given version.

        Args:
            version: Weight version; None if no version is in service, so that no request may continue.
        """
        core = self._engine.engine_core
        if version is None:
            self.cut()
        is_emptied = await core.reset_prefix_cache_async(
            reset_running_requests=True, reset_connector=True
        )
        if is_emptied is not True:
            logger.warning("the cache keeps blocks of older weights, so that responses are cut")
            self.cut()
        self._versions.append(_NO_VERSION if version is None else version)
        await core.resume_scheduler_async()

    def cut(self) -> None:
        """Ends all responses after the tokens that have arrived from the engine."""
        names = [*self._streams]
        self._end_streams()
        if names:
            ending = asyncio.ensure_future(self._engine.engine_core.abort_requests_async(names))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _request(self, name: str, body: Mapping[str, Any]) -> Any:
        """Returns vLLM's form of a request. Raises RefusedError."""
        from vllm import SamplingParams  # only a server has vLLM
        from vllm.sampling_params import RequestOutputKind

        try:
            parameters = SamplingParams(
                **{**body["sampling_params"], "output_kind": RequestOutputKind.DELTA}
            )
            prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": [*body["token_ids"]]}
            if body.get("cache_salt"):
                prompt["cache_salt"] = str(body["cache_salt"])
            return self._engine.input_processor.process_inputs(
                name, prompt, parameters, ("generate",)
            )
        except (LookupError, TypeError, ValueError) as error:
            raise RefusedError(400, f"vLLM does not accept the request: {error}") from error

    def _process(self, outputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """Passes outputs to their streams, and those of other requests to vLLM."""
        others = []
        for output in outputs:
            if not output.request_id.startswith(REQUESTS):
                others.append(output)
            elif (stream := self._streams.get(output.request_id)) is not None:
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
                stream.put(output)
        return self._process_others(others, *arguments, **options)

    def _fail(self, error: Exception) -> None:
        """Ends all responses: the engine has died, and the server ends after it."""
        self._end_streams()
        self._fail_others(error)

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()

    def _line(self, output: Any) -> bytes:
        """Returns the line of an output; for None, the last line of a response that was cut."""
        if output is None:
            return b'[[], [], [], 0, "abort"]\n'
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if (new := output.new_logprobs) is None:
            return json.dumps([[], [], [], 0, reason]).encode() + b"\n"
        token_ids, logprobs = output.new_token_ids, new.logprobs
        eras = new.logprob_token_ids.tolist()
        ends = [*(first for _, first in eras[1:]), len(token_ids)]
        runs = [
            [self._versions[era], end - first] for (era, first), end in zip(eras, ends, strict=True)
        ]
        sampled = logprobs if logprobs.ndim == 1 else logprobs[:, 0]
        cached = output.prefill_stats.num_cached_tokens if output.prefill_stats else 0
        return json.dumps([token_ids, sampled.tolist(), runs, cached, reason]).encode() + b"\n"


class _TokenStream:
    """Outputs of one request that were not sent yet."""

    def __init__(self) -> None:
        self._outputs: deque[Any] = deque()
        self._is_ended = False
        self._arrived = asyncio.Event()

    def put(self, output: Any) -> None:
        self._outputs.append(output)
        self._arrived.set()

    def end(self) -> None:
        """Ends the stream after the outputs that have arrived."""
        self._is_ended = True
        self._arrived.set()

    async def next(self) -> Any:
        """Returns the next output of the engine; None at the end of a response that was cut."""
        while not self._outputs and not self._is_ended:
            self._arrived.clear()
            await self._arrived.wait()
        return self._outputs.popleft() if self._outputs else None


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
