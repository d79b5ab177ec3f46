"""One rank's part of a policy that scores, and whose weights may be replaced between two scores."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from services.common.jagged import Jagged
from services.common.models.loading import stored_tensors
from services.trainer.batch.packing import pack
from services.trainer.batch.plan import StepPlan
from services.trainer.batch.samples import Samples
from services.trainer.model.parallel import free_gathered
from services.trainer.model.policy import Policy
from services.trainer.steps.outgrown import Outgrown
from services.trainer.steps.scores import score_tokens


class Scorer:
    """Scores without gradients. Every rank must be asked the same, one thing at a time.

    Args:
        policy: Frozen, on its device, sharded or not.
        device: Of the policy.
        shares_prefixes: Whether tokens that samples have in common are computed once.
        outgrown: What did not fit into memory before.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        device: torch.device,
        shares_prefixes: bool,
        outgrown: Outgrown,
    ) -> None:
        self._policy = policy
        self._device = device
        self._shares_prefixes = shares_prefixes
        self._outgrown = outgrown

    def logprobs(self, samples: Samples, plan: StepPlan) -> Tensor:
        """``[R]`` float32 logprobs of this rank's response tokens, on the CPU."""
        return score_tokens(
            self._policy,
            lambda packed: self._policy(packed)[0],
            samples,
            plan,
            device=self._device,
            shares_prefixes=self._shares_prefixes,
            outgrown=self._outgrown,
        )

    @torch.no_grad()
    def score_text(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token but the first, at temperature 1."""
        text = torch.tensor(token_ids, dtype=torch.int64)
        packed = pack(
            Jagged.from_list([text[:1]]), Jagged.from_list([text[1:]]), device=self._device
        )
        logprobs, _ = self._policy(packed, temperature=1.0)
        free_gathered(self._policy)
        return [float(value) for value in logprobs]

    def live(self) -> dict[str, Tensor]:
        """The weights by name, to be written in place; this rank's rows of them if they are sharded."""
        return {name: value.detach() for name, value in stored_tensors(self._policy.model).items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See that weights are those of this model.

        Raises:
            ValueError: If they are not.
        """
        names = self.live().keys()
        if names != tensors.keys():
            raise ValueError(
                f"the weights lack {sorted(names - tensors.keys())[:3]} and have "
                f"{sorted(tensors.keys() - names)[:3]} that the model does not"
            )

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Replace the weights. Of sharded ones each rank gets its rows, one tensor after the other.

        Args:
            tensors: Whole, on rank 0, where they were checked; None on the others.
        """
        for name, live in self.live().items():
            if isinstance(live, DTensor):
                whole = torch.empty(live.shape, dtype=live.dtype, device=self._device)
                if tensors is not None:
                    whole.copy_(tensors[name])
                live.copy_(distribute_tensor(whole, live.device_mesh, live.placements))
            else:
                assert tensors is not None, "weights that are not sharded have one rank"
                live.copy_(tensors[name])
