// What the API can do with a run, offered to those who may: buttons, and a dialog where something is to be said.
import { act } from "./api.js";
import { $, h } from "./dom.js";
import { go } from "./route.js";

const RANK = { viewer: 0, operator: 1, admin: 2 };
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];

/** Whether a run has not ended. */
export const isActive = ({ state }) => !ENDED.includes(state);
const isTraining = ({ state }) => state === "RUNNING";

/** Actions: text, role, when it is offered, what is asked first ([key, label, kind, value]), and what is sent. */
const ACTIONS = [
  { text: "Evaluate", role: "operator", when: isTraining, send: (run) => act("POST", `/v1/runs/${run.id}/validate`) },
  { text: "Save checkpoint", role: "operator", when: isTraining, send: (run) => act("POST", `/v1/runs/${run.id}/checkpoint`) },
  {
    text: "Pause", role: "operator", when: (run) => isActive(run) && run.desired !== "PAUSED" && run.state !== "PAUSED",
    about: "The run finishes its step and gives its workers back. It can be resumed.",
    asks: () => [["checkpoint", "save a checkpoint behind the step", "checkbox", true]],
    send: (run, said) => act("POST", `/v1/runs/${run.id}/pause`, { checkpoint: said.checkpoint }),
  },
  { text: "Resume", role: "operator", when: ({ state }) => state === "PAUSED", send: (run) => act("POST", `/v1/runs/${run.id}/resume`) },
  {
    text: "Change", role: "operator", when: isActive, about: "What is left empty stays as it is.",
    asks: (run) => [
      ["validation_every", "evaluate every … steps", "number", "", run.spec.validation?.every],
      ["checkpoint_every", "save every … steps", "number", "", run.spec.trainer.checkpoint?.every],
      ["rollout_replicas", "rollouts", "number", "", run.spec.rollout?.replicas], ["priority", "priority", "number", "", run.priority],
    ],
    send: (run, said) => act("PATCH", `/v1/runs/${run.id}`,
      Object.fromEntries(Object.entries(said).filter(([, value]) => value !== "").map(([key, value]) => [key, Number(value)])), run.revision),
  },
  {
    text: "Fork", role: "operator", when: (run) => run.step > 0,
    about: "A new run goes on from a checkpoint, with the same prompts behind it.",
    asks: (run) => [
      ["name", "name of the new run", "text", run.name], ["checkpoint_id", "checkpoint (empty: the newest)", "text", ""],
      ["overrides", "keys that differ, as JSON", "text", run.spec.trainer.steps ? `{"trainer": {"steps": ${run.spec.trainer.steps * 2}}}` : `{"data": {"epochs": ${run.spec.data.epochs * 2}}}`],
    ],
    send: async (run, said) => {
      const made = await act("POST", `/v1/runs/${run.id}/fork`, { ...said, overrides: JSON.parse(said.overrides || "{}") });
      go({ run: made.id, tab: "curves", others: [] });
    },
  },
  {
    text: "Cancel", role: "operator", when: isActive, isGrave: true, about: "The run ends and cannot be resumed.",
    asks: () => [
      ["save_checkpoint", "save a checkpoint behind the step", "checkbox", true], ["grace_seconds", "seconds to finish the step", "number", "60"],
    ],
    send: (run, said) => act("POST", `/v1/runs/${run.id}/cancel`, { save_checkpoint: said.save_checkpoint, grace_seconds: Number(said.grace_seconds) }),
  },
  {
    text: "Delete", role: "admin", when: (run) => !isActive(run), isGrave: true, about: "The run and what is recorded of it are forgotten.",
    asks: () => [["delete_checkpoints", "delete its checkpoints, too", "checkbox", false]],
    send: async (run, said) => {
      await act("DELETE", `/v1/runs/${run.id}?delete_checkpoints=${said.delete_checkpoints}`, undefined, run.revision);
      location.assign("/page/");
    },
  },
];

/** Show the buttons that a role may press now; they stay as they are while their set does. */
export function offerActions(run, role, onDone) {
  const offered = ACTIONS.filter((action) => RANK[role] >= RANK[action.role] && action.when(run));
  const place = $("actions");
  const shape = `${run.id} ${offered.map(({ text }) => text)}`;
  place.run = run;
  if (place.dataset.shape === shape) return;
  place.dataset.shape = shape;
  place.replaceChildren(...offered.map((action) => h("button", {
    type: "button", class: action.isGrave ? "grave" : "", onclick: () => perform(action, place.run, onDone),
  }, action.text)));
}

/** Do something at once, or after what it asks was said. */
export function perform(action, run, onDone) {
  if (!action.asks) return send(action, run, {}, onDone);
  const fields = action.asks(run).map(([name, label, kind, value, hint]) => [name, label, h("input", {
    name, type: kind, placeholder: hint ?? "", ...(kind === "checkbox" ? { checked: value } : { value: String(value), ...(kind === "number" ? { step: "any" } : {}) }),
  })]);
  const dialog = h("dialog", { "aria-label": action.text, onclose: () => dialog.remove() }, h("form", {
    method: "dialog", onsubmit: (submitted) => {
      if (submitted.submitter.value !== "yes") return;
      const said = Object.fromEntries(fields.map(([name, , input]) => [name, input.type === "checkbox" ? input.checked : input.value]));
      send(action, run, said, onDone);
    },
  }, h("h2", {}, `${action.text} ${run.name}`), h("p", {}, action.about),
  fields.map(([, label, input]) => h("label", { class: input.type }, input.type === "checkbox" ? [input, ` ${label}`] : [label, input])),
  h("p", { class: "buttons" }, h("button", { value: "no", formNoValidate: true }, "Leave it"),
    h("button", { value: "yes", class: action.isGrave ? "grave" : "main" }, action.text))));
  document.body.append(dialog);
  dialog.showModal();
}

async function send(action, run, said, onDone) {
  try {
    await action.send(run, said);
    onDone(`${action.text}: the controller has it.`);
  } catch (error) {
    onDone(`${action.text}: ${error.message}`, true);
  }
}
