"""Attacks by web pages and by other users of a developer's machine; honest requests succeed."""

import json
import re
import stat

import httpx
import pytest

from tests.helpers.cli import as_owner, slipstream, started
from tests.helpers.controllers import SPEC

pytestmark = pytest.mark.timeout(120)

# A service that reads the data of this specification runs a shell command.
COMMAND = {
    **SPEC,
    "name": "attack",
    "data": {"train": {"source": "python", "path": "subprocess:getoutput"}},
}


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """Starts services as a developer does; yields address, state directory and printed lines."""
    state = tmp_path_factory.mktemp("up") / "runs"
    with started("up", "--port", "0", "--state-directory", state, until="run page ") as (_, lines):
        yield json.loads((state / "up.json").read_text())["url"], state, "".join(lines)


def test_a_foreign_page_starts_nothing_on_a_developers_machine(up):
    url, state, _ = up
    attack = {
        "Content-Type": "text/plain",
        "Origin": "https://evil.example",
        "Host": "evil.example",
    }
    for headers, status in (
        (attack, 421),
        ({"Content-Type": "text/plain", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json"}, 401),
    ):
        refused = httpx.post(f"{url}/v1/runs", content=json.dumps(COMMAND), headers=headers)
        assert refused.status_code == status, (headers, refused.text)
    owner_headers = as_owner(url)
    assert httpx.get(f"{url}/v1/runs", headers=owner_headers).json()["items"] == []
    log = (state / "logs" / "controller.log").read_text()
    for code in ("foreign_host", "foreign_origin", "not_json", "unauthenticated"):
        assert log.count(f"request refused: {code}") == 1
    honest = httpx.get(f"{url}/v1/quota", headers={**owner_headers, "Origin": url})
    assert honest.status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/page/", "/docs", "/openapi.json", "/v1/runs", "/v1/runs/stream"]
)
def test_a_name_that_resolves_here_reads_nothing(up, path):
    url, _, _ = up
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        refused = httpx.get(f"{url}{path}", headers={**as_owner(url), **headers})
        assert refused.status_code in (403, 421), (path, headers)


def test_other_users_of_the_machine_need_the_token(up):
    url, state, _ = up
    assert httpx.get(f"{url}/v1/runs").status_code == 401
    for path in (state / "up.json", state / "slipstream.db", *state.glob("logs/*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    listed = slipstream("list", "--url", url)
    assert (listed.code, listed.out.strip()) == (0, "no runs")


def test_the_description_of_the_api_loads_nothing_from_elsewhere(up):
    url, _, _ = up
    page = httpx.get(f"{url}/docs")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert named
    for path in named:
        assert not path.startswith(("http", "//"))
        loaded = httpx.get(f"{url}/{path}")
        assert loaded.status_code == 200, path
        assert loaded.headers["Content-Security-Policy"] == page.headers["Content-Security-Policy"]


def test_a_link_to_the_page_signs_one_browser_in_once(up):
    url, _, printed = up
    code = re.search(r"/page/#code=(\S+)", printed)[1]
    signed_in = httpx.post(f"{url}/page/sign-in", json={"code": code})
    headers = {"Authorization": f"Bearer {signed_in.json()['token']}"}
    assert httpx.get(f"{url}/v1/runs", headers=headers).status_code == 200
    assert httpx.post(f"{url}/page/sign-in", json={"code": code}).status_code == 401
    assert httpx.post(f"{url}/page/links").status_code == 401
    another = slipstream("page", "--url", url).out.strip()
    assert another.startswith(f"{url}/page/#code=")
    assert code not in another
