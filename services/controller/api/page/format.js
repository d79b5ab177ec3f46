// Numbers, times and sizes as texts.

/** A number in at most three digits that count. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  return String(size >= 1000 ? Math.round(value) : Number(value.toPrecision(3)));
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function clock(moment) {
  return new Date(moment).toLocaleTimeString([], { hourCycle: "h23" });
}

export function date(moment) {
  return new Date(moment).toLocaleString([], { hourCycle: "h23", dateStyle: "short", timeStyle: "short" });
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < units.length - 1) { count /= 1024; power += 1; }
  return `${short(count)} ${units[power]}`;
}

/** SYNCING_WEIGHTS as words. */
export function words(name) {
  return name.toLowerCase().replaceAll("_", " ");
}
