"""Load balancing of a mixture's experts: measures the load, and evens it out by a loss or by biases."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.common.runspec.run import RunSpec
from services.trainer.batch.samples import Samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.model.policy import Policy


class Balancer:
    """Measures and balances the expert load of a policy's routers; does nothing for a dense model.

    Args:
        policy: The policy.
        spec: The run.
        ranks: Data-parallel ranks.
    """

    def __init__(self, policy: Policy, spec: RunSpec, ranks: Ranks) -> None:
        self._routing = policy.routing
        self._spec = spec.trainer.balancing
        # Ranks that compute packs together each count their own tokens.
        self._ranks = ranks.everyone or ranks
        self._compares = spec.rollout.routing_replay != "off"
        config: Mapping[str, Any] = policy.model.config.to_dict()
        self._coefficient = self._spec.coefficient or config.get("router_aux_loss_coef") or 0.0
        self._update: Tensor | None = None

    def begin_update(self) -> None:
        """Clears the counts before an update's first micro-batch, also if the update is repeated."""
        self._update = None

    def loss(self, part: Samples, num_trained: Tensor, tally: MetricTotals) -> Tensor | float:
        """Returns a micro-batch's share of the balancing loss, after its forward pass.

        Args:
            part: The micro-batch.
            num_trained: Tokens that train in the update, over all ranks; at least 1.
            tally: Receives the metrics.
        """
        if self._routing is None:
            return 0.0
        counts = self._routing.counts()
        self._update = counts if self._update is None else self._update + counts
        if self._compares:
            nothing = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
            differs, known = self._routing.differences() or nothing
            tally.mean("routing_differs", differs.float(), known)
        if self._spec.kind != "loss":
            return 0.0
        loss = self._routing.balance_loss()
        trained = part.tokens["loss_mask"]
        tally.mean("balance_loss", loss.detach().expand(len(trained)), trained.to(loss.device))
        share = part.counted.sum() / num_trained.clamp(min=1)
        return self._coefficient * loss * share.to(loss.device)

    def updated(self, *, moved: bool) -> Tensor | None:
        """Moves the routers' biases; returns the counts of an update. All ranks must call it.

        Args:
            moved: True if the update changed weights.

        Returns:
            ``[layers, experts]`` tokens that chose each expert, over all ranks; None for a dense model.
        """
        if self._routing is None or self._update is None:
            return None
        counts, self._update = self._ranks.sum(self._update), None
        if self._spec.kind == "bias" and moved:
            self._routing.move_biases(counts, self._spec.bias_rate)
        return counts
