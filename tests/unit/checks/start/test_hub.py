"""How often checks ask the hub of Hugging Face whether it answers."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from services.checks.start import hub


class _Hub(BaseHTTPRequestHandler):
    """Answers as the hub does to a request without a page, and counts the requests."""

    paths: list[str]

    def do_HEAD(self) -> None:
        """Answers 404, which is an answer, too."""
        self.paths.append(self.path)
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Starts a hub and returns the paths of the requests to it."""
    handler = type("Handler", (_Hub,), {"paths": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "_REACH_TIMEOUT_S", 60.0)
        monkeypatch.setattr(hub, "_answered_at", {})
        yield handler.paths
        server.shutdown()
        thread.join()


def test_a_hub_that_has_answered_is_not_asked_again(paths: list[str]) -> None:
    assert all(hub.go_offline_unless_reachable() for _ in range(3))
    assert len(paths) == 1


def test_an_old_answer_does_not_count(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_FRESH_S", 0.0)
    assert all(hub.go_offline_unless_reachable() for _ in range(2))
    assert len(paths) == 2


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_REACH_TIMEOUT_S", 0.01)
    monkeypatch.setattr(hub, "_answered_at", {})
    monkeypatch.setattr(hub, "_probe", lambda url, _: probes.append(url))
    assert not any(hub.go_offline_unless_reachable() for _ in range(3))
    assert constants.HF_HUB_OFFLINE
    assert len(probes) <= 1, "a thread that has not started yet has not asked"
