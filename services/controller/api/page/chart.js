// A chart over steps: values at the cursor, lines that can be hidden, zoom by dragging.
import { h } from "./dom.js";
import { duration, short } from "./format.js";
import { address, current } from "./route.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";

const HEIGHT = 190;
const WAIT_PREFIX = "idle_seconds_";
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [1, 3]];

export class Chart {
  /**
   * @param title, unit Title and unit.
   * @param lines [[label, metric], ...], or a prefix of metric names
   * @param source "steps", or "scores" for evaluations
   * @param view State that all charts share: series, smoothing, axis, zoom(from, to)
   */
  constructor([title, unit, lines, source = "steps"], view) {
    const beginning = typeof lines === "string" ? lines : "";
    Object.assign(this, { title, beginning, lines: beginning ? [] : lines, source, view, hidden: new Set(), isLog: false, isStale: true });
    this.where = h("span", { class: "where" });
    this.logs = h("button", {
      type: "button", class: "part", "aria-pressed": "false", title: "Logarithmic axis",
      "aria-label": `Logarithmic axis for ${title}`, onclick: () => this.#toggleLog(),
    }, "log");
    this.samples = h("a", { hidden: true });
    this.plot = h("div", {
      class: "plot", tabIndex: 0, role: "img", "aria-label": title, onkeydown: (key) => this.#onKey(key), onclick: () => this.#onClick(),
    });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { "data-chart": title },
      h("figcaption", {}, h("b", {}, title), unit && h("span", { class: "quiet" }, ` ${unit}`), this.where, this.samples, this.logs),
      this.plot, this.legend);
  }

  /** True if a run has a value to draw. */
  get hasValues() {
    return this.view.runs.some((run) => this.lines.some(([, key]) => this.#values(run, key)));
  }

  /** Draws the current values of the view's series. */
  draw() {
    this.isStale = false;
    const { data, series } = this.#table();
    const shape = JSON.stringify([series.map(({ label, stroke, width }) => [label, stroke, width]), this.view.axis, this.isLog]);
    if (this.uplot && shape === this.shape) {
      this.uplot.setData(data);
    } else {
      this.uplot?.destroy();
      this.shape = shape;
      this.#entries(series);
      this.uplot = new uPlot(this.#options(series), data, this.plot);
    }
    this.#updateLegend();
  }

  /** Adapts to the width of the page. */
  fit() {
    if (this.uplot && this.plot.clientWidth) this.uplot.setSize({ width: this.plot.clientWidth, height: HEIGHT });
  }

  remove() {
    this.uplot?.destroy();
    this.uplot = null;
  }

  /** Returns the columns for uPlot, and the properties of each. */
  #table() {
    const { runs, smoothing, axis } = this.view;
    const tables = [];
    const series = [{}];
    runs.forEach((run, runIndex) => {
      const table = [this.#x(run, axis)];
      this.lines.forEach(([label, key], lineIndex) => {
        const values = this.#values(run, key);
        if (!values) return;
        const colour = runs.length > 1 ? runIndex : lineIndex;
        const line = {
          label: runs.length > 1 ? `${run.label} ${label}` : label, key: `${run.run.id} ${key}`, colour,
          dash: DASHES[lineIndex % DASHES.length], width: 1.6, values, // a line under another one shows through its gaps
        };
        if (smoothing) {
          table.push(values);
          series.push({ ...line, isRaw: true, width: 0.6 });
        }
        table.push(smoothing ? smooth(values, smoothing) : values);
        series.push(line);
      });
      tables.push(table);
    });
    const styles = getComputedStyle(document.documentElement);
    for (const line of series.slice(1)) {
      const colour = styles.getPropertyValue(`--line-${line.colour % 8}`).trim();
      line.stroke = line.isRaw ? `${colour}66` : colour;
    }
    return { data: tables.length === 1 ? tables[0] : uPlot.join(tables), series };
  }

  #x(run, axis) {
    if (this.source === "scores" && axis === "time") return run.scores.map(({ step }) => timeOf(run, step));
    if (this.source === "scores") return run.scores.map(({ step }) => step);
    return axis === "time" ? run.times.map((time) => time - run.begin) : run.steps;
  }

  #values(run, key) {
    const values = this.source === "scores" ? run.scores.map((score) => score[key] ?? null) : run.columns.get(key);
    if (!values?.some((value) => value !== null)) return null;
    if (key.startsWith(WAIT_PREFIX)) return values.map((value) => value ?? 0); // steps without a wait have no such metric
    return this.isLog ? values.map((value) => (value > 0 ? value : null)) : values;
  }

  #options(series) {
    const styles = getComputedStyle(document.documentElement);
    const [grid, text] = ["--line", "--quiet"].map((name) => styles.getPropertyValue(name).trim());
    const look = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, font: "11px system-ui" };
    const inTime = this.view.axis === "time";
    return {
      width: this.plot.clientWidth || 320, height: HEIGHT, legend: { show: false }, pxAlign: 0,
      scales: { x: { time: false }, y: this.isLog ? { distr: 3 } : {} },
      axes: [
        { ...look, size: 26, space: 55, values: (_, ticks) => ticks.map((tick) => (inTime ? duration(tick) : tickText(tick))) },
        { ...look, size: 48, space: 28, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) },
      ],
      series: series.map((line, index) => (index ? {
        label: line.label, stroke: line.stroke, width: line.width, dash: line.dash, spanGaps: true,
        show: !this.hidden.has(line.key), points: { show: line.values.length < 2 || this.source === "scores", size: 4 },
      } : {})),
      cursor: {
        // Cursors move together; a selection is not shared.
        sync: { key: "slipstream", setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.view.zoom(null) },
      },
      hooks: { setCursor: [() => this.#updateLegend()], setSelect: [(plot) => this.#onSelect(plot)] },
    };
  }

  #entries(series) {
    this.shown = series.map((line, index) => ({ ...line, index })).filter((line) => line.index && !line.isRaw);
    this.texts = this.shown.map(() => h("span", {}));
    this.legend.replaceChildren(...this.shown.map((line, index) => h("button", {
      type: "button", "aria-pressed": String(!this.hidden.has(line.key)), title: "Show or hide the line",
      onclick: (click) => {
        if (!this.hidden.delete(line.key)) this.hidden.add(line.key);
        const isShown = !this.hidden.has(line.key);
        click.currentTarget.setAttribute("aria-pressed", String(isShown));
        series.forEach((one, at) => { if (one.key === line.key) this.uplot.setSeries(at, { show: isShown }); });
      },
    }, h("i", { class: `swatch colour-${line.colour % 8}` }), this.texts[index])));
    if (!this.shown.length) this.legend.replaceChildren(h("span", { class: "quiet" }, "no values yet"));
  }

  /** Shows the values at the cursor, or the last ones. */
  #updateLegend() {
    if (!this.uplot) return; // uPlot calls while it is made
    const { data, cursor } = this.uplot;
    const [x] = data;
    const at = cursor.idx;
    const texts = this.shown.map((line, index) => {
      const column = data[line.index];
      const value = at === null || at === undefined ? column.findLast((one) => one !== null && one !== undefined) : near(column, at);
      this.texts[index].textContent = `${line.label} ${short(value)}`;
      return this.texts[index].textContent;
    });
    const position = x[at] === undefined ? "" : this.view.axis === "time" ? duration(x[at]) : `step ${x[at]}`;
    this.where.textContent = position;
    this.plot.setAttribute("aria-label", `${this.title}, ${position || "newest"}: ${texts.join(", ") || "no values yet"}`);
  }

  #onSelect(plot) {
    if (plot.select.width < 4) return;
    const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((left) => plot.posToVal(left, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.view.zoom(from, to);
  }

  #toggleLog() {
    this.isLog = !this.isLog;
    this.logs.setAttribute("aria-pressed", String(this.isLog));
    this.draw();
  }

  /** Links to the samples of the step at the cursor. */
  #onClick() {
    const x = this.uplot.data[0][this.uplot.cursor.idx];
    if (x === undefined) return;
    const [run] = this.view.runs;
    const step = this.view.axis === "time" ? run.steps[run.times.findLastIndex((time) => time - run.begin <= x)] : x;
    const split = this.source === "scores" ? { split: "heldout" } : {};
    this.samples.href = address({ ...current(), tab: "samples", search: { ...split, order_by: "worst", step } });
    this.samples.textContent = `samples of step ${step}`;
    this.samples.hidden = false;
  }

  /** Arrow keys move the cursor of all charts, Enter links to samples, + and - zoom, Escape resets. */
  #onKey(key) {
    const { uplot } = this;
    const [x] = uplot.data;
    const at = uplot.cursor.idx ?? x.length;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: x.length - 1 };
    if (key.key in moves && x.length) {
      const index = Math.min(Math.max(moves[key.key], 0), x.length - 1);
      uplot.setCursor({ left: uplot.valToPos(x[index], "x"), top: HEIGHT / 2 });
    } else if (key.key === "Enter") this.#onClick();
    else if (key.key === "+") this.view.zoomBy(0.5, uplot.cursor.idx === null ? undefined : x[at]);
    else if (key.key === "-") this.view.zoomBy(2);
    else if (key.key === "Escape") {
      uplot.setCursor({ left: -10, top: -10 });
      this.view.zoom(null);
    } else return;
    key.preventDefault();
  }
}

/** Exponential moving average with bias correction. */
function smooth(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Returns the value at an index, or the last one before it: runs may have different steps. */
function near(column, index) {
  while (index > 0 && (column[index] === null || column[index] === undefined)) index -= 1;
  return column[index];
}

function timeOf(run, step) {
  const index = run.steps.findIndex((known) => known >= step);
  return (index < 0 ? run.times.at(-1) ?? run.begin : run.times[index]) - run.begin;
}

function tickText(step) {
  return Number.isInteger(step) ? String(step) : "";
}
