"""Metadata of puts whose samples have one byte of one field each."""

from collections.abc import Sequence

from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta


def put_of(
    partition_id: str, keys: Sequence[str], field: str, *, shard_id: str = "s", blob_id: int = 1
) -> KVBatchMeta:
    """Returns the metadata of a put of samples, all in one blob."""
    count = len(keys)
    column = FieldColumn(
        name=field,
        dtype="uint8",
        row_rank=1,
        tail_shape=(),
        lengths=(1,) * count,
        blob_indexes=(0,) * count,
        offsets=tuple(range(count)),
    )
    blob = BlobRef(shard_id=shard_id, blob_id=blob_id, size_bytes=count, checksum=0)
    return KVBatchMeta(partition_id=partition_id, keys=tuple(keys), fields=(column,), blobs=(blob,))
