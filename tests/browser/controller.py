"""REST API and run page of a controller, over a database whose runs the tests write."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.http.server import serve_http
from services.common.runspec.loader import canonical_json, parse_spec, spec_digest
from services.controller.api.app import build_app
from services.controller.api.principals import Principal, TokenStore
from services.controller.api.run_page import PageLinks, add_page_links, with_run_page
from services.controller.manager.runs import RunManager
from services.controller.rules.run_state import RunEvent
from services.controller.schemas import Role
from services.controller.store import ledgers
from services.controller.store.database import Database
from services.controller.store.records import NewRun, Note
from services.controller.store.runs import RunStore
from tests.helpers.rest import SPEC, api_of, open_manager


@dataclass(frozen=True)
class PageController:
    """Served controller, with methods that write its runs."""

    url: str
    folder: Path
    manager: RunManager
    store: RunStore
    links: PageLinks
    running: str
    """Id of a running run, at step 10 of 20."""
    ended: str
    """Id of a run with another learning rate that succeeded after 12 steps."""
    failed: str

    def code(self, role: Role) -> str:
        """Returns the code of a link that signs one browser in."""
        who = Principal(name=f"the-{role}", project="default", role=role)
        return self.links.make(who).path.partition("code=")[2]

    def note(self, run_id: str, note: Note, also: Any = None) -> None:
        """Writes an event and notifies readers."""
        self.manager.feed.publish(self.store.record(run_id, note, also=also), project="default")

    def create(self, name: str) -> str:
        """Creates another running run, without a step; returns its id."""
        number = len(self.store.list_runs(limit=500)) + 10
        return _create(self.store, number, {"name": name})

    def end(self, run_id: str) -> None:
        """Sets a run's state to succeeded."""
        self.store.apply(run_id, RunEvent.FINISH, reason="Test")

    def train(self, run_id: str, step: int, **numbers: float) -> None:
        """Records a committed step."""
        reward = numbers.pop("reward_mean", step / 20)
        data = {
            "step": step,
            "reward_mean": reward,
            "reward_std": 0.3,
            "loss": 0.1 * math.sin(step),
            "grad_norm": 10.0**-step,
            "staleness_mean": 0.9,
            "staleness_max": 1,
            "seconds": 2.0,
            "trainer_wait_s": 1.5,
            "idle_seconds_no_data": 1.5,
            "reward/format": 0.5,
            "no_chart_names_it": 2,
            "histograms": {"staleness": {"0": 1, "1": 7}, "response_tokens": {"6": 8}},
            **numbers,
        }

        def commit(connection: Any) -> None:
            ledgers.begin_step(connection, run_id, step, version=step - 1, groups=[])
            ledgers.commit_step(connection, run_id, step, data)

        step_facts = {**data, "rollouts": {"idle_s": {"rollout-0": 0.5, "rollout-1": 2.0}}}
        prompts = {"issued": 40, "consumed": 30, "dropped": 10, "reasons": {"stale": 10}}
        advice = {
            "bottleneck": "generation",
            "remedy": "Predicted: rollout.replicas 2 instead of 1 would give 1.6x.",
        }
        text, summary = f"trained step {step}", {"prompts": prompts, "advice": advice}
        self.note(run_id, Note("StepCommitted", text, step_facts, step, step, summary), commit)
        sync = {
            "version": step,
            "sync_ms": 300.0,
            "prepare_ms": 100.0,
            "transfer_ms": 150.0,
            "adopt_ms": 50.0,
        }
        self.note(run_id, Note("WeightsPublished", f"weight version {step} is served", sync))

    def evaluate(self, run_id: str, version: int, score: float) -> None:
        """Records the evaluation of a version."""
        data = {
            "version": version,
            "greedy": score,
            "sampled": score / 2,
            "num_samples": 8,
            "seconds": 1.0,
        }
        self.note(run_id, Note("Validated", f"weight version {version}: greedy {score}", data))


async def _recognize(who: Principal) -> None:
    """Accepts every principal."""


@asynccontextmanager
async def open_controller(folder: Path) -> AsyncIterator[PageController]:
    """Serves a new database with three runs until the block ends."""
    database = Database(f"sqlite:///{folder / 'page.db'}")
    store, tokens = RunStore(database), TokenStore(database)
    async with open_manager(database) as manager:
        api = api_of(manager, database, folder, tokens)
        links = PageLinks(tokens, _recognize)
        app = build_app(api)
        add_page_links(app, api, links)
        async with serve_http("127.0.0.1:0", with_run_page(app)) as port:
            controller = PageController(
                url=f"http://127.0.0.1:{port}",
                folder=folder,
                manager=manager,
                store=store,
                links=links,
                ended=_create(
                    store,
                    3,
                    {"name": "sort4", "optimizer": {"learning_rate": 0.5}},
                    (RunEvent.FINISH, ""),
                ),
                failed=_create(
                    store, 1, {"name": "broken"}, (RunEvent.FAIL, "trainer-0 ended: out of memory")
                ),
                running=_create(store, 2, {"name": "sort4"}),
            )
            _fill(controller)
            yield controller
    database.close()


def _create(
    store: RunStore, number: int, more: dict[str, Any], end: tuple[RunEvent, str] | None = None
) -> str:
    trainer = {**SPEC["trainer"], "steps": 20, "optimizer": more.pop("optimizer", {})}
    spec = parse_spec({**SPEC, "trainer": trainer, **more})
    run_id = f"run_{number:032x}"
    new = NewRun(
        run_id=run_id, name=spec.name, spec_json=canonical_json(spec), spec_digest=spec_digest(spec)
    )
    store.create(new)
    for event in (RunEvent.ADMIT, RunEvent.READY):
        store.apply(run_id, event, reason="Test")
    if end is not None:
        store.apply(run_id, end[0], reason="WorkerLost", message=end[1])
    return run_id


def _fill(controller: PageController) -> None:
    lost = Note("WorkerLost", "<b>rollout-1</b> ended", {"workers": ["rollout-1"]})
    controller.note(controller.running, lost)
    for step in range(1, 11):
        controller.train(controller.running, step)
    controller.evaluate(controller.running, 10, 0.75)
    for step in range(1, 13):
        controller.train(controller.ended, step, reward_mean=-step / 12)
    logs = controller.folder / controller.running / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer-0.log").write_text("step 10 <i>done</i>\n")
