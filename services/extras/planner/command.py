"""The ``plan`` command: predicts GPU splits, staleness bounds and concurrency, and recommends one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from services.checks.start.hub import model_config
from services.checks.start.layouts import Layout, layouts
from services.cli.api_calls import call_operation
from services.cli.commands.spec import Overrides, SpecPath, load_checked
from services.cli.controller_address import Url
from services.cli.output import console, errors, fail, print_line, write
from services.common.models.stages import bubble, most_packs
from services.common.runspec.engines import engine_kind
from services.common.runspec.run import RunSpec, default_slots
from services.controller.api.operations import GetRun, ListMetrics
from services.controller.schemas import MetricPage
from services.extras.kubernetes.pod_rules import pod_problems
from services.extras.planner.gpu_splits import (
    GpuCapacity,
    Split,
    SplitPlan,
    may_colocate,
    plan_splits,
    trainer_unit,
    with_setting,
)
from services.extras.planner.inputs import (
    ASSUMPTIONS,
    Rates,
    Setting,
    Step,
    default_rates,
    measured_step_s,
    rates_of,
    representative_steps,
    setting_of,
    with_overrides,
)
from services.extras.planner.memory import Memory, distinct, gpu_bytes
from services.extras.planner.simulation import predict
from services.extras.planner.tail import tail_bound

_BOUNDS = (0, 1, 2, 4)
_NEWEST = 40
_MOST_LAYOUTS = 8
"""Layouts that the command prints; the JSON has all."""
# The longest responses are reported if they make a step this much longer than its other limits do.
_TAIL_LIMITS = 1.1


@dataclass(frozen=True, slots=True)
class _Rates:
    """Rates and their sources."""

    rates: Rates
    sources: Sequence[str]
    is_measured: bool


def plan(  # noqa: PLR0913, PLR0917 -- the options of a command
    spec: SpecPath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Number of GPUs to split. Default: that of the specification.", min=1),
    ] = None,
    gpu_memory: Annotated[
        str,
        typer.Option(help="Memory of one GPU, such as 141GB; splits that do not fit are omitted."),
    ] = "",
    from_: Annotated[
        str, typer.Option("--from", help="Run whose measured rates are used, by name or id.")
    ] = "",
    rates: Annotated[
        Path | None, typer.Option(help="YAML or JSON file with rates, instead of assumed ones.")
    ] = None,
    max_staleness: Annotated[
        int, typer.Option(help="Max weight versions that a sample may lag behind.", min=0, max=64)
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = None,
) -> None:
    """Predict step time, idle shares, staleness and memory for splits of the GPUs, and recommend one."""
    loaded = load_checked(spec, overrides, is_here=False)
    if loaded.algorithm.num_demonstrations:
        fail(
            f"algorithm.loss {loaded.algorithm.loss!r} samples no responses, so GPUs need no split: one "
            "rollout reads the rows, and the trainer has all other GPUs; set trainer.world_size"
        )
        raise typer.Exit(2)
    try:
        memory = Memory(loaded, gpu_bytes(gpu_memory) if gpu_memory else None)
        rates_known = _known(loaded, memory, from_, rates, url=url)
        plan_of_splits = _planned(
            loaded, memory, rates_known.rates, gpus=gpus, most_staleness=max_staleness
        )
        memory = _memory_of(memory, loaded, plan_of_splits.best.setting)
        ways = _layouts(with_setting(loaded, plan_of_splits.best.setting), gpu_memory)
    except (ValueError, OSError) as error:
        fail(str(error))
        raise typer.Exit(2) from error
    if as_json:
        write(json.dumps(_document(plan_of_splits, rates_known, memory, ways), indent=2))
        return
    _show(loaded, plan_of_splits, rates_known, memory=memory)
    _show_layouts(with_setting(loaded, plan_of_splits.best.setting), ways)


def _known(
    spec: RunSpec, memory: Memory, run: str, path: Path | None, *, url: str | None
) -> _Rates:
    """Returns measured rates if a run is named, else assumed ones; values from a file override both."""
    if run:
        rates, sources = _measured(run, url=url)
    else:
        rates = default_rates(
            weights=memory.weights,
            active_weights=memory.active_weights,
            engine_gpus=spec.engine_gpus,
            max_response_tokens=spec.rollout.max_response_tokens,
            moved_bytes=memory.moved,
        )
        sources = [f"assumed for an H200: {text}" for text in ASSUMPTIONS]
        idle = bubble(spec.trainer.pipeline_parallel, most_packs(spec))
        if idle:
            rates = replace(rates, train_tokens_per_s=rates.train_tokens_per_s * (1 - idle))
            sources.append(f"{_bubble_of(spec)}; training is assumed to be slower by as much")
    if path is not None:
        try:
            rates = with_overrides(rates, yaml.safe_load(path.read_text(encoding="utf-8")))
        except (ValueError, OSError, yaml.YAMLError) as error:
            raise ValueError(f"--rates {path}: {error}") from error
        sources = [f"{path}: overrides the assumptions below", *sources]
    return _Rates(rates, sources, is_measured=bool(run))


def _bubble_of(spec: RunSpec) -> str:
    stages, packs = spec.trainer.pipeline_parallel, most_packs(spec)
    return (
        f"bubble: each of {stages} pipeline stages is idle for at least {bubble(stages, packs):.0%} of an "
        f"update of at most {packs} micro-batches"
    )


def _layouts(spec: RunSpec, gpu_memory: str) -> Sequence[Layout]:
    """Returns the layouts of several GPUs of the trainer, if their memory is known."""
    if not gpu_memory or spec.trainer.world_size == 1:
        return ()
    return layouts(spec, model_config(spec), gpu_bytes=gpu_bytes(gpu_memory))


def _show_layouts(spec: RunSpec, ways: Sequence[Layout]) -> None:
    """Prints layouts that fit, or the one that needs the least memory if none does."""
    if spec.trainer.pipeline_parallel > 1:
        print_line(console, f"\n{_bubble_of(spec)}")
    if not ways:
        return
    num_fitting = sum(way.fits for way in ways)
    shown_layouts = distinct(ways)[:_MOST_LAYOUTS] or [min(ways, key=lambda way: way.memory)]
    table = Table("stages", "tensor", "experts", "context", "engine", "GB", "bubble", box=None)
    for way in shown_layouts:
        sizes = (
            way.pipeline_parallel,
            way.tensor_parallel,
            way.expert_parallel,
            way.context_parallel,
        )
        table.add_row(
            *map(str, sizes), way.engine, f"{way.memory / 1e9:.1f}", f"{100 * way.bubble:.0f} %"
        )
    size, least = spec.trainer.world_size, "the one that needs the least memory"
    shows = "the cheapest that differ in memory" if num_fitting else least
    print_line(
        console,
        f"\n{num_fitting} of {len(ways)} layouts of the trainer's {size} GPUs fit; {shows}:",
    )
    console.print(table, highlight=False)


def _measured(run: str, *, url: str | None) -> tuple[Rates, list[str]]:
    view = call_operation(url, GetRun, run_id=run)
    spec = RunSpec.model_validate(view.spec)
    page = call_operation(url, ListMetrics, run_id=run, from_step=max(0, view.step - _NEWEST))
    setting, steps = setting_of(spec), _steps(page)
    rates = rates_of(steps, _lengths(page), setting=setting)
    measured_s, predicted = measured_step_s(steps), predict(rates, setting).step_s
    first, *_, last = (step["step"] for step in representative_steps(steps))
    return rates, [
        f"measured in run {view.name} ({view.id}), steps {first:.0f} to {last:.0f}, model "
        f"{spec.model.path}",
        f"check: its steps took {measured_s:.2f} s, predicted {predicted:.2f} s "
        f"({100 * (predicted / measured_s - 1):+.0f} %)",
    ]


def _steps(page: MetricPage) -> list[Step]:
    return [
        {"step": float(step), **{item.name: item.values[index] for item in page.items}}
        for index, step in enumerate(page.steps)
    ]


def _lengths(page: MetricPage) -> Mapping[int, int]:
    """Returns the number of responses by upper bound of their length, over all steps."""
    for histogram in page.histograms:
        if histogram.name == "response_tokens":
            sums = [sum(counts) for counts in zip(*histogram.counts, strict=True)]
            return {bound: n for bound, n in zip(histogram.bounds, sums, strict=True) if n}
    return {}


def _planned(
    spec: RunSpec, memory: Memory, rates: Rates, *, gpus: int | None, most_staleness: int
) -> SplitPlan:
    base, kind = setting_of(spec), engine_kind(spec.rollout.engine)
    maximum = memory.max_slots(kind.most_running, mean_tokens=rates.lengths.mean())

    def follows(max_staleness: int, rollouts: int) -> int:
        return default_slots(spec, max_staleness=max_staleness, replicas=rollouts)

    has_own = base.slots != follows(base.max_staleness, base.rollouts)

    def slots(max_staleness: int, rollouts: int) -> int:
        """Return the specified slots, or the default for this split if none are specified."""
        return max(1, min(base.slots if has_own else follows(max_staleness, rollouts), maximum))

    def refused(setting: Setting) -> str:
        unplaced = next(pod_problems(with_setting(spec, setting)), "")
        return unplaced or _memory_of(memory, spec, setting).refused(setting.trainer_gpus)

    count = gpus or base.gpus
    return plan_splits(
        rates,
        base,
        room=GpuCapacity(
            gpus=count,
            engine_gpus=spec.engine_gpus,
            trainer_unit=trainer_unit(spec),
            gpus_per_node=spec.topology.gpus_per_node,
        ),
        bounds={
            bound
            for bound in (*_BOUNDS, base.max_staleness, most_staleness)
            if bound <= most_staleness
        },
        slots=slots,
        max_slots=maximum,
        refused=refused,
        may_colocate=lambda way: may_colocate(spec, way),
    )


def _memory_of(memory: Memory, spec: RunSpec, setting: Setting) -> Memory:
    return memory.like(with_setting(spec, setting), gpus=1 if setting.shares_gpu else None)


def _show(spec: RunSpec, splits: SplitPlan, rates: _Rates, *, memory: Memory) -> None:
    columns = (
        "",
        "trainer",
        "rollouts",
        "bound",
        "slots",
        "step s",
        "samples/s",
        "trainer idle",
    )
    table = Table(*columns, "rollouts idle", "slots used", "stale", "of limit", box=None)
    for split in splits.splits:
        mark = "*" if split.setting == splits.best.setting else ""
        table.add_row(mark, *_cells(split))
    if splits.now is not None:
        table.add_row("now", *_cells(splits.now))
    console.print(table, highlight=False)
    if text := _tail(splits.now or splits.best, rates.rates):
        print_line(console, f"\n{text}")
    for way, reason in splits.refused.items():
        print_line(console, f"\n{way} is not possible for the trainer: {reason}")
    print_line(console, f"\nrecommended ({_why(splits)}):")
    for key, value in _keys(splits.best).items():
        print_line(console, f"  {key}: {value}")
    if text := memory.tables(splits.best.setting.trainer_gpus):
        print_line(console, f"\n{text}")
    print_line(console, "\nrates:")
    for source in rates.sources:
        print_line(console, f"  {source}")
    if not rates.is_measured:
        print_line(
            errors,
            "note: these rates are assumed; --from RUN uses the measured rates of a run after ten steps",
        )


def _tail(split: Split, rates: Rates) -> str:
    """Returns that the longest responses limit a split, and what makes it faster; empty if they do not."""
    bound, setting = tail_bound(rates, split.setting), split.setting
    if not setting.stale_wait_s or bound.step_s <= _TAIL_LIMITS * split.prediction.limit_s:
        return ""
    return (
        f"the longest response of a step has {bound.longest_tokens:.0f} tokens on average; with "
        f"algorithm.max_staleness={setting.max_staleness}, an engine can then run {bound.max_running:.0f} "
        f"samples on average, and a step takes at least {bound.step_s:.2f} s, whatever the slots are; a "
        "larger algorithm.max_staleness, a lower rollout.max_response_tokens or algorithm.on_stale=mask, "
        "which masks stale tokens, makes steps shorter"
    )


def _why(splits: SplitPlan) -> str:
    best = splits.best.prediction
    text = f"{best.samples_per_s:.1f} samples/s"
    if splits.now is not None and splits.now.setting != splits.best.setting:
        text += f", {best.samples_per_s / splits.now.prediction.samples_per_s:.2f}x of the current split"
    waits = {
        why: duration_s
        for why, duration_s in best.waits.items()
        if duration_s >= 0.02 * best.step_s
    }
    if waits:
        reason = max(waits, key=lambda why: waits[why])
        text += (
            f"; the trainer waits {100 * best.trainer_idle:.0f} % of the time, mostly for {reason}"
        )
    return text


def _cells(split: Split) -> Iterator[str]:
    setting, prediction = split.setting, split.prediction
    together = f", {setting.colocated_rollouts} colocated" if setting.is_colocated else ""
    together = ", same GPU" if setting.shares_gpu else together
    yield from (str(setting.trainer_gpus), f"{setting.rollouts}{together}")
    yield from map(str, (setting.max_staleness, setting.slots))
    yield from (f"{prediction.step_s:.2f}", f"{prediction.samples_per_s:.1f}")
    for share in (prediction.trainer_idle, prediction.rollout_idle, prediction.slots_used):
        yield f"{100 * share:.0f} %"
    yield f"{prediction.staleness_mean:.1f} / {prediction.staleness_p95}"
    yield f"{prediction.share_of_limit:.2f}"


def _keys(split: Split) -> dict[str, int | str]:
    """Returns the keys to set in the specification."""
    return {
        "topology.placement": split.setting.placement,
        "trainer.world_size": split.setting.trainer_gpus,
        "rollout.replicas": split.setting.rollouts,
        "rollout.max_running_samples": split.setting.slots,
        "algorithm.max_staleness": split.setting.max_staleness,
    }


def _document(
    splits: SplitPlan, rates: _Rates, memory: Memory, ways: Sequence[Layout]
) -> dict[str, Any]:
    def of(split: Split | None) -> dict[str, Any] | None:
        if split is None:
            return None
        facts = asdict(split.prediction)
        shares = {
            "trainer_idle": split.prediction.trainer_idle,
            "share_of_limit": split.prediction.share_of_limit,
        }
        tail = asdict(tail_bound(rates.rates, split.setting))
        return {"keys": _keys(split), **facts, **shares, "tail": tail}

    return {
        "recommended": of(splits.best),
        "now": of(splits.now),
        "splits": [of(split) for split in splits.splits],
        "refused": splits.refused,
        "memory": memory.document(splits.best.setting.trainer_gpus),
        "layouts": [asdict(way) for way in ways],
        "is_measured": rates.is_measured,
        "sources": list(rates.sources),
        "rates": asdict(rates.rates),
    }
