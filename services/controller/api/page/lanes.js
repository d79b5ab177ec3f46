// Work and waits of trainer and rollouts, from a run's events: lanes of pieces with a begin and an end, in seconds.

/** Types of the events that lanes are built from. */
export const TYPES = ["StepCommitted", "WeightsPublished", "Validated", "CheckpointSaved", "WorkerLost", "StateChanged", "Rewound"];

// In the order within a step; a checkpoint is written before the step.
const WAITS = [
  ["idle_seconds_no_data", "waits for groups"], ["idle_seconds_barrier", "waits for stale groups"],
  ["idle_seconds_scoring", "waits for scores"],
  ["idle_seconds_gpu_switch", "GPU switch"], ["idle_seconds_weight_sync", "waits for weight sync"],
];

export const KINDS = [
  "training", "waits for groups", "waits for stale groups", "waits for scores", "GPU switch",
  "waits for weight sync", "checkpoint", "generates", "prepare", "transfer", "adopt", "evaluation", "event",
  "idle", "between steps",
];

// What a lane does while it has no piece.
const REST = { trainer: "between steps", "weight sync": "no sync", evaluation: "no evaluation" };

/** Lanes by name; a piece is {kind, begin, end, part, label}: `part` of its height is filled. */
export function lanesOf(events) {
  const lanes = new Map([["trainer", []]]);
  const lane = (name) => lanes.get(name) ?? lanes.set(name, []).get(name);
  for (const event of events) {
    const end = Date.parse(event.time) / 1000;
    if (event.type === "StepCommitted") addStep(lane, event.data, end);
    else if (event.type === "WeightsPublished") addSync(lane("weight sync"), event.data, end);
    else if (event.type === "Validated") lane("evaluation").push({ kind: "evaluation", begin: end - event.data.seconds, end, part: 1, label: event.message });
    else lane("events").push({ kind: event.type === "CheckpointSaved" ? "checkpoint" : "event", begin: end, end, part: 1, label: `${event.type}: ${event.message}` });
  }
  const last = ["weight sync", "evaluation", "events"];
  const order = (name) => (name === "trainer" ? 0 : last.indexOf(name) + 2); // rollouts are between
  return [...lanes].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b, undefined, { numeric: true }));
}

function addStep(lane, step, end) {
  const name = `step ${step.step}`;
  const begin = end - step.seconds;
  const saved = step.idle_seconds_checkpoint ?? 0;
  if (saved > 0) lane("trainer").push({ kind: "checkpoint", begin: begin - saved, end: begin, part: 1, label: "checkpoint", step: step.step });
  let at = begin;
  for (const [key, kind] of WAITS) {
    const until = Math.min(at + (step[key] ?? 0), end);
    if (until > at) lane("trainer").push({ kind, begin: at, end: until, part: 1, label: `${name}: ${kind}`, step: step.step });
    at = until;
  }
  lane("trainer").push({ kind: "training", begin: at, end, part: 1, label: `${name}: training`, step: step.step });
  for (const [worker, idle] of Object.entries(step.rollouts?.idle_s ?? {})) {
    const part = step.seconds ? Math.max(1 - idle / step.seconds, 0) : 0;
    lane(worker).push({ kind: "generates", begin, end, part, label: `${name}: ${worker} generates ${Math.round(100 * part)} % of the time`, step: step.step });
  }
}

function addSync(lane, sync, end) {
  let at = end - sync.sync_ms / 1000;
  for (const kind of ["prepare", "transfer", "adopt"]) {
    const until = at + (sync[`${kind}_ms`] ?? 0) / 1000;
    lane.push({ kind, begin: at, end: until, part: 1, label: `version ${sync.version}: ${kind}` });
    at = until;
  }
}

/** Returns the gaps between the pieces of a lane, inside a window, as pieces of a kind. */
export function gaps(pieces, kind, from, to) {
  const found = [];
  let at = from;
  for (const { begin, end } of [...pieces].sort((a, b) => a.begin - b.begin)) {
    if (begin - at > 1e-3) found.push({ kind, begin: at, end: begin, part: 1, label: kind });
    at = Math.max(at, end);
  }
  if (to - at > 1e-3) found.push({ kind, begin: at, end: to, part: 1, label: kind });
  return found;
}

/** Returns whole percentages by kind in each lane, inside a window; those of a lane sum to 100. */
export function shares(lanes, from, to) {
  const total = to - from;
  return lanes.filter(([name]) => name !== "events").map(([name, pieces]) => {
    const spent = new Map();
    let left = total;
    for (const { kind, begin, end, part } of pieces) {
      const seconds = Math.min((Math.min(end, to) - Math.max(begin, from)) * part, left);
      if (seconds <= 0) continue;
      spent.set(kind, (spent.get(kind) ?? 0) + seconds);
      left -= seconds;
    }
    const rest = REST[name] ?? "idle";
    spent.set(rest, (spent.get(rest) ?? 0) + left);
    return [name, percentages(spent, total)];
  });
}

/** Rounds amounts to whole percentages of their sum: those with the largest remainders are rounded up. */
function percentages(amounts, total) {
  const parts = [...amounts].map(([name, amount]) => ({ name, exact: (100 * amount) / total }));
  for (const part of parts) part.whole = Math.floor(part.exact + 1e-9);
  const missing = 100 - parts.reduce((sum, { whole }) => sum + whole, 0);
  parts.sort((a, b) => (b.exact - b.whole) - (a.exact - a.whole));
  parts.slice(0, missing).forEach((part) => { part.whole += 1; });
  return parts.filter(({ whole }) => whole > 0).sort((a, b) => b.whole - a.whole).map(({ name, whole }) => [name, whole]);
}
