"""One model that scores responses, and whose weights may be replaced between two scores."""

import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.common.errors import FailedPreconditionError
from services.common.jagged import Jagged
from services.trainer.batch.packing import micro_batches, pack
from services.trainer.model.policy import Policy, freeze


class Scorer:
    """Scores responses without gradients. Its methods block and may be called from several threads.

    Args:
        policy: Whose logprobs are wanted, on its device.
        max_tokens: Packed tokens of one forward pass.
        version: Number of its weights; -1 for weights that may not be used yet.
    """

    def __init__(self, policy: Policy, *, max_tokens: int, version: int) -> None:
        freeze(policy)
        self._policy = policy
        self._max_tokens = max_tokens
        self._turn = threading.Lock()
        self._is_open = False
        self.version = version

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._policy.model.device

    def score(
        self, prompts: Jagged, responses: Jagged, *, version: int | None = None
    ) -> list[Tensor]:
        """Logprob of each response token, float32 on the CPU.

        Args:
            prompts: Token ids, at least one in each row.
            responses: Token ids.
            version: Weights that are meant; None takes those that are there.

        Raises:
            FailedPreconditionError: If other weights are in service.
        """
        totals = (prompts.lengths + responses.lengths).tolist()
        result = torch.zeros(len(responses.values))
        rows = Jagged(torch.arange(len(responses.values)), responses.lengths)
        with self._turn, torch.no_grad():
            if version is not None and version != self.version:
                raise FailedPreconditionError(
                    f"weights {version} are asked for, but this worker has {self.version}; publish "
                    "them first",
                    asked=version,
                    served=self.version,
                )
            for micro in micro_batches(totals, self._max_tokens):
                packed = pack(prompts.select(micro), responses.select(micro), device=self.device)
                logprobs, _ = self._policy(packed)
                result[rows.select(micro).values] = logprobs.cpu()
        return Jagged(result, responses.lengths).unbind()

    @torch.no_grad()
    def adopt(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Replace the weights; returns the seconds in which nothing could be scored.

        Raises:
            ValueError: If they are not those of this model.
        """
        parameters = dict(self._policy.model.named_parameters())
        if parameters.keys() != tensors.keys():
            raise ValueError(
                f"the weights lack {sorted(parameters.keys() - tensors.keys())[:3]} and have "
                f"{sorted(tensors.keys() - parameters.keys())[:3]} that the model does not"
            )
        if not self._is_open:
            self._turn.acquire()
        try:
            start = time.perf_counter()
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
            self.version = version
            return time.perf_counter() - start
        finally:
            self._is_open = False
            self._turn.release()

    def open(self) -> dict[str, Tensor]:
        """Score nothing, and give the live weights to be written in place, until they are adopted."""
        self._turn.acquire()
        self._is_open = True
        return {name: value.detach() for name, value in self._policy.model.named_parameters()}

    def close(self) -> None:
        """Go on with the live weights: nothing was written."""
        if self._is_open:
            self._is_open = False
            self._turn.release()

    def refuse(self) -> None:
        """The weights are wrong: score nothing until others are adopted."""
        with self._turn:
            self.version = -1

    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token but the first, at temperature 1."""
        text = torch.tensor(token_ids, dtype=torch.int64)
        packed = pack(
            Jagged.from_list([text[:1]]), Jagged.from_list([text[1:]]), device=self.device
        )
        with self._turn, torch.no_grad():
            logprobs, _ = self._policy(packed, temperature=1.0)
        return [float(value) for value in logprobs]
