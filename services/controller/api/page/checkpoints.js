// Lists the checkpoints of a run, with a button to delete each.
import { act, getJson } from "./api.js";
import { perform } from "./actions.js";
import { h, table } from "./dom.js";
import { bytes, date } from "./format.js";

export class Checkpoints {
  constructor(panel, run, { role, say }) {
    Object.assign(this, { run, role, say });
    this.list = h("div", {});
    panel.replaceChildren(this.list);
    this.refresh();
  }

  close() {}

  onEvent(event) {
    if (event.type.startsWith("Checkpoint")) this.refresh();
  }

  async refresh() {
    const { items } = await getJson(`/v1/runs/${this.run.id}/checkpoints`);
    const there = items.filter(({ state }) => state !== "DELETED");
    this.list.replaceChildren(table("Checkpoints", ["step", "state", "size", "saved", "id", "folder", "action"], there.map((one) => [
      one.step, h("span", {}, h("span", { class: "whole" }, one.state), one.message && `: ${one.message}`), bytes(one.size_bytes), date(one.create_time),
      h("code", { class: "long" }, one.id), h("code", { class: "long" }, one.path), this.#delete(one),
    ]), "No checkpoints yet. The last step is always saved, others according to trainer.checkpoint.every (steps) or every_s (seconds)."));
  }

  #delete(one) {
    if (this.role === "viewer") return "";
    const action = {
      text: "Delete checkpoint", isDangerous: true, inputs: () => [], about: `No run can continue from step ${one.step} (${one.id}) afterwards.`,
      send: () => act("DELETE", `/v1/runs/${this.run.id}/checkpoints/${one.id}`),
    };
    return h("button", {
      type: "button", class: "part", onclick: () => perform(action, this.run, (...values) => { this.say(...values); this.refresh(); }),
    }, "delete");
  }
}
