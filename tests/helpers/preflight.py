"""The checks of a specification before a start, as tests call them."""

from services.checks.start.preflight import examined_here
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec


def check(spec: RunSpec) -> None:
    """Checks all resources that a specification names.

    Raises:
        SpecError: With one line per problem.
    """
    if problems := examined_here(spec).problems:
        raise SpecError(problems)
