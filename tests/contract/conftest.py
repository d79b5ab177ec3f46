"""Fixture that closes shared engines at the end of the session."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.contract.engines import close_shared


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def shared_engines() -> AsyncIterator[None]:
    """Closes shared engines at the end of the session."""
    yield
    await close_shared()
