"""The tests that hold for every kind of store; the modules that import them have their fixtures."""

from tests.unit.extras.objects import test_checkpoints as checkpoints
from tests.unit.extras.objects import test_folders as folders
from tests.unit.extras.objects import test_records as records

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
