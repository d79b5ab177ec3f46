// The page's address: /runs/RUN/TAB?with=OTHER,OTHER, and on the tab of samples what is searched for.

export const TABS = [
  ["curves", "Curves"], ["timeline", "Time line"], ["samples", "Samples"], ["events", "Events"],
  ["workers", "Workers and logs"], ["checkpoints", "Checkpoints"], ["configuration", "Configuration"],
];

/**
 * What the address names: a run (empty on a page that opens on what is running), a tab, runs to compare with, and
 * what is searched for, by field.
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

/** Move to another address of the page; `show` of `onMove` follows. */
export function go(where, { replaces = false } = {}) {
  history[replaces ? "replaceState" : "pushState"](null, "", address(where));
  dispatchEvent(new PopStateEvent("popstate"));
}

/** Call `show` whenever the address changes; links inside the page load nothing anew. */
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
