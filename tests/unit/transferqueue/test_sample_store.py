"""Tests of queries and limits of the store of sample records."""

import json
import sqlite3
from array import array
from contextlib import closing

import pytest

from services.common.errors import NotFoundError
from services.transferqueue.records.store import SampleRecord, SampleStore
from services.wire.transferqueue.types import SampleRecordQuery

NO_BOUND = {"max_bytes": 1 << 30, "max_steps": 0}


def made(number, *, member=0, reward=None, response="so be it", version=0, split="train"):
    facts = {
        "group_id": f"g{number}",
        "member": member,
        "split": split,
        "row": number,
        "oldest_version": version,
        "newest_version": version,
        "reward": float(number) if reward is None else reward,
        "finish_reason": "stop",
    }
    record = {
        "facts": facts,
        "prompt": f"prompt {number}",
        "response": response,
        "answer": None,
        "turns": [{"is_sampled": True, "text": response, "num_tokens": 2}],
        "vocabulary": {"5": "so", "6": " be"},
    }
    columns = {
        "response_ids": array("i", [5, 6]).tobytes(),
        "rollout_logprobs": array("f", [-0.5, -1.0]).tobytes(),
        "version_runs": array("i", [version, 1, version + 1, 1]).tobytes(),
    }
    return SampleRecord(sample_id=f"g{number}.{member}", record=record, columns=columns)


def trained(number, step, *, member=0):
    columns = {
        "advantages": array("f", [1.5, 1.5]).tobytes(),
        "trained_logprobs": array("f", [-0.5, -0.5]).tobytes(),
        "loss_mask": b"\x01\x00",
    }
    record = {"step": step, "staleness": 1, "advantage": 1.5}
    return SampleRecord(sample_id=f"g{number}.{member}", record=record, columns=columns)


@pytest.fixture
def store(tmp_path):
    return SampleStore(tmp_path / "folder" / "run_1.db")


def ids(store, **query):
    lines = [line for some in store.lines(SampleRecordQuery(**query)) for line in some]
    return [json.loads(line)["id"] for line in lines]


def test_a_store_without_a_file_holds_nothing(store):
    assert ids(store) == []


@pytest.mark.parametrize("is_trainer_first", [False, True])
def test_records_of_rollout_and_trainer_form_one_sample(store, is_trainer_first):
    records = [made(1), trained(1, step=7)]
    for record in reversed(records) if is_trainer_first else records:
        store.write([record], **NO_BOUND)
    query = SampleRecordQuery(step=7, with_turns=True, with_tokens=True)
    ((line,),) = store.lines(query)
    sample = json.loads(line)
    assert (sample["step"], sample["staleness"], sample["advantage"]) == (7, 1, 1.5)
    assert (sample["prompt"], sample["response"]) == ("prompt 1", "so be it")
    assert sample["tokens"] == {
        "ids": [5, 6],
        "texts": ["so", " be"],
        "logprobs": [-0.5, -1.0],
        "weight_versions": [0, 1],
        "is_trained": [True, False],
        "advantages": [1.5, 1.5],
        "trained_logprobs": [-0.5, -0.5],
        "ratios": [1.0, 1.64872],
    }


def test_queries_return_the_filtered_and_ordered_samples(store):
    records = [made(n, split="heldout" if n == 3 else "train", version=n) for n in range(5)]
    records[2].record["facts"]["reward"] = None
    store.write([*records, made(9, reward=-2.0, response="100% SURE")], **NO_BOUND)
    assert ids(store) == ["g9.0", "g4.0", "g3.0", "g2.0", "g1.0", "g0.0"]
    assert ids(store, order_by="best") == ["g4.0", "g3.0", "g1.0", "g0.0", "g9.0", "g2.0"]
    assert ids(store, order_by="worst") == ["g9.0", "g0.0", "g1.0", "g3.0", "g4.0", "g2.0"]
    assert ids(store, split="heldout") == ["g3.0"]
    assert ids(store, min_reward=1.0, max_reward=3.0) == ["g3.0", "g1.0"]
    assert ids(store, weight_version=4) == ["g4.0"]
    assert ids(store, row=9) == ids(store, group_id="g9") == ids(store, text="0% sure") == ["g9.0"]
    assert ids(store, text="_") == []


@pytest.mark.parametrize("order", ["newest", "best", "worst"])
def test_pages_hold_every_sample_once(store, order):
    records = [made(n, reward=float(n % 3) if n % 4 else None) for n in range(40)]
    for record in records[::7]:
        record.record["facts"]["reward"] = None
    store.write(records, **NO_BOUND)
    sample_ids, after = [], ""
    while page := ids(store, order_by=order, limit=7, after=after):
        sample_ids += page
        after = page[-1]
    assert sample_ids == ids(store, order_by=order)
    assert sorted(sample_ids) == sorted(record.sample_id for record in records)


def test_a_page_after_a_deleted_sample_is_rejected(store):
    store.write([made(1)], **NO_BOUND)
    with pytest.raises(NotFoundError, match=r"g7\.0"):
        ids(store, after="g7.0")


def test_the_oldest_go_when_bytes_or_steps_are_used_up(store):
    big = "x" * 20_000
    store.write([made(n, response=big) for n in range(6)], max_bytes=200_000, max_steps=0)
    assert ids(store) == ["g5.0", "g4.0", "g3.0", "g2.0"][: len(ids(store))]
    assert 1 <= len(ids(store)) < 6
    store.write([trained(5, step=10), made(6, version=4)], max_bytes=1 << 30, max_steps=3)
    assert ids(store) == ["g5.0"]


def test_the_file_never_exceeds_its_bytes_and_uses_most_of_them(store, tmp_path):
    path, max_bytes = tmp_path / "folder" / "run_1.db", 1 << 20
    for number in range(60):
        # Sizes that no estimate by the number of samples would meet.
        response = "x" * (17 if number % 3 else 50_000)
        store.write(
            [made(number, member=m, response=response) for m in range(4)]
            + [trained(number, number, member=m) for m in range(4)],
            max_bytes=max_bytes,
            max_steps=0,
        )
        assert path.stat().st_size <= max_bytes
    assert path.stat().st_size > max_bytes / 2
    sample_ids = ids(store)
    assert sample_ids[:4] == [f"g59.{m}" for m in (3, 2, 1, 0)]
    with closing(sqlite3.connect(path)) as database:
        for table in ("contents", "training"):
            count = database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            assert count == len(sample_ids)


def test_trained_records_without_a_sample_go_after_a_while(store, tmp_path):
    def num_trained():
        with closing(sqlite3.connect(tmp_path / "folder" / "run_1.db")) as database:
            return database.execute("SELECT count(*) FROM training").fetchone()[0]

    store.write([trained(number, step=number) for number in range(10)], **NO_BOUND)
    store.write([made(50, version=100)], **NO_BOUND)
    assert num_trained() == 9, "only the record of step 0 is old enough"
    store.write([made(51, version=400)], **NO_BOUND)
    assert num_trained() == 0
    # A run that was rewound trains old steps again.
    store.write([trained(3, step=3)], **NO_BOUND)
    assert num_trained() == 0


def test_a_write_takes_no_longer_if_more_samples_are_kept(store, monkeypatch):
    connect, instructions = sqlite3.connect, 0

    def count():
        nonlocal instructions
        instructions += 10

    def counted(*arguments, **options):
        database = connect(*arguments, **options)
        database.set_progress_handler(count, 10)
        return database

    def records(numbers):
        return [made(n, version=n) for n in numbers] + [trained(n, step=n) for n in numbers]

    def cost(begin, end):
        """Stores samples; returns the database's instructions of a further write of ten."""
        nonlocal instructions
        store.write(records(range(begin, end)), **NO_BOUND)
        instructions = 0
        store.write(records(range(end, end + 10)), max_bytes=1 << 30, max_steps=10_000)
        return instructions

    store.write([made(0)], **NO_BOUND)
    monkeypatch.setattr(sqlite3, "connect", counted)
    few = cost(1, 200)
    assert cost(300, 3_000) < 1.5 * few


def test_a_list_shows_the_beginnings_of_texts_and_no_tokens(store):
    store.write([made(1)], **NO_BOUND)
    ((line,),) = store.lines(SampleRecordQuery(excerpt=2))
    sample = json.loads(line)
    assert (sample["prompt"], sample["response"]) == ("pr", "so")
    assert "tokens" not in sample and "turns" not in sample
