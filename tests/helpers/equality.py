"""Compares the logprobs of the engine torch with those of the trainer's policy."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.common.runspec.engines import InvariantEngine
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.engines.torch.decoding import DecodeBatch
from services.rollout.engines.torch.engine import use_decoding_kernels
from services.trainer.batch.packing import PackedTokens, pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged

TEMPERATURE = 0.7
_GROUP = 4


@dataclass(frozen=True)
class Subject:
    """A random model on a device."""

    config: dict[str, Any]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**self.config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        return model.to(device=self.device, dtype=self.dtype)

    def batch(self) -> DecodeBatch:
        model = self.model().eval().requires_grad_(False)
        use_decoding_kernels(model, is_invariant=True)
        return DecodeBatch(model, is_invariant=True)

    def policy(
        self, engine: InvariantEngine | None = "torch", *, temperature: float = TEMPERATURE
    ) -> Policy:
        return Policy(self.model(), temperature=temperature, engine=engine)

    def packed(
        self,
        requests: list[GenerationRequest],
        results: dict[str, GenerationResult],
        *,
        shares_prefixes: bool,
    ) -> PackedTokens:
        responses = [
            torch.tensor(results[request.request_id].token_ids).int() for request in requests
        ]
        return pack(
            Jagged.from_list([torch.tensor(request.context_ids).int() for request in requests]),
            Jagged.from_list(responses),
            device=torch.device(self.device),
            shares_prefixes=shares_prefixes,
        )


def groups(count: int, *, tokens: int, vocabulary: int, context: int) -> list[GenerationRequest]:
    """Returns requests in groups that share a context; contexts and responses have random lengths."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for group in range(count // _GROUP):
        length = int(torch.randint(1, context + 1, (1,), generator=generator))
        ids = tuple(torch.randint(2, vocabulary, (length,), generator=generator).tolist())
        result += [
            GenerationRequest(
                request_id=f"{group}.{member}",
                context_ids=ids,
                max_tokens=int(torch.randint(1, tokens + 1, (1,), generator=generator)),
                seed=_GROUP * group + member,
                temperature=TEMPERATURE,
            )
            for member in range(_GROUP)
        ]
    return result


def decoded(
    batch: DecodeBatch, requests: list[GenerationRequest], *, running: int
) -> dict[str, GenerationResult]:
    """Decodes requests; admits up to three per step while fewer than ``running`` are in the batch."""
    waiting, results = list(requests), {}
    while waiting or len(batch):
        if waiting and len(batch) < running:
            batch.admit(waiting[:3])
            del waiting[:3]
        results |= dict(batch.step(0))
    return results


def logprobs(requests: list[GenerationRequest], results: dict[str, GenerationResult]) -> Tensor:
    """Returns the logprobs of all response tokens."""
    return torch.tensor(
        [value for request in requests for value in results[request.request_id].logprobs]
    )


def trained(
    subject: Subject, packed: PackedTokens, engine: InvariantEngine | None
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor | None]]:
    """Returns a policy's logprobs and entropy, and the gradients of a loss of both."""
    policy = subject.policy(engine)
    logprobs_found, entropy = policy(packed)
    (logprobs_found.square().mean() + 0.1 * entropy.mean()).backward()
    gradients = {name: value.grad for name, value in policy.named_parameters()}
    return (logprobs_found.detach(), entropy.detach()), gradients
