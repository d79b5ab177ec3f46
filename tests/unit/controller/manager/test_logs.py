"""Logs of workers: the memory that a reader uses, and the position at which a reader resumes."""

import re
import tracemalloc

import pytest

from services.controller.launch.worker_process import last_lines
from services.controller.manager.logs import RunLogs

RUN = "run_01"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / RUN / "logs"
    folder.mkdir(parents=True)
    return folder


def logs_of(tmp_path, *, ended=True):
    async def is_ended(run_id):
        return ended

    return RunLogs(tmp_path, is_ended)


async def test_the_memory_of_a_tail_does_not_grow_with_the_number_of_workers(tmp_path, folder):
    for number in range(30):
        (folder / f"rollout-{number}.log").write_text("a line of a log\n" * 2_500)
    tracemalloc.start()
    try:
        num_lines = 0
        async for lines in logs_of(tmp_path).tail(RUN, "", 2_500):
            num_lines += len(lines)
        assert num_lines == 75_000
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_of_a_very_long_line_the_end_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text("a" * (1 << 20) + "end\n")
    assert last_lines(log, 2, max_bytes=100) == "a" * 96 + "end"
    assert len(last_lines(log)) <= 1 << 16


async def test_a_reader_that_leaves_between_two_lines_resumes_at_the_next_one(tmp_path, folder):
    for number in range(3):
        (folder / f"rollout-{number}.log").write_text("".join(f"{number}.{i}\n" for i in range(50)))
    expected = {f"{number}.{i}" for number in range(3) for i in range(50)}
    logs = logs_of(tmp_path)
    numbers, cursor = [], ""
    for stop_after in (7, 61, 1000):
        count = 0
        async for batch in logs.follow(RUN, "", 100, cursor):
            for id_, line in batch:
                numbers.append(line.line)
                cursor = id_ or cursor
                count += 1
                if count == stop_after:
                    break
            if count == stop_after:
                break
    assert {*numbers} == expected


async def test_all_lines_of_an_ended_run_come_before_the_end(tmp_path, folder):
    text = "".join(f"{i} {'x' * 90}\n" for i in range(40_000))
    (folder / "trainer-0.log").write_text(text)
    cursor = "trainer-0:0"
    numbers = [
        int(re.match(r"\d+", line.line)[0])
        async for batch in logs_of(tmp_path).follow(RUN, "", 0, cursor)
        for _, line in batch
    ]
    assert numbers == [*range(40_000)]
