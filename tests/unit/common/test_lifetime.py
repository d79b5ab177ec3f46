"""Tests of the exit code of a worker that ends because another service does not answer."""

from collections.abc import Callable

import pytest

from services.common.errors import InternalError, UnavailableError
from services.common.lifetime import OUTAGE_EXIT, ending_with_outages
from services.wire.data.transport import links
from services.wire.transferqueue.client import TransferQueueClient
from tests.helpers.ports import free_port


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: UnavailableError("away"), OUTAGE_EXIT),
        (lambda: ExceptionGroup("", [ExceptionGroup("", [UnavailableError("away")])]), OUTAGE_EXIT),
        (lambda: ExceptionGroup("", [UnavailableError("away"), ValueError("wrong")]), None),
        (lambda: InternalError("broken"), None),
    ],
)
def test_only_outages_end_with_their_own_exit_code(
    make: Callable[[], Exception], code: int | None
) -> None:
    ends = pytest.raises(SystemExit) if code else pytest.raises(type(make()))
    with ends as caught, ending_with_outages():
        raise make()
    assert code in (None, getattr(caught.value, "code", None))


async def test_a_transferqueue_that_does_not_answer_is_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", 0.1)
    address = f"127.0.0.1:{free_port()}"
    async with TransferQueueClient.connect(address) as metadata:
        with pytest.raises(UnavailableError, match=address):
            async with links.Links(address, use_shared_memory=False).opened(metadata):
                """It never gets here."""
