"""Measures how much reference-logprob time a separate worker hides: ``python -m bench.learning.overlap``.

sort4 runs with a KL penalty, with the reference inside the trainer and in a separate worker; on
GPUs if there are any, else on CPUs. Results go to ``bench/results/overlap.json``: means over the
steps, in seconds. ``--smoke`` writes none.
"""

import argparse
import json
import tempfile
from pathlib import Path

from bench.learning.variants import VARIANTS
from bench.report import write_json
from bench.whole_run import REPOSITORY, whole_run

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
    measurements = {name: measure(settings, steps) for name, settings in _PLACES.items()}
    inside, apart = measurements["inside"], measurements["apart"]
    waits = apart["idle_seconds_no_data"] - inside["idle_seconds_no_data"]
    spent = inside["seconds_ref_logprob"]
    result = {**measurements, "hidden_fraction": round(min(1.0, 1.0 - waits / spent), 3)}
    print(json.dumps(result, indent=1))
    if is_smoke:
        return
    write_json(RESULTS, result)


def measure(settings: tuple[str, ...], num_steps: int) -> dict[str, float]:
    """Returns the mean metrics of a step."""
    settings = (*settings, f"trainer.steps={num_steps}", "validation.every=0")
    with tempfile.TemporaryDirectory() as folder:
        run = whole_run(Path(folder), settings)
    return run.means(_NUMBERS, after=_WARMUP_STEPS)


if __name__ == "__main__":
    main()
