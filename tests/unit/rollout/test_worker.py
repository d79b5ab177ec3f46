"""Tests of the process of a rollout."""

import pytest

from services.rollout import worker
from services.rollout.engines.base import EngineDiedError
from services.rollout.settings import RolloutSettings


def test_an_engine_that_died_ends_the_process_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def die(settings: RolloutSettings) -> None:
        raise ExceptionGroup("", [EngineDiedError("the engine died"), ValueError("later")])

    monkeypatch.setattr(worker, "run", die)
    monkeypatch.setattr(worker, "configure", lambda **_: None)
    with pytest.raises(SystemExit) as exit_:
        worker.serve_rollout(
            RolloutSettings(worker_id="rollout-0", run_id="run", controller_address="none:1")
        )
    assert exit_.value.code == "the engine died"
