"""The tests of checkpoints, records and copies through the client of Google Cloud Storage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gcs import environment, gcs_server, new_bucket
from tests.helpers.s3 import needs_s3
from tests.unit.extras.objects import test_checkpoints as checkpoints
from tests.unit.extras.objects import test_folders as folders
from tests.unit.extras.objects import test_records as records
from tests.unit.extras.objects.test_checkpoints import _no_pauses, opened  # noqa: F401

pytestmark = [needs_s3, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def google_port() -> Iterator[int]:
    with gcs_server() as port:
        yield port


@pytest.fixture
def bucket(google_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(google_port, tmp_path).items():
        monkeypatch.setenv(name, value)
    return new_bucket(google_port)


test_newest = checkpoints.test_the_newest_checkpoint_is_restored_on_another_machine
test_retention = checkpoints.test_retention_in_the_store_is_that_of_the_disk
test_left_history = checkpoints.test_later_steps_of_a_left_history_are_deleted
test_damage = checkpoints.test_a_damaged_checkpoint_is_not_restored
test_ranks = checkpoints.test_each_rank_uploads_its_files
test_record = records.test_a_record_is_read_whole_after_the_disk_was_lost_twice
test_record_deletion = records.test_records_are_deleted_with_the_last_checkpoint
test_folder = folders.test_objects_are_written_listed_read_in_pieces_and_deleted
test_parts = folders.test_a_file_is_uploaded_in_parts_and_downloaded
test_weights = folders.test_weights_may_be_written
