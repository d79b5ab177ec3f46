// The run page: a list of runs, and one run with its charts, workers, events and logs, live.
import { drawCharts } from "./charts.js";
import { TokenNeeded, getJson, readEvents, readLogs, useToken } from "./api.js";

const REFRESH_MS = 2000;
const KEPT_EVENTS = 300;
const KEPT_LINES = 1000;
const QUIET = new Set(["StepCommitted", "WeightsPublished"]);
const $ = (id) => document.getElementById(id);

let shown = { id: "", steps: [], syncs: [], scores: [], stop: new AbortController() };
let reading = new AbortController(); // the log

async function refresh() {
  try {
    const { items } = await getJson("/v1/runs");
    listRuns(items);
    const wanted = location.hash.slice(1) || items[0]?.id || "";
    if (wanted !== shown.id) open(wanted);
    if (shown.id) {
      const [run, workers] = await Promise.all([
        getJson(`/v1/runs/${shown.id}`), getJson(`/v1/runs/${shown.id}/topology`),
      ]);
      showRun(run);
      showWorkers(workers.items);
    }
    $("trouble").hidden = true;
    $("sign-in").hidden = true;
  } catch (error) {
    $("sign-in").hidden = !(error instanceof TokenNeeded);
    if (error instanceof TokenNeeded) return;
    $("trouble").textContent = `The controller does not answer: ${error.message}`;
    $("trouble").hidden = false;
  }
}

function listRuns(runs) {
  $("empty").hidden = runs.length > 0;
  $("run").hidden = runs.length === 0;
  $("runs").replaceChildren(...runs.map((run) => {
    const link = element("a", run.name, { href: `#${run.id}` });
    if (run.id === shown.id) link.setAttribute("aria-current", "true");
    link.append(element("small", `${run.state}, step ${run.step}`));
    const item = element("li");
    item.append(link);
    return item;
  }));
}

function open(id) {
  shown.stop.abort();
  shown = { id, steps: [], syncs: [], scores: [], stop: new AbortController() };
  $("events").replaceChildren();
  $("component").replaceChildren($("component").firstElementChild);
  drawCharts($("charts"), shown);
  if (id) follow(shown);
  openLog();
}

/** Read the log that is chosen, from its end on. */
function openLog() {
  reading.abort();
  reading = new AbortController();
  $("logs").replaceChildren();
  if (shown.id) followLogs(shown.id, $("component").value, reading.signal);
}

async function followLogs(id, chosen, signal) {
  while (!signal.aborted) {
    try {
      let isFirst = true;
      for await (const { component, line } of readLogs(id, chosen, 100, signal)) {
        if (component === undefined) return; // the run has ended
        if (isFirst) $("logs").replaceChildren(); // a stream that is opened again begins with the past
        isFirst = false;
        offerLog(component);
        addLine(chosen ? `${line}\n` : `${component}  ${line}\n`);
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

function offerLog(component) {
  const options = [...$("component").options];
  if (options.some((option) => option.value === component)) return;
  const next = options.find((option) => option.value > component) ?? null;
  $("component").insertBefore(element("option", component, { value: component }), next);
}

function addLine(text) {
  const logs = $("logs");
  const isAtEnd = logs.scrollTop + logs.clientHeight >= logs.scrollHeight - 4;
  logs.append(text);
  if (logs.childNodes.length > KEPT_LINES) logs.firstChild.remove();
  if (isAtEnd) logs.scrollTop = logs.scrollHeight;
}

async function follow(run) {
  let seq = 0;
  let isDrawn = true;
  while (!run.stop.signal.aborted) {
    try {
      for await (const event of readEvents(run.id, seq, run.stop.signal)) {
        if (event.state) return; // the run has ended
        seq = event.seq;
        takeIn(run, event);
        if (isDrawn) {
          isDrawn = false; // many events arrive at once when a run is opened
          requestAnimationFrame(() => { isDrawn = true; if (run === shown) drawCharts($("charts"), run); });
        }
      }
    } catch (error) {
      if (run.stop.signal.aborted) return;
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

function takeIn(run, event) {
  if (event.type === "StepCommitted") run.steps.push(event.data);
  else if (event.type === "WeightsPublished") run.syncs.push({ ...event.data, step: event.data.version });
  else if (event.type === "Validated") run.scores.push({ ...event.data, step: event.data.version });
  if (QUIET.has(event.type)) return;
  const item = element("li");
  item.append(
    element("time", new Date(event.time).toLocaleTimeString([], { hourCycle: "h23" }), { class: "quiet" }),
    element("b", event.type), element("span", event.message || describe(event.data)),
  );
  $("events").prepend(item);
  if ($("events").children.length > KEPT_EVENTS) $("events").lastChild.remove();
}

function describe(data) {
  return Object.entries(data).filter(([, value]) => typeof value !== "object")
    .map(([key, value]) => `${key} ${value}`).join(", ");
}

function showRun(run) {
  $("name").textContent = run.name;
  $("state").textContent = run.state;
  $("state").className = `state ${run.state}`;
  $("progress").textContent = progress(run, shown.steps.slice(-10));
  $("id").textContent = run.id;
  $("prompts").textContent = prompts(run.summary?.prompts);
  $("message").textContent = run.message;
  $("message").hidden = !run.message;
  $("verdict").textContent = verdict(shown.steps.slice(-10));
  showRows("conditions", run.conditions.map((condition) => [
    condition.type, condition.status.toLowerCase(), new Date(condition.last_transition_time).toLocaleString(),
    why(condition),
  ]));
}

/** Why a condition is as it is; some messages begin with the reason. */
function why({ reason, message }) {
  return message.startsWith(reason) ? message : [reason, message].filter(Boolean).join(": ");
}

/** How far the run is, what it does, and how long the rest takes at the pace of the newest steps. */
function progress(run, steps) {
  const parts = [`step ${run.step} of ${run.spec.trainer.steps}`, `weight version ${run.weight_version}`];
  const left = ((run.spec.trainer.steps - run.step) * sum(steps, "seconds")) / (steps.length || 1);
  if (run.state === "RUNNING" && left) parts.push(`about ${duration(left)} left`);
  const doing = run.activities?.map((name) => name.toLowerCase().replaceAll("_", " ")) ?? [];
  return parts.concat(doing).join(" · ");
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Where the issued prompts are. */
function prompts(counts) {
  if (!counts) return "";
  const { issued, reasons, ...places } = counts;
  const text = Object.entries(places).map(([place, count]) => `${count} ${place}`).join(", ");
  const why = Object.entries(reasons ?? {}).map(([reason, count]) => `${count} ${reason}`).join(", ");
  return `${issued} prompts issued: ${text}${why && ` (${why})`}`;
}

/** Who waits for whom, from the newest steps. */
function verdict(steps) {
  const total = sum(steps, "seconds");
  if (!total) return "";
  const share = Math.round((100 * sum(steps, "trainer_wait_s")) / total);
  const of = `in the last ${steps.length} steps the trainer waited ${share} % of the time`;
  if (share > 50) return `Rollouts are the bottleneck: ${of} for samples.`;
  if (share < 10) return `The trainer is the bottleneck: ${of} for samples.`;
  return `Trainer and rollouts are in balance: ${of} for samples.`;
}

function sum(items, key) {
  return items.reduce((total, item) => total + (item[key] ?? 0), 0);
}

function showWorkers(workers) {
  showRows("workers", workers.map((worker) => [
    worker.worker_id, worker.state, worker.activity, worker.weight_version,
    worker.gauges.running_samples ?? "", worker.gauges.waiting_samples ?? "",
  ]));
}

/** Fill a table. */
function showRows(id, rows) {
  $(id).replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => element("td", cell)));
    return row;
  }));
}

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

$("sign-in").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  useToken($("token").value);
  refresh();
});
$("component").addEventListener("change", openLog);
window.addEventListener("hashchange", refresh);
await refresh();
setInterval(refresh, REFRESH_MS);
