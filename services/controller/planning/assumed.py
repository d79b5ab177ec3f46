"""Rates of GPUs that nobody has measured yet, with where they are from."""

from services.controller.planning.lengths import Geometric
from services.controller.planning.rates import DecodeTime, Rates

# Two H200s, 1.31 billion parameters, prompts of 100 tokens (``bench/results/e2e-geometric.json``).
_WEIGHTS = 1.31e9
_TRAIN_TOKENS_PER_S = 46_000.0
_ENGINE_TOKENS_PER_S = 45_000.0
_DECODE_S = 0.005
_BYTES_PER_S = 4.8e12
_COPY_S, _TRANSFER_S, _STALL_S = 0.01, 0.08, 0.035
# Where nobody drops anything (``bench/results/one-gpu-colocated.json``); and where an engine with a KV cache
# of 90 GB sleeps (``one-gpu-sleeping.json``). Both with 1.5 billion parameters.
_KEPT_S, _HANDOVER_S = 0.01, 0.41
_HOST_BYTES_PER_S = 5e10
# Part of the longest response that a response has on average.
_MEAN_LENGTH = 0.25


def assumed_rates(
    *,
    weights: float,
    active_weights: float,
    engine_gpus: int,
    max_response_tokens: int,
    moved_bytes: float | None = None,
) -> Rates:
    """What an H200 would do with a model, scaled from one that was measured.

    Args:
        weights: Parameters of the model.
        active_weights: Those of them that a token passes.
        engine_gpus: GPUs of one rollout.
        max_response_tokens: Of the run.
        moved_bytes: Of a trainer's GPU, which a handover moves to host memory, and another one back; None
            where engines give up nothing either.
    """
    size = weights / _WEIGHTS
    handover_s = _KEPT_S
    if moved_bytes is not None:
        handover_s = _HANDOVER_S + 2 * moved_bytes / _HOST_BYTES_PER_S
    fixed_s = _DECODE_S + 2 * weights / _BYTES_PER_S / engine_gpus
    return Rates(
        train_tokens_per_s=_TRAIN_TOKENS_PER_S * _WEIGHTS / active_weights,
        decode=DecodeTime(
            fixed_s=fixed_s, sample_s=0.0, most_samples=fixed_s * _ENGINE_TOKENS_PER_S
        ),
        lengths=Geometric(
            mean_tokens=max(2.0, _MEAN_LENGTH * max_response_tokens), max_tokens=max_response_tokens
        ),
        copy_s=_COPY_S * size,
        transfer_s=_TRANSFER_S * size,
        stall_s=_STALL_S * size,
        handover_s=handover_s,
    )


ASSUMPTIONS = (
    "training: 46,000 response tokens/s of a GPU at 1.31 billion parameters, in proportion to those that a "
    "token passes; each doubling of the trainer's GPUs loses 5 %",
    "generation: 45,000 tokens/s of a rollout at most, a decode step of 5 ms and the time to read the "
    "weights at 4.8 TB/s",
    "responses: geometric, a quarter of rollout.max_response_tokens on average",
    "turns on the same GPUs: 0.01 s of handovers in each step where all of both sides fits; else 0.41 s, "
    "measured with 1.5 billion parameters, and where the trainer's state does not fit beside the engines its "
    "way to host memory and back at 50 GB/s",
    "weights: copied in 10 ms, received in 80, adopted in 35, at 1.31 billion parameters",
)
"""What is taken for true without a measurement; all of it of H200s (``bench/results/e2e-geometric.json``)."""
