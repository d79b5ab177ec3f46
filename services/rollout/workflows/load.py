"""The workflow that a run names."""

from services.common.callables import load_callable
from services.common.spec.built_in import WORKFLOWS
from services.common.spec.rollout import RolloutSpec
from services.rollout.workflows.base import Workflow


def load_workflow(spec: RolloutSpec) -> Workflow:
    """Make the workflow with its arguments.

    Raises:
        ValueError: If there is no such workflow or it does not take the arguments.
    """
    make = load_callable(WORKFLOWS.get(spec.workflow, spec.workflow))
    try:
        workflow: Workflow = make(**spec.workflow_arguments)
    except TypeError as error:
        raise ValueError(
            f"rollout.workflow {spec.workflow!r} cannot be made with "
            f"{sorted(spec.workflow_arguments)} ({error}); check rollout.workflow_arguments"
        ) from error
    return workflow
