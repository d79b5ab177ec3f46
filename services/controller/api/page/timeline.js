// The time line of a run: a lane for the trainer, each rollout, weight syncs, evaluations and events.
import { getJson } from "./api.js";
import { choice, h, oncePerFrame, table } from "./dom.js";
import { clock, duration } from "./format.js";
import { KINDS, TYPES, gaps, lanesOf, shares } from "./lanes.js";

const PAGE = 400;
const MAX_EVENTS = 4000;
const LEFT = 92;
const ROW = 26;
const AXIS = 22;

export class Timeline {
  constructor(panel, run) {
    Object.assign(this, { run, events: [], count: 30, offset: 0, isWhole: false, pieces: [], at: null });
    this.canvas = h("canvas", {
      tabIndex: 0, role: "img", "aria-label": "Time line", onpointermove: (move) => this.#onPointer(move),
      onpointerleave: () => this.#describe(null), onkeydown: (key) => this.#onKey(key),
    });
    this.label = h("p", { class: "label", role: "status" }, "");
    this.sums = h("div", {});
    this.older = h("button", { type: "button", class: "part", onclick: () => this.#move(1) }, "← older");
    this.newer = h("button", { type: "button", class: "part", onclick: () => this.#move(-1) }, "newer →");
    const many = choice("Steps shown", [["10", "10"], ["30", "30"], ["100", "100"], ["300", "300"]], "30", (count) => {
      this.count = Number(count);
      this.#fill();
    });
    panel.replaceChildren(
      h("div", { class: "tools" }, h("span", {}, "steps ", many), h("span", { class: "choice" }, this.older, this.newer)),
      h("figure", { class: "wide" }, this.canvas, this.label, h("div", { class: "legend" }, KINDS.map((kind, index) => h("span", {},
        h("i", { class: `swatch kind-${index}` }), kind)))),
      h("h3", {}, "In this window"), this.sums);
    this.draw = oncePerFrame(() => this.#draw());
    this.sizes = new ResizeObserver(this.draw);
    this.sizes.observe(panel);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.onchange = this.draw;
    this.#fill();
  }

  close() {
    this.sizes.disconnect();
    this.scheme.onchange = null;
  }

  onEvent(event) {
    if (!TYPES.includes(event.type) || event.seq <= (this.events.at(-1)?.seq ?? 0)) return;
    this.events.push(event);
    if (this.offset && event.type === "StepCommitted") this.offset += 1; // keep showing the past steps
    else if (this.events.length > MAX_EVENTS) this.events.splice(0, PAGE);
    this.draw();
  }

  async #move(direction) {
    this.offset = Math.max(this.offset + direction * Math.ceil(this.count / 2), 0);
    await this.#fill();
  }

  /** Reads events until the window is full, or the run's start is reached. */
  async #fill() {
    const steps = () => this.events.filter(({ type }) => type === "StepCommitted").length;
    while (!this.isWhole && steps() < this.offset + this.count) {
      const oldest = this.events[0]?.seq ?? 0;
      const types = TYPES.map((type) => `type=${type}`).join("&");
      // A step has about two events, and they are large.
      const limit = Math.min(PAGE, 3 * (this.offset + this.count - steps()));
      const { items } = await getJson(`/v1/runs/${this.run.id}/events?order_by=-seq&limit=${limit}&before_seq=${oldest}&${types}`);
      this.isWhole = items.length < limit;
      const known = this.events[0]?.seq ?? Infinity;
      this.events.unshift(...items.reverse().filter(({ seq }) => seq < known));
    }
    this.offset = Math.max(Math.min(this.offset, steps() - this.count), 0);
    this.draw();
  }

  /** Returns the events, and the time range of the shown steps. */
  #window() {
    const steps = this.events.filter(({ type }) => type === "StepCommitted");
    const last = steps.length - this.offset;
    const shown = steps.slice(Math.max(last - this.count, 0), last);
    if (!shown.length) return { events: this.events, from: 0, to: 0 };
    const [first, newest] = [shown[0], shown.at(-1)];
    const from = Date.parse(first.time) / 1000 - first.data.seconds;
    const to = this.offset ? Date.parse(newest.time) / 1000 : Math.max(Date.parse(newest.time), Date.parse(this.events.at(-1).time)) / 1000;
    return { events: this.events, from, to };
  }

  #draw() {
    const { events, from, to } = this.#window();
    this.older.disabled = this.isWhole && from <= Date.parse(events.find(({ type }) => type === "StepCommitted")?.time ?? 0) / 1000;
    this.newer.disabled = this.offset === 0;
    const lanes = lanesOf(events).map(([name, pieces]) => [name, pieces.filter((piece) => piece.end >= from && piece.begin <= to)]);
    const trainer = lanes.find(([name]) => name === "trainer")[1];
    trainer.push(...gaps(trainer, "between steps", from, to));
    trainer.sort((a, b) => a.begin - b.begin);
    const width = this.canvas.parentElement.clientWidth - 24;
    const height = lanes.length * ROW + AXIS;
    const scale = devicePixelRatio;
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.pieces = [];
    if (to > from) this.#paint(pen, { lanes, from, to, width, height });
    this.#showShares(lanes, from, to);
    this.#describe(null);
  }

  #paint(pen, { lanes, from, to, width, height }) {
    const styles = getComputedStyle(document.documentElement);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT);
    pen.font = "12px system-ui";
    lanes.forEach(([name, pieces], row) => {
      const top = row * ROW;
      pen.globalAlpha = 1;
      pen.fillStyle = colour("--quiet");
      pen.fillText(name, 0, top + ROW / 2 + 4, LEFT - 8);
      pen.fillStyle = colour("--line");
      pen.fillRect(LEFT, top + ROW - 3, width - LEFT, 1);
      for (const piece of pieces) {
        const [left, right] = [Math.max(x(piece.begin), LEFT), Math.min(x(piece.end), width)];
        const size = Math.max(right - left - (right - left > 4 ? 1 : 0), 1.5);
        const full = ROW - 6;
        pen.fillStyle = colour(`--kind-${KINDS.indexOf("idle")}`);
        if (piece.part < 1) pen.fillRect(left, top + 2, size, full);
        pen.fillStyle = colour(`--kind-${KINDS.indexOf(piece.kind)}`);
        pen.fillRect(left, top + 2 + full * (1 - piece.part), size, full * piece.part);
        this.pieces.push({ ...piece, left, right: left + size, row });
      }
    });
    pen.fillStyle = colour("--quiet");
    pen.globalAlpha = 1;
    pen.fillText(clock(from * 1000), LEFT, height - 6);
    pen.textAlign = "right";
    pen.fillText(`${clock(to * 1000)} (${duration(to - from)})`, width, height - 6);
  }

  #showShares(lanes, from, to) {
    const rows = to <= from ? [] : shares(lanes, from, to).map(([name, parts]) => [
      name, parts.map(([kind, percent]) => `${kind} ${percent} %`).join(", "),
    ]);
    this.sums.replaceChildren(table("Shares of the window", ["lane", "share of the time"], rows, "No steps yet."));
  }

  #onPointer(move) {
    const row = Math.floor(move.offsetY / ROW);
    const near = this.pieces.filter((piece) => piece.row === row && move.offsetX >= piece.left - 2 && move.offsetX <= piece.right + 2);
    this.#describe(near.at(-1) ?? null);
  }

  #onKey(key) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[key.key];
    if (!way || !this.pieces.length) return;
    key.preventDefault();
    const last = this.pieces.length - 1;
    const index = this.at === null ? (way < 0 ? last : 0) : Math.min(Math.max(this.pieces.indexOf(this.at) + way, 0), last);
    this.#describe(this.pieces[index]);
  }

  #describe(piece) {
    this.at = piece;
    this.label.textContent = piece ? `${piece.label}, ${clock(piece.begin * 1000)}${piece.end > piece.begin ? `, ${duration(piece.end - piece.begin)}` : ""}`
      : "Point at a piece, or select one with the arrow keys.";
  }
}
