// A histogram over steps: one column per step, one row per bucket, darker for more of the step's samples.
import { h } from "./dom.js";

const LEFT = 56;
const BOTTOM = 20;
const HEIGHT = 190;

export class Histogram {
  constructor([title, name, unit], view) {
    Object.assign(this, { title, name, view, isStale: true, at: null });
    this.where = h("span", { class: "where" });
    this.canvas = h("canvas", {
      tabIndex: 0, role: "img", "aria-label": title, onpointermove: (move) => this.#onPointer(move),
      onpointerleave: () => this.#showStep(null), onkeydown: (key) => this.#onKey(key),
    });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { "data-chart": title },
      h("figcaption", {}, h("b", {}, title), h("span", { class: "quiet" }, ` ${unit}`), this.where),
      h("div", { class: "plot" }, this.canvas), this.legend);
  }

  get hasValues() {
    return Boolean(this.view.runs[0].histograms.get(this.name)?.bounds.length);
  }

  draw() {
    this.isStale = false;
    const [series] = this.view.runs;
    this.steps = series.steps;
    this.histogram = series.histograms.get(this.name);
    const width = this.element.clientWidth - 24;
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = HEIGHT * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    if (this.histogram?.bounds.length) this.#paint(pen, width);
    this.#showStep(null);
  }

  fit() { this.draw(); }

  remove() {}

  #paint(pen, width) {
    const { bounds, counts } = this.histogram;
    const styles = getComputedStyle(document.documentElement);
    const [fill, text] = ["--line-0", "--quiet"].map((name) => styles.getPropertyValue(name).trim());
    this.cell = (width - LEFT) / counts.length;
    const row = (HEIGHT - BOTTOM) / bounds.length;
    pen.fillStyle = fill;
    counts.forEach((column, x) => {
      const total = column.reduce((sum, count) => sum + count, 0);
      column.forEach((count, y) => {
        if (!count) return;
        pen.globalAlpha = 0.12 + 0.88 * (count / total);
        pen.fillRect(LEFT + x * this.cell, HEIGHT - BOTTOM - (y + 1) * row, Math.ceil(this.cell), Math.ceil(row));
      });
    });
    pen.globalAlpha = 1;
    pen.fillStyle = text;
    pen.font = "11px system-ui";
    pen.textAlign = "right";
    const every = Math.ceil(bounds.length / (HEIGHT / 20));
    bounds.forEach((_, y) => {
      if (y % every === 0) pen.fillText(bucket(bounds, y), LEFT - 6, HEIGHT - BOTTOM - (y + 0.5) * row + 4);
    });
    pen.textAlign = "left";
    pen.fillText(this.steps[0], LEFT, HEIGHT - 5);
    pen.textAlign = "right";
    pen.fillText(this.steps.at(-1), width, HEIGHT - 5);
  }

  #onPointer(move) {
    if (!this.histogram) return;
    const index = Math.floor((move.offsetX - LEFT) / this.cell);
    this.#showStep(index >= 0 && index < this.steps.length ? index : null);
  }

  #onKey(key) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key.key];
    if (!step || !this.histogram) return;
    key.preventDefault();
    const last = this.steps.length - 1;
    this.#showStep(Math.min(Math.max((this.at ?? last + (step < 0 ? 1 : 0)) + step, 0), last));
  }

  /** Shows the counts of a step; of the newest one if `at` is null. */
  #showStep(at) {
    this.at = at;
    const counts = this.histogram?.counts.at(at ?? -1) ?? [];
    const parts = counts.map((count, y) => (count ? `${bucket(this.histogram.bounds, y)}: ${count}` : "")).filter(Boolean);
    this.where.textContent = at === null ? "" : `step ${this.steps[at]}`;
    this.legend.textContent = parts.join(" · ") || "no values yet";
    this.canvas.setAttribute("aria-label", `${this.title}, ${this.where.textContent || "newest step"}: ${this.legend.textContent}`);
  }
}

/** Returns the range of numbers in a bucket; bounds grow by a half or a third. */
function bucket(bounds, index) {
  const bound = bounds[index];
  if (bound < 5) return String(bound);
  const isPower = (bound & (bound - 1)) === 0;
  const lowest = (isPower ? (bound * 3) / 4 : (bound * 2) / 3) + 1;
  return lowest === bound ? String(bound) : `${lowest}–${bound}`;
}
