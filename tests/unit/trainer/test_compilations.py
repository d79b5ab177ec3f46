"""A step says how many parts of the model it had to compile."""

import torch

from services.trainer.steps.report import Early, num_compiled


def test_compilations_are_those_since_the_step_began() -> None:
    double = torch.compile(lambda values: values * 2, backend="eager", dynamic=True)
    double(torch.ones(3))
    early = Early()
    double(torch.ones(5))
    assert num_compiled() == early.compiled_before
    with torch.no_grad():
        double(torch.ones(5))
    assert num_compiled() == early.compiled_before + 1
