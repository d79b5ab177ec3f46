"""Conversion of errors of the Kubernetes API."""

import json
from typing import Any

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import ProtocolError

from services.common.errors import FailedPreconditionError, UnavailableError
from services.extras.kubernetes.pod_api import PodApi

POD = {"metadata": {"name": "run-01-trainer-0"}}


class FakeCore:
    """Fake Kubernetes API that raises one error in every method."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.api_client = self

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: object, **options: object) -> None:
            raise self._error

        return method


def refusal(status: int, message: str = "") -> ApiException:
    error = ApiException(status=status, reason="Refused")
    error.body = json.dumps({"message": message}) if message else None
    return error


def failing(error: Exception) -> PodApi:
    return PodApi(FakeCore(error), "train")  # type: ignore[arg-type]


async def test_a_refusal_has_the_message_of_kubernetes() -> None:
    api = failing(refusal(403, "exceeded quota: gpus"))
    with pytest.raises(FailedPreconditionError, match="run-01-trainer-0: exceeded quota: gpus"):
        await api.create(POD)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_in_trouble_may_be_asked_again(status: int) -> None:
    with pytest.raises(UnavailableError, match=f"{status} Refused"):
        await failing(refusal(status)).list("run=1")


async def test_a_server_that_does_not_answer_may_be_asked_again() -> None:
    with pytest.raises(UnavailableError, match="does not answer: reset"):
        await failing(ProtocolError("reset")).put_secret({"metadata": {"name": "token"}})


async def test_what_is_gone_needs_no_deletion() -> None:
    api = failing(refusal(404))
    assert await api.delete("run-01-trainer-0") is False
    await api.delete_secret("token")


async def test_a_cluster_without_job_sets_is_reported_with_a_fix() -> None:
    with pytest.raises(FailedPreconditionError, match=r"workers\.jobSet\.enabled"):
        await failing(refusal(404)).create_job_set(POD)
