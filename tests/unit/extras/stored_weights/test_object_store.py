"""Tests of weight versions in a bucket of a server of the S3 protocol."""

import pytest

from services.common.errors import FailedPreconditionError, ServiceError, UnavailableError
from services.extras.objects.connection import ObjectFolder
from services.extras.stored_weights.folders import check_directory
from tests.helpers.s3 import needs_s3
from tests.helpers.stored_members import StoredCluster
from tests.unit.extras.objects.conftest import bucket, relay, s3_port  # noqa: F401

pytestmark = [needs_s3, pytest.mark.timeout(120)]


@pytest.mark.parametrize("mode", ["shadow", "delta"])
async def test_versions_reach_the_receivers_through_a_bucket(bucket, mode):  # noqa: F811
    cluster = StoredCluster(mode=mode, url=f"{bucket}/weights/run_1")
    other = ObjectFolder(f"{bucket}/weights/run_2")
    other.write("v0-e1-1/source-0/part-00000", b"theirs")
    await cluster.form_group()
    for version in range(3):
        cluster.weights["embed"][version, 3] = version + 0.5
        await cluster.publish(version, base_version=version - 1 if mode == "delta" else -1)
        assert cluster.serves_what_was_sent()
    stored = ObjectFolder(f"{bucket}/weights/run_1").sizes()
    assert {name.split("/")[0] for name in stored} == {"v2-e1-3"}
    await cluster.senders[0].retain(1, [], timeout_s=10)
    assert ObjectFolder(f"{bucket}/weights/run_1").sizes() == {}
    assert list(other.sizes()) == ["v0-e1-1/source-0/part-00000"]


async def test_a_large_part_passes_in_pieces(bucket, monkeypatch):  # noqa: F811
    folder = ObjectFolder(f"{bucket}/weights")
    content = bytes(range(256)) * (20 << 12)
    folder.put("part", memoryview(content))
    target = bytearray(len(content))
    assert folder.read_into("part", memoryview(target)) == len(content)
    assert bytes(target) == content


@pytest.mark.parametrize("mode", ["refuse", "full"])
async def test_a_store_that_is_gone_or_full_is_reported_and_served_weights_stay(
    bucket,  # noqa: F811
    relay,  # noqa: F811
    mode,
):
    cluster = StoredCluster(url=f"{bucket}/weights/run_1")
    await cluster.form_group()
    await cluster.publish(0)
    relay.set(mode)
    with pytest.raises(ServiceError, match=r"507|error sending request|Connection"):
        await cluster.write(1)
    assert [sink.version for sink in cluster.sinks] == [0, 0]
    relay.set("forward")
    await cluster.form_group(2)
    await cluster.publish(1)
    assert cluster.serves_what_was_sent()


async def test_a_connection_that_is_cut_in_a_write_leaves_no_version(bucket, relay):  # noqa: F811
    cluster = StoredCluster(url=f"{bucket}/weights/run_1")
    await cluster.form_group()
    relay.cut_after = relay.num_bytes + 10_000
    with pytest.raises(UnavailableError):
        await cluster.write(0)
    relay.cut_after = None
    relay.set("forward")
    stored = ObjectFolder(f"{bucket}/weights/run_1").sizes()
    assert not [name for name in stored if name.endswith("manifest.json")]


def test_a_bucket_that_does_not_exist_is_named(bucket):  # noqa: F811
    with pytest.raises(ServiceError, match="absent"):
        check_directory("s3://absent/weights")


def test_a_url_with_credentials_is_refused():
    with pytest.raises(FailedPreconditionError, match="credentials"):
        check_directory("s3://key:secret@bucket/weights")
