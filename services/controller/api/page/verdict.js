// Sentences about a run: how far it is, where its prompts are, who waits for whom, what became worse.
import { duration, short, words } from "./format.js";

const NEWEST = 10;
// Stretches of a run that are compared, and the least change of a number that may be why the reward fell.
const STRETCHES = 10;
const NOTABLE = 0.2;

/** How far the run is, what it does, and how long the rest takes at the pace of the newest steps. */
export function progress(run, series) {
  const parts = [`step ${run.step} of ${run.target_steps || "?"}`, `weight version ${run.weight_version}`];
  if (run.spec?.topology) parts.push(run.spec.topology.placement);
  const pace = series.last("seconds", NEWEST);
  const left = ((run.target_steps - run.step) * sum(pace)) / (pace.length || 1);
  if (run.state === "RUNNING" && left) parts.push(`about ${duration(left)} left`);
  return parts.concat(run.activities?.map(words) ?? []).join(" · ");
}

/** Where the issued prompts are. */
export function prompts(counts) {
  if (!counts) return "";
  const { issued, reasons, ...places } = counts;
  const text = Object.entries(places).map(([place, count]) => `${count} ${place}`).join(", ");
  const why = Object.entries(reasons ?? {}).map(([reason, count]) => `${count} ${reason}`).join(", ");
  return `${issued} prompts issued: ${text}${why && ` (${why})`}`;
}

/** The parts of the newest steps in which the trainer and the rollouts waited; null without steps. */
function waits(series) {
  const seconds = series.last("seconds", NEWEST);
  const total = sum(seconds);
  const part = (name) => sum(series.last(name, NEWEST)) / total;
  return total ? { steps: seconds.length, waited: part("trainer_wait_s"), idle: part("rollout_idle_s") } : null;
}

/** The side that the other one waits for, by the same bounds as in planning/advice.py. */
function bottleneck({ waited, idle }) {
  if (waited < 0.1) return idle < 0.1 ? "neither" : "training";
  return idle <= waited / 2 ? "generation" : "neither";
}

/** Who waits for whom in the newest steps, and what the controller advises if it found the same. */
export function verdict(series, placement, advice) {
  const found = waits(series);
  if (!found) return "";
  const percent = (part) => `${Math.round(100 * part)} %`;
  const time = `in the last ${found.steps} steps the trainer waited ${percent(found.waited)} of the time for samples`;
  const both = `${time}, and the rollouts were idle ${percent(found.idle)}`;
  const side = bottleneck(found);
  const together = found.waited < 0.1 ? "are in balance" : "wait for each other";
  const text = placement === "colocated" ? `Trainer and rollouts take turns: ${time}.` : {
    generation: `Rollouts are the bottleneck: ${time}.`,
    training: `The trainer is the bottleneck: ${both}.`,
    neither: `Trainer and rollouts ${together}: ${both}.`,
  }[side];
  const agrees = placement === "colocated" || advice?.short === side;
  return agrees && advice?.remedy ? `${text} ${advice.remedy}` : text;
}

/** Whether the reward is lower than in the run's best stretch, beyond its noise, and what changed with it. */
export function fall(series) {
  const rewards = series.columns.get("reward_mean") ?? [];
  const size = Math.max(Math.floor(rewards.length / STRETCHES), 3);
  const newest = rewards.length - size;
  let best = newest;
  for (let begin = newest % size; begin < newest; begin += size) if (mean(rewards, begin, size) > mean(rewards, best, size)) best = begin;
  const [from, to] = [mean(rewards, best, size), mean(rewards, newest, size)];
  const noise = Math.sqrt((variance(rewards, best, size) + variance(rewards, newest, size)) / size);
  if (newest < size || from - to <= Math.max(2 * noise, Math.abs(from) / 20)) return "";
  const names = ["response_length_mean", "entropy", ...[...series.columns.keys()].filter((name) => name.startsWith("reward/"))];
  const changes = names.map((name) => [name, mean(series.columns.get(name) ?? [], best, size), mean(series.columns.get(name) ?? [], newest, size)])
    .map(([name, before, after]) => ({ name, before, after, part: Math.abs(after - before) / Math.max(Math.abs(before), Math.abs(after), 1e-9) }))
    .filter(({ part }) => part > NOTABLE).sort((one, other) => other.part - one.part);
  const says = changes.slice(0, 3).map(({ name, before, after }) => `${name} went from ${short(before)} to ${short(after)}`);
  return `Reward fell from ${short(from)} (steps ${series.steps[best]} to ${series.steps[best + size - 1]}) to ${short(to)}${says.length ? `; with it ${says.join(", ")}` : ""}.`;
}

function mean(values, begin, size) {
  const some = values.slice(begin, begin + size).filter((value) => value !== null);
  return sum(some) / some.length;
}

function variance(values, begin, size) {
  const middle = mean(values, begin, size);
  return sum(values.slice(begin, begin + size).map((value) => (value === null ? 0 : (value - middle) ** 2))) / size;
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}
