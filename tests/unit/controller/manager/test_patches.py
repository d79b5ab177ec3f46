"""Immutable keys of a patch, and the runs that count against quotas."""

from types import SimpleNamespace

import pytest

from services.common.runspec.loader import SpecError, canonical_json, parse_spec
from services.controller.manager.changes import patched_spec
from services.controller.run.state.requests import resource_needs
from services.controller.schemas import RunPatch
from tests.helpers.rest import named


def spec_of(placement):
    document = named(1)
    document["trainer"] = {**document["trainer"], "world_size": 2}
    document["rollout"] = {**document["rollout"], "replicas": 3 if placement == "mixed" else 2}
    return parse_spec({**document, "topology": {"placement": placement}})


def test_rollouts_on_the_trainers_gpus_stay_as_many():
    patch = RunPatch(rollout_replicas=4)
    run = SimpleNamespace(spec_json=canonical_json(spec_of("colocated")))
    with pytest.raises(SpecError, match=r"^rollout\.replicas: "):
        patched_spec(run, patch)
    run = SimpleNamespace(spec_json=canonical_json(spec_of("mixed")))
    with pytest.raises(SpecError, match="3 or more"):
        patched_spec(run, RunPatch(rollout_replicas=2))
    assert patched_spec(run, patch).rollout.replicas == 4
    run = SimpleNamespace(spec_json=canonical_json(spec_of("disaggregated")))
    assert patched_spec(run, patch).rollout.replicas == 4


def test_gpus_that_both_sides_use_count_once():
    assert resource_needs(spec_of("disaggregated")).gpus == 4
    assert resource_needs(spec_of("colocated")).gpus == 2
    assert resource_needs(spec_of("mixed")).gpus == 3
