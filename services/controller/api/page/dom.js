// Elements and their texts. Text is never markup.

export const $ = (id) => document.getElementById(id);

/** An element with attributes, properties (those that are no text), handlers (`onclick`) and children. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (typeof value === "string" || typeof value === "number") element.setAttribute(key, value);
    else if (value !== undefined) element[key] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** A table that can be scrolled sideways; cells are texts or nodes. */
export function table(label, heads, rows, emptyText) {
  if (!rows.length) return h("p", { class: "quiet" }, emptyText);
  const about = (kind, column) => (kind === "th" ? { scope: "col" } : { "data-head": heads[column] }); // for narrow pages
  const cells = (kind, row) => h("tr", {}, row.map((cell, column) => h(kind, about(kind, column), cell ?? "")));
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, cells("th", heads)), h("tbody", {}, rows.map((row) => cells("td", row)))));
}

/** A choice between options, as a group of buttons of which one is pressed. */
export function choice(label, options, chosen, onchoice) {
  const buttons = options.map(([value, text]) => h("button", {
    type: "button", class: "part", "aria-pressed": String(value === chosen), onclick: () => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.value === value));
      onchoice(value);
    }, value,
  }, text));
  return h("span", { class: "choice", role: "group", "aria-label": label }, buttons);
}

/** Returns a function that calls `work` once at the next frame, however often it is called. */
export function oncePerFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; work(); });
  };
}
