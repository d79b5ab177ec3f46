"""How fast a run would be with other places, rates and lags: ``python -m bench.pace.simulated``, seconds.

What ``slipstream plan`` reckons (:mod:`services.controller.planning.prediction`), with the rates that the
fakes have. With those of two H200s it comes within 2 % of what was measured there: 112 samples/s at 31,000
tokens/s with .5 s of each step at the barrier, 155 at 45,000.
"""

import argparse
import itertools
from dataclasses import replace

from bench.pace.fakes import Pace
from services.controller.planning.prediction import predict
from services.controller.planning.rates import Setting

GROUPS, GROUP_SIZE = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="+", default=[192, 256, 384])
    parser.add_argument("--rates", type=float, nargs="+", default=[31_000.0, 45_000.0])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for rate, lag, places in itertools.product(options.rates, options.lags, options.places):
        setting = Setting(
            trainer_gpus=1,
            rollouts=1,
            places=places,
            max_staleness=lag,
            groups_per_step=GROUPS,
            group_size=GROUP_SIZE,
        )
        rates = replace(Pace(), tokens_per_s=rate).rates()
        found = predict(rates, setting, num_steps=options.steps)
        print(f"{rate:,.0f} tokens/s, lag {lag}, {places} places: {found}", flush=True)


if __name__ == "__main__":
    main()
