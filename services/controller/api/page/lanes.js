// Who worked and who waited, from a run's events: lanes of pieces with a beginning and an end, in seconds.

/** Events that lanes are made of. */
export const TYPES = ["StepCommitted", "WeightsPublished", "Validated", "CheckpointSaved", "WorkerLost", "StateChanged", "Rewound"];

// In the order in which a step has them; a checkpoint is written before it.
const WAITS = [
  ["idle_seconds_no_data", "waits for data"], ["idle_seconds_barrier", "waits for stale groups"],
  ["idle_seconds_scoring", "waits for scores"],
  ["idle_seconds_handover", "waits for GPUs"], ["idle_seconds_weight_sync", "waits for weight sync"],
];

export const KINDS = [
  "training", "waits for data", "waits for stale groups", "waits for scores", "waits for values",
  "waits for weight sync", "checkpoint", "generates", "prepare", "transfer", "adopt", "evaluation", "event",
  "waits for GPUs",
];

/** Lanes by name; a piece is {kind, begin, end, part, says}: `part` of its height is filled. */
export function lanesOf(events) {
  const lanes = new Map([["trainer", []]]);
  const lane = (name) => lanes.get(name) ?? lanes.set(name, []).get(name);
  for (const event of events) {
    const end = Date.parse(event.time) / 1000;
    if (event.type === "StepCommitted") addStep(lane, event.data, end);
    else if (event.type === "WeightsPublished") addSync(lane("weight sync"), event.data, end);
    else if (event.type === "Validated") lane("evaluation").push({ kind: "evaluation", begin: end - event.data.seconds, end, part: 1, says: event.message });
    else lane("events").push({ kind: event.type === "CheckpointSaved" ? "checkpoint" : "event", begin: end, end, part: 1, says: `${event.type}: ${event.message}` });
  }
  const last = ["weight sync", "evaluation", "events"];
  const order = (name) => (name === "trainer" ? 0 : last.indexOf(name) + 2); // rollouts are between
  return [...lanes].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b, undefined, { numeric: true }));
}

function addStep(lane, step, end) {
  const name = `step ${step.step}`;
  const begin = end - step.seconds;
  const saved = step.idle_seconds_checkpoint ?? 0;
  if (saved > 0) lane("trainer").push({ kind: "checkpoint", begin: begin - saved, end: begin, part: 1, says: "checkpoint", step: step.step });
  let at = begin;
  for (const [key, kind] of WAITS) {
    const until = Math.min(at + (step[key] ?? 0), end);
    if (until > at) lane("trainer").push({ kind, begin: at, end: until, part: 1, says: `${name}: ${kind}`, step: step.step });
    at = until;
  }
  lane("trainer").push({ kind: "training", begin: at, end, part: 1, says: `${name}: training`, step: step.step });
  for (const [worker, idle] of Object.entries(step.rollouts?.idle_s ?? {})) {
    const part = step.seconds ? Math.max(1 - idle / step.seconds, 0) : 0;
    lane(worker).push({ kind: "generates", begin, end, part, says: `${name}: ${worker} generates ${Math.round(100 * part)} % of it`, step: step.step });
  }
}

function addSync(lane, sync, end) {
  let at = end - sync.sync_ms / 1000;
  for (const kind of ["prepare", "transfer", "adopt"]) {
    const until = at + (sync[`${kind}_ms`] ?? 0) / 1000;
    lane.push({ kind, begin: at, end: until, part: 1, says: `version ${sync.version}: ${kind}` });
    at = until;
  }
}

/** Seconds by kind in each lane, inside a window. */
export function shares(lanes, from, to) {
  return lanes.filter(([name]) => name !== "events").map(([name, pieces]) => {
    const spent = new Map();
    for (const { kind, begin, end, part } of pieces) {
      const seconds = (Math.min(end, to) - Math.max(begin, from)) * part;
      if (seconds > 0) spent.set(kind, (spent.get(kind) ?? 0) + seconds);
    }
    return [name, spent];
  });
}
