// The workers of a run, the servers of fleets that it uses, and the workers' logs.
import { getJson, readLogs } from "./api.js";
import { h, table } from "./dom.js";
import { short } from "./format.js";

const MAX_LINES = 1000;
const RETRY_MS = 2000;

export class Workers {
  constructor(panel, run) {
    Object.assign(this, { run, reading: new AbortController() });
    this.list = h("div", { id: "workers" });
    this.servers = h("div", { id: "servers" });
    this.component = h("select", { id: "component", "aria-label": "Worker", onchange: () => this.#open() }, h("option", { value: "" }, "all workers"));
    this.logs = h("pre", { id: "logs", tabIndex: 0, role: "region", "aria-label": "Logs of the workers" });
    panel.replaceChildren(h("h3", {}, "Workers"), this.list, this.servers, h("h3", {}, "Logs ", this.component), this.logs);
    this.refresh();
    this.#open();
  }

  close() { this.reading.abort(); }

  onEvent() {}

  async refresh() {
    const { items } = await getJson(`/v1/runs/${this.run.id}/topology`);
    this.list.replaceChildren(table("Workers", ["worker", "state", "activity", "version", "running samples", "waiting samples"], items.map((worker) => [
      worker.worker_id, worker.state, worker.activity, worker.weight_version < 0 ? "–" : worker.weight_version, gauge(worker, "running_samples"), gauge(worker, "waiting_samples"),
    ]), "No workers are registered."));
    const addresses = this.run.spec?.rollout?.engine_arguments?.addresses;
    if (addresses) await this.#showServers(addresses);
  }

  /** Shows the servers of fleets that the run uses, with its part of each; one that does not answer says why. */
  async #showServers(addresses) {
    const { items } = await getJson("/v1/fleets");
    const rows = items.flatMap((fleet) => fleet.servers.filter((server) => addresses.includes(server.address)).map((server) => {
      const total = server.runs.reduce((sum, use) => sum + use.share, 0);
      const use = server.runs.find(({ run_id }) => run_id === this.run.id);
      const isExclusive = server.exclusive_run === this.run.id;
      const share = use ? `${Math.round(100 * use.share / total)} %` : isExclusive ? "all" : "–";
      const version = use?.weight_version ?? (isExclusive ? server.weight_version : null) ?? "–";
      const others = server.runs.length - (use ? 1 : 0);
      return [fleet.name, server.address, server.is_healthy ? "answers" : server.problem, share, version, use?.tokens.toLocaleString() ?? "–", use?.running ?? "–", use?.waiting ?? "–", others];
    }));
    if (rows.length === 0) return;
    const columns = ["fleet", "server", "state", "share", "version", "tokens", "running", "waiting", "other runs"];
    this.servers.replaceChildren(h("h3", {}, "Servers"), table("Servers", columns, rows, ""));
  }

  /** Streams the chosen log, starting with its last lines. */
  #open() {
    this.reading.abort();
    this.reading = new AbortController();
    this.logs.replaceChildren();
    this.#follow(this.component.value, this.reading.signal);
  }

  async #follow(chosen, signal) {
    while (!signal.aborted) {
      try {
        let isFirst = true;
        for await (const { component, line } of readLogs(this.run.id, chosen, 100, signal)) {
          if (component === undefined) return; // the run has ended
          if (isFirst) this.logs.replaceChildren(); // a reopened stream begins with past lines
          isFirst = false;
          this.#offer(component);
          this.#add(chosen ? `${line}\n` : `${component}  ${line}\n`);
        }
      } catch (error) {
        if (signal.aborted) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #offer(component) {
    const options = [...this.component.options];
    if (options.some((option) => option.value === component)) return;
    const next = options.find((option) => option.value > component) ?? null;
    this.component.insertBefore(h("option", { value: component }, component), next);
  }

  #add(text) {
    const isAtEnd = this.logs.scrollTop + this.logs.clientHeight >= this.logs.scrollHeight - 4;
    this.logs.append(text);
    if (this.logs.childNodes.length > MAX_LINES) this.logs.firstChild.remove();
    if (isAtEnd) this.logs.scrollTop = this.logs.scrollHeight;
  }
}

function gauge(worker, name) {
  return name in worker.gauges ? short(worker.gauges[name]) : "";
}
