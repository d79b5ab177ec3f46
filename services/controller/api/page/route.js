// The page's address: /runs/RUN/TAB?with=OTHER,OTHER

export const TABS = [
  ["curves", "Curves"], ["timeline", "Time line"], ["samples", "Samples"], ["events", "Events"],
  ["workers", "Workers and logs"], ["checkpoints", "Checkpoints"], ["configuration", "Configuration"],
];

/** What the address names: a run (empty on a page that opens on what is running), a tab, runs to compare with. */
export function current() {
  const [, run = "", tab = ""] = location.pathname.match(/^\/runs\/([^/]+)(?:\/([^/]+))?/) ?? [];
  const others = (new URLSearchParams(location.search).get("with") ?? "").split(",").filter(Boolean);
  return { run, tab: TABS.some(([name]) => name === tab) ? tab : "curves", others };
}

export function address({ run, tab, others }) {
  const path = `/runs/${run}${tab === "curves" ? "" : `/${tab}`}`;
  return others.length ? `${path}?with=${others.join(",")}` : path;
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
