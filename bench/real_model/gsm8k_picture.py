"""Draws ``docs/gsm8k-1.5b.png`` from ``bench/results/gsm8k-1.5b.json``."""

import json

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.real_model.gsm8k import ARMS, RESULTS
from bench.whole_run import REPOSITORY

mpl.use("Agg")


def main() -> None:
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    by_samples, by_seconds = figure.subplots(1, 2, sharey=True)
    for number, arm in enumerate(ARMS):
        for name, run in runs.items():
            if name.rpartition(", seed ")[0] != arm:
                continue
            points = run["curve"]
            greedy = [point["greedy"] for point in points]
            # The initial weights are evaluated before the first step, at a time that is not recorded.
            seconds = [
                max(0.0, point["seconds"] - run["seconds_to_first_step"]) for point in points
            ]
            style = {"color": f"C{number}", "marker": "o", "label": name}
            by_samples.plot([point["samples"] for point in points], greedy, **style)
            if "times" not in run:
                by_seconds.plot(seconds, greedy, **style)
    by_samples.set_xlabel("samples trained")
    by_seconds.set_xlabel("seconds after the first step, evaluations included")
    by_samples.set_ylabel("accuracy on 512 held-out questions, greedy")
    for axes in (by_samples, by_seconds):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    devices = sorted({run["device"] for run in runs.values()})
    figure.suptitle(f"GSM8K, Qwen2.5-Coder-1.5B-Instruct, one {' or '.join(devices)}")
    figure.savefig(REPOSITORY / "docs" / "gsm8k-1.5b.png", dpi=110)


if __name__ == "__main__":
    main()
