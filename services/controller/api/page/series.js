// Metrics of a run's steps, as columns; new values arrive with the run's events.
import { getJson } from "./api.js";
import { CHARTED, isCharted } from "./catalog.js";

const POINTS = 300;
const MAX_POINTS = 1500;

/** Columns of some steps of a run, with its evaluations. */
export class Series {
  /**
   * @param run The run.
   * @param isWhole True to read all metrics; otherwise those of the charts, which is faster.
   */
  constructor(run, { isWhole = false } = {}) {
    this.run = run;
    this.isWhole = isWhole;
    this.steps = [];
    this.times = []; // seconds since the epoch
    this.columns = new Map();
    this.histograms = new Map(); // name -> {bounds, counts}
    this.scores = []; // {step, greedy, sampled, "heldout/SET NAME"}, in order
  }

  /** Reads steps `from` to `to`, thinned out; 0 is the newest. */
  async read(from = 0, to = 0) {
    const path = `/v1/runs/${this.run.id}`;
    const names = this.isWhole ? "" : CHARTED.map((name) => `&name=${encodeURIComponent(name)}`).join("");
    const range = `from_step=${Math.max(Math.floor(from), 0)}&to_step=${Math.max(Math.ceil(to), 0)}`;
    const [page, evaluations] = await Promise.all([
      getJson(`${path}/metrics?max_points=${POINTS}&${range}${names}`),
      getJson(`${path}/events?type=Validated&order_by=-seq&limit=500`),
    ]);
    this.steps = page.steps;
    this.times = page.times.map((time) => Date.parse(time) / 1000);
    this.columns = new Map(page.items.map(({ name, values }) => [name, values]));
    this.histograms = new Map(page.histograms.map((each) => [each.name, each]));
    this.scores = [];
    for (const event of evaluations.items.reverse()) this.#score(event.data);
    return this;
  }

  /** Adds the values of an event; returns true if it changed anything. */
  onEvent(event) {
    if (event.type === "Validated") this.#score(event.data);
    else if (event.type === "StepCommitted") this.#append(event);
    else return false;
    return true;
  }

  /** Returns the last `count` values of a column. */
  last(name, count) {
    return (this.columns.get(name) ?? []).slice(-count);
  }

  #score({ version, greedy, sampled, num_samples: count, by_set: sets = {} }) {
    this.scores = this.scores.filter((score) => score.step < version);
    if (count === 0) return;
    const score = { step: version, greedy, sampled };
    for (const [set, { prompts: _, ...values }] of Object.entries(sets))
      for (const [name, value] of Object.entries(values)) score[`heldout/${set} ${name}`] = value;
    this.scores.push(score);
  }

  #append({ time, data: { step, histograms = {}, ...numbers } }) {
    this.#truncate(this.steps.findLastIndex((known) => known < step) + 1); // a rewound run trains steps again
    this.steps.push(step);
    this.times.push(Date.parse(time) / 1000);
    for (const [name, value] of Object.entries(numbers)) {
      if (typeof value !== "number" || !(this.isWhole || isCharted(name))) continue;
      if (!this.columns.has(name)) this.columns.set(name, Array(this.steps.length - 1).fill(null));
    }
    for (const [name, column] of this.columns) column.push(numbers[name] ?? (name === "step" ? step : null));
    const names = new Set([...this.histograms.keys(), ...Object.keys(histograms)]);
    for (const name of names) this.#addHistogram(name, histograms[name] ?? {});
    if (this.steps.length > MAX_POINTS) this.#thin();
  }

  #addHistogram(name, counts) {
    const known = this.histograms.get(name) ?? { name, bounds: [], counts: this.steps.slice(1).map(() => []) };
    const bounds = [...new Set([...known.bounds, ...Object.keys(counts).map(Number)])].sort((a, b) => a - b);
    const rows = known.counts.map((row) => bounds.map((bound) => row[known.bounds.indexOf(bound)] ?? 0));
    rows.push(bounds.map((bound) => counts[bound] ?? 0));
    this.histograms.set(name, { name, bounds, counts: rows });
  }

  #truncate(count) {
    if (count < this.steps.length) this.#pick((_, index) => index < count);
  }

  #thin() {
    const last = this.steps.length - 1;
    this.#pick((_, index) => (last - index) % 2 === 0);
  }

  #pick(isKept) {
    this.steps = this.steps.filter(isKept);
    this.times = this.times.filter(isKept);
    for (const [name, column] of this.columns) this.columns.set(name, column.filter(isKept));
    for (const histogram of this.histograms.values()) histogram.counts = histogram.counts.filter(isKept);
  }
}
