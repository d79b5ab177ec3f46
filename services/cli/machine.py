"""What this machine lacks for a run: GPUs, packages, and a way to Hugging Face."""

import importlib.util
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.cli.settings import MachineSettings
from services.common.compiler import missing_compiler
from services.common.models.made_tokenizers import is_made, tokenizer_name
from services.common.processors import usable_processors
from services.common.spec.engines import engine_kind
from services.common.spec.run import RunSpec
from services.common.spec.trackers import TRACKERS
from services.controller.launch.gpus import host_gpus
from services.controller.launch.launcher import gpu_needs, total_gpus, worker_names

# Where there are no GPUs a process stands for each, and this many share a core before nothing moves.
_PROCESSES_A_CORE = 4
_LEAST_PROCESSES = 8
_REACH_TIMEOUT_S = 2.0


def lacks(spec: RunSpec) -> Iterator[str]:
    """What a run needs and this machine does not have."""
    engine = spec.rollout.engine
    package = engine_kind(engine).package
    if package is not None and importlib.util.find_spec(package) is None:
        yield (
            f"rollout.engine is {engine!r}, but the package {package} is not installed; install it, or set "
            "rollout.engine to 'torch'"
        )
    for index, tracker in enumerate(spec.trackers):
        package = TRACKERS[tracker.kind].package
        if importlib.util.find_spec(package) is None:
            yield (
                f"trackers.{index}.kind is {tracker.kind!r}, but the package {package} is not installed; "
                f"install it with pip install 'slipstream[{tracker.kind}]', or leave the tracker out"
            )
    gpus = len(host_gpus(MachineSettings().visible_gpus))
    if gpus == 0 and spec.weight_sync.backend == "nccl":
        yield (
            "weight_sync.backend is 'nccl', but this machine has no GPU; set it to 'auto' or 'gloo'"
        )
    if gpus and (problem := missing_compiler()):
        yield problem
    yield from _too_many(spec, gpus)


@dataclass(frozen=True, slots=True)
class FewerRollouts:
    """How many a run gets that does not say it."""

    count: int
    why: str


def fewer_rollouts(spec: RunSpec) -> FewerRollouts | None:
    """Rollouts of a run whose default is more than this machine has GPUs for; None where it is not.

    Two engines on one GPU hold the weights twice and each half of a cache, for the same work.
    """
    gpus = len(host_gpus(MachineSettings().visible_gpus))
    wanted = spec.rollout.replicas
    if not 0 < gpus < total_gpus(spec):
        return None
    others = total_gpus(spec) - wanted * spec.engine_gpus
    count = max(1, (gpus - others) // spec.engine_gpus)
    if count >= wanted:
        return None
    why = (
        f"rollout.replicas is not given: {count} in place of {wanted}, as this machine has {gpus} GPU(s); "
        "set it to have more of them share one"
    )
    return FewerRollouts(count, why)


def shared_gpus(spec: RunSpec) -> str:
    """What to know where workers share this machine's GPUs, which each would have to itself; or nothing."""
    gpus = len(host_gpus(MachineSettings().visible_gpus))
    if gpus == 0 or total_gpus(spec) <= gpus:
        return ""
    text = (
        f"{len(worker_names(spec))} workers share the {gpus} GPU(s) of this machine, in time and memory"
        " (slipstream validate --gpu-gb says how)"
    )
    if spec.rollout.replicas > 1:
        text += f"; rollout.replicas is {spec.rollout.replicas}, fewer leave an engine more"
    return text


def slow_settings(spec: RunSpec) -> str:
    """What to know of a trainer that does not use what this machine's GPUs are fast at; or nothing."""
    if spec.model.is_tiny or not host_gpus(MachineSettings().visible_gpus):
        return ""
    faster = []
    if spec.trainer.dtype == "float32":
        faster.append("trainer.dtype: bfloat16 takes a fraction of the time of float32")
    if not spec.trainer.compile:
        faster.append("trainer.compile: true takes less time and memory, after a longer start")
    return "on GPUs " + "; ".join(faster) if faster else ""


def hub_is_needed(spec: RunSpec) -> bool:
    """Whether a model, a tokenizer or data come from Hugging Face."""
    for model in (spec.model, spec.of_reference.model):
        if not (is_made(name := tokenizer_name(model)) or _is_folder(name)):
            return True
        if not (model.is_tiny or _is_folder(model.path)):
            return True
    return any(source.source == "huggingface" for source in spec.data.sets.values())


def _is_folder(name: str) -> bool:
    """Whether a name is that of a folder, even of one that is not there."""
    return name.startswith(("/", ".", "~")) or Path(name).is_dir()


def go_offline_unless_reachable() -> bool:
    """Have Hugging Face's libraries look into their cache alone if nobody answers within two seconds.

    They would try for most of a minute, for every file.

    Returns:
        Whether somebody answered.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()
    # Resolving a name has no deadline of its own.
    threading.Thread(target=_reach, args=(constants.ENDPOINT, answered), daemon=True).start()
    if answered.wait(_REACH_TIMEOUT_S):
        return True
    constants.HF_HUB_OFFLINE = True
    return False


def _reach(url: str, answered: threading.Event) -> None:
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 -- the user's own endpoint
        with urllib.request.urlopen(request, timeout=_REACH_TIMEOUT_S):  # noqa: S310
            answered.set()
    except urllib.error.HTTPError:
        answered.set()
    except (OSError, ValueError):
        return


def _too_many(spec: RunSpec, gpus: int) -> Iterator[str]:
    key = "topology.gpus" if spec.topology.task_groups else "trainer.world_size"
    needs = gpu_needs(spec)
    total = spec.topology.gpus or sum(needs.values())
    if gpus:
        worker_id, most = max(needs.items(), key=lambda item: item[1])
        if spec.topology.placement == "mixed" and total_gpus(spec) > gpus:
            yield (
                f"topology.placement is 'mixed': with {spec.rollout.replicas - spec.rollouts_in_turns} "
                f"rollout(s) beside the trainer's {spec.trainer.world_size} GPU(s) the run needs "
                f"{total_gpus(spec)} GPUs, but this machine has {gpus}; lower trainer.world_size or "
                "rollout.replicas, set topology.placement to 'colocated', or say --elsewhere"
            )
        elif most > gpus or spec.topology.gpus > gpus:
            yield (
                f"{key}: the run needs {max(most, spec.topology.gpus)} GPUs ({worker_id} alone {most}), but "
                f"this machine has {gpus}; lower trainer.world_size, topology.gpus or "
                "rollout.engine_arguments, or say --elsewhere"
            )
        return
    cores = usable_processors()
    most_processes = max(_LEAST_PROCESSES, _PROCESSES_A_CORE * cores)
    if total > most_processes:
        yield (
            f"{key}: the run needs {total} GPUs, but this machine has none; as many processes on its "
            f"{cores} cores would not get on (at most {most_processes}); lower trainer.world_size, "
            "rollout.replicas or topology.gpus, or say --elsewhere"
        )
