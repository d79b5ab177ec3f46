"""Tests that a rollout in the trainer's pod waits for the trainer and uses its GPUs."""

import json

import pytest

from services.extras.kubernetes.colocated import wait_for_gpus


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("named", "gpus"), [("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c"), ("", "")])
def test_it_takes_gpus_that_the_trainer_names_once_it_has_loaded(tmp_path, named, gpus):
    file, clock = tmp_path / "trainer-0.ready", Clock()

    def pause(seconds):
        clock.now += seconds
        if clock.now >= 3:
            file.write_text(json.dumps({"gpus": named}))

    assert wait_for_gpus(file, [1, 2], timeout_s=10, clock=clock, pause=pause) == gpus


def test_a_trainer_that_does_not_load_is_not_waited_for_for_ever(tmp_path):
    clock = Clock()

    def pause(seconds):
        clock.now += seconds

    with pytest.raises(TimeoutError, match=r"10 s.*limits.start_timeout_s"):
        wait_for_gpus(tmp_path / "never", [0], timeout_s=10, clock=clock, pause=pause)
