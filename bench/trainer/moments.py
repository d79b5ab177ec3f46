"""Compares AdamW with moments in 8 bits, ours and torchao's: ``python -m bench.trainer.moments [--smoke]``.

Needs torchao. Both update the same weights with the same gradients for 50 steps, and torch's AdamW in float32
too. Gradients are normal, with columns of equal or of very different size. The error is the mean distance to
the weights of float32, relative to their mean movement; ``largest_step`` is the largest change of a weight in
one step, in learning rates. In ``rare`` one value of a block has a large gradient, the others have a small
one, and then none. ``equal_bits`` says whether shards of 2, 3 and 4 ranks give the bits of one rank after
ten steps.
torchao's update runs without ``torch.compile``, which changes no formula. Results go to
``bench/results/trainer-moments.json``; ``--smoke`` writes none.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from bench.report import report_to
from bench.whole_run import REPOSITORY
from services.extras.optimizers.eight_bit import AdamW8bit

RESULTS = REPOSITORY / "bench" / "results" / "trainer-moments.json"
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
_SHAPE = (1024, 192)
_SHARDS = (2, 3, 4)


def _torchao(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    return TorchaoAdamW8bit(weights, **_OPTIONS)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "float32": lambda weights: torch.optim.AdamW(weights, **_OPTIONS),
    "slipstream": lambda weights: AdamW8bit([{"params": weights}], **_OPTIONS),
    "torchao": _torchao,
}


def gradients(kind: str, steps: int) -> list[Tensor]:
    """Returns the gradients of all steps."""
    source = torch.Generator().manual_seed(0)
    if kind == "rare":
        small = torch.full(_SHAPE, 1e-5)
        small[:, ::64] = 1.0
        return [small] * 3 + [torch.zeros(_SHAPE)] * 3
    sizes = torch.full((_SHAPE[1],), 1e-3)
    if kind == "unequal":
        sizes = sizes * torch.exp(2 * torch.randn(_SHAPE[1], generator=source))
    mean = 0.3 * torch.randn(_SHAPE, generator=source)
    return [sizes * (mean + torch.randn(_SHAPE, generator=source)) for _ in range(steps)]


def trained(name: str, steps: Sequence[Tensor], *, shards: int = 1) -> tuple[Tensor, float]:
    """Returns the weights after all steps, and the largest change of one in a step in learning rates."""
    weights = [nn.Parameter(shard.clone()) for shard in torch.zeros(_SHAPE).chunk(shards)]
    optimizer = OPTIMIZERS[name](weights)
    largest = 0.0
    for gradient in steps:
        before = [weight.detach().clone() for weight in weights]
        for weight, shard_gradient in zip(weights, gradient.chunk(shards), strict=True):
            weight.grad = shard_gradient.clone()
        optimizer.step()
        changes = zip(weights, before, strict=True)
        moved = max(float((weight.detach() - old).abs().max()) for weight, old in changes)
        largest = max(largest, moved / _OPTIONS["lr"])
    return torch.cat([weight.detach() for weight in weights]), largest


def measured(steps: int) -> dict[str, Any]:
    """Trains with every optimizer and every kind of gradients."""
    result: dict[str, Any] = {"torchao": version("torchao"), "torch": torch.__version__}
    for kind in ("equal", "unequal", "rare"):
        step_gradients = gradients(kind, steps)
        exact, _ = trained("float32", step_gradients)
        for name in ("slipstream", "torchao"):
            weights, largest = trained(name, step_gradients)
            whole, _ = trained(name, step_gradients[:10])
            result[f"{kind}/{name}"] = {
                "error": round(float((weights - exact).abs().mean() / exact.abs().mean()), 4),
                "largest_step": round(largest, 2),
                "equal_bits": {
                    str(shards): torch.equal(
                        whole, trained(name, step_gradients[:10], shards=shards)[0]
                    )
                    for shards in _SHARDS
                },
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="five steps")
    options = parser.parse_args()
    # torchao compiles a kernel for each shape.
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    report_to(None if options.smoke else RESULTS, measured(5 if options.smoke else 50))


if __name__ == "__main__":
    main()
