"""The run page in a real browser, over an API that tells of one run as a controller would."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from services.common.http_server import serve_http
from services.controller.api.run_page import with_run_page

RUN_ID = "run_01"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def step_event(step: int) -> dict[str, Any]:
    data = {
        "step": step,
        "reward_mean": step / 20,
        "reward_std": 0.3,
        "staleness_mean": 0.9,
        "staleness_max": 1,
        "seconds": 2.0,
        "trainer_wait_s": 1.5,
        "loss": 0.01,
    }
    return {
        "seq": step,
        "time": "2026-01-01T00:00:00Z",
        "type": "StepCommitted",
        "message": "",
        "data": data,
    }


def log_line(component: str, line: str) -> dict[str, str]:
    return {"component": component, "line": line}


class FakeController:
    """Ten steps are over; more come when the test says so."""

    def __init__(self) -> None:
        self.state = "RUNNING"
        self.message = ""
        self.steps = 10
        self.more = asyncio.Event()
        self.token = ""

    def run(self) -> dict[str, Any]:
        return {
            "id": RUN_ID,
            "name": "sort4",
            "state": self.state,
            "message": self.message,
            "step": self.steps,
            "weight_version": self.steps,
            "activities": ["TRAINING"],
            "summary": {
                "prompts": {"issued": 40, "consumed": 30, "dropped": 10, "reasons": {"stale": 10}}
            },
            "spec": {"trainer": {"steps": 20}},
            "conditions": [
                {
                    "type": "Placed",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes have a GPU",
                    "last_transition_time": "2026-01-01T00:00:00Z",
                }
            ],
        }

    async def events(self, after_seq: int) -> AsyncIterator[dict[str, Any]]:
        lost = {"type": "WorkerLost", "message": "<b>rollout-1</b> ended", "data": {}}
        yield {"seq": 0, "time": "2026-01-01T00:00:00Z", **lost}
        for step in range(after_seq + 1, self.steps + 1):
            yield step_event(step)
        await self.more.wait()
        yield step_event(self.steps)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def ask_for_token(request: Request, call_next: Any) -> Any:
            wanted = f"Bearer {self.token}" if self.token else None
            if request.url.path.startswith("/v1") and wanted not in (
                None,
                request.headers.get("authorization"),
            ):
                return JSONResponse({"detail": "an API token is needed"}, status_code=401)
            return await call_next(request)

        @app.get("/v1/runs")
        def list_runs() -> dict[str, Any]:
            return {"items": [self.run()], "next_page_token": ""}

        @app.get("/v1/runs/{run_id}")
        def get_run(run_id: str) -> dict[str, Any]:
            return self.run()

        @app.get("/v1/runs/{run_id}/topology")
        def topology(run_id: str) -> dict[str, Any]:
            worker = {"worker_id": "rollout-0", "role": "rollout", "state": "ready"}
            return {"items": [{**worker, "activity": "", "weight_version": 9, "gauges": {}}]}

        @app.get("/v1/runs/{run_id}/events/stream", response_class=EventSourceResponse)
        async def stream(run_id: str, after_seq: int = 0) -> AsyncIterator[ServerSentEvent]:
            async for event in self.events(after_seq):
                yield ServerSentEvent(data=event, event=event["type"], id=str(event["seq"]))

        @app.get("/v1/runs/{run_id}/logs/stream", response_class=EventSourceResponse)
        async def logs(run_id: str, component: str = "") -> AsyncIterator[ServerSentEvent]:
            if component:
                yield ServerSentEvent(data=log_line(component, "alone"), event="line")
                await asyncio.Event().wait()
            yield ServerSentEvent(data=log_line("trainer-0", "step 10 <i>done</i>"), event="line")
            await self.more.wait()
            yield ServerSentEvent(data=log_line("rollout-0", "weights synced"), event="line")
            yield ServerSentEvent(data={}, event="end")

        return with_run_page(app)


@pytest.fixture
def chromium() -> str:
    """The browser; Debian's package, and any other build on the path, will do."""
    if CHROMIUM is None:
        if os.getenv("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    return CHROMIUM


@contextmanager
def _no_requests_elsewhere(page: Any, base: str) -> Iterator[None]:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    yield
    assert urls
    assert all(url.startswith(base) for url in urls)


@pytest.mark.timeout(120)
async def test_page_shows_a_run_live_and_asks_nobody_else(chromium: str) -> None:
    playwright = pytest.importorskip("playwright.async_api")
    controller = FakeController()
    async with (
        serve_http("127.0.0.1:0", controller.app()) as port,
        playwright.async_playwright() as p,
    ):
        base = f"http://127.0.0.1:{port}/"
        browser = await p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        with _no_requests_elsewhere(page, base):
            await page.goto(base)
            expect = playwright.expect
            await expect(page.locator("#name")).to_have_text("sort4")
            await expect(page.locator("#state")).to_have_text("RUNNING")
            await expect(page.locator("#progress")).to_have_text(
                "step 10 of 20 · weight version 10 · about 20 s left · training"
            )
            await expect(page.locator("#prompts")).to_have_text(
                "40 prompts issued: 30 consumed, 10 dropped (10 stale)"
            )
            reward = page.locator("figure", has_text="Reward")
            await expect(reward.locator("polyline")).to_have_count(2)
            await expect(reward.locator(".legend")).to_contain_text("mean 0.5")
            await expect(page.locator("#verdict")).to_contain_text("Rollouts are the bottleneck")
            await expect(page.locator("#workers")).to_contain_text("rollout-0")
            await expect(page.locator("#conditions")).to_contain_text(
                "Unschedulable: 0/3 nodes have a GPU"
            )
            await expect(page.locator("#events")).to_contain_text("<b>rollout-1</b> ended")
            await expect(page.locator("#logs")).to_have_text("trainer-0  step 10 <i>done</i>")

            controller.steps = 11
            controller.more.set()
            await expect(reward.locator(".legend")).to_contain_text("mean 0.55")
            await expect(page.locator("#logs")).to_contain_text("rollout-0  weights synced")
            await page.select_option("#component", "trainer-0")
            await expect(page.locator("#logs")).to_have_text("alone")
            controller.state, controller.message = "FAILED", "trainer-0 ended"
            await expect(page.locator("#message")).to_have_text("trainer-0 ended")
        assert errors == []
        await browser.close()


@pytest.mark.timeout(120)
async def test_page_asks_for_a_token_where_the_api_does(chromium: str) -> None:
    playwright = pytest.importorskip("playwright.async_api")
    controller = FakeController()
    controller.token = "slp_secret"
    async with (
        serve_http("127.0.0.1:0", controller.app()) as port,
        playwright.async_playwright() as p,
    ):
        browser = await p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{port}/")
        await playwright.expect(page.locator("#sign-in")).to_be_visible()
        await page.fill("#token", "slp_secret")
        await page.click("#sign-in button")
        await playwright.expect(page.locator("#name")).to_have_text("sort4")
        await playwright.expect(page.locator("#sign-in")).to_be_hidden()
        await browser.close()
