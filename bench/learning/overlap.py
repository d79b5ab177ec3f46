"""How much of the time for reference logprobs their own worker hides: ``python -m bench.learning.overlap``.

sort4 with a KL penalty, with the reference inside the trainer and apart; on the GPUs that there are, else on
CPUs. Results go to ``bench/results/overlap.json``: means over the steps, in seconds. ``--smoke`` keeps none.
"""

import argparse
import json

from bench.learning.steps import REPOSITORY, measure_steps
from bench.learning.variants import VARIANTS

RESULTS = REPOSITORY / "bench" / "results" / "overlap.json"
_PLACES = {
    "inside": ("algorithm.kl.coefficient=0.01",),
    "apart": VARIANTS["kl to the reference, ref_logp apart"].settings,
}
_NUMBERS = ("seconds_ref_logprob", "seconds_total", "idle_seconds_no_data", "tokens_per_s")
_WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two steps, not kept")
    is_smoke = parser.parse_args().smoke
    steps = _WARMUP_STEPS + (2 if is_smoke else 13)
    found = {place: measure(settings, steps) for place, settings in _PLACES.items()}
    inside, apart = found["inside"], found["apart"]
    waits = apart["idle_seconds_no_data"] - inside["idle_seconds_no_data"]
    spent = inside["seconds_ref_logprob"]
    result = {**found, "hidden_fraction": round(min(1.0, 1.0 - waits / spent), 3)}
    print(json.dumps(result, indent=1))
    if is_smoke:
        return
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(settings: tuple[str, ...], num_steps: int) -> dict[str, float]:
    """Mean numbers of a step of sort4."""
    settings = (*settings, f"trainer.steps={num_steps}", "validation.every=0")
    found = measure_steps(
        REPOSITORY / "examples" / "sort4.yaml", settings, warmup_steps=_WARMUP_STEPS
    )
    return {name: found.get(name, 0.0) for name in _NUMBERS}


if __name__ == "__main__":
    main()
