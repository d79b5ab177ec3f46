"""Algorithms that learn sort4, the score that each must reach, and a control that must not reach it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train sort4 (``examples/sort4.yaml``)."""

    settings: tuple[str, ...] = ()
    """Differences from the example, which trains with GRPO one step off-policy."""
    least_greedy: float = 0.88
    """Min held-out accuracy after 50 steps, decoded greedily."""
    least_sampled: float = 0.75
    """Min held-out accuracy after 50 steps, sampled at temperature 1."""
    most_sampled: float = 1.0
    """Upper bound of a control, which must stay below it."""


_STAGES = (
    "trainer.engine=stages",
    "trainer.pipeline_parallel=2",
    "trainer.tokens_per_micro_batch=1024",
)
_LAG_4 = ("algorithm.max_staleness=4",)


def _apart(role: str) -> tuple[str, ...]:
    """Returns settings for a separate process of a role, with one trainer and two rollouts."""
    return (
        f"topology.task_groups=[train, {role}, generate]",
        "topology.ratios=[0.25, 0.25, 0.5]",
        "topology.gpus=4",
    )


VARIANTS = {
    "grpo, synchronous": Variant(
        settings=("algorithm.max_staleness=0",), least_greedy=0.90, least_sampled=0.78
    ),
    "grpo": Variant(),
    "rloo": Variant(settings=("algorithm.advantage=rloo",)),
    "reinforce++": Variant(settings=("algorithm.advantage=reinforce_pp",)),
    "gspo": Variant(settings=("algorithm.loss=gspo",)),
    "cispo": Variant(settings=("algorithm.loss=cispo",)),
    "dppo, total variation": Variant(settings=("algorithm.loss=dppo",)),
    "dppo, divergence": Variant(
        settings=(
            "algorithm.loss=dppo",
            "algorithm.loss_arguments.divergence=kl",
            "algorithm.clip_low=0.05",
            "algorithm.clip_high=0.05",
        )
    ),
    "gmpo": Variant(settings=("algorithm.loss=gmpo",)),
    "vespo": Variant(settings=("algorithm.loss=vespo",)),
    "m2po": Variant(settings=("algorithm.loss=m2po",)),
    "clip-cov": Variant(settings=("algorithm.loss=clip_cov",)),
    "kl-cov": Variant(settings=("algorithm.loss=kl_cov",)),
    "maxrl": Variant(settings=("algorithm.advantage=maxrl",)),
    "gdpo": Variant(
        settings=(
            "algorithm.advantage=gdpo",
            "algorithm.advantage_arguments.weights={exact_match: 1.0, places: 0.5}",
            "rollout.rewards=[{name: exact_match}, {name: 'sort4.py:places', weight: 0}]",
        )
    ),
    "muon": Variant(
        settings=("trainer.optimizer.kind=muon", "trainer.optimizer.learning_rate=6.0e-4")
    ),
    "float16": Variant(settings=("trainer.dtype=float16",)),
    "adamw, 8 bits": Variant(settings=("trainer.optimizer.kind=adamw_8bit",)),
    "hybrid of gated delta nets": Variant(settings=("model.path=tiny:qwen3_5-0.4m",)),
    "hybrid of mamba-2 mixers": Variant(settings=("model.path=tiny:falcon_h1-0.5m",)),
    "entropy target": Variant(
        settings=("algorithm.entropy_target=0.15", "algorithm.entropy_step=1.0e-3")
    ),
    "decoupled ppo, 4 mini-batches": Variant(
        settings=("trainer.updates_per_step=4", "trainer.optimizer.learning_rate=1.5e-4")
    ),
    "2 stages of 2 tensor-parallel ranks": Variant(
        settings=(*_STAGES, "trainer.world_size=4", "trainer.tensor_parallel=2"), least_greedy=0.90
    ),
    "mixture, 2 expert x 2 tensor parallel": Variant(
        settings=(
            "model.path=tiny:qwen3_moe-0.7m",
            "trainer.world_size=4",
            "trainer.tensor_parallel=2",
            "trainer.expert_parallel=2",
        ),
        least_greedy=0.90,
    ),
    "kl to the reference, ref_logp apart": Variant(
        settings=("algorithm.kl.coefficient=0.01", *_apart("ref_logp"))
    ),
    "decoupled ppo, logp apart": Variant(
        settings=(
            "trainer.updates_per_step=4",
            "trainer.optimizer.learning_rate=1.5e-4",
            *_apart("logp"),
        )
    ),
    "grpo, lag 4": Variant(settings=_LAG_4, least_greedy=0.88, least_sampled=0.78),
    # Weights that are all cut to the same tiny number are no correction: AdamW and gradient
    # clipping are invariant to the gradient's scale.
    "grpo, lag 4, uncorrected": Variant(
        settings=(
            *_LAG_4,
            "algorithm.correction=decoupled",
            "algorithm.correction_cap=1.0e-3",
            "trainer.optimizer.max_grad_norm=1.0e-3",
        ),
        least_greedy=0.0,
        least_sampled=0.0,
        most_sampled=0.50,
    ),
}
