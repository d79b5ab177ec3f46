"""Tokens of vLLM's engine, as the server of a fleet sends them: in batches that name their weight versions.

Requests go to vLLM's engine process directly, and their outputs past vLLM's output processor, which handles
each token as several objects. Its scheduler (``scheduler.py``) sends the tokens of several steps together,
with the era of each. While weights change, the engine is paused between two steps. Requests then continue
under the new weights, with caches that are computed again.
"""

import asyncio
import base64
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import torch
from starlette.types import Receive, Send

from services.common.errors import DataLossError
from services.extras.fleets.answers import RefusedError
from services.extras.fleets.protocol import REQUESTS, SCHEDULER, TOKEN_LINES
from services.wire.data.model_inputs import ModelInputs

logger = logging.getLogger(__name__)

_START: Final = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", TOKEN_LINES.encode()), (b"cache-control", b"no-store")],
}
_NO_VERSION: Final = -1

ImageConverter = Callable[[Sequence[int], ModelInputs], Mapping[str, Any]]
"""Returns the entries of vLLM's input for token ids and the images of their prompt."""


class VllmTokens:
    """Samples responses that may cross changes of the weights.

    Args:
        engine: vLLM's ``AsyncLLM``, whose scheduler is that of ``protocol.SCHEDULER``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._streams: dict[str, tuple[_TokenStream, int]] = {}
        """Stream of a running request, and its number there."""
        self._groups: dict[str, Mapping[int, str]] = {}
        """Names of a group's requests by their numbers."""
        self._num_cuts = 0
        self._numbers = itertools.count()
        self._versions = [_NO_VERSION]
        """Weight version of each era."""
        self._ending: set[asyncio.Future[None]] = set()
        self._image_inputs: ImageConverter | None = getattr(engine, "image_inputs", None)
        """Converts images to vLLM's inputs; None before the first one. Engines that stand for vLLM set it."""
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

    async def respond(
        self,
        body: dict[str, Any],
        receive: Receive,
        send: Send,
        *,
        on_passed: Callable[[], None] = lambda: None,
    ) -> None:
        """Answers the requests of a group with lines of tokens until all end, or until their client has gone.

        Args:
            body: The group, whose entries are removed.
            on_passed: Called once the engine has the requests, and no memory of the group is needed here.

        Raises:
            RefusedError: If the group is malformed, or vLLM does not accept one of its requests.
        """
        group, requests = await self._requests(body)
        body.clear()
        stream, num_cuts = _TokenStream(), self._num_cuts
        names = self._groups[group] = {number: r.request_id for number, r in requests.items()}
        leaving: asyncio.Future[None] | None = None
        try:
            for number, request in requests.items():
                if self._num_cuts != num_cuts:
                    stream.put(number, None)  # whoever may sample now did not send it
                    continue
                self._streams[request.request_id] = (stream, number)
                await self._engine.engine_core.add_request_async(request)
            num_left = len(requests)
            del request
            requests.clear()
            on_passed()
            await send(_START)
            leaving = asyncio.ensure_future(_client_gone(receive))
            leaving.add_done_callback(lambda _: stream.leave())
            while num_left and (outputs := await stream.take()):
                num_left -= sum(o is None or o.finish_reason is not None for _, o in outputs)
                lines = b"".join(self._line(number, output) for number, output in outputs)
                await send({"type": "http.response.body", "body": lines, "more_body": num_left > 0})
        finally:
            if leaving is not None:
                leaving.cancel()
            del self._groups[group]
            if unfinished_ids := [name for name in names.values() if self._streams.pop(name, None)]:
                await self._engine.engine_core.abort_requests_async(unfinished_ids)

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
        self._num_cuts += 1
        self._end([*self._streams])

    def cut_requests(self, group: str, numbers: Sequence[int]) -> None:
        """Ends requests of a group; ignores unknown ones, which have ended."""
        names = self._groups.get(group, {})
        self._end([names[number] for number in numbers if number in names])

    def _end(self, names: Sequence[str]) -> None:
        names = [name for name in names if name in self._streams]
        self._end_streams(names)
        if names:
            ending = asyncio.ensure_future(self._engine.engine_core.abort_requests_async(names))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _requests(self, body: Mapping[str, Any]) -> tuple[str, dict[int, Any]]:
        """Returns the name of a group, and vLLM's form of its requests by number. Raises RefusedError."""
        try:
            group = str(body["group"])
            bodies = {int(number): dict(content) for number, content in body["requests"]}
        except (LookupError, TypeError, ValueError) as error:
            raise RefusedError(400, f"the group has no form: {error!r}") from error
        if group in self._groups or not bodies:
            raise RefusedError(400, f"group {group!r} is empty, or its name is not unique")
        images = await asyncio.to_thread(_decoded_images, body.get("model_inputs") or {})
        requests = {}
        for number, content in bodies.items():
            requests[number] = self._request(f"{REQUESTS}{next(self._numbers)}", content, images)
            await asyncio.sleep(0)  # tokens of others are passed on meanwhile
        return group, requests

    def _request(
        self, name: str, body: Mapping[str, Any], images: Mapping[str, ModelInputs]
    ) -> Any:
        """Returns vLLM's form of a request. Raises RefusedError."""
        try:
            # Engines that stand for vLLM have other parameters.
            make_parameters = getattr(self._engine, "make_parameters", _vllm_parameters)
            parameters = make_parameters(**body["sampling_params"])
            prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": [*body["token_ids"]]}
            if body.get("cache_salt"):
                prompt["cache_salt"] = str(body["cache_salt"])
            if digest := body.get("model_inputs"):
                prompt |= self._converter()(prompt["prompt_token_ids"], images[digest])
            return self._engine.input_processor.process_inputs(
                name, prompt, parameters, ("generate",)
            )
        except (LookupError, TypeError, ValueError) as error:
            raise RefusedError(400, f"vLLM does not accept the request: {error}") from error

    def _converter(self) -> ImageConverter:
        if self._image_inputs is None:
            from services.extras.vllm.images import ImageInputs  # only a server has vLLM

            model = self._engine.vllm_config.model_config
            self._image_inputs = ImageInputs(model.hf_config, model.dtype).of
        return self._image_inputs

    def _process(self, outputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """Passes outputs to their streams, and those of other requests to vLLM."""
        others = []
        for output in outputs:
            if not output.request_id.startswith(REQUESTS):
                others.append(output)
            elif (member := self._streams.get(output.request_id)) is not None:
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
                stream, number = member
                stream.put(number, output)
        return self._process_others(others, *arguments, **options)

    def _fail(self, error: Exception) -> None:
        """Ends all responses: the engine has died, and the server ends after it."""
        self._end_streams([*self._streams])
        self._fail_others(error)

    def _end_streams(self, names: Sequence[str]) -> None:
        for name in names:
            stream, number = self._streams.pop(name)
            stream.put(number, None)

    def _line(self, number: int, output: Any) -> bytes:
        """Returns the line of an output; for None, the last line of a request that was cut."""
        if output is None:
            return json.dumps([number, [], [], [], 0, "abort"]).encode() + b"\n"
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if (new := output.new_logprobs) is None:
            return json.dumps([number, [], [], [], 0, reason]).encode() + b"\n"
        token_ids, logprobs = output.new_token_ids, new.logprobs
        eras = new.logprob_token_ids.tolist()
        ends = [*(first for _, first in eras[1:]), len(token_ids)]
        runs = [
            [self._versions[era], end - first] for (era, first), end in zip(eras, ends, strict=True)
        ]
        sampled = logprobs if logprobs.ndim == 1 else logprobs[:, 0]
        cached = output.prefill_stats.num_cached_tokens if output.prefill_stats else 0
        line = [number, token_ids, sampled.tolist(), runs, cached, reason]
        return json.dumps(line).encode() + b"\n"


class _TokenStream:
    """Outputs of a group that were not sent yet."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, Any]] = []
        self._has_left = False
        self._arrived = asyncio.Event()

    def put(self, number: int, output: Any) -> None:
        """Adds an output of the engine, or None for a request that was cut."""
        self._outputs.append((number, output))
        self._arrived.set()

    def leave(self) -> None:
        """Ends the stream: its client has gone."""
        self._has_left = True
        self._arrived.set()

    async def take(self) -> list[tuple[int, Any]]:
        """Waits for outputs, and returns all of them; none once the client has gone."""
        while not self._outputs and not self._has_left:
            self._arrived.clear()
            await self._arrived.wait()
        outputs, self._outputs = self._outputs, []
        return [] if self._has_left else outputs


def _decoded_images(encoded: Mapping[str, str]) -> dict[str, ModelInputs]:
    """Decodes the images of a group by their digests. Raises RefusedError."""
    try:
        return {
            str(digest): ModelInputs.from_encoded(
                torch.frombuffer(
                    bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8
                )
            )
            for digest, data in encoded.items()
        }
    except (AttributeError, DataLossError, TypeError, ValueError) as error:
        raise RefusedError(400, f"the images cannot be decoded: {error}") from error


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _vllm_parameters(**parameters: Any) -> Any:
    """Returns vLLM's parameters of a request, whose outputs have only the tokens after the last output."""
    from vllm import SamplingParams  # only a server has vLLM
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**{**parameters, "output_kind": RequestOutputKind.DELTA})
