"""Tests of the shutdown of a rollout."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from services.rollout import worker as program


class Session:
    """Fake worker session that receives no commands."""

    spec = SimpleNamespace(
        has_engine=True,
        limits=SimpleNamespace(stall_timeout_s=1.0),
        rollout=SimpleNamespace(partial_rollout=True),
        sends_adapters=False,
        trainer=SimpleNamespace(lora=None),
    )

    def report(self, **changes):
        """Does nothing."""


class Engine:
    async def run(self):
        """Returns at once."""

    async def wait_ready(self):
        """Returns at once."""


async def test_a_rollout_stops_serving_before_its_engine_closes(monkeypatch):
    """A call between both found a closed engine and failed the run of its caller."""
    ended = []

    @asynccontextmanager
    async def until(name, value):
        yield value
        ended.append(name)

    class Loader:
        def __init__(self, stack, *arguments):
            self.stack, self.spec = stack, Session.spec

        async def load(self):
            sampler = await self.stack.enter_async_context(until("sampler", object()))
            return Engine(), sampler, SimpleNamespace(oldest_pending_s=0.0)

    async def nothing(*arguments, **keywords):
        """Returns at once."""

    monkeypatch.setattr(program, "serve", lambda bind, register: until("server", 1))
    monkeypatch.setattr(program, "WorkerSession", lambda *a, **k: until("session", Session()))
    monkeypatch.setattr(program, "RolloutLoader", Loader)
    monkeypatch.setattr(program, "monitor", nothing)
    monkeypatch.setattr(program, "freeze_startup_objects", lambda: None)
    monkeypatch.setattr(program, "_serve_until_stopped", nothing)
    await program.run(
        SimpleNamespace(
            device="cpu", bind="", advertise_host="here", ready_file=None, drain_timeout_s=1.0
        )
    )
    assert ended == ["server", "sampler", "session"]
