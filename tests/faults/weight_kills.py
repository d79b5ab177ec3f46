"""Measures how soon rollouts serve a new version after another one was killed or stopped at random.

``python -m tests.faults.weight_kills [--kills 20] [--megabytes 64] [--gpu]``

One trainer and three rollouts are processes with a weight member each; the controller's session runs in this
process. Rollouts are lost one after the other. Each lost rollout is replaced and receives the served version;
the trainer is never restarted. Results are added to ``bench/results/weightsync.json``.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.helpers.weight_session import open_session, session_of

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "weightsync.json"
ROLLOUTS = ("rollout-0", "rollout-1", "rollout-2")
MOMENTS = ("before", "during", "after")


@dataclass(frozen=True)
class Kill:
    """Loss of one rollout."""

    moment: str
    """Moment relative to the transfer of the next version."""
    signal: str
    """``SIGKILL`` or ``SIGSTOP``."""
    seconds: float
    """Seconds from the signal until the others serve the next version."""
    was_lost: bool
    """True if the session noticed the loss; a rollout lost after a transfer may already have adopted it."""


async def kill_in_a_row(
    count: int, *, seed: int, num_bytes: int, use_gpu: bool = False
) -> list[Kill]:
    """Kills rollouts one after the other; fails unless the others then serve the same version bit by bit."""
    chooser = random.Random(seed)
    names = ("trainer", *ROLLOUTS)
    async with session_of(*names, num_bytes=num_bytes, use_gpu=use_gpu) as parts:
        session, members, started = parts
        await session.publish(partial(int, 0))
        begin = time.monotonic()
        await session.publish(partial(int, 1))
        usual_s = time.monotonic() - begin
        trainer, version, kills = members["trainer"].process.pid, 1, []
        for _ in range(count):
            victim = chooser.choice(ROLLOUTS)
            moment = chooser.choice(MOMENTS)
            kill_signal = chooser.choice((signal.SIGKILL, signal.SIGSTOP))
            delay_s = {"before": 0.0, "during": chooser.random() * usual_s, "after": 0.0}[moment]
            spare = started.start(victim, names.index(victim))
            version += 1
            if moment == "after":
                await session.publish(partial(int, version))
                version += 1
            if moment == "during":
                publishing = asyncio.ensure_future(session.publish(partial(int, version)))
                await asyncio.sleep(delay_s)
            members[victim].send_signal(kill_signal)
            begin = time.monotonic()
            report = await (
                publishing if moment == "during" else session.publish(partial(int, version))
            )
            seconds = time.monotonic() - begin
            assert set(report.lost) <= {victim}, (
                f"{report.lost} were lost, but only {victim} was ended"
            )
            survivors = [members[name] for name in ROLLOUTS if name != victim]
            digests = {await member.serves_version(version) for member in survivors}
            assert len(digests) == 1, f"rollouts serve different weights: {digests}"
            kills.append(Kill(moment, kill_signal.name, seconds, victim in report.lost))
            print(f"  {len(kills):3} {moment:7} {kill_signal.name} {seconds:6.2f} s", flush=True)
            members[victim].end()
            members[victim] = spare
            await members[victim].started()
            # A new session with all current members, as the run's loop opens it.
            await session.close()
            session = await open_session(members, attempt=1 + len(kills))
            await session.publish(partial(int, version))
            assert await members[victim].serves_version(version) in digests
        assert members["trainer"].process.pid == trainer
        assert members["trainer"].process.is_alive()
        return kills


def summary(kills: Sequence[Kill]) -> dict[str, float]:
    """Returns statistics of a series of kills."""
    seconds = [kill.seconds for kill in kills]
    return {
        "kills": len(kills),
        "p50_s": statistics.median(seconds),
        "max_s": max(seconds),
        "within_5_s": sum(s <= 5 for s in seconds),
    } | {
        f"max_s_{name}": max(k.seconds for k in kills if k.signal == name)
        for name in {kill.signal for kill in kills}
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="over NCCL; needs four GPUs")
    options = parser.parse_args()
    kills = asyncio.run(
        kill_in_a_row(
            options.kills,
            seed=options.seed,
            num_bytes=options.megabytes << 20,
            use_gpu=options.gpu,
        )
    )
    row = summary(kills)
    print(row)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    backend = "nccl" if options.gpu else "gloo"
    results[f"recovery {backend} 1+3, {options.megabytes} MB"] = row
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
