// Metrics that share a chart. Other metrics of steps get one chart each.

/**
 * Charts by heading: title, unit, lines as [label, metric] or a prefix of metric names; `scores` are metrics of
 * evaluations.
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
    ["Loss scale", "", [["policy", "loss_scale"], ["critic", "critic_loss_scale"]]],
    ["Overflows in float16", "updates", [["policy", "overflow_updates"], ["critic", "critic_overflow_updates"]]],
  ]],
  ["Off-policy", [
    ["Staleness", "versions", [["mean", "staleness_mean"], ["max", "staleness_max"]]],
    ["Trainer vs. rollout policy", "nats", [["divergence", "kl_rollout"]]],
    ["Divergence by staleness", "nats", "kl_rollout_by_staleness/"],
    ["Effective sample size by staleness", "share", "ess_by_staleness/"],
    ["Capped weights by staleness", "share", "is_clipped_by_staleness/"],
    ["Tokens by staleness", "share", "tokens_by_staleness/"],
    ["Clipped tokens", "share", [["ratio", "clip_fraction"], ["weight", "is_clipped_fraction"]]],
  ]],
  ["Speed", [
    ["The trainer waits", "s", [
      ["for groups", "idle_seconds_no_data"], ["for stale groups", "idle_seconds_barrier"],
      ["weight sync", "idle_seconds_weight_sync"], ["GPU switch", "idle_seconds_gpu_switch"], ["checkpoint", "idle_seconds_checkpoint"],
      ["control", "idle_seconds_control"],
    ]],
    ["Weight sync", "ms", [
      ["total", "sync_ms"], ["prepare", "prepare_ms"], ["transfer", "transfer_ms"], ["adopt", "adopt_ms"],
    ]],
    ["Tokens of a trainer rank", "tokens", [["most", "rank_tokens_max"], ["fewest", "rank_tokens_min"]]],
    ["Balance of the trainer", "", [["most to mean", "rank_tokens_ratio"], ["fill of packs", "pack_fill"]]],
    ["Groups", "", [["finished, waiting", "ready_groups"], ["running", "running_groups"]]],
    ["Generated tokens", "per s", [["tokens", "generated_tokens_per_s"]]],
    ["Tokens of a pass with proposals", "", [["for each sample", "acceptance_length"]]],
  ]],
];

/** Histograms over steps: title, name in the steps' events, unit. */
export const HISTOGRAMS = [
  ["Staleness of samples", "staleness", "versions"],
  ["Length of responses", "response_tokens", "tokens"],
];

const LINES = CATALOG.flatMap(([, charts]) => charts.map(([, , lines]) => lines));
const PREFIXES = LINES.filter((lines) => typeof lines === "string");
const KNOWN = new Set(LINES.filter(Array.isArray).flatMap((lines) => lines.map(([, key]) => key)));
const NO_CHART = new Set(["step"]);

/** Metrics of the charts above; a name that ends with "*" means all with that prefix. */
export const CHARTED = [...KNOWN, ...PREFIXES.map((beginning) => `${beginning}*`), ...HISTOGRAMS.map(([, name]) => name)];

/** Returns true if a chart above shows a metric. */
export function isCharted(name) {
  return KNOWN.has(name) || PREFIXES.some((beginning) => name.startsWith(beginning));
}

/** Returns a line for each metric with a prefix. */
export function linesOf(beginning, names) {
  return [...names].filter((name) => name.startsWith(beginning)).sort().map((name) => [name.slice(beginning.length), name]);
}

/** Returns charts of the metrics that no other chart shows: those with the same prefix before "/" share one. */
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
