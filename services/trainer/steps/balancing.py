"""How evenly a mixture's experts are chosen: measured, and evened out by a loss or by biases."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.common.runspec.run import RunSpec
from services.trainer.batch.samples import Samples
from services.trainer.collectives import MetricTotals, Ranks
from services.trainer.model.policy import Policy
from services.trainer.model.routing import imbalance


class Balancer:
    """Watches the routers of a policy over a step; does nothing for a dense one.

    Args:
        policy: The policy.
        spec: The run.
        ranks: Data-parallel ranks.
    """

    def __init__(self, policy: Policy, spec: RunSpec, ranks: Ranks) -> None:
        self._routing = policy.routing
        self._spec = spec.trainer.balancing
        # Where ranks compute packs together each counts its own tokens.
        self._ranks = ranks.everyone or ranks
        self._compares = spec.rollout.routing_replay != "off"
        config: Mapping[str, Any] = policy.model.config.to_dict()
        self._coefficient = self._spec.coefficient or config.get("router_aux_loss_coef") or 0.0
        self._update: Tensor | None = None
        self._step: Tensor | None = None

    def begin_update(self) -> None:
        """Before the first micro-batch of an update, or again before it if it begins anew."""
        self._update = None

    def loss(self, part: Samples, num_trained: Tensor, tally: MetricTotals) -> Tensor | float:
        """After the forward pass of a micro-batch: its share of the balancing loss.

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

    def updated(self, *, moved: bool) -> None:
        """After an update. Every rank calls it.

        Args:
            moved: Whether weights moved.
        """
        if self._routing is None or self._update is None:
            return
        counts, self._update = self._ranks.sum(self._update), None
        if self._spec.kind == "bias" and moved:
            self._routing.move_biases(counts, self._spec.bias_rate)
        self._step = counts if self._step is None else self._step + counts

    def metrics(self) -> dict[str, float]:
        """Of the step that ends."""
        if self._step is None:
            return {}
        mean, worst = imbalance(self._step)
        self._step = None
        return {"expert_load_max": mean, "expert_load_worst": worst}
