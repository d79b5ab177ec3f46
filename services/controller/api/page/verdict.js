// Sentences about a run: how far it is, where its prompts are, who waits for whom.
import { duration, words } from "./format.js";

const NEWEST = 10;

/** How far the run is, what it does, and how long the rest takes at the pace of the newest steps. */
export function progress(run, series) {
  const parts = [`step ${run.step} of ${run.target_steps || "?"}`, `weight version ${run.weight_version}`];
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

/** Who waits for whom, from the newest steps. */
export function verdict(series) {
  const seconds = series.last("seconds", NEWEST);
  const total = sum(seconds);
  if (!total) return "";
  const share = Math.round((100 * sum(series.last("trainer_wait_s", NEWEST))) / total);
  const of = `in the last ${seconds.length} steps the trainer waited ${share} % of the time`;
  if (share > 50) return `Rollouts are the bottleneck: ${of} for samples.`;
  if (share < 10) return `The trainer is the bottleneck: ${of} for samples.`;
  return `Trainer and rollouts are in balance: ${of} for samples.`;
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}
