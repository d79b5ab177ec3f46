"""Generates identifiers."""

import os
import time


def new_run_id() -> str:
    """Returns ``run_`` and a UUIDv7 in hex: later runs sort later."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10), "big")
    value = (value & ~(0xF << 76)) | (0x7 << 76)
    value = (value & ~(0x3 << 62)) | (0x2 << 62)
    return f"run_{value:032x}"


def new_id(prefix: str) -> str:
    """Returns ``prefix`` and 16 random hexadecimal digits."""
    return f"{prefix}_{os.urandom(8).hex()}"
