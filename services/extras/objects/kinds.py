"""Entries of the door ``slipstream.stores``; imports no package of a store."""

from typing import Final

from services.common.stores import StoreKind

_HERE: Final = "services.extras.objects"

CLOUD: Final = StoreKind(
    fetch=f"{_HERE}.cache:fetch",
    checkpoints=f"{_HERE}.checkpoints:open_checkpoints",
    upload=f"{_HERE}.exports:upload",
    folder=f"{_HERE}.connection:ObjectFolder",
    samples=f"{_HERE}.sample_records:ObjectSamples",
    sample_reports=f"{_HERE}.reports:SampleReports",
    extra="slipstream[objects]",
)
"""S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""
