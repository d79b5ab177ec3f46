// The specification of a run: keys that differ from the defaults, with their meanings.
import { getJson } from "./api.js";
import { choice, h, table } from "./dom.js";

let described = null; // the OpenAPI document, read once

export class Configuration {
  constructor(panel, run, others) {
    Object.assign(this, { run, others, onlyChanged: "changed", filter: "" });
    const search = h("input", { type: "search", placeholder: "key or value", "aria-label": "Search the configuration", oninput: () => { this.filter = search.value.toLowerCase(); this.#show(); } });
    const which = choice("Keys shown", [["changed", "changed"], ["all", "all"]], "changed", (chosen) => { this.onlyChanged = chosen; this.#show(); });
    this.place = h("div", {});
    panel.replaceChildren(h("div", { class: "tools" }, which, search), this.place);
    this.#read();
  }

  close() {}

  onEvent() {}

  async #read() {
    described ??= getJson("/openapi.json");
    const defaults = [this.run, ...this.others].map(({ id }) => getJson(`/v1/runs/${id}/defaults`));
    const { schemas } = (await described).components;
    this.meanings = new Map(meanings(schemas, schemas.RunSpec, ""));
    this.defaults = (await Promise.all(defaults)).map(({ items }) => items);
    this.#show();
  }

  #show() {
    const runs = [this.run, ...this.others];
    const values = runs.map(({ spec }) => new Map(leaves(spec, "")));
    const names = [...new Set(values.flatMap((each) => [...each.keys()]))].sort();
    const rows = names.map((name) => {
      const texts = values.map((each) => text(each.get(name)));
      const about = this.meanings.get(name) ?? this.meanings.get(name.replace(/^(data\.[^.]+\.)[^.]+/, "$1*")) ?? "";
      const changed = texts.map((value, index) => values[index].has(name) && !(name in this.defaults[index] && text(this.defaults[index][name]) === value));
      return { name, texts, changed, fallback: text(this.defaults[0][name]), isChanged: changed.includes(true), about };
    }).filter((row) => (this.onlyChanged === "all" || row.isChanged)
      && `${row.name} ${row.texts.join(" ")}`.toLowerCase().includes(this.filter));
    this.place.replaceChildren(table("Configuration", ["key", ...runs.map((run) => (runs.length > 1 ? `${run.name} ${run.id.slice(-6)}` : "value")), "default", "meaning"],
      rows.map((row) => [h("code", { class: row.isChanged ? "changed" : "" }, row.name),
        ...row.texts.map((value, index) => h(row.changed[index] ? "b" : "span", {}, value)), row.fallback,
        h("span", { class: "quiet" }, firstSentence(row.about))]), "All keys have their defaults."));
  }
}

/** Yields keys with their meanings, of a schema and its parts. */
function* meanings(schemas, schema, prefix) {
  for (const [key, property] of Object.entries(schema.properties ?? {})) {
    const name = prefix + key;
    for (const [below, part] of parts(property, `${name}.`)) yield* meanings(schemas, schemas[part.split("/").at(-1)], below);
    yield [name, property.description ?? ""];
  }
}

/** Yields the parts of a property in each of its forms, with the prefix of their keys; `*` stands for a name that users choose. */
function* parts(property, prefix) {
  if (property.$ref) yield [prefix, property.$ref];
  for (const form of [...(property.anyOf ?? []), ...(property.oneOf ?? []), ...(property.allOf ?? [])]) yield* parts(form, prefix);
  for (const form of Object.values(property.patternProperties ?? {})) yield* parts(form, `${prefix}*.`);
}

/** Yields keys of a document with their values; lists are values. */
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
  return typeof value === "string" ? value : JSON.stringify(value, null, 1).replace(/\n */g, " "); // spaces let lines break
}
