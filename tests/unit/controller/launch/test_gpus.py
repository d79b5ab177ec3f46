"""Assignment of a host's GPUs to workers."""

import pytest

from services.common.errors import FailedPreconditionError
from services.common.runspec.loader import parse_spec
from services.common.runspec.worker_kinds import gpu_needs, total_gpus
from services.controller.launch.gpus import HostGpus, host_gpus


def test_every_worker_gets_separate_gpus_while_available():
    needs = {"trainer-0": 2, "rollout-0": 1, "rollout-1": 1}
    assert HostGpus(["0", "1", "2", "3"]).assign("run", needs) == {
        "trainer-0": ("0", "1"),
        "rollout-0": ("2",),
        "rollout-1": ("3",),
    }


def test_one_gpu_is_shared_by_all_workers():
    needs = {"trainer-0": 1, "rollout-0": 1}
    assert HostGpus(["7"]).assign("run", needs) == {"trainer-0": ("7",), "rollout-0": ("7",)}


def test_workers_that_share_a_gpu_are_listed():
    gpus = HostGpus(["0", "1"])
    gpus.assign("run", {"trainer-0": 1, "rollout-0": 1, "rollout-1": 1})
    assert gpus.workers_sharing("run", "rollout-0") == []
    assert gpus.workers_sharing("run", "rollout-1") == ["trainer-0"]


def test_a_second_run_takes_the_gpus_that_are_free():
    gpus = HostGpus(["0", "1", "2"])
    gpus.assign("first", {"trainer-0": 1})
    assert gpus.assign("second", {"trainer-0": 1, "rollout-0": 1}) == {
        "trainer-0": ("1",),
        "rollout-0": ("2",),
    }
    gpus.release("first")
    assert gpus.assign("third", {"trainer-0": 1}) == {"trainer-0": ("0",)}


def test_a_worker_that_is_started_again_has_the_same_gpus():
    gpus = HostGpus(["0", "1"])
    needs = {"trainer-0": 1, "rollout-0": 1}
    first = dict(gpus.assign("run", needs))
    assert gpus.assign("run", needs) == first


def test_a_host_without_gpus_gives_none():
    needs = {"trainer-0": 2, "rollout-0": 1}
    assert HostGpus([]).assign("run", needs) == {"trainer-0": (), "rollout-0": ()}


def test_a_worker_that_needs_more_than_the_host_has_is_named():
    with pytest.raises(FailedPreconditionError, match=r"trainer-0 needs 4 GPUs, .* 2"):
        HostGpus(["0", "1"]).assign("run", {"trainer-0": 4})


def test_gpus_are_counted_by_their_device_files(tmp_path):
    for name in ("nvidia5", "nvidia6", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert host_gpus(None, tmp_path) == ("0", "1")


def test_cuda_visible_devices_limits_what_is_given(tmp_path):
    (tmp_path / "nvidia0").touch()
    assert host_gpus("2,3", tmp_path) == ("2", "3")
    assert host_gpus("", tmp_path) == ()


def test_workers_that_take_turns_with_the_trainer_are_on_its_gpus():
    needs = {"trainer-0": 4, "rollout-0": 2, "rollout-1": 2, "rollout-2": 2, "rollout-3": 2}
    hosts = dict.fromkeys([name for name in needs if name != "trainer-0"], "trainer-0")
    assert HostGpus(["0", "1", "2", "3", "4", "5"]).assign("run", needs, hosts=hosts) == {
        "trainer-0": ("0", "1", "2", "3"),
        "rollout-0": ("0", "1"),
        "rollout-1": ("2", "3"),
        "rollout-2": ("0", "1"),
        "rollout-3": ("2", "3"),
    }


def test_time_shared_gpus_are_not_assigned_to_others():
    needs = {"trainer-0": 1, "rollout-0": 1, "rollout-1": 1}
    hosts = {"rollout-0": "trainer-0"}
    assert HostGpus(["0", "1"]).assign("run", needs, hosts=hosts) == {
        "trainer-0": ("0",),
        "rollout-0": ("0",),
        "rollout-1": ("1",),
    }
    with pytest.raises(FailedPreconditionError, match=r"rollout-1 needs 1 GPUs, .* 0"):
        HostGpus(["0"]).assign("run", needs, hosts=hosts)


def test_a_rollout_that_samples_nothing_has_no_gpu():
    rows = {"source": "jsonl", "path": "rows.jsonl"}
    spec = {
        "name": "sft",
        "model": {"path": "tiny:qwen2-0.4m"},
        "data": {"train": rows, "prompt_column": "question"},
        "algorithm": "sft",
        "trainer": {"steps": 1, "prompts_per_step": 2, "world_size": 2},
    }
    parsed_spec = parse_spec(spec)
    assert gpu_needs(parsed_spec) == {"trainer-0": 2, "rollout-0": 0}
    assert total_gpus(parsed_spec) == 2
    assert HostGpus(["0", "1"]).assign("run", gpu_needs(parsed_spec))["rollout-0"] == ()
    evaluated = parse_spec({**spec, "data": {**spec["data"], "heldout": rows}})
    assert gpu_needs(evaluated) == {"trainer-0": 2, "rollout-0": 1}


def test_a_run_may_have_its_gpus_and_unassigned_ones():
    host = HostGpus(["0", "1", "2", "3"])
    host.assign("one", {"trainer-0": 1, "rollout-0": 1})
    host.assign("other", {"trainer-0": 1})
    assert (host.available_to("one"), host.available_to("other")) == (3, 2)
    assert HostGpus([]).available_to("one") == 0
