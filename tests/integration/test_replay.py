"""A recorded asynchronous run whose processes are killed is replayed bit by bit, without rollouts."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.extras.replay import files
from tests.helpers.cli import Finished, ranks_of, slipstream, started

pytestmark = pytest.mark.timeout(600)

SETTINGS = (
    "record=full",
    "trainer.world_size=2",
    "trainer.steps=8",
    "trainer.checkpoint.every=3",
    "algorithm.max_staleness=2",
    "rollout.max_response_tokens=24",
    "rollout.partial_rollout=true",
    "rollout.reproducible=batch_invariant",
)
OTHER_LOSS = ("--set", "algorithm.entropy_coefficient=0.01")


def test_a_run_that_was_killed_replays_bit_by_bit_and_parts_with_another_loss(plumbing, tmp_path):
    settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
    arguments = ("run", plumbing, "--state-directory", tmp_path / "runs", *settings)
    with started(*arguments, until=r"step +5/") as (process, _):
        ranks_of("trainer-0", tmp_path / "runs")["1"].kill()
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0, out
    (record,) = (tmp_path / "runs").glob("run_*/checkpoints/record")
    assert files.recorded_steps(record) == [*range(9)]
    starts = [start["step"] for start in files.read_starts(record)]
    assert starts[0] == 0
    assert len(starts) == 2

    def command(name: str, *options: object) -> Finished:
        return slipstream(name, *map(str, options), "--state-directory", tmp_path / "runs")

    # The commands run in parallel, because most of their time is the start of the ranks.
    with ThreadPoolExecutor() as threads:
        same = threads.submit(command, "replay", "plumbing", "--json")
        regenerated = ("--sample", 2, "--sample", 7)
        again = threads.submit(command, "replay", "plumbing", "--json", *regenerated)
        other = threads.submit(command, "replay", "plumbing", *OTHER_LOSS, "--to", 2)
    replayed, sampled, changed = same.result(), again.result(), other.result()
    assert replayed.code == 0, replayed.out + replayed.err
    steps = [json.loads(line) for line in replayed.out.splitlines()]
    assert [step["step"] for step in steps] == [*range(9)]
    assert not any(step["tensors"] for step in steps)
    assert all(step["metrics"] == step["recorded"] for step in steps[1:])

    assert sampled.code == 0, sampled.out + sampled.err
    responses = [json.loads(line) for line in sampled.out.splitlines()]
    assert len(responses) == 2 * 16
    assert not any(response["difference"] for response in responses)

    assert changed.code == 0, changed.out + changed.err
    assert re.search(r"parts at step 1$", changed.err.strip())

    files.rank_file(record, 4, 1).unlink()
    with ThreadPoolExecutor() as threads:
        refused = threads.submit(command, "replay", "plumbing")
        incomparable = threads.submit(command, "diff", "plumbing", "plumbing")
    assert (refused.result().code, incomparable.result().code) == (2, 2)
