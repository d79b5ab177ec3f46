"""Test of garbage collection in a rollout."""

import subprocess
import sys

_PROGRAM = """
import gc

from services.rollout.monitor import freeze_startup_objects

model = [[] for _ in range(100_000)]  # lives as long as the process
freeze_startup_objects()
running = []
for number in range(1_000_000):
    episode = [number]
    episode.append(episode)
    running.append(episode)
    if len(running) == 7_100:  # some outlive two young collections
        del running[:-700]
print(gc.get_stats()[2]["collected"])
"""


def test_garbage_that_outlives_young_collections_is_collected() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) > 100_000
