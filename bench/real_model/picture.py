"""Draws ``docs/real-model.png`` from ``bench/results/real-model.json``."""

import json

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.real_model.__main__ import RESULTS
from bench.whole_run import REPOSITORY

mpl.use("Agg")


def main() -> None:
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    by_samples, by_seconds = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        points = run["curve"]
        greedy = [point["greedy"] for point in points]
        by_samples.plot([p["samples"] for p in points], greedy, label=name, marker="o")
        # The initial model is evaluated before the first step, at a time that is not told.
        begin = run["seconds_to_first_step"]
        seconds = [max(0.0, point["seconds"] - begin) for point in points]
        by_seconds.plot(seconds, greedy, label=name, marker="o")
    by_samples.set_xlabel("samples trained")
    by_seconds.set_xlabel("seconds after the first step")
    by_samples.set_ylabel("held-out accuracy, greedy")
    for axes in (by_samples, by_seconds):
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1)
    by_samples.legend()
    devices = {run["device"] for run in runs.values()}
    figure.suptitle(f"SmolLM2-135M-Instruct, three-digit addition, one {', '.join(devices)}")
    figure.savefig(REPOSITORY / "docs" / "real-model.png", dpi=110)


if __name__ == "__main__":
    main()
