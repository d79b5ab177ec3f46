"""Rewards in worker processes: typed failures, deadlines, and replacement of processes."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from services.common.runspec.rollout import RewardSpec
from services.rollout.calls.pool import CallPool
from services.rollout.failures import CallError
from services.rollout.rewards.base import RewardInput, Score
from services.rollout.rewards.scorer import Scorer

USER_CODE = """
import asyncio, os, time
def good(prompt, response, answer, row, bonus=0):
    print("noise on standard output")
    return len(response) + bonus
async def later(prompt, response, answer, row):
    await asyncio.sleep(0)
    return 0.5
def sleeps(*args): time.sleep(100)
def raises(*args): raise KeyError("oops")
def dies(*args): os.abort()
def gives_up(*args): raise TimeoutError("too hard")
def nan(*args): return float("nan")
def text(*args): return "great"
def nothing(*args): return None
def empty(*args): return {}
def big(*args): return 7
def long(*args): raise ValueError("y" * 100_000)
def huge(*args): return "y" * 100_000
def asks(*args): return len(input())
def leaves(*args): raise SystemExit(3)
def forks(number):
    child = os.fork()
    if child == 0:
        return -1.0
    os.waitpid(child, 0)
    return number
def lives_on(path):
    if os.fork() == 0:
        while not os.path.exists(path): time.sleep(0.01)
    return os.getpid()
class Mute(Exception):
    def __str__(self): raise RuntimeError
def mute(*args): raise Mute
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "rewards.py"
    file.write_text(USER_CODE)
    return str(file)


def given(response: str = "abc", **changes: Any) -> RewardInput:
    values: dict[str, Any] = {"prompt": "p", "answer": "abc", "row": {}} | changes
    return RewardInput(response=response, **values)


async def test_user_functions_sync_and_async_are_summed_by_weight(code: str) -> None:
    specs = [
        RewardSpec(name=f"{code}:good", weight=2.0, arguments={"bonus": 1}),
        RewardSpec(name=f"{code}:later", weight=-1.0),
        RewardSpec(name="exact_match"),
    ]
    async with CallPool(2) as pool:
        assert await Scorer(specs, pool).score(given()) == Score(
            2 * 4 - 0.5 + 1, {"good": 4.0, "later": 0.5, "exact_match": 1.0}
        )


async def test_arrays_are_numbers_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "arrays.py"
    file.write_text(
        "import numpy as np, torch\n"
        "def one(*args): return torch.tensor([0.5])\n"
        "def several(*args): return np.array([0.5, 2], np.float32)\n"
    )
    async with CallPool(1) as pool:
        assert (await Scorer([RewardSpec(name=f"{file}:one")], pool).score(given())).value == 0.5
        assert await pool.call(f"{file}:several", timeout_s=60) == [0.5, 2.0]


async def test_calls_of_a_process_share_an_event_loop(tmp_path: Path) -> None:
    file = tmp_path / "client.py"
    file.write_text(
        "import asyncio\n"
        "loops = []\n"  # like a client's open connections, which belong to one event loop
        "async def same(*args):\n"
        "    loops.append(asyncio.get_running_loop())\n"
        "    return loops[0] is loops[-1] and not loops[0].is_closed()\n"
    )
    async with CallPool(1) as pool:
        assert [await pool.call(f"{file}:same", timeout_s=10) for _ in range(2)] == [True, True]


async def test_arguments_that_contain_themselves_fail_their_own_call(code: str) -> None:
    row: dict[str, object] = {}
    row["row"] = row
    async with CallPool(1) as pool:
        with pytest.raises(CallError) as failed:
            await pool.call(f"{code}:good", ("p", "r", "a", row), timeout_s=10)
        assert failed.value.kind == "invalid_value"
        assert await pool.call(f"{code}:good", ("p", "r", "a", {}), timeout_s=10) == 1


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "exception", "KeyError: 'oops'"),
        ("gives_up", "timeout", "too hard"),
        ("asks", "exception", "EOFError"),
        ("leaves", "exception", "SystemExit: 3"),
        ("mute", "exception", "Mute"),
        ("dies", "sandbox_killed", "exit status -6"),
        ("nan", "invalid_value", "nan"),
        ("text", "invalid_value", "great"),
        ("nothing", "invalid_value", "None"),
        ("empty", "invalid_value", "empty"),
        ("big", "invalid_value", "big"),
        ("sleeps", "timeout", "longer than 0.2 s"),
    ],
)
async def test_failures_are_typed_and_the_pool_continues(
    code: str, name: str, kind: str, message: str
) -> None:
    bad = RewardSpec(name=f"{code}:{name}", timeout_s=0.2, bounds=(0.0, 1.0))
    async with CallPool(1) as pool:
        with pytest.raises(CallError, match=message) as caught:
            await Scorer([bad], pool).score(given())
        assert caught.value.kind == kind
        assert await pool.call(f"{code}:good", ("p", "r", "a", {}), timeout_s=60) == 1


async def test_an_answer_that_is_too_long_to_read_is_a_failure_by_name(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.calls.pool._LINE_BYTES", 1 << 14)
    async with CallPool(1) as pool:
        with pytest.raises(CallError, match="ValueError: yyy"):
            await pool.call(f"{code}:long", timeout_s=30)
        with pytest.raises(CallError, match="16384") as caught:
            await pool.call(f"{code}:huge", timeout_s=30)
    assert caught.value.kind == "invalid_value"


async def test_a_reward_that_hangs_delays_the_others_by_at_most_its_deadline(code: str) -> None:
    async with CallPool(1) as pool:
        await pool.check(f"{code}:sleeps")
        started_at = time.monotonic()
        hanging = asyncio.ensure_future(
            Scorer([RewardSpec(name=f"{code}:sleeps", timeout_s=0.3)], pool).score(given())
        )
        await asyncio.sleep(0)
        assert await pool.call(f"{code}:good", ("p", "r", "a", {}), timeout_s=60) == 1
        assert time.monotonic() - started_at < 30
        with pytest.raises(CallError):
            await hanging


async def test_a_wrong_name_is_found_before_the_run_and_names_its_key(code: str) -> None:
    async with CallPool(1) as pool:
        specs = [RewardSpec(name="exact_match"), RewardSpec(name=f"{code}:missing")]
        with pytest.raises(ValueError, match=r"rollout\.rewards\.1\.name: .* has no 'missing'"):
            await Scorer(specs, pool).check()


async def test_workers_are_reused_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "pid.py").write_text("import os\ndef pid(*args): return os.getpid()\n")
    spec = RewardSpec(name=f"{tmp_path}/pid.py:pid")
    async with CallPool(2) as pool:
        scorer = Scorer([spec], pool)
        pids = await asyncio.gather(*[scorer.score(given()) for _ in range(20)])
    assert 1 <= len({pid.value for pid in pids}) <= 2


async def test_files_of_the_working_directory_do_not_replace_the_standard_library(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the user's own')\n")
    monkeypatch.chdir(tmp_path)
    async with CallPool(1) as pool:
        assert await pool.call(f"{code}:big", timeout_s=30) == 7


async def test_the_answer_of_a_process_that_user_code_forks_is_none_of_the_worker(
    code: str, tmp_path: Path
) -> None:
    async with CallPool(1) as pool:
        for number in range(5):
            assert await pool.call(f"{code}:forks", [number], timeout_s=30) == number
        go = tmp_path / "go"
        worker = await pool.call(f"{code}:lives_on", [str(go)], timeout_s=30)
        go.touch()
        for number in range(5):
            assert await pool.call(f"{code}:forks", [number], timeout_s=30) == number
        assert await pool.call("os:getpid", timeout_s=30) == worker
