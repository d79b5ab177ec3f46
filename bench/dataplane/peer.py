"""The peer's side: TransferQueue on Ray, and Ray's object store, in the peer's own environment.

It reads one JSON request per line from standard input and writes one JSON line per answer to the
given descriptor.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from bench.dataplane.workloads import Workload, build


def _to_tensordict(workload: Workload) -> TensorDict:
    columns = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        if isinstance(values, list)
        else values
        for name, values in workload.fields.items()
    }
    return TensorDict(columns, batch_size=workload.num_rows)


def _check(workload: Workload, fetched: TensorDict) -> None:
    for name, values in workload.fields.items():
        rows = fetched[name].unbind()
        assert len(rows) == len(values)
        assert all(torch.equal(a, b) for a, b in zip(rows, values, strict=True)), name


def _measure(workload: Workload, batch: TensorDict, *, check: bool) -> tuple[float, float]:
    put_s = get_s = 0.0
    for _ in range(workload.repeats):
        keys = [f"k.{n}" for n in range(workload.num_rows)]
        started = time.perf_counter()
        meta = transfer_queue.kv_batch_put(keys=keys, partition_id="bench", fields=batch)
        put_s += time.perf_counter() - started
        started = time.perf_counter()
        fetched = transfer_queue.kv_batch_get_by_meta(meta)
        get_s += time.perf_counter() - started
        if check:
            _check(workload, fetched)
        transfer_queue.kv_clear(keys=keys, partition_id="bench")
    return put_s / workload.repeats, get_s / workload.repeats


def _measure_together(workload: Workload, batch: TensorDict, clients: int) -> float:
    """Returns the seconds until several threads have each put and got the batch under separate keys."""

    def work(owner: int) -> None:
        keys = [f"{owner}.{n}" for n in range(workload.num_rows)]
        meta = transfer_queue.kv_batch_put(keys=keys, partition_id="bench", fields=batch)
        transfer_queue.kv_batch_get_by_meta(meta)

    with ThreadPoolExecutor(clients) as threads:
        started = time.perf_counter()
        list(threads.map(work, range(clients)))
        seconds = time.perf_counter() - started
    keys = [f"{owner}.{n}" for owner in range(clients) for n in range(workload.num_rows)]
    transfer_queue.kv_clear(keys=keys, partition_id="bench")
    return seconds


def _measure_ray(size_bytes: int) -> tuple[float, float]:
    data = torch.zeros(size_bytes, dtype=torch.uint8).numpy()
    started = time.perf_counter()
    reference = ray.put(data)
    put_s = time.perf_counter() - started
    started = time.perf_counter()
    ray.get(reference).copy()
    return put_s, time.perf_counter() - started


def main() -> None:
    """Serves requests until standard input ends."""
    units, answers = int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")
    torch.set_num_threads(1)
    ray.init(num_cpus=8, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    transfer_queue.init(
        OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}})
    )
    batches: dict[str, tuple[Workload, TensorDict]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "ray_bytes" in request:
            times = _measure_ray(request["ray_bytes"])
        else:
            name = request["case"]
            is_first = name not in batches
            if is_first:
                workload = build(name)
                batches[name] = (workload, _to_tensordict(workload))
            if "clients" in request:
                seconds = _measure_together(*batches[name], request["clients"])
                times = (seconds, seconds)
            else:
                times = _measure(*batches[name], check=is_first)
        answers.write(json.dumps(times) + "\n")
        answers.flush()
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
