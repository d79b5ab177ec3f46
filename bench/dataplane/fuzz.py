"""Feeds the header decoder a million damaged and random inputs: ``python -m bench.dataplane.fuzz``."""

import json
import random
import resource
import sys
import time

import msgpack

from services.wire.data.encoding import codec

_SEEDS = (
    codec.Reserve("put_0", "run/train", (64, 128, 1 << 20), 30.0),
    codec.Write(1 << 40, 1 << 20),
    codec.Describe("put_0", bytes(range(256))),
    codec.Commit("put_0", (1 << 63, 7)),
    codec.Store("put_0", "run/train", (64, 64), 1.0, b"meta" * 20, (1, 2)),
    codec.Read((1, 0, 64) * 20, in_arena=True),
    codec.Granted((1, 2, 3), (0, 64, 128)),
    codec.Located(5, (0, 64)),
    codec.Failed("NOT_FOUND", "gone", ("key", "a")),
)


def one_input(rng: random.Random) -> bytes:
    """Returns a random input: noise, a damaged message, or well-formed msgpack with the wrong shape."""
    kind = rng.random()
    if kind < 0.2:
        return bytes([codec.VERSION]) + rng.randbytes(rng.randrange(64))
    if kind < 0.8:
        data = bytearray(codec.encode(rng.choice(_SEEDS), rng.randrange(1 << 40)))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.3 else data)
    fields: list[object] = [
        rng.choice((None, -1, 1 << 63, 0.5, "x", b"y", [1], [[]], True)) for _ in range(5)
    ]
    packed: bytes = msgpack.packb([rng.randrange(16), 1, *fields])
    return bytes([codec.VERSION]) + packed


def fuzz(count: int) -> dict[str, float]:
    """Decodes damaged inputs; raises unless each gives a message or a ValueError."""
    rng = random.Random(0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest_s = 0.0
    refused = 0
    for _ in range(count):
        data = one_input(rng)
        started = time.thread_time()
        try:
            codec.decode(data)
        except ValueError:
            refused += 1
        slowest_s = max(slowest_s, time.thread_time() - started)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "inputs": count,
        "refused": refused,
        "slowest_ms": round(1e3 * slowest_s, 3),
        "grown_kib": grown_kib,
    }


if __name__ == "__main__":
    print(json.dumps(fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)))
