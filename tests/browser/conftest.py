"""Fixtures of the run page's tests: one controller and one browser for all."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.browser.controller import PageController, open_controller

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[object]:
    """Yields Chromium: Debian's package or another build on ``PATH``."""
    playwright = pytest.importorskip("playwright.async_api")
    if _CHROMIUM is None:
        if os.getenv("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    playwright.expect.set_options(timeout=30_000)  # for busy machines
    async with playwright.async_playwright() as started:
        opened = await started.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield opened
        await opened.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def controller(tmp_path_factory) -> AsyncIterator[PageController]:
    """Yields a controller with one running run and two ended ones."""
    async with open_controller(tmp_path_factory.mktemp("page")) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser, controller):
    """Yields a function that opens the page as a user with a role.

    Requests to other hosts and console errors fail the test.
    """
    foreign, errors = [], []
    async with AsyncExitStack() as stack:

        async def opened(path="/page/", *, role="admin", width=1280, scheme="light"):
            size = {"width": width, "height": 900}
            context = await browser.new_context(viewport=size, color_scheme=scheme)
            stack.push_async_callback(context.close)
            page = await context.new_page()
            page.on(
                "request",
                lambda r: r.url.startswith((controller.url, "blob:")) or foreign.append(r.url),
            )
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on(
                "console",
                lambda m: errors.append(m.text) if m.type in ("error", "warning") else None,
            )
            await page.goto(f"{controller.url}{path}#code={controller.code(role)}")
            await page.wait_for_selector("#name:not(:empty)")
            return page

        yield opened
    assert (foreign, errors) == ([], [])
