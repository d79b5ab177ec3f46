"""Properties of the engine ``torch``. Imports no torch."""

from typing import Final

from services.common.runspec.engines import EngineKind

KIND: Final = EngineKind(
    adapter="services.rollout.engines.torch.engine:build",
    arguments=frozenset({"max_kv_tokens"}),
    harmless_arguments=frozenset({"max_kv_tokens"}),
    cache_argument="max_kv_tokens",
    length_argument="max_kv_tokens",
    most_running=256,
    is_writable=True,
    reports_masks=True,
    reports_masks_on_cpu=True,
    reports_masks_with_speculation=True,
    reports_top_logprobs=True,
    sleeps=True,
    quantizations={"fp8": None, "fp8_block": None},
    quantizes_on_cpu=True,
    speculation=("ngram",),
    speculates_on_cpu=True,
    speculates_with_seeds=True,
    invariant_environment={},
)
