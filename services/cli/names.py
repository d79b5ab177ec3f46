"""Lookup of runs by name or by a unique prefix of their id."""

import re
from collections.abc import Sequence
from http import HTTPStatus

from services.cli.api import Api, ApiError
from services.common.runspec.suggestions import did_you_mean
from services.controller.api.operations import ListRuns

_ID = re.compile("run_[0-9a-f]{32}")
_MAY_BE = re.compile("run_[0-9a-f]{1,32}|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_RUNS = 500
# Ids begin with the submission time: this prefix changes within a quarter of an hour.
_MIN_DIGITS = len("run_") + 7


def is_id(text: str) -> bool:
    """Returns True if a text is the complete id of a run."""
    return _ID.fullmatch(text) is not None


def may_be_run(text: str) -> bool:
    """Returns True if a text can be the name of a run or the beginning of its id."""
    return _MAY_BE.fullmatch(text) is not None


async def find_run(api: Api, text: str | None) -> str:
    """Returns the id of a run.

    Args:
        api: The controller.
        text: The run's id, the beginning of its id, or its name, which selects the newest run
            with that name; None selects the newest run of all.

    Raises:
        ApiError: If there is no such run (status 404), or several ids have this beginning.
    """
    if text is None:
        newest = (await api.call(ListRuns(page_size=1))).items
        if not newest:
            raise ApiError(
                "no runs yet; 'slipstream run' and 'slipstream submit' start one",
                status=HTTPStatus.NOT_FOUND,
            )
        return newest[0].id
    if is_id(text):
        return text
    if named := (await api.call(ListRuns(name=text, page_size=1))).items:
        return named[0].id
    runs = (await api.call(ListRuns(page_size=_MAX_RUNS))).items
    found = [run.id for run in runs if run.id.startswith((text, f"run_{text}"))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ApiError(
            f"the ids of {len(found)} runs start with {text!r}, such as {found[0]} and {found[1]}; use a "
            "longer one"
        )
    meant = did_you_mean(text, sorted({run.name for run in runs}))
    raise ApiError(
        f"no run has the name or id {text!r}; 'slipstream list' shows all runs.{meant}",
        status=HTTPStatus.NOT_FOUND,
    )


def short_ids(ids: Sequence[str]) -> list[str]:
    """Returns the shortest prefix of each id that distinguishes all of them; all have the same length."""
    length = _MIN_DIGITS
    while len({each[:length] for each in ids}) < len(set(ids)):
        length += 1
    return [each[:length] for each in ids]
