"""Tests of the plotted curves of a run."""

from matplotlib.figure import Figure

from services.cli import follow


def test_rewards_below_zero_are_drawn_upright():
    for values, lowest in (([-2.0, -1.0, None], -3.0), ([0.5, 1.0, None], 0.0)):
        axes = Figure().subplots()
        follow._line(axes, [1, 2, 3], values, "reward")
        follow._decorate(axes, "Training reward", "mean reward of the batch")
        bottom, top = axes.get_ylim()
        assert lowest <= bottom <= min(v for v in values if v is not None) < top
