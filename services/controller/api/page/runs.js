// The list of runs: search by name, state or label, and choice of runs to compare.
import { $, h } from "./dom.js";
import { address, current, go } from "./route.js";

const MAX_COMPARED = 4;

/** Returns the run that the page opens: the newest running one, otherwise the newest. */
export function defaultRun(runs) {
  return runs.find(({ state }) => state === "RUNNING") ?? runs.find(({ state }) => state === "STARTING") ?? runs[0];
}

/** Shows the runs whose state, name or label match the search. */
export function listRuns(runs) {
  const where = current();
  const wanted = $("search").value.toLowerCase();
  const found = runs.filter((run) => `${run.name} ${run.state} ${run.id} ${Object.entries(run.labels ?? {}).map((pair) => pair.join("=")).join(" ")}`
    .toLowerCase().includes(wanted));
  const shape = JSON.stringify([where, found.map(({ id, name, state, step }) => [id, name, state, step])]);
  if ($("runs").dataset.shape === shape) return; // so that nothing moves under a pointer
  $("runs").dataset.shape = shape;
  const focused = document.activeElement?.closest?.("#runs [data-key]")?.dataset.key;
  $("runs").replaceChildren(...found.map((run) => entry(run, where)));
  if (focused) $("runs").querySelector(`[data-key="${focused}"]`)?.focus();
}

function entry(run, where) {
  const isShown = run.id === where.run;
  const link = h("a", { href: address({ ...where, run: run.id, others: [], search: {} }), "data-key": `link ${run.id}` },
    h("span", {}, run.name, run.target_steps ? h("progress", { max: String(run.target_steps), value: String(run.step), "aria-label": "Steps done" }) : ""),
    h("small", {}, h("b", { class: `state ${run.state}` }, run.state), ` step ${run.step}`, run.target_steps ? ` of ${run.target_steps}` : "", ` · ${run.id.slice(-6)}`));
  if (isShown) link.setAttribute("aria-current", "page");
  const others = where.others.filter((id) => id !== run.id);
  const box = h("input", {
    type: "checkbox", "data-key": `box ${run.id}`, checked: where.others.includes(run.id), disabled: isShown || (others.length >= MAX_COMPARED && !where.others.includes(run.id)),
    title: "Compare", "aria-label": `Compare with ${run.name} ${run.id.slice(-6)}`,
    onchange: (changed) => go({ ...where, others: changed.target.checked ? [...others, run.id] : others }),
  });
  return h("li", {}, box, link);
}
