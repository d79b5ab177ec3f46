"""Measures the loading time of each view of the run page: Chromium, a real controller, several long runs.

Writes ``bench/results/page.json``. A view is complete when the visible charts, or the rows of its
table, are drawn; its time begins with the click. Each view is opened several times, with only the
scripts cached.
"""

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright

from bench.controller.stage import TOKEN, stage
from bench.report import report_to
from services.common.runspec.loader import canonical_json, parse_spec, spec_digest
from services.controller.rules.run_state import RunEvent
from services.controller.settings import DATABASE_FILE
from services.controller.store.database import Database
from services.controller.store.records import NewRun
from services.controller.store.runs import RunStore
from services.controller.store.tables import EVENTS, STEPS

RESULTS = Path(__file__).parents[1] / "results" / "page.json"
BAR_MS = 200.0
RUNS = [f"run_{number:032x}" for number in range(1, 4)]
FURTHER = 45
"""Number of a step's metrics that no chart shows."""

# All visible content is drawn: each chart has its canvas and shows the newest step's value.
CHARTS = """() => {
  const isSeen = (f) => f.checkVisibility() && f.getBoundingClientRect().top < innerHeight;
  const seen = [...document.querySelectorAll('figure')].filter(isSeen);
  const says = (f) => /[0-9]/.test(f.querySelector('.legend').textContent);
  return seen.length > 3 && seen.every((f) => f.querySelector('canvas') && says(f));
}"""
ROWS = "() => document.querySelectorAll('#panel tbody tr, #panel #events li').length > 3"
VIEWS = {
    "one run": ("", CHARTS),
    "three runs": (f"?with={RUNS[1]},{RUNS[2]}", CHARTS),
    "time line": ("/timeline", ROWS),
    "events": ("/events", ROWS),
    "configuration": ("/configuration", ROWS),
}


def fill(folder: Path, steps: int) -> None:
    """Writes ended runs into the database of a controller before its start."""
    database = Database(f"sqlite:///{folder / DATABASE_FILE}")
    store = RunStore(database)
    for number, run_id in enumerate(RUNS):
        spec = parse_spec(
            {
                "name": f"long-{number}",
                "model": {"path": "tiny:qwen2-0.4m"},
                "data": {"train": {"source": "jsonl", "path": "prompts.jsonl"}},
                "rollout": {"rewards": [{"name": "exact_match"}]},
                "trainer": {"steps": steps, "prompts_per_step": 32},
            }
        )
        document, digest = canonical_json(spec), spec_digest(spec)
        store.create(NewRun(run_id=run_id, name=spec.name, spec_json=document, spec_digest=digest))
        for event in (RunEvent.ADMIT, RunEvent.READY, RunEvent.FINISH):
            store.apply(run_id, event, reason="Bench")
        first, begin = store.newest_seq(run_id) + 1, time.time() - steps
        rows = [_step(number, step) for step in range(1, steps + 1)]
        with database.write_unfenced() as connection:
            connection.execute(
                STEPS.insert(),
                [
                    {
                        "run_id": run_id,
                        "step": row["step"],
                        "is_committed": True,
                        "groups_json": "[]",
                    }
                    | {"weight_version": row["step"] - 1, "metrics_json": json.dumps(row)}
                    | {"time": begin + row["step"]}
                    for row in rows
                ],
            )
            events = [event for row in rows for event in _events(row)]
            connection.execute(
                EVENTS.insert(),
                [
                    {
                        "run_id": run_id,
                        "seq": first + index,
                        "time": begin + data.get("step", data.get("version", 0)),
                    }
                    | {"type": kind, "message": kind, "data_json": json.dumps(data), "actor": ""}
                    for index, (kind, data) in enumerate(events)
                ],
            )
    database.close()


NAMES = [
    *("reward_mean", "reward_std", "loss", "entropy", "grad_norm", "response_length_mean"),
    *("staleness_mean", "staleness_max", "kl_rollout", "clip_fraction", "trainer_wait_s"),
    *("rollout_idle_s", "sync_ms", "prepare_ms", "transfer_ms", "adopt_ms", "ready_groups"),
    *("running_groups", "generated_tokens_per_s", "idle_seconds_no_data"),
]


def _step(number: int, step: int) -> dict[str, Any]:
    noise = random.Random(step * 7 + number)
    numbers = {name: math.log1p(step) + noise.random() for name in NAMES}
    further = {f"further_{index}": noise.random() for index in range(FURTHER)}
    spread = {
        "staleness": {"0": 20, "1": 236},
        "response_tokens": {str(1 << k): 32 for k in range(4, 12)},
    }
    return {"step": step, **numbers, **further, "seconds": 1.0, "histograms": spread}


def _events(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    step = row["step"]
    idle = {"idle_s": {f"rollout-{index}": 0.2 for index in range(8)}}
    events = [
        ("StepCommitted", {**row, "rollouts": idle}),
        (
            "WeightsPublished",
            {name: row[name] for name in row if name.endswith("_ms")} | {"version": step},
        ),
    ]
    if step % 50 == 0:
        scores = {"greedy": 0.5, "sampled": 0.4, "num_samples": 64, "seconds": 3.0}
        events.append(("Validated", {"version": step, **scores}))
        events.append(("CheckpointSaved", {"step": step}))
    return events


async def measure(page: Page, address: str, condition: str) -> float:
    """Returns the milliseconds from the navigation to an address until the page is complete."""
    took: float = await page.evaluate(
        f"""async (address) => {{
          const isThere = {condition};
          const begin = performance.now();
          history.pushState(null, '', address);
          dispatchEvent(new PopStateEvent('popstate'));
          await new Promise((resolve) => {{
            const look = () => (isThere() ? resolve() : requestAnimationFrame(look));
            requestAnimationFrame(look);
          }});
          return performance.now() - begin;
        }}""",
        address,
    )
    return took


async def _busy_s(session: Any) -> float:
    """Returns the CPU time of the page's thread so far."""
    response = await session.send("Performance.getMetrics")
    (busy,) = (
        metric["value"] for metric in response["metrics"] if metric["name"] == "TaskDuration"
    )
    return float(busy)


async def main(steps: int, times: int) -> dict[str, Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    figures: dict[str, Any] = {}
    async with stage(prepare=lambda folder: fill(folder, steps)) as on, async_playwright() as p:
        browser = await p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": 1400, "height": 900})
        await context.add_init_script(f"sessionStorage.setItem('slipstream-token', '{TOKEN}')")
        page = await context.new_page()
        session = await context.new_cdp_session(page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})
        for name, (query, condition) in VIEWS.items():
            took, scripts_ms, controller_ms = [], [], []
            for _ in range(times):
                # Another run's view without charts, so that nothing of the measured view is loaded
                # yet.
                await page.goto(f"{on.url}/runs/{RUNS[1]}/checkpoints")
                await page.wait_for_selector("#panel p")
                await page.wait_for_timeout(300)
                cpu_s, page_s = on.cpu_s(), await _busy_s(session)
                took.append(await measure(page, f"/runs/{RUNS[0]}{query}", condition))
                scripts_ms.append(1000 * (await _busy_s(session) - page_s))
                controller_ms.append(1000 * (on.cpu_s() - cpu_s))
            figures[name] = {
                "median_ms": round(statistics.median(took), 1),
                "worst_ms": round(max(took), 1),
                # In CPU time, which other work on the machine disturbs less.
                "page_cpu_ms": round(statistics.median(scripts_ms), 1),
                "controller_cpu_ms": round(statistics.median(controller_ms), 1),
            }
            print(name, figures[name], flush=True)
        begin = time.perf_counter()
        await page.goto(f"{on.url}/runs/{RUNS[0]}?with={RUNS[1]},{RUNS[2]}")
        await page.wait_for_function(CHARTS)
        figures["three runs, with scripts"] = {
            "median_ms": round(1000 * (time.perf_counter() - begin), 1)
        }
        await browser.close()
    return {"steps": steps, "bar_ms": BAR_MS, "cores": os.cpu_count(), "views": figures} | {
        "load_average": os.getloadavg()[0]
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="short runs; writes no results")
    is_smoke = parser.parse_args().smoke
    report = asyncio.run(main(200 if is_smoke else 10_000, 2 if is_smoke else 5))
    report_to(None if is_smoke else RESULTS, report)
