"""Measures 1,024 images of 1 MiB through the queue: ``python -m bench.dataplane.images``.

They travel as model inputs do, and are compared with the tensors of the case ``mm1m``, round by round.
Results go to ``bench/results/images.json``.
"""

import asyncio
from statistics import median

from bench.dataplane.ratios import paired_ratio
from bench.dataplane.sides import ROOT, Ours, service
from bench.dataplane.workloads import build
from bench.report import write_json

_ROUNDS = 8
"""Each moves 128 images."""
_LEAST = 0.9
"""Bar: speed relative to ``mm1m``, with room for noise."""


async def main() -> None:
    """Measures both paths, prints and writes the results."""
    images, tensors = build("images"), build("mm1m")
    rows = []
    with service() as address:
        for path, is_shared in (("shared memory", True), ("network", False)):
            async with Ours.connect(address, use_shared_memory=is_shared) as ours:
                times = [
                    (await ours.measure(images, check=n == 0), await ours.measure(tensors))
                    for n in range(_ROUNDS + 1)
                ][1:]
            for number, op in enumerate(("put", "get")):
                image_times, other_times = (
                    [pair[number] for pair in side] for side in zip(*times, strict=True)
                )
                ratio = paired_ratio(other_times, image_times)
                row = {
                    "path": path,
                    "op": op,
                    "images": _ROUNDS * images.num_rows,
                    "gbps": round(images.size_bytes / median(image_times) / 1e9, 3),
                    "over_mm1m": round(ratio.middle, 2),
                    "low": round(ratio.low, 2),
                    "high": round(ratio.high, 2),
                    "meets_bar": ratio.high >= _LEAST,
                }
                print(row, flush=True)
                rows.append(row)
    out = ROOT / "bench" / "results" / "images.json"
    write_json(out, {"rows": rows})


if __name__ == "__main__":
    asyncio.run(main())
