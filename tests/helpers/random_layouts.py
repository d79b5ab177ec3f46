"""Random layouts of trainer, critic and scoring workers, and the start of their ranks without peers."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.checks.start.preflight import examined_here
from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.run import RunSpec
from services.common.runspec.worker_kinds import gpu_needs
from services.extras.scoring.worker import build_policy, build_reference
from services.trainer.engines.fsdp import build, parallel
from services.trainer.ranks.build import build_critic, build_rank
from services.trainer.settings import TrainerSettings
from tests.helpers.specs import changed

Options = dict[str, Any]
"""Values by dotted key; ``apart`` has the GPUs of tasks that run outside of the trainer."""

_SIZES: Final = (1, 1, 1, 2, 2, 4, 8, 3)
_CHOICES: Final[Mapping[str, tuple[float, tuple[Any, ...]]]] = {
    "trainer.dtype": (1.0, ("float32", "bfloat16", "bfloat16", "float16")),
    "trainer.tensor_parallel": (1.0, _SIZES),
    "trainer.expert_parallel": (1.0, _SIZES),
    "trainer.context_parallel": (1.0, _SIZES),
    "trainer.pipeline_parallel": (0.4, (2, 2, 4)),
    "trainer.cpu_offload": (0.3, (True, "optimizer")),
    "trainer.activation_offloading": (0.2, (True,)),
    "trainer.activation_checkpointing": (0.4, (True, False, "selective", 2)),
    "trainer.zero_stage": (0.25, (1,)),
    "trainer.keep_gathered": (0.2, (True, False)),
    "trainer.optimizer.kind": (0.3, ("adamw_8bit", "muon")),
    "trainer.lora.base_dtype": (0.3, (None, "nf4", "int8")),
    "trainer.balancing.kind": (0.2, ("loss", "bias")),
    "trainer.updates_per_step": (0.2, (2,)),
    "algorithm.kl.coefficient": (0.3, (0.1,)),
    "algorithm.advantage": (0.2, ("gae",)),
    "rollout.routing_replay": (0.15, ("compare", "replay")),
    "weight_sync.mode": (0.5, ("cpu_async",)),
    "weight_sync.senders": (0.1, ("ranks", "leader")),
    "apart": (
        0.4,
        ({"ref_logp": 2}, {"logp": 2, "ref_logp": 4}, {"critic": 4}, {"critic": 2, "logp": 2}),
    ),
}
"""Probability of each key to have a value, and the values."""
_OF_SCORING: Final = {
    "topology.scoring_ranks": (1, 2, 2),
    "topology.scoring.tensor_parallel": _SIZES,
    "topology.scoring.expert_parallel": _SIZES,
    "topology.scoring.cpu_offload": (False, True),
}
_OF_CRITIC: Final = {
    "critic.tensor_parallel": _SIZES,
    "critic.expert_parallel": _SIZES,
    "critic.pipeline_parallel": (1, 1, 2, 4),
    "critic.cpu_offload": (None, True, "optimizer"),
}
_SECTIONS: Final = "trainer|topology|critic|model|teacher|algorithm|rollout|weight_sync"
_KEY: Final = re.compile(rf"\b({_SECTIONS})\.\w+")


def random_options(source: random.Random, models: tuple[str, ...]) -> Options:
    """Returns options of a run, which need not be possible together."""
    options: Options = {
        "model.path": source.choice(models),
        "ranks": source.choice((1, 2, 4, 8, 16)),
    }
    options |= {
        key: source.choice(values)
        for key, (share, values) in _CHOICES.items()
        if source.random() < share
    }
    if "trainer.pipeline_parallel" in options:
        options["trainer.engine"] = "stages"
    if source.random() < 0.2:
        options["teacher.path"] = source.choice(models)
    tasks = options.get("apart", {})
    further = _OF_SCORING if tasks.keys() & {"logp", "ref_logp"} else {}
    further = {**further, **(_OF_CRITIC if "critic" in tasks else {})}
    return options | {key: source.choice(values) for key, values in further.items()}


def document_of(options: Options, folder: Path) -> dict[str, Any]:
    """Returns the specification with the options; its data are in the folder."""
    rows = folder / "prompts.jsonl"
    rows.write_text(4 * (json.dumps({"prompt": "1", "answer": "2"}) + "\n"), encoding="utf-8")
    tokenizer = "chars:0123456789"
    data, model = {"train": {"source": "jsonl", "path": str(rows)}}, {"tokenizer": tokenizer}
    document = deepcopy(changed(data=data, model=model))
    if "teacher.path" in options:
        document["teacher"] = {"tokenizer": tokenizer}
    for key, value in options.items():
        *sections, name = key.split(".")
        section = document
        for part in sections:
            section = section.setdefault(part, {})
        if sections:
            section[name] = value
    tasks = options.get("apart", {})
    if not tasks:
        document["trainer"]["world_size"] = options["ranks"]
        return document
    groups = {"train": options["ranks"], **tasks, "generate": 1}
    total = sum(groups.values())
    document["topology"] = document.get("topology", {}) | {
        "task_groups": [*groups],
        "ratios": [count / total for count in groups.values()],
        "gpus": total,
    }
    document["algorithm"] = {
        **({"kl": {"coefficient": 0.1}} if "ref_logp" in tasks else {}),
        **({"advantage": "gae"} if "critic" in tasks else {}),
        **document.get("algorithm", {}),
    }
    if "logp" in tasks:
        document["trainer"]["updates_per_step"] = 2
    return document


def accepted(source: random.Random, options: Options, folder: Path) -> RunSpec | None:
    """Removes refused options until the checks before a start accept the run; None if they refuse the rest.

    Raises:
        AssertionError: If a refusal names no key.
    """
    options = dict(options)
    while True:
        problems = _problems(document_of(options, folder))
        if isinstance(problems, RunSpec):
            return problems
        assert all(map(_KEY.search, problems)), problems
        text = " ".join(problems)
        refused = [
            key
            for key in options
            if key != "model.path" and re.search(rf"\b{re.escape(_named(key))}\b", text)
        ]
        if "topology." in text and "apart" in options:
            refused.append("apart")
        if not refused:
            return None
        key = source.choice(refused)
        del options[key]
        if key == "trainer.pipeline_parallel":
            options.pop("trainer.engine", None)
        if key == "apart":
            options = {
                name: value
                for name, value in options.items()
                if not name.startswith(("topology.", "critic."))
            }


def _named(key: str) -> str:
    """Returns the key that problems name; no problem names only ``ranks`` or ``apart``."""
    return key.removesuffix(".kind").removesuffix(".base_dtype") + ("" if "." in key else ".")


def _problems(document: Mapping[str, Any]) -> RunSpec | tuple[str, ...]:
    try:
        spec = parse_spec(document)
    except SpecError as error:
        return error.problems
    problems = examined_here(spec, tries_functions=False, has_workers=False).problems
    return tuple(problems) or spec


def start_ranks(spec: RunSpec, folder: Path, *, is_first: bool) -> None:
    """Builds the first or the last rank of the trainer and of each worker that scores or trains apart.

    Ranks have no peers: collectives exchange nothing, and only first ranks read weights.
    """
    needs = gpu_needs(spec)
    scoring = spec.topology.scoring_ranks
    workers = {
        "trainer-0": (build_rank, spec.trainer.world_size),
        "critic-0": (build_critic, spec.topology.own_gpus("critic")),
        "logp-0": (build_policy, scoring),
        "ref-logp-0": (build_reference, scoring),
    }
    for name, (start, size) in workers.items():
        if name not in needs:
            continue
        rank = 0 if is_first else size - 1
        settings = TrainerSettings.model_construct(
            **{key: value.get_default() for key, value in TrainerSettings.model_fields.items()}
        ).model_copy(
            update={
                "run_id": "run",
                "device": "cpu",
                "state_directory": folder,
                "model_cache": folder,
                "rank": rank,
                "world_size": size,
            }
        )
        with _without_peers(rank, size):
            start(spec, settings, transfers=_NoTransfers(), progress=lambda activity: None)  # type: ignore[operator]


class _NoTransfers:
    """Transfers that a start does not need."""

    def fetch(self, *arguments: Any) -> None:
        raise AssertionError("a start fetches no samples")

    add = store_records = fetch


@contextmanager
def _without_peers(rank: int, size: int) -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    new_group = distributed.new_group
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(parallel, "join_processes", lambda **_: None))
            stack.enter_context(
                patch.object(distributed, "new_group", lambda *a, **_: new_group(*a))
            )
            if rank > 0:
                stack.enter_context(patch.object(build, "read_weights", lambda *_: None))
            yield
    finally:
        distributed.destroy_process_group()
