"""Discrete-event simulation of a run's steps, with the scheduling rules of real runs.

The functions that decide in a real run (``services.controller.rules``) also decide here which
groups start, which are trained and what is waited for. Nothing changes between two events, so time
jumps from one to the next. ``bench/pace/planned.py`` compares it with a real controller: it is 1 to
13 % off over 16 placements. No closed formula replaces it: the bottleneck (:func:`min_step_s`) is 7 to
84 % off. A formula that adds the time of the longest response, divided by the versions in flight, is up
to 18 % off for these placements and up to 81 % off in other settings (few slots, engines that drain).

a sample ends       -> its group may be finished; groups start in its slot
a step ends         -> its weights are copied, transferred and adopted; the gate opens
the trainer is free -> it takes a batch, or waits for one, which is counted with its reason
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from random import Random
from statistics import fmean
from typing import Generic, TypeVar

from services.controller.rules.ledger import Group
from services.controller.rules.placement import SlotUsage
from services.controller.rules.staleness import StalenessGate, choose_batch
from services.extras.planner.inputs import DecodeTime, Rates, Setting, trainer_speedup

_Owner = TypeVar("_Owner")
# Ends that differ by less than a thousandth of a token count as simultaneous.
_SAME = 1e-3

_MAX_EVENTS = 3_000_000
_WARMUP_STEPS = 4
"""Number of steps before the measured ones, in addition to ``max_staleness``."""
_MIN_STEPS, _MAX_STEPS = 8, 40
_SAMPLES = 10_000
"""Min number of samples to simulate, within the max number of steps."""
_MAX_GROUPS = 64


@dataclass(slots=True)
class SimulatedEngine(Generic[_Owner]):
    """Simulates an engine that decodes samples of several owners.

    Samples in slots get their tokens in parallel, so it is enough to count the tokens that one
    sample would have got since the beginning: each ends when that count has grown by its length.
    """

    slots: int
    step_seconds: Callable[[int], float]
    """Returns the seconds of one decode step, from the number of running samples."""
    on_start: Callable[[_Owner], None]
    """Called with the owner of each sample that gets a slot."""
    is_open: bool = True
    """True if waiting samples may get slots."""
    num_groups: int = 0
    """Groups dispatched to it that are not finished."""
    idle_s: float = 0.0
    """Seconds without a running sample."""
    slot_s: float = 0.0
    """Slot-seconds: the time of all used slots, added up."""
    stamp: int = 0
    """Counter of changes of the running samples: an end computed before a change is invalid."""
    _waiting: deque[tuple[_Owner, int]] = field(default_factory=deque)
    _running: list[tuple[float, int, _Owner]] = field(default_factory=list)
    _num_started: int = 0
    _tokens: float = 0.0
    _debt_s: float = 0.0
    _now: float = 0.0
    _step_s: float = 0.0

    @property
    def num_running(self) -> int:
        """Number of samples in slots."""
        return len(self._running)

    def put(self, owner: _Owner, length: int) -> None:
        """Adds a sample that waits for a slot."""
        self._waiting.append((owner, length))

    def park(self) -> list[tuple[_Owner, int]]:
        """Removes and returns all samples with their missing tokens; call :meth:`advance` before."""
        owners = [(owner, max(1, round(end - self._tokens))) for end, _, owner in self._running]
        owners += self._waiting
        self._running.clear()
        self._waiting.clear()
        self.stamp += 1
        return owners

    def pause(self, seconds: float) -> None:
        """Decodes nothing for some seconds."""
        self._debt_s += seconds
        self.stamp += 1

    def advance(self, now: float) -> list[_Owner]:
        """Advances the time to ``now``; returns the owners of the samples that ended, one for each."""
        elapsed, self._now = now - self._now, now
        num_running = len(self._running)
        if not num_running:
            self.idle_s += elapsed
            self._debt_s = max(0.0, self._debt_s - elapsed)
            return []
        self.slot_s += elapsed * num_running
        paid = min(self._debt_s, elapsed)
        self._debt_s -= paid
        self._tokens += (elapsed - paid) / self._step_s
        finished = []
        while self._running and self._running[0][0] <= self._tokens + _SAME:
            finished.append(heappop(self._running)[2])
        return finished

    def admit(self) -> None:
        """Gives free slots to waiting samples; call :meth:`advance` before."""
        while self.is_open and self._waiting and len(self._running) < self.slots:
            owner, length = self._waiting.popleft()
            self._num_started += 1
            self.on_start(owner)
            heappush(self._running, (self._tokens + length, self._num_started, owner))
        if self._running:
            self._step_s = self.step_seconds(len(self._running))
        self.stamp += 1

    def next_end(self) -> float | None:
        """Returns the time at which the next sample ends if nothing changes; None if none runs."""
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._tokens)
        return self._now + self._debt_s + tokens * self._step_s


@dataclass(slots=True)
class SimulatedGroup:
    """Group that is being generated."""

    group: Group
    lengths: tuple[int, ...]
    engines: tuple[int, ...]
    num_running: int
    version: int = -1
    """Version under which its first token was sampled."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(slots=True)
class ParkedGroup:
    """Part of a group that a paused engine had, parked until another engine takes it."""

    group: SimulatedGroup
    engine: int
    tokens: list[int]
    """Missing tokens of its samples."""

    def resume(self, engines: Sequence[SimulatedEngine[SimulatedGroup]], number: int) -> None:
        """Continues it on an engine; call the engine's ``advance`` before."""
        self.group.engines = tuple(number if n == self.engine else n for n in self.group.engines)
        engines[number].num_groups += 1
        for num_tokens in self.tokens:
            engines[number].put(self.group, num_tokens)


def park(engines: Sequence[SimulatedEngine[SimulatedGroup]]) -> list[ParkedGroup]:
    """Parks all groups of some engines, oldest first; call ``advance`` of the engines before."""
    groups: dict[tuple[int, int], ParkedGroup] = {}
    for number, engine in enumerate(engines):
        for group, tokens in engine.park():
            key = group.group.sequence, number
            groups.setdefault(key, ParkedGroup(group, number, [])).tokens.append(tokens)
        engine.num_groups = 0
    return [groups[key] for key in sorted(groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted speed of a run."""

    step_s: float
    samples_per_s: float
    limit_s: float
    """Min seconds of a step: the trainer's work or the engines' at their best, whichever is longer."""
    train_s: float
    """Seconds of the trainer's work in a step."""
    waits: dict[str, float]
    """Seconds of a step in which the trainer waits, by reason, as a run names them."""
    rollout_idle: float
    """Fraction of the time in which an engine decodes nothing."""
    slots_used: float
    """Mean fraction of the engines' slots in use."""
    staleness_mean: float
    staleness_p95: int

    @property
    def trainer_idle(self) -> float:
        """Fraction of the time in which the trainer waits."""
        return sum(self.waits.values()) / self.step_s

    @property
    def share_of_limit(self) -> float:
        """Min seconds of a step relative to its predicted seconds; 1 is the best."""
        return min(1.0, self.limit_s / self.step_s)


def min_step_s(rates: Rates, setting: Setting) -> float:
    """Returns the min seconds of a step: ``max(T_train, tokens / R)``, with R as the engines' tokens/s.

    Colocated rollouts generate nothing during ``T_train``.
    """
    tokens = setting.samples_per_step * rates.lengths.mean()
    generated_s = tokens * rates.decode(setting.slots) / setting.slots / setting.rollouts
    trained_s = work_s(rates, setting, tokens) + rates.step_s
    if setting.is_colocated:
        trained_s += rates.gpu_switch_s
    return max(trained_s, generated_s + trained_s * setting.colocated_rollouts / setting.rollouts)


def work_s(rates: Rates, setting: Setting, tokens: float) -> float:
    """Returns the trainer's seconds for a number of response tokens."""
    return tokens / (rates.train_tokens_per_s * trainer_speedup(setting.trainer_gpus))


@dataclass(slots=True)
class _Trainer:
    """State of the trainer."""

    is_busy: bool = False
    holds_step: bool = False
    """True while it works on a whole batch."""
    version: int = 0
    """Number of steps that it has trained."""
    early: set[int] = field(default_factory=set)
    """Groups of the next batch that it has trained already."""
    waits_for: int = -1
    """Version from which the batch is to be trained that ``wait_ends`` belongs to."""
    wait_ends: float = 0.0
    """Time from which the trainer no longer waits for groups that are due."""
    idle_since: float = 0.0
    why: str = "no_data"
    work_left_s: float = 0.0
    """Seconds of its current work if the GPU were its own; 0 if it does not compute."""
    slowdown: float = 1.0
    """Factor of the time of its current work."""
    changed_at: float = 0.0
    """Time up to which ``work_left_s`` counts."""
    stamp: int = 0
    """Counter of changes of ``slowdown``: an end computed before a change is invalid."""


class Simulation:
    """Simulates one run. ``_events`` is a heap of the next events."""

    def __init__(self, rates: Rates, setting: Setting) -> None:
        self._rates = rates
        self._setting = setting
        self._gate = StalenessGate(
            max_staleness=setting.max_staleness, groups_per_step=setting.groups_per_step
        )
        self._use = SlotUsage(setting.slots, setting.group_size)
        self._engines = [
            SimulatedEngine[SimulatedGroup](setting.slots, self._decode_s, self._on_start)
            for _ in range(setting.rollouts)
        ]
        self._lengths: Iterator[int] = rates.lengths.draws(Random(0))  # noqa: S311 -- no secret
        self._trainer = _Trainer()
        self._published = 0
        self._offered = 0
        self._is_publishing = False
        self._present = range(setting.rollouts)
        """Engines that receive groups."""
        self._parked: list[ParkedGroup] = []
        self._served: list[int] = [0] * setting.rollouts
        self._running: dict[int, SimulatedGroup] = {}
        self._ready: dict[int, SimulatedGroup] = {}
        self._num_issued = 0
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ends: list[float] = []
        self._work_s: list[float] = []
        self._waits: dict[str, float] = {}
        self._staleness: list[int] = []
        self._begin_s = 0.0
        self._idle_before = self._used_before = 0.0
        self._on_computed: Callable[[], None] = lambda: None
        """Called when the trainer has computed, on a shared GPU."""

    def run(self, num_steps: int) -> Prediction:
        filling = _WARMUP_STEPS + self._setting.max_staleness
        self._dispatch()
        for _ in range(_MAX_EVENTS):
            self._now, _, act = heappop(self._events)
            act()
            if len(self._ends) == filling and not self._begin_s:
                self._start_measuring()
            if len(self._ends) == filling + num_steps:
                return self._result(num_steps)
        raise ValueError(
            f"the simulation did not end within {_MAX_EVENTS} events; check {self._rates}, {self._setting}"
        )

    def _start_measuring(self) -> None:
        """Starts the measurement; earlier steps do not count."""
        self._settle_all()
        self._begin_s = self._ends[-1]
        self._waits, self._staleness, self._work_s = {}, [], []
        self._idle_before = sum(engine.idle_s for engine in self._engines)
        self._used_before = sum(engine.slot_s for engine in self._engines)

    def _result(self, num_steps: int) -> Prediction:
        self._settle_all()
        step_s = (self._ends[-1] - self._begin_s) / num_steps
        engine_s = (self._now - self._begin_s) * len(self._engines)
        idle_s = sum(engine.idle_s for engine in self._engines) - self._idle_before
        used_s = sum(engine.slot_s for engine in self._engines) - self._used_before
        by_age = sorted(self._staleness)
        return Prediction(
            step_s=step_s,
            samples_per_s=self._setting.samples_per_step / step_s,
            limit_s=min_step_s(self._rates, self._setting),
            train_s=sum(self._work_s) / num_steps,
            waits={why: duration_s / num_steps for why, duration_s in sorted(self._waits.items())},
            rollout_idle=idle_s / engine_s,
            slots_used=used_s / engine_s / self._setting.slots,
            staleness_mean=fmean(by_age),
            staleness_p95=by_age[int(0.95 * (len(by_age) - 1))],
        )

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._events, (self._now + seconds, next(self._order), act))

    # One GPU that both sides share

    def _decode_s(self, num_running: int) -> float:
        """Returns the seconds of a decode step, which takes longer beside a working trainer."""
        is_beside = self._setting.shares_gpu and self._trainer.work_left_s > 0
        return self._rates.decode(num_running) * (self._rates.decode_slowdown if is_beside else 1.0)

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Makes the trainer compute; on a shared GPU this takes longer while an engine decodes."""
        if not self._setting.shares_gpu:
            self._work_s.append(seconds)
            self._after(seconds, then)
            return
        trainer, began = self._trainer, self._now

        def ended() -> None:
            self._work_s.append(self._now - began)
            trainer.work_left_s = 0.0
            for number in range(len(self._engines)):
                self._update_engine(number)
            then()

        self._on_computed = ended
        trainer.work_left_s, trainer.changed_at = seconds, self._now
        for number in range(len(self._engines)):
            self._update_engine(number)
        self._adjust_trainer()

    def _adjust_trainer(self) -> None:
        """Sets the speed of the trainer's work by whether an engine decodes, and schedules its end."""
        trainer = self._trainer
        if not trainer.work_left_s:
            return
        trainer.work_left_s -= (self._now - trainer.changed_at) / trainer.slowdown
        is_beside = any(engine.num_running for engine in self._engines)
        trainer.slowdown = self._rates.train_slowdown if is_beside else 1.0
        trainer.changed_at = self._now
        trainer.stamp += 1
        stamp = trainer.stamp
        trainer.work_left_s = max(trainer.work_left_s, 1e-9)

        def act() -> None:
            if trainer.stamp == stamp:
                self._on_computed()

        self._after(trainer.work_left_s * trainer.slowdown, act)

    # Engines

    def _on_start(self, group: SimulatedGroup) -> None:
        if group.version < 0:
            group.version = self._served[group.engines[0]]

    def _settle_all(self) -> None:
        for number in range(len(self._engines)):
            self._advance(number)

    def _advance(self, number: int) -> None:
        """Advances an engine's time and processes the samples that ended."""
        for group in self._engines[number].advance(self._now):
            if self._rates.outside_s:
                self._after(self._rates.outside_s, lambda group=group: self._ended(group))  # type: ignore[misc]
            else:
                self._ended(group)

    def _update_engine(self, number: int) -> None:
        """Advances an engine, fills its slots, and schedules the end of its next sample."""
        engine = self._engines[number]
        was_running = engine.num_running > 0
        self._advance(number)
        engine.admit()
        self._schedule_end(number)
        if was_running != (engine.num_running > 0):
            self._adjust_trainer()

    def _schedule_end(self, number: int) -> None:
        engine = self._engines[number]
        end, stamp = engine.next_end(), engine.stamp
        if end is None:
            return

        def act() -> None:
            if engine.stamp == stamp:
                self._update_engine(number)

        self._after(end - self._now, act)

    def _ended(self, group: SimulatedGroup) -> None:
        """Processes a finished sample."""
        group.num_running -= 1
        if group.num_running:
            return
        for number in group.engines:
            self._engines[number].num_groups -= 1
        self._use.finished(group.lengths)
        del self._running[group.group.sequence]
        group.group.oldest_version = group.version
        self._ready[group.group.sequence] = group
        # Scheduled, so that other samples that end at the same time come first.
        self._after(0.0, self._group_finished)

    def _group_finished(self) -> None:
        self._next_work()
        self._dispatch()

    def _dispatch(self) -> None:
        """Dispatches groups by the rules of ``controller/run/dispatch/dispatcher.py``."""
        present = self._present
        ahead = max(0, len(self._ready) - self._setting.groups_per_step)
        running = len(self._running) - len(
            {parked_group.group.group.sequence for parked_group in self._parked}
        )
        free = max(0, self._use.num_groups(len(present)) - running - ahead)
        resumed, self._parked = self._parked[:free], self._parked[free:]
        touched: set[int] = set()
        for parked_group in resumed:
            number = min(present, key=lambda n: self._engines[n].num_groups)
            self._advance(number)
            parked_group.resume(self._engines, number)
            touched.add(number)
        free -= len(resumed)
        issued, published = self._num_issued, self._published
        for _ in range(
            self._gate.capacity(published=published, num_admitted=issued, max_groups=free)
        ):
            touched |= self._start()
        for number in touched:
            self._update_engine(number)

    def _start(self) -> set[int]:
        """Dispatches one group to the engines with the fewest groups."""
        size, slots = self._setting.group_size, self._setting.slots
        by_load = sorted(self._present, key=lambda n: self._engines[n].num_groups)
        engines = tuple(by_load[: math.ceil(size / slots)])
        group = Group(sequence=self._num_issued, row=0)
        group.oldest_version = min(self._served[number] for number in engines)
        lengths = tuple(next(self._lengths) for _ in range(size))
        new_group = SimulatedGroup(group, lengths, engines, size)
        self._running[group.sequence] = new_group
        self._num_issued += 1
        for number in engines:
            engine = self._engines[number]
            self._advance(number)
            engine.num_groups += 1
            engine.pause(self._rates.prompt_s)
        for member, length in enumerate(lengths):
            self._engines[engines[member % len(engines)]].put(new_group, length)
        return set(engines)

    # The trainer

    def _next_work(self) -> None:
        """Starts the trainer on available groups, by the rules of ``controller/run/train/train_step.py``."""
        trainer = self._trainer
        if trainer.is_busy:
            return
        choice = choose_batch(
            [sampled_group.group for sampled_group in self._ready.values()],
            [sampled_group.group for sampled_group in self._running.values()],
            gate=self._gate,
            trainer_version=trainer.version,
            wait_for_due=self._may_wait(),
            keep_stale=True,
        )
        if choice.batch:
            batch = [self._ready.pop(group.sequence) for group in choice.batch]
            self._staleness += [trainer.version - sampled_group.version for sampled_group in batch]
            self._train(
                [
                    sampled_group
                    for sampled_group in batch
                    if sampled_group.group.sequence not in trainer.early
                ]
            )
            trainer.early, trainer.holds_step = set(), True
            self._dispatch()
        elif self._setting.accumulate_early and (new := self._ready.keys() - trainer.early):
            self._train([self._ready[sequence] for sequence in new])
            trainer.early |= new
        else:
            self._note_wait("barrier" if choice.awaited else "no_data")

    def _may_wait(self) -> bool:
        """Returns True while the trainer may wait for groups that are due in this step."""
        trainer, wait_s = self._trainer, self._setting.stale_wait_s
        if trainer.waits_for != trainer.version:
            trainer.waits_for, trainer.wait_ends = trainer.version, self._now + wait_s
            self._after(wait_s, self._next_work)
        return self._now < trainer.wait_ends

    def _train(self, groups: list[SimulatedGroup]) -> None:
        tokens = sum(group.tokens for group in groups)
        trained_s = work_s(self._rates, self._setting, tokens)
        fixed_s = self._rates.piece_s if self._setting.accumulate_early else self._rates.step_s
        switched_s = self._switch_gpus(trained_s + fixed_s) if self._setting.is_colocated else 0.0
        self._note_wait(self._trainer.why)
        self._trainer.is_busy = True
        self._after(switched_s, lambda: self._compute(trained_s + fixed_s, self._trained))

    def _switch_gpus(self, work_s: float) -> float:
        """Switches the shared GPUs to the trainer; returns the seconds that it waits for them.

        The engines on them decode nothing until they adopt new weights.
        """
        rates, setting = self._rates, self._setting
        self._waits["gpu_switch"] = self._waits.get("gpu_switch", 0.0) + rates.gpu_switch_s / 2
        self._settle_all()
        if setting.dedicated_rollouts and setting.partial_rollout:
            self._present = range(setting.colocated_rollouts, setting.rollouts)
            self._parked += park(self._engines[: setting.colocated_rollouts])
            self._dispatch()
        for number, engine in enumerate(self._engines[: setting.colocated_rollouts]):
            engine.is_open = False
            engine.pause(rates.gpu_switch_s + work_s + rates.copy_s + rates.transfer_s)
            self._schedule_end(number)
        return rates.gpu_switch_s / 2

    def _note_wait(self, why: str) -> None:
        """Adds the idle time until now to the current reason, and sets the reason from now on."""
        trainer = self._trainer
        waited_s = self._now - trainer.idle_since
        self._waits[trainer.why] = self._waits.get(trainer.why, 0.0) + waited_s
        trainer.idle_since, trainer.why = self._now, why

    def _free(self) -> None:
        self._trainer.is_busy = False
        self._trainer.idle_since, self._trainer.why = self._now, "no_data"
        self._next_work()

    def _trained(self) -> None:
        trainer = self._trainer
        if trainer.holds_step:
            trainer.holds_step = False
            trainer.version += 1
            self._ends.append(self._now)
            if trainer.version % self._setting.publish_every == 0:
                self._offered = trainer.version
        if self._offered > self._published and not self._is_publishing:
            self._publish()
        else:
            self._free()

    # Weights

    def _publish(self) -> None:
        """Publishes the newest weights: the trainer waits for the copy, and trains during the transfer."""
        self._is_publishing, version = True, self._offered
        copied_s = self._rates.copy_s
        self._waits["weight_sync"] = self._waits.get("weight_sync", 0.0) + copied_s

        def copied() -> None:
            back_s = self._rates.gpu_switch_s / 2 if self._setting.is_colocated else 0.0
            self._after(back_s + self._rates.transfer_s, lambda: self._adopt(version))
            if self._setting.is_colocated:
                self._trainer.idle_since, self._trainer.why = self._now, "weight_sync"
            else:
                self._free()

        self._trainer.is_busy = True
        self._after(copied_s, copied)

    def _adopt(self, version: int) -> None:
        """Lets every engine adopt the version, at once or after its responses have ended."""
        self._present = range(self._setting.rollouts)
        for number, engine in enumerate(self._engines):
            self._advance(number)
            engine.is_open = self._setting.partial_rollout
        self._try_adopt(version, set(range(len(self._engines))))

    def _try_adopt(self, version: int, behind: set[int]) -> None:
        """Lets the engines that may adopt do so; the others are tried again when their next response ends."""
        for number in sorted(behind):
            engine = self._engines[number]
            self._advance(number)
            if engine.is_open or not engine.num_running:
                behind.discard(number)
                engine.pause(self._rates.stall_s)
                self._served[number] = version
                engine.is_open = True
                self._update_engine(number)
        if not behind:
            self._after(self._rates.stall_s, lambda: self._serve(version))
            return
        ends = [end for n in behind if (end := self._engines[n].next_end()) is not None]
        for number in behind:
            self._schedule_end(number)
        self._after(min(ends) - self._now, lambda: self._try_adopt(version, behind))

    def _serve(self, version: int) -> None:
        """Opens the gate after all engines serve the version."""
        self._published, self._is_publishing = version, False
        if self._setting.is_colocated:
            self._note_wait("weight_sync")
            self._free()
        self._dispatch()
        if self._offered > version and not self._trainer.is_busy:
            self._note_wait(self._trainer.why)
            self._publish()


def predict(rates: Rates, setting: Setting, *, num_steps: int | None = None) -> Prediction:
    """Predicts a run's steps after it has filled up; deterministic for equal arguments.

    Args:
        num_steps: Number of steps to measure, after those in which the run fills up; None chooses
            as many as stable means need.
    """
    few = math.ceil(_SAMPLES / setting.samples_per_step)
    prediction = Simulation(*_scaled_down(rates, setting)).run(
        num_steps or max(_MIN_STEPS, min(few, _MAX_STEPS))
    )
    return replace(prediction, samples_per_s=setting.samples_per_step / prediction.step_s)


def _scaled_down(rates: Rates, setting: Setting) -> tuple[Rates, Setting]:
    """Scales a run down to fewer and slower parts, if single groups of a step no longer matter."""
    divisor = min(setting.groups_per_step // _MAX_GROUPS, setting.slots)
    if divisor < 2:
        return rates, setting
    decode = rates.decode
    slower = replace(
        rates,
        train_tokens_per_s=rates.train_tokens_per_s / divisor,
        prompt_s=rates.prompt_s * divisor,
        decode=DecodeTime(
            fixed_s=decode.fixed_s,
            sample_s=decode.sample_s * divisor,
            max_samples=decode.max_samples / divisor,
        ),
    )
    smaller = replace(
        setting, groups_per_step=setting.groups_per_step // divisor, slots=setting.slots // divisor
    )
    return slower, smaller
