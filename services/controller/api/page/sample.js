// One sample: rewards, turns, tokens coloured by a value, and the difference from other samples.
import { choice, h, table } from "./dom.js";
import { short } from "./format.js";
import { difference } from "./difference.js";

const COLOURS = [["none", "none"], ["ratio", "logprob ratio"], ["version", "weight version"], ["logprob", "logprob"], ["advantage", "advantage"]];

function picture({ name, width, height, thumbnail }) {
  const about = `${name || "image"}, ${width} × ${height}`;
  return h("img", { src: thumbnail, alt: about, title: about });
}

export class Sample {
  /**
   * @param sample Sample as the API returns it.
   * @param read Reads another sample by its id.
   */
  constructor(sample, read) {
    Object.assign(this, { sample, read, colour: sample.tokens?.ratios?.length ? "ratio" : "version" });
    this.text = h("div", { class: "tokens", role: "group", "aria-label": "Response, token by token" });
    this.legend = h("p", { class: "legend" });
    this.colours = choice("Colour of the tokens", COLOURS, this.colour, (colour) => { this.colour = colour; this.#paint(); });
    this.element = h("div", {},
      h("h3", {}, `Sample ${sample.id}`), this.#facts(),
      sample.images?.length ? [h("h4", {}, "Images"), h("p", { class: "images" }, sample.images.map(picture))] : null,
      h("h4", {}, "Prompt"), h("pre", { class: "text" }, sample.prompt),
      sample.answer ? [h("h4", {}, "Answer"), h("pre", { class: "text" }, sample.answer)] : null,
      h("h4", {}, "Response"), this.colours, this.legend, this.text,
      sample.turns?.length > 1 ? h("details", {}, h("summary", {}, `${sample.turns.length} turns`), sample.turns.map(turn)) : null);
    this.#paint();
  }

  /** Shows the difference of another sample's response from this one. */
  async differ(id) {
    const other = await this.read(id);
    for (const button of this.colours.children) button.setAttribute("aria-pressed", "false");
    const parts = difference(other.tokens.texts, this.sample.tokens.texts);
    this.legend.replaceChildren(h("span", { class: "removed" }, `only in ${id} (reward ${short(other.reward)})`),
      h("span", { class: "added" }, `only in ${this.sample.id} (reward ${short(this.sample.reward)})`));
    this.text.replaceChildren(...parts.map(([kind, text]) => h(kind === "same" ? "span" : kind === "added" ? "ins" : "del", { class: kind }, text)));
    this.text.scrollIntoView({ block: "nearest" });
  }

  #facts() {
    const { sample } = this;
    const facts = [
      ["reward", short(sample.reward)], ["advantage", short(sample.advantage)], ["step", sample.step ?? "not trained"],
      ["decoding", sample.is_greedy ? "greedy" : "sampled"],
      ["weight version", sample.oldest_version === sample.newest_version ? sample.oldest_version : `${sample.oldest_version} to ${sample.newest_version}`],
      ["staleness", sample.staleness ?? "–"], ["length", `${sample.response_tokens} tokens`], ["finish reason", sample.finish_reason],
      ["data", `${sample.data_source}, row ${sample.row}`], ["attempt", sample.attempt],
    ];
    const terms = Object.entries(sample.terms ?? {});
    return [h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      terms.length ? table("Reward by term", ["term", "unweighted value"], terms.map(([name, value]) => [name, short(value)]), "") : null];
  }

  #paint() {
    const { tokens } = this.sample;
    if (!tokens?.texts?.length) {
      this.text.replaceChildren(h("span", {}, this.sample.response ?? ""));
      return;
    }
    const versions = [...new Set(tokens.weight_versions)].sort((a, b) => a - b);
    this.text.replaceChildren(...tokens.texts.map((text, index) => h("span", {
      class: `token ${this.#classOf(tokens, index, versions)}`, title: tooltipOf(tokens, index),
    }, text)));
    this.legend.replaceChildren(...this.#legendEntries(versions).map(([name, text]) => h("span", {}, h("i", { class: `swatch ${name}` }), text)));
  }

  #classOf(tokens, index, versions) {
    if (tokens.weight_versions[index] < 0) return "tool";
    if (this.colour === "version") return `version-${versions.indexOf(tokens.weight_versions[index]) % 8}`;
    if (this.colour === "ratio") return level(Math.log(tokens.ratios?.[index] ?? 1), [0.05, 0.2, 0.5]);
    if (this.colour === "logprob") return level(tokens.logprobs?.[index] ?? 0, [0.1, 1, 3]);
    if (this.colour === "advantage") return level(tokens.advantages?.[index] ?? 0, [0.01, 0.5, 1.5]);
    return "";
  }

  #legendEntries(versions) {
    if (this.colour === "version") return versions.map((version, index) => (version < 0 ? ["tool", "tool"] : [`version-${index % 8}`, `version ${version}`]));
    if (this.colour === "none") return [];
    const text = {
      ratio: ["less likely under the trainer", "more likely"], logprob: ["unlikely", ""], advantage: ["discouraged", "encouraged"],
    }[this.colour];
    return [["level--3", text[0]], ["level-3", text[1]]].filter(([, text]) => text);
  }
}

/** Returns the class for a number's distance from 0, in three levels per sign. */
function level(value, bounds) {
  const size = bounds.filter((bound) => Math.abs(value) > bound).length;
  return size ? `level-${Math.sign(value) * size}` : "";
}

function tooltipOf(tokens, index) {
  const number = (name, values) => (values?.length ? `${name} ${short(values[index])}` : "");
  return [`token ${index + 1}, id ${tokens.ids?.[index]}`, tokens.weight_versions[index] < 0 ? "tool" : `version ${tokens.weight_versions[index]}`,
    number("logprob", tokens.logprobs), number("trainer logprob", tokens.trained_logprobs), number("ratio", tokens.ratios), number("advantage", tokens.advantages)].filter(Boolean).join(" · ");
}

function turn(one) {
  const calls = one.tool_calls?.length ? h("pre", { class: "text" }, JSON.stringify(one.tool_calls, null, 1)) : null;
  return [h("h4", {}, `${one.is_sampled ? "policy" : "environment"}, ${one.num_tokens} tokens${one.finish_reason ? `, ${one.finish_reason}` : ""}`),
    h("pre", { class: "text" }, one.text), calls];
}
