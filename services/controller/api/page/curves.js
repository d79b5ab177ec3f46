// The curves of a run and of runs to compare with it: smoothing, axes, zoom.
import { isActive } from "./actions.js";
import { CATALOG, HISTOGRAMS, furtherCharts, linesOf } from "./catalog.js";
import { Chart } from "./chart.js";
import { choice, h, oncePerFrame } from "./dom.js";
import { Series } from "./series.js";
import { Histogram } from "./histogram.js";
import { ending } from "./verdict.js";

const SETTINGS = "slipstream-curves";

export class Curves {
  /**
   * @param panel Element to fill.
   * @param all Series of whole runs: the shown one first.
   */
  constructor(panel, all) {
    const saved = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    Object.assign(this, { all, runs: all, axis: "step", smoothing: 0, ...saved, range: null, charts: [] });
    this.draw = oncePerFrame(() => this.#draw());
    this.body = h("div", {});
    panel.replaceChildren(this.#tools(), this.body);
    this.visible = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        target.chart.isVisible = isIntersecting;
        if (isIntersecting && target.chart.isStale) target.chart.draw();
      }
    }, { rootMargin: "200px" });
    this.sizes = new ResizeObserver(oncePerFrame(() => this.charts.forEach((chart) => chart.isVisible && chart.fit())));
    this.sizes.observe(panel);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.onchange = () => this.draw();
    this.#build();
  }

  close() {
    this.visible.disconnect();
    this.sizes.disconnect();
    this.scheme.onchange = null;
    this.charts.forEach((chart) => chart.remove());
  }

  /** Updates the charts after an event with new values. */
  onEvent() {
    if (!this.range) this.draw();
  }

  /** Zooms to steps (or seconds, by the axis) `from` to `to`; shows all of them if `from` is null. */
  async zoom(from, to) {
    const wanted = (this.wanted = from === null ? null : [from, to]);
    let runs = this.all;
    if (wanted) {
      runs = await Promise.all(this.all.map((whole) => {
        const part = Object.assign(new Series(whole.run, whole), { label: whole.label, begin: whole.begin });
        return part.read(...(this.axis === "time" ? stepsBetween(whole, from, to) : [Math.max(from, 1), Math.max(to, 1)]));
      }));
      for (const part of runs) {
        const [first, last] = [part.steps[0] ?? 0, part.steps.at(-1) ?? 0];
        part.scores = part.scores.filter(({ step }) => step >= first && step <= last);
      }
    }
    if (wanted !== this.wanted) return; // another part was chosen meanwhile
    this.range = wanted;
    this.runs = runs;
    this.#showRange();
    this.draw();
  }

  /** Scales the shown range around `middle`. */
  zoomBy(factor, middle) {
    const xs = this.all.map(({ steps, times, begin }) => (this.axis === "time" ? times.map((time) => time - begin) : steps));
    const [first, last] = [Math.min(...xs.map((x) => x[0] ?? 0)), Math.max(...xs.map((x) => x.at(-1) ?? 1))];
    const [from, to] = this.range ?? [first, last];
    const width = (to - from) * factor;
    if (width >= last - first) return this.zoom(null);
    const begin = Math.min(Math.max((middle ?? (from + to) / 2) - width / 2, first), last - width);
    return this.zoom(begin, begin + width);
  }

  #tools() {
    this.from = h("input", { type: "number", min: 1, "aria-label": "First step", placeholder: "first" });
    this.to = h("input", { type: "number", min: 1, "aria-label": "Last step", placeholder: "last" });
    this.reset = h("button", { type: "button", class: "part", disabled: true, onclick: () => this.zoom(null) }, "all");
    const smoothing = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: String(this.smoothing), "aria-label": "Smoothing",
      oninput: () => { this.smoothing = Number(smoothing.value); this.#saveSettings(); },
    });
    const axis = choice("Horizontal axis", [["step", "steps"], ["time", "time"]], this.axis, (value) => {
      this.axis = value;
      this.#saveSettings();
      this.zoom(null);
    });
    return h("form", { class: "tools", onsubmit: (submitted) => this.#onRange(submitted) },
      h("label", {}, "smoothing ", smoothing), axis,
      h("span", { class: "choice", role: "group", "aria-label": "Zoom" },
        h("button", { type: "button", class: "part", "aria-label": "Zoom in", onclick: () => this.zoomBy(0.5) }, "+"),
        h("button", { type: "button", class: "part", "aria-label": "Zoom out", onclick: () => this.zoomBy(2) }, "−"),
        this.reset),
      h("span", {}, "steps ", this.from, " to ", this.to, " ", h("button", { class: "part" }, "show")),
      h("span", { class: "quiet hint" }, "drag over a chart to zoom, double-click for all"));
  }

  #onRange(submitted) {
    submitted.preventDefault();
    const steps = this.all.flatMap((run) => [run.steps[0] ?? 1, run.steps.at(-1) ?? 1]);
    const from = Number(this.from.value) || Math.min(...steps);
    const to = Number(this.to.value) || Math.max(...steps);
    const [first] = this.all;
    if (this.axis === "time") this.zoom(...[from, to].map((step) => (first.times[first.steps.findLastIndex((one) => one <= step)] ?? first.begin) - first.begin));
    else this.zoom(Math.min(from, to), Math.max(from, to));
  }

  #saveSettings() {
    localStorage.setItem(SETTINGS, JSON.stringify({ axis: this.axis, smoothing: this.smoothing }));
    this.draw();
  }

  #showRange() {
    this.reset.disabled = !this.range;
    const [first, last] = this.range ? [this.runs[0].steps[0], this.runs[0].steps.at(-1)] : ["", ""];
    this.from.value = first ?? "";
    this.to.value = last ?? "";
  }

  /** Creates the charts; those of other metrics are added when steps have them. */
  #build() {
    const sections = CATALOG.map(([heading, charts]) => [heading, charts.map((chart) => new Chart(chart, this))]);
    this.key = new Set(sections[0][1]);
    sections.find(([heading]) => heading === "Off-policy")[1].push(...HISTOGRAMS.map((spread) => new Histogram(spread, this)));
    this.further = h("details", { class: "further", ontoggle: () => this.#readAll() }, h("summary", {}), h("div", { class: "charts" }));
    this.furtherNames = new Set();
    this.sections = sections.map(([heading, charts], index) => h("section", { "aria-label": heading }, h("h3", {}, heading),
      h("div", { class: index ? "charts" : "charts glance" }, charts.map((chart) => this.#attach(chart)))));
    this.empty = h("p", { class: "quiet" });
    this.body.replaceChildren(...this.sections, this.further, this.empty);
    this.draw();
  }

  #attach(chart) {
    chart.element.chart = chart;
    this.charts.push(chart);
    this.visible.observe(chart.element);
    return chart.element;
  }

  /** Reads the other metrics when their section is opened. */
  async #readAll() {
    if (!this.further.open || this.all.every(({ isWhole }) => isWhole)) return;
    for (const series of this.all) series.isWhole = true;
    await Promise.all(this.all.map((series) => series.read()));
    await this.zoom(...(this.range ?? [null]));
  }

  #updateFurther() {
    const names = new Set(this.runs.flatMap((run) => [...run.columns.keys(), ...run.scores.flatMap(Object.keys)]));
    const isWhole = this.all.every((series) => series.isWhole);
    for (const chart of this.charts.filter(({ beginning }) => beginning)) {
      const lines = linesOf(chart.beginning, names);
      chart.lines = lines.filter(([, key]) => !this.#isCopy(key, chart.source));
      chart.isCopy = lines.length > 0 && !chart.lines.length;
    }
    this.further.children[0].textContent = `All other metrics of steps${isWhole ? ` (${furtherCharts(names).length})` : ""}`;
    if (names.size === this.furtherNames.size) return;
    const [, place] = this.further.children;
    this.charts = this.charts.filter((chart) => !place.contains(chart.element) || chart.remove());
    this.furtherNames = names;
    const charts = furtherCharts(names);
    place.replaceChildren(...charts.map((chart) => this.#attach(new Chart(chart, this))));
    this.further.hidden = isWhole && !charts.length;
  }

  /** Returns true if a metric of a term or a set equals one of the first charts, as with a single term or set. */
  #isCopy(key, source) {
    const valuesOf = (run, name) => (source === "scores" ? run.scores.map((score) => score[name] ?? null) : run.columns.get(name) ?? []);
    return ["reward_mean", "greedy", "sampled"].some((first) => this.runs.every((run) => {
      const [values, others] = [valuesOf(run, key), valuesOf(run, first)];
      return values.length === others.length && values.every((value, index) => value === others[index]);
    }));
  }

  /** Hides charts without values, except the key ones, and lists their titles. */
  #hideEmpty() {
    const [{ run }] = this.all;
    const isBare = !isActive(run) && this.all.every(({ steps, scores }) => !steps.length && !scores.length);
    const empty = this.charts.filter((chart) => (isBare || !this.key.has(chart)) && !chart.hasValues);
    for (const chart of this.charts) chart.element.hidden = empty.includes(chart);
    for (const section of this.sections) section.hidden = [...section.querySelectorAll("figure")].every(({ hidden }) => hidden);
    const titles = empty.filter(({ isCopy }) => !isCopy).map(({ title }) => title);
    this.empty.textContent = isBare ? `The run ended before its first step: ${ending(run)}` : titles.length ? `Without values: ${titles.join(", ")}` : "";
    if (isBare) this.further.hidden = true;
  }

  #draw() {
    this.#updateFurther();
    this.#hideEmpty();
    for (const chart of this.charts) {
      chart.isStale = true;
      if (chart.isVisible) chart.draw();
    }
  }
}

/** Returns the first and last step that a run trained between two times, in seconds from its start. */
function stepsBetween({ steps, times, begin }, from, to) {
  const first = times.findIndex((time) => time - begin >= from);
  const last = times.findLastIndex((time) => time - begin <= to);
  return [steps[Math.max(first, 0)] ?? 1, steps[Math.max(last, 0)] ?? 1];
}
