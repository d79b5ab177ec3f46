import httpx
from fastapi import FastAPI, HTTPException
from prometheus_client import REGISTRY

from services.controller.api.app import Measured

_APP = FastAPI()


@_APP.get("/v1/things/{name}")
def thing(name: str) -> str:
    if name == "absent":
        raise HTTPException(503)
    if name == "faulty":
        raise RuntimeError(name)
    return name


def recorded() -> dict[tuple[str, str, str], float]:
    """Returns the number of recorded responses by route, method and status code."""
    return {
        (sample.labels["route"], sample.labels["method"], sample.labels["code"]): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "slipstream_http_request_duration_seconds_count"
        and "things" in sample.labels["route"]
    }


async def test_answers_are_recorded_by_route_and_code_and_made_up_requests_are_not():
    transport = httpx.ASGITransport(app=Measured(_APP), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("a", "b", "absent", "faulty"):
            await client.get(f"/v1/things/{path}")
        for number in range(3):
            await client.get(f"/v1/made/up/{number}")
            await client.request(f"MADE{number}", "/v1/things/a")
    route = "/v1/things/{name}"
    assert recorded() == {
        (route, "GET", "200"): 2,
        (route, "GET", "503"): 1,
        (route, "GET", "500"): 1,
    }
