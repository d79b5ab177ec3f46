"""The Python client trains a run and reads all its data, with and without await."""

import os
import subprocess
import sys

import pytest

from slipstream_client import ApiError, AsyncClient, Client
from tests.helpers.pages import example
from tests.helpers.plumbing import write_plumbing

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, system) -> str:
    """Trains a run with the documentation's program; returns the controller's address."""
    folder = tmp_path_factory.mktemp("client")
    write_plumbing(folder).rename(folder / "my.yaml")
    result = subprocess.run(
        [sys.executable, example("client.md", "train.py", folder)],
        cwd=folder,
        env={**os.environ, "SLIPSTREAM_URL": system.url},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SUCCEEDED {'step': [1, 2, 3], 'reward_mean': [" in result.stdout
    return system.url


def test_a_run_is_found_and_read(trained):
    with Client(trained) as client:
        run = client.run("plumbing")
        assert [event.type for event in run.follow(timeout_s=60)].count("StepCommitted") == 3
        assert run.wait(timeout_s=60).state == "SUCCEEDED"
        assert [run_found.id for run_found in client.runs(label="team=blue")] == [run.id]
        assert len(run.metrics("reward_mean")["reward_mean"]) == 3
        samples = list(run.samples(step=2, limit=5, order_by="worst", tokens=True))
        assert {sample.step for sample in samples} == {2}
        assert sorted(sample.reward for sample in samples) == [sample.reward for sample in samples]
        assert samples[0].tokens is not None
        assert [line.component for line in run.logs(component="trainer-0", tail_lines=1)]
        assert client.get_quota().active_runs == 0
        assert client.page_link().startswith(f"{trained}/page/#code=")
        with pytest.raises(ApiError, match=r"trainer\.stesp"):
            client.validate({"trainer": {"stesp": 3}})


async def test_the_same_is_read_with_await(trained):
    async with AsyncClient(trained) as client:
        run = await client.run("plumbing")
        assert (await run.wait(timeout_s=60)).state == "SUCCEEDED"
        followed = [event.seq async for event in run.follow(timeout_s=60)]
        assert [event.seq async for event in run.events()] == followed
        assert len([event async for event in run.events("StepCommitted")]) == 3
        assert (await run.metrics())["step"] == [1, 2, 3]
        (worst,) = [sample async for sample in run.samples(limit=1, order_by="worst")]
        assert (await run.sample(worst.id)).response == worst.response
        assert [saved.step for saved in await run.checkpoints()] == [3]
