"""Tests of base models that a warm start trains from a user's examples."""

import pytest
import torch

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.trainer.model.warm_start import base_folder

TASK = """
def raising(count, seed):
    return {}["word"]

def single(count, seed):
    return ["word"] * count

def pairs(count, seed):
    yield from [("1=", "1")] * count
"""


@pytest.fixture
def make_base(tmp_path):
    """Returns a function that makes a base model with a function of the task."""
    (tmp_path / "task.py").write_text(TASK)

    def make(function):
        model = ModelSpec.model_validate(
            {
                "path": "tiny:qwen2-0.4m",
                "tokenizer": "chars:0123456789=",
                "warm_start": {"examples": f"{tmp_path}/task.py:{function}", "steps": 1},
            }
        )
        return base_folder(
            model,
            load_tokenizer(model),
            seed=0,
            device=torch.device("cpu"),
            cache=tmp_path / "cache",
            progress=lambda activity: None,
        )

    return make


@pytest.mark.parametrize(
    ("function", "message"),
    [("raising", r"examples .*raising.* raised KeyError: 'word'"), ("single", r"pairs.*'word'")],
)
def test_a_function_that_gives_no_examples_is_named_with_what_it_gave(make_base, function, message):
    with pytest.raises(ValueError, match=message):
        make_base(function)


def test_examples_may_come_from_a_generator(make_base):
    assert (make_base("pairs") / "model.safetensors").exists()
