"""Draws ``docs/real-model.png`` from ``bench/results/real-model.json`` and ``real-model-calculator.json``."""

import json

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from bench.real_model.__main__ import RESULTS
from bench.whole_run import REPOSITORY

mpl.use("Agg")
CALCULATOR = RESULTS.with_name("real-model-calculator.json")
_SAMPLES = range(0, 30_721, 5_120)
_TIMED_ON = "NVIDIA H200"
"""Device of the runs whose times are compared: they ran on one host, each on its own GPU."""
_COLORS = {
    "lag 0": "C0",
    "lag 1": "C1",
    "lag 4": "C2",
    "TRL 1.16 colocated": "C3",
    "lag 1, LoRA": "C4",
}


def main() -> None:
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    figure = Figure(figsize=(14, 5.0), layout="constrained")
    by_samples, by_seconds, calculator = figure.subplots(1, 3, sharey=True)
    for variant, color in _COLORS.items():
        curves = []
        for name, run in runs.items():
            points = run["curve"]
            if name.split(", seed")[0] != variant or len(points) == 1:  # evaluated at the end only
                continue
            samples = [point["samples"] for point in points]
            greedy = [point["greedy"] for point in points]
            curves.append(np.interp(_SAMPLES, samples, greedy, right=np.nan))
            by_samples.plot(samples, greedy, color=color, alpha=0.25)
            if run["device"] == _TIMED_ON:
                # The initial model is evaluated before the first step, at a time that is not recorded.
                begin = run["seconds_to_first_step"]
                seconds = [max(0.0, point["seconds"] - begin) for point in points]
                by_seconds.plot(seconds, greedy, color=color, marker="o")
        label = f"{variant}, mean of {len(curves)} runs"
        by_samples.plot(_SAMPLES, np.nanmean(curves, axis=0), color=color, marker="o", label=label)
    agents = json.loads(CALCULATOR.read_text(encoding="utf-8"))["runs"]
    for name, run in agents.items():
        points = run["curve"]
        samples = [point["samples"] for point in points]
        (line,) = calculator.plot(
            samples, [point["greedy"] for point in points], label=f"{name}, greedy", alpha=0.4
        )
        calculator.plot(
            samples,
            [point["sampled"] for point in points],
            label=f"{name}, sampled",
            color=line.get_color(),
            marker="o",
        )
    calculator.set_xlabel("samples trained")
    calculator.set_title("multiplication with a calculator tool", fontsize="medium")
    by_samples.set_title("three-digit addition", fontsize="medium")
    by_seconds.set_title(f"three-digit addition, {_TIMED_ON}", fontsize="medium")
    by_samples.set_xlabel("samples trained")
    by_seconds.set_xlabel("seconds after the first step")
    by_samples.set_ylabel("held-out accuracy (addition: greedy)")
    for axes in (by_samples, by_seconds, calculator):
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1.02)
    by_samples.legend(fontsize="small")
    calculator.legend(fontsize="small")
    devices = sorted({run["device"] for run in runs.values()})
    figure.suptitle(f"SmolLM2-135M-Instruct, one {' or '.join(devices)}")
    figure.savefig(REPOSITORY / "docs" / "real-model.png", dpi=110)


if __name__ == "__main__":
    main()
