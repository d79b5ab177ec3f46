"""Tests that error messages are shortened to the size limit of a call's headers."""

import grpc
import pytest
from google.rpc import status_pb2

from services.common.errors import InvalidArgumentError, to_status


@pytest.mark.parametrize("char", ["a", "\n", "é", "\U0001f600", "\ud800"])
def test_a_message_of_any_length_fits_into_a_status_with_its_beginning_and_end(char):
    error = InvalidArgumentError(f"begin {char * 200_000} end", key=char.strip("\ud800") * 5000)
    status = to_status(error)
    assert status.details.startswith("begin ")
    assert status.details.endswith(" end")
    (detail,) = status.trailing_metadata
    escaped = sum(1 if " " <= c <= "~" else 3 * len(c.encode()) for c in status.details)
    assert escaped + len(detail[1]) < 8000
    assert status_pb2.Status.FromString(detail[1]).message == status.details


def test_a_message_that_fits_is_not_changed():
    message = "rollout.replicas: must be 1 or more, got 0\n" * 40
    assert to_status(InvalidArgumentError(message)).details == message
    assert to_status(InvalidArgumentError(message)).code is grpc.StatusCode.INVALID_ARGUMENT
