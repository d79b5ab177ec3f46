"""Draws ``docs/real-model.png`` from ``bench/results/real-model.json`` and ``real-model-calculator.json``."""

import json

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.real_model.__main__ import RESULTS
from bench.whole_run import REPOSITORY

mpl.use("Agg")
CALCULATOR = RESULTS.with_name("real-model-calculator.json")


def main() -> None:
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    figure = Figure(figsize=(14, 5.0), layout="constrained")
    by_samples, by_seconds, calculator = figure.subplots(1, 3, sharey=True)
    for name, run in runs.items():
        points = run["curve"]
        if len(points) == 1:  # evaluated at the end only
            continue
        greedy = [point["greedy"] for point in points]
        (line,) = by_samples.plot([p["samples"] for p in points], greedy, label=name, marker="o")
        if "times" in run:  # it shared the GPU with others
            continue
        # The initial model is evaluated before the first step, at a time that is not recorded.
        begin = run["seconds_to_first_step"]
        seconds = [max(0.0, point["seconds"] - begin) for point in points]
        by_seconds.plot(seconds, greedy, color=line.get_color(), marker="o")
    agents = json.loads(CALCULATOR.read_text(encoding="utf-8"))["runs"]
    for name, run in agents.items():
        points, rewards = run["curve"], run["reward_mean"]
        samples = [point["samples"] for point in points]
        (line,) = calculator.plot(
            samples, [point["greedy"] for point in points], label=f"{name}, greedy", marker="o"
        )
        step = samples[-1] / len(rewards)
        calculator.plot(
            [step * number for number in range(len(rewards))],
            rewards,
            label=f"{name}, training reward, sampled",
            color=line.get_color(),
            alpha=0.5,
        )
    calculator.set_xlabel("samples trained")
    calculator.set_title("multiplication with a calculator tool", fontsize="medium")
    by_samples.set_title("three-digit addition", fontsize="medium")
    by_seconds.set_title("three-digit addition", fontsize="medium")
    by_samples.set_xlabel("samples trained")
    by_seconds.set_xlabel("seconds after the first step")
    by_samples.set_ylabel("held-out accuracy, greedy")
    for axes in (by_samples, by_seconds, calculator):
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1.02)
    by_samples.legend(fontsize="x-small")
    calculator.legend(fontsize="small")
    devices = {run["device"] for run in runs.values()}
    figure.suptitle(f"SmolLM2-135M-Instruct, one {', '.join(devices)}")
    figure.savefig(REPOSITORY / "docs" / "real-model.png", dpi=110)


if __name__ == "__main__":
    main()
