// Sentences about a run: progress, prompts, bottleneck.
import { isActive } from "./actions.js";
import { duration, words } from "./format.js";

const NEWEST = 10;

/** Returns the progress of a run, its activities, and the remaining time at the pace of the newest steps. */
export function progress(run, series) {
  const parts = [`step ${run.step} of ${run.target_steps || "?"}`];
  if (run.weight_version >= 0) parts.push(`weight version ${run.weight_version}`);
  if (run.spec?.topology) parts.push(run.spec.topology.placement);
  const pace = series.last("seconds", NEWEST);
  const left = ((run.target_steps - run.step) * sum(pace)) / (pace.length || 1);
  if (run.state === "RUNNING" && left) parts.push(`about ${duration(left)} left`);
  return parts.concat(run.activities?.map(words) ?? []).join(" · ");
}

/** Returns why a run ended without success; its message while it has not ended. */
export function ending(run) {
  if (run.message || isActive(run) || run.state === "SUCCEEDED") return run.message;
  const [first, ...rest] = run.state_reason.split(/(?=[A-Z])/); // CancelledByUser
  return [first, ...rest.map((word) => word.toLowerCase())].join(" ");
}

/** Returns the number of issued prompts by state. */
export function prompts(counts) {
  if (!counts) return "";
  const { issued, reasons, ...states } = counts;
  const text = Object.entries(states).map(([state, count]) => `${count} ${state}`).join(", ");
  const why = Object.entries(reasons ?? {}).map(([reason, count]) => `${count} ${reason}`).join(", ");
  return `${issued} prompts issued: ${text}${why && ` (${why})`}`;
}

/** Returns the fractions of the newest steps in which trainer and rollouts waited; null without steps. */
function waits(series) {
  const seconds = series.last("seconds", NEWEST);
  const total = sum(seconds);
  const part = (name) => sum(series.last(name, NEWEST)) / total;
  return total ? { steps: seconds.length, waited: part("trainer_wait_s"), idle: part("rollout_idle_s") } : null;
}

/** Returns the side that the other one waits for, by the same bounds as planning/advice.py. */
function bottleneck({ waited, idle }) {
  if (waited < 0.1) return idle < 0.1 ? "neither" : "training";
  return idle <= waited / 2 ? "generation" : "neither";
}

/** Returns the bottleneck of the newest steps, with the controller's advice if it found the same one. */
export function verdict(series, placement, advice) {
  const found = waits(series);
  if (!found) return "";
  const percent = (part) => `${Math.round(100 * part)} %`;
  const time = `in the last ${found.steps} steps the trainer waited for samples ${percent(found.waited)} of the time`;
  const both = `${time}, and the rollouts were idle ${percent(found.idle)}`;
  const side = bottleneck(found);
  const isOther = found.waited + found.idle >= 1.1; // both waited at once
  const other = isOther ? "wait at once, for rewards, tools, environments or overhead" : "wait for each other";
  const together = found.waited < 0.1 ? "are balanced" : other;
  const text = placement === "colocated" ? `Trainer and rollouts share GPUs: ${time}.` : {
    generation: `Rollouts are the bottleneck: ${both}.`,
    training: `The trainer is the bottleneck: ${both}.`,
    neither: `Trainer and rollouts ${together}: ${both}.`,
  }[side];
  const agrees = placement === "colocated" || advice?.bottleneck === side;
  return agrees && advice?.remedy ? `${text} ${advice.remedy}` : text;
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}
