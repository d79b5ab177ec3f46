// Conditions and events of a run, newest first.
import { getJson } from "./api.js";
import { h, table } from "./dom.js";
import { clock, date } from "./format.js";

const PAGE = 100;
/** Events of every step; curves and the time line show them. */
const QUIET = ["StepCommitted", "WeightsPublished"];

export class Events {
  constructor(panel, run) {
    Object.assign(this, { run, newest: 0, oldest: 0, type: "" });
    this.conditions = h("div", { id: "conditions" });
    this.list = h("ol", { id: "events", reversed: true, tabIndex: 0, "aria-label": "Events, newest first" });
    this.more = h("button", { type: "button", class: "part", onclick: () => this.#read() }, "older");
    const type = h("input", { type: "search", size: 26, placeholder: "type, such as WorkerLost", "aria-label": "Only events of this type", onchange: () => { this.type = type.value.trim(); this.#again(); } });
    panel.replaceChildren(h("h3", {}, "Conditions"), this.conditions, h("h3", {}, "Events ", type), this.list, this.more);
    this.refresh(run);
    this.#again();
  }

  close() {}

  refresh(run) {
    this.conditions.replaceChildren(table("Conditions", ["condition", "status", "since", "reason"], run.conditions.map((condition) => [
      condition.type, condition.status.toLowerCase(), date(condition.last_transition_time), why(condition),
    ]), "No conditions yet."));
  }

  onEvent(event) {
    if (this.type ? event.type !== this.type : QUIET.includes(event.type)) return;
    if (event.seq <= this.newest) return;
    this.newest = event.seq;
    this.oldest ||= event.seq; // the first page may still be on its way
    this.list.prepend(entry(event));
  }

  async #again() {
    this.list.replaceChildren();
    Object.assign(this, { oldest: 0, newest: 0 });
    await this.#read();
  }

  async #read() {
    const { type } = this;
    const only = this.type ? `type=${encodeURIComponent(this.type)}` : QUIET.map((type) => `not_type=${type}`).join("&");
    const { items } = await getJson(`/v1/runs/${this.run.id}/events?order_by=-seq&limit=${PAGE}&before_seq=${this.oldest}&${only}`);
    if (type !== this.type) return; // another page has been asked for
    const older = items.filter(({ seq }) => !this.oldest || seq < this.oldest);
    this.list.append(...older.map(entry));
    this.newest = Math.max(this.newest, older[0]?.seq ?? 0);
    this.oldest = older.at(-1)?.seq ?? this.oldest;
    this.more.hidden = items.length < PAGE;
  }
}

function entry(event) {
  return h("li", {}, h("time", { class: "quiet", datetime: event.time, title: date(event.time) }, clock(event.time)),
    h("b", {}, event.type), h("span", {}, event.message || describe(event.data), event.actor ? ` (${event.actor})` : ""));
}

function describe(data) {
  return Object.entries(data).filter(([, value]) => typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", ");
}

/** Returns reason and message of a condition; some messages begin with the reason. */
function why({ reason, message }) {
  return message.startsWith(reason) ? message : [reason, message].filter(Boolean).join(": ");
}
