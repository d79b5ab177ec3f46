"""Tests that a browser's token expires with the token that created its sign-in link."""

import asyncio
import time

import httpx
import pytest

from services.common.errors import UnauthenticatedError
from services.common.runspec.loader import parse_spec
from services.controller.api import operations, principals, run_api
from services.controller.api.app import build_app
from services.controller.api.principals import Principal, TokenStore
from services.controller.api.run_page import PageLinks, add_page_links
from services.controller.store.records import Submission
from tests.helpers.rest import SPEC, api_of

ADMIN = {"name": "ann", "project": "default", "role": "admin"}


@pytest.fixture
def tokens(database) -> TokenStore:
    return TokenStore(database)


@pytest.fixture
def users(manager, database, tmp_path, tokens):
    return api_of(manager, database, tmp_path, tokens)


async def signed_in(users, tokens, token: str) -> str:
    links = PageLinks(tokens, users.check_valid)
    link = links.make(await users.authenticate(f"Bearer {token}", ""))
    return (await links.sign_in(link.path.partition("code=")[2])).token


async def test_a_sign_in_has_a_small_body(users, tokens):
    app = build_app(users)
    add_page_links(app, users, PageLinks(tokens, users.check_valid))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    async with client:
        for size, status in ((1000, 401), (8000, 413)):
            answer = await client.post("/page/sign-in", json={"code": "a" * size})
            assert answer.status_code == status


@pytest.mark.parametrize("generations", [1, 3])
async def test_it_ends_when_the_token_expires(users, tokens, generations, monkeypatch):
    token = tokens.create(**ADMIN, life_s=3600.0)
    for _ in range(generations):
        token = await signed_in(users, tokens, token)
    assert tokens.authenticate(f"Bearer {token}").name == "ann"
    later = time.time() + 3601.0
    monkeypatch.setattr(principals.time, "time", lambda: later)
    with pytest.raises(UnauthenticatedError):
        tokens.authenticate(f"Bearer {token}")


@pytest.mark.parametrize("generations", [1, 3])
async def test_it_ends_when_the_token_is_revoked(users, tokens, database, generations):
    first = token = tokens.create(**ADMIN)
    for _ in range(generations):
        token = await signed_in(users, tokens, token)
    tokens.revoke("ann")
    for bearer_token in (first, token):
        with pytest.raises(UnauthenticatedError):
            tokens.authenticate(f"Bearer {bearer_token}")


async def test_a_link_is_void_when_its_token_has_ended(users, tokens):
    links = PageLinks(tokens, users.check_valid)
    who = await users.authenticate(f"Bearer {tokens.create(**ADMIN)}", "")
    link = links.make(who)
    tokens.revoke("ann")
    with pytest.raises(UnauthenticatedError):
        await links.sign_in(link.path.partition("code=")[2])


async def test_one_user_cannot_fill_the_memory_with_links_or_void_those_of_others(users, tokens):
    links = PageLinks(tokens, users.check_valid)
    ann = await users.authenticate(f"Bearer {tokens.create(**ADMIN)}", "")
    bob = await users.authenticate(f"Bearer {tokens.create(**ADMIN | {'name': 'bob'})}", "")
    of_bob = links.make(bob)
    links_of_ann = [links.make(ann) for _ in range(200)]
    assert len(links._codes) < 50
    for link, user in ((links_of_ann[-1], "ann"), (of_bob, "bob")):
        token = (await links.sign_in(link.path.partition("code=")[2])).token
        assert tokens.authenticate(f"Bearer {token}").name == user
    with pytest.raises(UnauthenticatedError):
        await links.sign_in(links_of_ann[0].path.partition("code=")[2])


def test_tokens_of_browsers_do_not_fill_the_database(tokens, monkeypatch):
    monkeypatch.setattr(principals, "_MAX_DERIVED", 3)
    first = tokens.create(**ADMIN)
    ann = tokens.authenticate(f"Bearer {first}")
    derived = [tokens.derive(ann, 60.0) for _ in range(5)]
    assert len(tokens.list_tokens()) == 4
    for token in (first, *derived[-3:]):
        tokens.authenticate(f"Bearer {token}")
    later = time.time() + 61.0
    monkeypatch.setattr(principals.time, "time", lambda: later)
    tokens.derive(ann, 60.0)
    assert len(tokens.list_tokens()) == 2


def test_it_ends_with_the_token_of_another_provider(tokens, monkeypatch):
    now = time.time()
    token = tokens.derive(Principal(**ADMIN, expire_time=now + 60.0), 3600.0)
    again = tokens.derive(tokens.authenticate(f"Bearer {token}"), 3600.0)
    monkeypatch.setattr(principals.time, "time", lambda: now + 61.0)
    with pytest.raises(UnauthenticatedError):
        tokens.authenticate(f"Bearer {again}")


async def test_a_stream_ends_with_the_token(users, tokens, manager, monkeypatch):
    monkeypatch.setattr(run_api, "_STREAM_CHECK_S", 0.0)
    run, _ = await manager.create(Submission(spec=parse_spec(SPEC)))
    who = await users.authenticate(f"Bearer {tokens.create(**ADMIN)}", "")
    items, _ = await users.answer(who, operations.WatchRun(run_id=run.run_id))
    assert await anext(items)
    tokens.revoke("ann")
    await manager.cancel(run.run_id)
    async with asyncio.timeout(20):
        assert [item async for item in items] == []
