"""Tests that dynamic sampling replaces groups with equal rewards, up to a limit per batch."""

from types import SimpleNamespace
from typing import Any

from services.controller.rules.ledger import Ledger
from services.controller.run.dispatch.sample_index import GroupSamples
from services.controller.run.dispatch.scheduler import GenerationScheduler
from services.controller.run.state.requests import CurrentSpec
from services.wire.batch import KVBatchMeta
from tests.helpers.specs import spec_with

SPEC = spec_with(
    rollout={"group_size": 2},
    trainer={"steps": 10, "prompts_per_step": 2},
    algorithm={"dynamic_sampling": True, "max_refill_factor": 2.0},
)
BATCH = KVBatchMeta(
    partition_id="run_1/train",
    keys=("a.0", "a.1"),
    tags={"reward": (1.0, 1.0), "finish_reason": ("stop", "stop"), "greedy": (0, 0)},
)


EQUAL = GroupSamples(BATCH, range(2))


def test_as_many_groups_are_replaced_for_each_batch_as_for_the_first() -> None:
    ledger, anything = Ledger(max_attempts=3), SimpleNamespace(gate=None)
    connections: dict[str, Any] = dict.fromkeys(
        ("prompt_order", "journal", "rollout_pool", "sample_index"), anything
    )
    generation = GenerationScheduler(
        CurrentSpec(SPEC), ledger=ledger, dispatcher=anything, **connections
    )

    def num_replaced() -> int:
        count = 0
        while generation._why_unfit(EQUAL) is not None:
            ledger.drop(ledger.issue(count, position=count + 1), "equal_rewards")
            count += 1
            assert count < 10
        return count

    assert num_replaced() == 2
    generation.batch_taken()
    assert num_replaced() == 2
    # A recovery within a batch builds another scheduler with the same ledger.
    restored = GenerationScheduler(
        CurrentSpec(SPEC), ledger=ledger, dispatcher=anything, **connections
    )
    assert restored._why_unfit(EQUAL) is None
