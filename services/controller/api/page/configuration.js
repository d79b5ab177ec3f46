// The specification of a run: what differs from the defaults first, with what each key means.
import { getJson } from "./api.js";
import { choice, h, table } from "./dom.js";

const NOTHING = new Set(["{}", "[]", "null"]);

let described = null; // the API's own description, read once

export class Configuration {
  constructor(panel, run, others) {
    Object.assign(this, { run, others, onlyChanged: "changed", words: "" });
    const search = h("input", { type: "search", placeholder: "key or value", "aria-label": "Search the configuration", oninput: () => { this.words = search.value.toLowerCase(); this.#show(); } });
    const which = choice("Keys shown", [["changed", "differs from the default"], ["all", "all"]], "changed", (chosen) => { this.onlyChanged = chosen; this.#show(); });
    this.place = h("div", {});
    panel.replaceChildren(h("div", { class: "tools" }, which, search), this.place);
    this.#read();
  }

  close() {}

  take() {}

  async #read() {
    described ??= getJson("/openapi.json");
    const { schemas } = (await described).components;
    this.known = new Map(flat(schemas, schemas.RunSpec, ""));
    this.#show();
  }

  #show() {
    const runs = [this.run, ...this.others];
    const values = runs.map(({ spec }) => new Map(leaves(spec, "")));
    const names = [...new Set(values.flatMap((each) => [...each.keys()]))].sort();
    const rows = names.map((name) => {
      const said = values.map((each) => text(each.get(name)));
      const known = this.known.get(name) ?? this.known.get(name.replace(/^(data\.[^.]+\.)[^.]+/, "$1*"));
      const standard = known && "value" in known ? text(known.value) : "";
      const isChanged = said.some((value) => value !== standard && !(standard === "" && NOTHING.has(value)));
      return { name, said, standard, isChanged, about: known?.about ?? "" };
    }).filter((row) => (this.onlyChanged === "all" || row.isChanged)
      && `${row.name} ${row.said.join(" ")}`.toLowerCase().includes(this.words));
    this.place.replaceChildren(table("Configuration", ["key", ...runs.map((run) => (runs.length > 1 ? `${run.name} ${run.id.slice(-6)}` : "value")), "default", "meaning"],
      rows.map((row) => [h("code", { class: row.isChanged ? "changed" : "" }, row.name),
        ...row.said.map((value) => h(row.isChanged && value !== row.standard ? "b" : "span", {}, value)), row.standard,
        h("span", { class: "quiet" }, firstSentence(row.about))]), "Nothing differs from the defaults."));
  }
}

/** Keys with their defaults and what they mean, through all parts of a schema. */
function* flat(schemas, schema, prefix, standard) {
  for (const [key, property] of Object.entries(schema.properties ?? {})) {
    const name = prefix + key;
    const value = standard && key in standard ? standard[key] : property.default;
    for (const [below, part] of parts(property, `${name}.`)) yield* flat(schemas, schemas[part.split("/").at(-1)], below, value ?? undefined);
    const isKnown = (standard && key in standard) || "default" in property;
    yield [name, { about: property.description ?? "", ...(isKnown ? { value } : {}) }];
  }
}

/** The parts that a property holds in each of its forms, and what stands before their keys: a name that users choose is `*`. */
function* parts(property, prefix) {
  if (property.$ref) yield [prefix, property.$ref];
  for (const form of [...(property.anyOf ?? []), ...(property.oneOf ?? []), ...(property.allOf ?? [])]) yield* parts(form, prefix);
  for (const form of Object.values(property.patternProperties ?? {})) yield* parts(form, `${prefix}*.`);
}

/** Keys of a document with their values; lists are values. */
function* leaves(document, prefix) {
  for (const [key, value] of Object.entries(document)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) yield* leaves(value, `${prefix}${key}.`);
    else yield [prefix + key, value];
  }
}

function firstSentence(about) {
  return about.replaceAll("``", "").replaceAll("\n", " ").split(/(?<=\.) /)[0];
}

function text(value) {
  if (value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}
