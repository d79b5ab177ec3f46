"""The documentation as a site that is opened from disk, without a network."""

import pytest

from tests.helpers.site import build_site

playwright = pytest.importorskip("playwright.async_api")
pytest.importorskip("mkdocs")
expect = playwright.expect
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


@pytest.mark.parametrize("start", ["index.html", "adr/0001-services-is-the-import-root.html"])
async def test_its_search_loads_nothing_from_elsewhere(browser, site, start):
    foreign = []
    context = await browser.new_context()
    page = await context.new_page()
    page.on("request", lambda r: r.url.startswith("file:") or foreign.append(r.url))
    await page.goto((site / start).as_uri())
    await page.locator("input[name=query]").first.fill("staleness")
    await expect(page.locator(".md-search-result__item").first).to_contain_text("taleness")
    await context.close()
    assert foreign == []
