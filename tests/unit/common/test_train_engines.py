"""Tests of training engines in a specification, and of the settings that each engine supports."""

from typing import Any

import pytest

from services.common.runspec.loader import SpecError, parse_spec
from tests.helpers.specs import changed


def test_the_default_engine_is_fsdp_and_the_reference_supports_a_plain_run() -> None:
    assert parse_spec(changed()).trainer.engine == "fsdp"
    assert parse_spec(changed(trainer={"engine": "reference"})).trainer.engine == "reference"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trainer": {"world_size": 2}}, "trainer.world_size"),
        ({"trainer": {"world_size": 2, "context_parallel": 2}}, "trainer.world_size"),
        ({"trainer": {"lora": {"rank": 4}}}, "trainer.lora"),
        ({"trainer": {"dtype": "bfloat16"}}, "trainer.dtype"),
        ({"trainer": {"cpu_offload": "optimizer"}}, "trainer.cpu_offload"),
        ({"trainer": {"compile": True}}, "trainer.compile"),
        ({"topology": {"placement": "colocated"}}, "topology.placement"),
    ],
    ids=str,
)
def test_settings_that_an_engine_does_not_support_are_refused_by_key(
    changes: dict[str, Any], key: str
) -> None:
    trainer = {"engine": "reference", **changes.get("trainer", {})}
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(**{**changes, "trainer": trainer}))
    assert f"supports {key} " in str(caught.value)


def test_models_with_gpus_of_their_own_are_refused() -> None:
    topology = {
        "task_groups": ["train", "generate", "ref_logp"],
        "ratios": [0.5, 0.25, 0.25],
        "gpus": 4,
    }
    changes = {"algorithm": {"kl": {"coefficient": 0.1}}, "trainer": {"engine": "reference"}}
    with pytest.raises(SpecError, match="ref_logp"):
        parse_spec(changed(topology=topology, **changes))


def test_an_unknown_engine_is_refused_by_key() -> None:
    with pytest.raises(SpecError, match=r"trainer\.engine"):
        parse_spec(changed(trainer={"engine": "fdsp"}))
