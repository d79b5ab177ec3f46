// The page's address: /runs/RUN/TAB?with=OTHER,OTHER, and on the tab of samples the search fields.

export const TABS = [
  ["curves", "Curves"], ["timeline", "Time line"], ["samples", "Samples"], ["events", "Events"],
  ["workers", "Workers and logs"], ["checkpoints", "Checkpoints"], ["configuration", "Configuration"],
];

/**
 * Parses the address: the run (empty if the page chooses one), the tab, runs to compare with, and the search by
 * field.
 */
export function current() {
  const [, run = "", tab = ""] = location.pathname.match(/^\/runs\/([^/]+)(?:\/([^/]+))?/) ?? [];
  const { with: others = "", ...search } = Object.fromEntries(new URLSearchParams(location.search));
  return { run, tab: TABS.some(([name]) => name === tab) ? tab : "curves", others: others.split(",").filter(Boolean), search };
}

export function address({ run, tab, others, search = {} }) {
  const path = `/runs/${run}${tab === "curves" ? "" : `/${tab}`}`;
  const query = [others.length ? `with=${others.join(",")}` : "", new URLSearchParams(search).toString()].filter(Boolean);
  return query.length ? `${path}?${query.join("&")}` : path;
}

/** Goes to another address of the page, which calls `show` of `onMove`. */
export function go(where, { replaces = false } = {}) {
  history[replaces ? "replaceState" : "pushState"](null, "", address(where));
  dispatchEvent(new PopStateEvent("popstate"));
}

/** Calls `show` when the address changes; links inside the page do not reload it. */
export function onMove(show) {
  addEventListener("popstate", show);
  addEventListener("click", (click) => {
    const link = click.target.closest?.('a[href^="/runs/"]');
    if (!link || click.ctrlKey || click.metaKey || click.shiftKey || click.button) return;
    click.preventDefault();
    history.pushState(null, "", link.getAttribute("href"));
    show();
  });
}
