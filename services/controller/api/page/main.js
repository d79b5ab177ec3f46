// The run page: a list of runs, and one run with its tabs, live.
import { isActive, offerActions } from "./actions.js";
import { ApiError, TokenNeeded, getJson, readEvents, signIn, useToken } from "./api.js";
import { Checkpoints } from "./checkpoints.js";
import { Configuration } from "./configuration.js";
import { Curves } from "./curves.js";
import { $, h, oncePerFrame } from "./dom.js";
import { Events } from "./events.js";
import { TABS, address, current, go, onMove } from "./route.js";
import { listRuns, defaultRun } from "./runs.js";
import { Samples } from "./samples.js";
import { Series } from "./series.js";
import { Timeline } from "./timeline.js";
import { ending, progress, prompts, verdict } from "./verdict.js";
import { Workers } from "./workers.js";

const REFRESH_MS = 2000;
// Events that are read again, because the series may be some milliseconds older.
const OVERLAP = 20;

let who = null;
let runs = [];
let shown = null; // {key, all: [Series], tab, stop}

async function refresh() {
  try {
    const [list] = await Promise.all([getJson("/v1/runs?page_size=200"), who ?? getJson("/page/who").then((me) => { who = me; })]);
    runs = list.items;
    await show();
    $("trouble").hidden = true;
    $("sign-in").hidden = true;
  } catch (error) {
    showError(error);
  }
}

function showError(error) {
  const needsToken = error instanceof TokenNeeded;
  $("sign-in").hidden = !needsToken;
  $("trouble").hidden = needsToken;
  $("trouble").textContent = error instanceof ApiError ? error.message : `The controller does not answer: ${error.message}`;
  if (!needsToken && !(error instanceof ApiError)) console.warn(error);
}

/** Updates the page to the address and to the current state of the run. */
async function show() {
  $("empty").hidden = runs.length > 0;
  if (!current().run && runs.length) go({ ...current(), run: defaultRun(runs).id }, { replaces: true });
  const where = current();
  listRuns(runs);
  $("run").hidden = !where.run;
  if (!where.run) return;
  const key = [where.run, ...where.others].join(" ");
  const isNew = shown?.key !== key;
  if (isNew) await open(key, where);
  if (shown?.key !== key || !shown.all) return; // the address changed meanwhile, or the run is still being read
  if (shown.tab !== where.tab) openTab(where.tab);
  else shown.view.find?.(where.search);
  if (!isNew) {
    const run = await getJson(`/v1/runs/${where.run}`);
    if (shown.key !== key) return;
    Object.assign(shown.all[0].run, run);
  }
  head();
  shown.view.refresh?.(shown.all[0].run);
}

async function open(key, { run: id, others }) {
  close();
  const opened = { key, tab: "", stop: new AbortController() };
  shown = opened;
  const all = [id, ...others].map((each) => new Series({ id: each }));
  const newest = await Promise.all(all.map(readWhole)).catch((error) => {
    if (shown === opened) shown = null; // retried at the next refresh
    throw error;
  });
  if (shown !== opened) return;
  const found = all.map(({ run }) => run);
  for (const series of all) series.label = labelOf(series.run, found);
  opened.all = all;
  all.forEach((series, index) => { if (isActive(series.run)) follow(opened, series, newest[index]); });
}

/** Reads a run with its series; returns the number of an event that both certainly include. */
async function readWhole(series) {
  const path = `/v1/runs/${series.run.id}`;
  const [run, { items }] = await Promise.all([getJson(path), getJson(`${path}/events?order_by=-seq&limit=1`), series.read()]);
  Object.assign(series.run, run);
  series.begin = Date.parse(run.start_time ?? run.create_time) / 1000;
  return Math.max((items[0]?.seq ?? 0) - OVERLAP, 0);
}

function close() {
  shown?.stop.abort();
  shown?.view?.close();
}

/** Returns a run's label among others: its name, with its id if the name is not unique. */
function labelOf(run, all) {
  return all.filter(({ name }) => name === run.name).length > 1 ? `${run.name} ${run.id.slice(-6)}` : run.name;
}

function openTab(tab) {
  shown.view?.close();
  shown.tab = tab;
  const where = current();
  $("tabs").replaceChildren(...TABS.map(([name, text]) => h("a", {
    href: address({ ...where, tab: name, search: {} }), role: "tab", id: `tab-${name}`, "aria-selected": String(name === tab), "aria-controls": "panel", tabIndex: name === tab ? 0 : -1,
  }, text)));
  $(`tab-${tab}`).scrollIntoView({ inline: "center", block: "nearest" });
  $("panel").setAttribute("aria-labelledby", `tab-${tab}`);
  $("panel").replaceChildren();
  const [{ run }] = shown.all;
  const others = shown.all.slice(1).map((series) => series.run);
  const makers = {
    curves: (panel) => new Curves(panel, shown.all), timeline: (panel) => new Timeline(panel, run), samples: (panel) => new Samples(panel, run, where.search),
    events: (panel) => new Events(panel, run), workers: (panel) => new Workers(panel, run),
    checkpoints: (panel) => new Checkpoints(panel, run, { role: who.role, say }), configuration: (panel) => new Configuration(panel, run, others),
  };
  shown.view = makers[tab]($("panel"));
}

/** Processes a run's events until it has ended or another run is shown. */
async function follow(opened, series, seq) {
  const { signal } = opened.stop;
  while (!signal.aborted) {
    try {
      for await (const event of readEvents(series.run.id, seq, signal)) {
        if (event.state) return; // the run has ended
        seq = event.seq;
        const isNews = series.onEvent(event);
        if (shown !== opened) return;
        if (series === opened.all[0]) {
          if (!(opened.view instanceof Curves)) opened.view?.onEvent(event);
          if (isNews) head();
        }
        if (isNews && opened.view instanceof Curves) opened.view.onEvent();
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

const head = oncePerFrame(() => {
  if (!shown?.all) return;
  const [series] = shown.all;
  const { run } = series;
  document.title = `${run.name} ${run.state.toLowerCase()} ${run.step} – Slipstream`;
  $("name").textContent = run.name;
  $("state").textContent = run.state;
  $("state").className = `state ${run.state}`;
  $("progress").textContent = progress(run, series);
  $("bar").max = run.target_steps || 1;
  $("bar").value = run.step;
  $("id").textContent = run.id;
  $("prompts").textContent = prompts(run.summary?.prompts);
  const message = ending(run);
  $("message").textContent = message;
  $("message").hidden = !message;
  $("verdict").textContent = verdict(series, run.spec?.topology?.placement, run.summary?.advice);
  $("learning").textContent = run.summary?.nothing_learned?.message || run.summary?.reward_drop?.message || "";
  const legend = shown.all.length < 2 ? [] : shown.all.map(({ label }, index) => h("span", {}, h("i", { class: `swatch colour-${index}` }), label));
  $("compared").replaceChildren(...legend);
  offerActions(run, who.role, say);
});

function say(text, isTrouble = false) {
  $("said").textContent = text;
  $("said").className = isTrouble ? "bad" : "";
  $("said").hidden = false;
  setTimeout(() => { if ($("said").textContent === text) $("said").hidden = true; }, isTrouble ? 20000 : 5000);
  refresh();
}

$("sign-in").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  useToken($("token").value);
  who = null;
  refresh();
});
$("search").addEventListener("input", () => listRuns(runs));
$("tabs").addEventListener("keydown", (key) => {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[key.key];
  if (!way) return;
  const names = TABS.map(([name]) => name);
  const tab = names[(names.indexOf(current().tab) + way + names.length) % names.length];
  go({ ...current(), tab, search: {} });
  refresh().then(() => $(`tab-${tab}`)?.focus());
});
const narrow = matchMedia("(max-width: 50rem)");
narrow.onchange = () => { $("choose").open = !narrow.matches; };
narrow.onchange();
onMove(() => {
  if (narrow.matches) $("choose").open = false; // a run was chosen
  show().catch(showError);
});
const code = new URLSearchParams(location.hash.slice(1)).get("code");
if (code) {
  history.replaceState(null, "", location.pathname + location.search); // the code works once, so remove it from the address
  await signIn(code);
}
await refresh();
setInterval(refresh, REFRESH_MS);
