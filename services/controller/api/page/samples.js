// Recorded samples: search by step, reward and text, and one sample with its tokens and its group.
import { download, getJson } from "./api.js";
import { h, table } from "./dom.js";
import { date, short } from "./format.js";
import { address, current } from "./route.js";
import { Sample } from "./sample.js";

const FILTERS = [
  ["split", "samples of", "select", [["train", "training"], ["heldout", "evaluations"]]],
  ["order_by", "order", "select", [["newest", "newest first"], ["best", "best first"], ["worst", "worst first"]]],
  ["step", "step", "number"], ["text", "text", "search"], ["min_reward", "reward from", "number"], ["max_reward", "reward to", "number"],
  ["finish_reason", "finish reason", "select", [["", "anything"], ["stop", "stop"], ["length", "length"], ["failed", "failed"]]],
];

export class Samples {
  /**
   * @param panel Element to fill.
   * @param run The run.
   * @param search Search by field.
   */
  constructor(panel, run, search) {
    Object.assign(this, { run, page: "", id: "" });
    this.fields = FILTERS.map(([name, label, kind, options]) => {
      const change = () => this.#changed();
      const input = kind === "select"
        ? h("select", { name, onchange: change }, options.map(([value, text]) => h("option", { value }, text)))
        : h("input", { name, type: kind, onchange: change, ...(kind === "number" ? { step: "any" } : {}) });
      return h("label", {}, `${label} `, input);
    });
    this.form = h("form", { class: "tools", onsubmit: (submitted) => { submitted.preventDefault(); this.shown = ""; this.#changed(); } }, this.fields,
      h("button", { type: "button", class: "part", onclick: () => this.#download() }, "download as JSONL"));
    this.list = h("ol", { class: "samples", "aria-label": "Samples" });
    this.status = h("p", { class: "quiet", role: "status" });
    this.more = h("button", { type: "button", class: "part", hidden: true, onclick: () => this.#read() }, "more");
    this.one = h("article", { class: "sample", "aria-label": "One sample", tabIndex: -1 });
    panel.replaceChildren(this.form, this.status, h("div", { class: "beside" }, h("div", {}, this.list, this.more), this.one));
    this.find(search);
  }

  close() {}

  onEvent() {}

  /** Shows the samples of an address's search. */
  find(shown) {
    if (this.shown === JSON.stringify(shown)) return;
    this.shown = JSON.stringify(shown);
    for (const [name, , kind, options] of FILTERS) {
      this.form.elements[name].value = shown[name] ?? (kind === "select" ? options[0][0] : "");
    }
    this.#again();
  }

  /** Searches by the current fields; the address includes them, so that it can be shared. */
  #changed() {
    const first = Object.fromEntries(FILTERS.map(([name, , , options]) => [name, options?.[0][0]]));
    const search = Object.fromEntries([...this.#query()].filter(([name, value]) => value !== first[name]));
    history.replaceState(null, "", address({ ...current(), search }));
    this.find(search);
  }

  /** Returns the search as a query. */
  #query() {
    const values = new FormData(this.form);
    return new URLSearchParams([...values].filter(([, value]) => value !== ""));
  }

  async #again() {
    Object.assign(this, { page: "", id: "" });
    this.list.replaceChildren();
    await this.#read();
  }

  async #read() {
    const query = this.#query();
    if (this.page) query.set("page_token", this.page);
    const asked = (this.asked = {});
    this.status.textContent = "";
    try {
      const found = await getJson(`/v1/runs/${this.run.id}/samples?page_size=50&excerpt=200&${query}`);
      if (this.asked !== asked) return; // the search changed meanwhile
      this.list.append(...found.items.map((sample) => this.#entry(sample)));
      this.page = found.next_page_token;
      this.more.hidden = !this.page;
      if (!this.id && found.items.length) await this.#open(found.items[0].id);
      if (this.list.children.length) return;
      this.status.textContent = "No samples match.";
      this.one.replaceChildren();
    } catch (error) {
      this.status.textContent = error.message;
    }
  }

  #entry(sample) {
    const facts = [sample.step === null ? "not trained" : `step ${sample.step}`, `${sample.response_tokens} tokens`,
      sample.staleness ? `staleness ${sample.staleness}` : "", sample.is_greedy ? "greedy" : "", sample.finish_reason === "stop" ? "" : sample.finish_reason].filter(Boolean);
    return h("li", {}, h("button", { type: "button", "data-sample": sample.id, onclick: () => this.#open(sample.id), "aria-current": String(sample.id === this.id), title: date(sample.time) },
      h("b", { class: "reward" }, short(sample.reward)), h("span", { class: "quiet" }, facts.join(" · ")),
      h("span", { class: "excerpt" }, h("span", { class: "quiet" }, sample.prompt, " "), sample.response)));
  }

  async #open(id) {
    this.id = id;
    for (const button of this.list.querySelectorAll("button")) button.setAttribute("aria-current", String(button.dataset.sample === id));
    const path = `/v1/runs/${this.run.id}/samples`;
    const sample = await getJson(`${path}/${id}`);
    const { items } = await getJson(`${path}?split=${sample.split}&group_id=${sample.group_id}&page_size=100&excerpt=200${sample.split === "heldout" ? `&weight_version=${sample.oldest_version}` : ""}`);
    if (this.id !== id) return;
    // The list may be older than the step that trained these samples.
    for (const other of items) this.list.querySelector(`[data-sample="${other.id}"]`)?.parentElement.replaceWith(this.#entry(other));
    const members = items.sort((a, b) => a.member - b.member);
    const view = new Sample(sample, (other) => getJson(`${path}/${other}`));
    this.one.replaceChildren(view.element, h("h3", {}, `Group ${sample.group_id}`), table("The group", ["member", "reward", "advantage", "tokens", "finish reason", "response", "action"], members.map((one) => [
      one.member, short(one.reward), short(one.advantage), one.response_tokens, one.finish_reason, h("span", { class: "excerpt" }, one.response),
      one.id === id ? "shown" : h("span", { class: "choice" },
        h("button", { type: "button", class: "part", onclick: () => this.#open(one.id) }, "show"),
        h("button", { type: "button", class: "part", onclick: () => view.differ(one.id) }, "diff")),
    ]), "The group has no other members."));
  }

  async #download() {
    const query = this.#query();
    this.status.textContent = "downloading";
    await download(`/v1/runs/${this.run.id}/samples.jsonl?${query}`, `${this.run.name}-samples.jsonl`);
    this.status.textContent = "";
  }
}
