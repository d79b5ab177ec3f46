// Actions on a run that the user's role permits: buttons, and a dialog for actions with inputs.
import { act } from "./api.js";
import { $, h } from "./dom.js";
import { go } from "./route.js";

const RANK = { viewer: 0, operator: 1, admin: 2 };
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];

/** Returns true if a run has not ended. */
export const isActive = ({ state }) => !ENDED.includes(state);
const isTraining = ({ state }) => state === "RUNNING";

/** Actions: text, required role, when it is offered, inputs ([key, label, kind, value, hint]), and the request. */
const ACTIONS = [
  { text: "Evaluate", role: "operator", when: isTraining, send: (run) => act("POST", `/v1/runs/${run.id}/validate`) },
  { text: "Save checkpoint", role: "operator", when: isTraining, send: (run) => act("POST", `/v1/runs/${run.id}/checkpoint`) },
  {
    text: "Pause", role: "operator", when: (run) => isActive(run) && run.desired !== "PAUSED" && run.state !== "PAUSED",
    about: "The run finishes its step and stops its workers. It can be resumed.",
    inputs: () => [["checkpoint", "save a checkpoint after the step", "checkbox", true]],
    send: (run, values) => act("POST", `/v1/runs/${run.id}/pause`, { checkpoint: values.checkpoint }),
  },
  { text: "Resume", role: "operator", when: ({ state }) => state === "PAUSED", send: (run) => act("POST", `/v1/runs/${run.id}/resume`) },
  {
    text: "Change", role: "operator", when: isActive, about: "Empty fields keep their values.",
    inputs: (run) => [
      ["validation_every", "evaluate every … steps", "number", "", run.spec.validation?.every],
      ["checkpoint_every", "save every … steps", "number", "", run.spec.trainer.checkpoint?.every],
      ["rollout_replicas", "rollouts", "number", "", run.spec.rollout?.replicas], ["priority", "priority", "number", "", run.priority],
    ],
    send: (run, values) => act("PATCH", `/v1/runs/${run.id}`,
      Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "").map(([key, value]) => [key, Number(value)])), run.revision),
  },
  {
    text: "Fork", role: "operator", when: (run) => run.step > 0,
    about: "A new run continues from a checkpoint and does not repeat trained prompts.",
    inputs: (run) => [
      ["name", "name of the new run (empty: similar)", "text", ""], ["checkpoint_id", "checkpoint (empty: the newest)", "text", ""],
      ["overrides", "changed keys, as JSON", "text", run.spec.trainer.steps ? `{"trainer": {"steps": ${run.spec.trainer.steps * 2}}}` : `{"data": {"epochs": ${run.spec.data.epochs * 2}}}`],
    ],
    send: async (run, values) => {
      const created = await act("POST", `/v1/runs/${run.id}/fork`, { ...values, overrides: JSON.parse(values.overrides || "{}") });
      go({ run: created.id, tab: "curves", others: [] });
    },
  },
  {
    text: "Cancel", role: "operator", when: isActive, isDangerous: true, about: "The run ends and cannot be resumed.",
    inputs: () => [
      ["save_checkpoint", "save a checkpoint after the step", "checkbox", true], ["grace_seconds", "seconds to finish the step", "number", "60"],
    ],
    send: (run, values) => act("POST", `/v1/runs/${run.id}/cancel`, { save_checkpoint: values.save_checkpoint, grace_seconds: Number(values.grace_seconds) }),
  },
  {
    text: "Delete", role: "admin", when: (run) => !isActive(run), isDangerous: true, about: "Deletes the run and its records.",
    inputs: () => [["delete_checkpoints", "also delete its checkpoints", "checkbox", false]],
    send: async (run, values) => {
      await act("DELETE", `/v1/runs/${run.id}?delete_checkpoints=${values.delete_checkpoints}`, undefined, run.revision);
      location.assign("/page/");
    },
  },
];

/** Shows the buttons that a role may use now; they are replaced only if the set changes. */
export function offerActions(run, role, onDone) {
  const offered = ACTIONS.filter((action) => RANK[role] >= RANK[action.role] && action.when(run));
  const bar = $("actions");
  const key = `${run.id} ${offered.map(({ text }) => text)}`;
  bar.run = run;
  if (bar.dataset.key === key) return;
  bar.dataset.key = key;
  bar.replaceChildren(...offered.map((action) => h("button", {
    type: "button", class: action.isDangerous ? "danger" : "", onclick: () => perform(action, bar.run, onDone),
  }, action.text)));
}

/** Performs an action, after a dialog if it has inputs. */
export function perform(action, run, onDone) {
  if (!action.inputs) return send(action, run, {}, onDone);
  const controls = action.inputs(run).map(([name, label, kind, value, hint]) => [name, label, h("input", {
    name, type: kind, placeholder: hint ?? "", ...(kind === "checkbox" ? { checked: value } : { value: String(value), ...(kind === "number" ? { step: "any" } : {}) }),
  })]);
  const dialog = h("dialog", { "aria-label": action.text, onclose: () => dialog.remove() }, h("form", {
    method: "dialog", onsubmit: (submitted) => {
      if (submitted.submitter.value !== "yes") return;
      const values = Object.fromEntries(controls.map(([name, , input]) => [name, input.type === "checkbox" ? input.checked : input.value]));
      send(action, run, values, onDone);
    },
  }, h("h2", {}, `${action.text} ${run.name}`), h("p", {}, action.about),
  controls.map(([, label, input]) => h("label", { class: input.type }, input.type === "checkbox" ? [input, ` ${label}`] : [label, input])),
  h("p", { class: "buttons" }, h("button", { value: "no", formNoValidate: true }, "Close"),
    h("button", { value: "yes", class: action.isDangerous ? "danger" : "main" }, action.text))));
  document.body.append(dialog);
  dialog.showModal();
}

async function send(action, run, values, onDone) {
  try {
    await action.send(run, values);
    onDone(`${action.text}: request accepted.`);
  } catch (error) {
    onDone(`${action.text}: ${error.message}`, true);
  }
}
