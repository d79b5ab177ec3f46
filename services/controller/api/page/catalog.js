// Which numbers are drawn together. What steps record and no chart names gets a chart of its own.

/**
 * Charts by heading: title, unit, lines as [label, number], or what the names of all its numbers begin with; those of
 * `scores` are evaluations.
 */
export const CATALOG = [
  ["At a glance", [
    ["Reward", "", [["mean", "reward_mean"], ["deviation", "reward_std"]]],
    ["Held-out score", "", [["greedy", "greedy"], ["sampled", "sampled"]], "scores"],
    ["Response length", "tokens", [["mean", "response_length_mean"], ["p95", "response_length_p95"], ["max", "response_length_max"]]],
    ["Time of a step", "s", [["total", "seconds"], ["trainer waits", "trainer_wait_s"], ["rollouts idle", "rollout_idle_s"]]],
  ]],
  ["Learning", [
    ["Reward by term", "", "reward/"],
    ["Reward by set", "", "set_reward/"],
    ["Held-out score by set", "", "heldout/", "scores"],
    ["Loss", "", [["loss", "loss"]]],
    ["Entropy", "nats", [["entropy", "entropy"]]],
    ["Gradient norm", "", [["norm", "grad_norm"]]],
  ]],
  ["Off-policy", [
    ["Staleness", "versions", [["mean", "staleness_mean"], ["max", "staleness_max"]]],
    ["Trainer against rollout", "nats", [["divergence", "kl_rollout"]]],
    ["Clipped tokens", "share", [["ratio", "clip_fraction"], ["weight", "is_clipped_fraction"]]],
  ]],
  ["Speed", [
    ["The trainer waits", "s", [
      ["for data", "idle_seconds_no_data"], ["for stale groups", "idle_seconds_barrier"],
      ["weight sync", "idle_seconds_weight_sync"], ["handover of GPUs", "idle_seconds_handover"], ["checkpoint", "idle_seconds_checkpoint"],
      ["control", "idle_seconds_control"],
    ]],
    ["Weight sync", "ms", [
      ["total", "sync_ms"], ["prepare", "prepare_ms"], ["transfer", "transfer_ms"], ["adopt", "adopt_ms"],
    ]],
    ["Groups", "", [["finished, waiting", "ready_groups"], ["running", "running_groups"]]],
    ["Generated tokens", "per s", [["tokens", "generated_tokens_per_s"]]],
  ]],
];

/** Histograms over steps: title, what steps call it, unit. */
export const SPREADS = [
  ["Staleness of samples", "staleness", "versions"],
  ["Length of responses", "response_tokens", "tokens"],
];

const LINES = CATALOG.flatMap(([, charts]) => charts.map(([, , lines]) => lines));
const BEGINNINGS = LINES.filter((lines) => typeof lines === "string");
const KNOWN = new Set(LINES.filter(Array.isArray).flatMap((lines) => lines.map(([, key]) => key)));
const NO_CHART = new Set(["step"]);

/** What the charts above need; a name that ends with "*" means all that begin so. */
export const CHARTED = [...KNOWN, ...BEGINNINGS.map((beginning) => `${beginning}*`), ...SPREADS.map(([, name]) => name)];

/** Whether a chart above needs a number. */
export function isCharted(name) {
  return KNOWN.has(name) || BEGINNINGS.some((beginning) => name.startsWith(beginning));
}

/** Lines of the numbers whose names begin alike. */
export function linesOf(beginning, names) {
  return [...names].filter((name) => name.startsWith(beginning)).sort().map((name) => [name.slice(beginning.length), name]);
}

/** Charts of the numbers that no other chart has: those with a common beginning before "/" share one. */
export function furtherCharts(names) {
  const byTitle = new Map();
  for (const name of [...names].sort()) {
    if (isCharted(name) || NO_CHART.has(name)) continue;
    const [title, ...rest] = name.split("/");
    const lines = byTitle.get(title) ?? byTitle.set(title, []).get(title);
    lines.push([rest.join("/") || name, name]);
  }
  return [...byTitle].map(([title, lines]) => [title, "", lines]);
}
