// Line charts over steps, as SVG.

const COLOURS = ["#2f81f7", "#e5730b", "#1a9e5c", "#a855d4", "#d6336c"];
const WIDTH = 340;
const HEIGHT = 140;
const MARGIN = { left: 52, right: 8, top: 8, bottom: 18 };

// [title, source, unit, [[label, key], ...]]
const CHARTS = [
  ["Reward", "steps", "", [["mean", "reward_mean"], ["deviation", "reward_std"]]],
  ["Held-out score", "scores", "", [["greedy", "greedy"], ["sampled", "sampled"]]],
  ["Staleness", "steps", "versions", [["mean", "staleness_mean"], ["max", "staleness_max"]]],
  ["Weight sync", "syncs", "ms", [
    ["total", "sync_ms"], ["prepare", "prepare_ms"], ["transfer", "transfer_ms"], ["adopt", "adopt_ms"],
  ]],
  ["Time of a step", "steps", "s", [["total", "seconds"], ["trainer waits", "trainer_wait_s"]]],
  ["The trainer waits", "steps", "s", [
    ["for data", "idle_seconds_no_data"], ["for stale groups", "idle_seconds_barrier"],
    ["weight sync", "idle_seconds_weight_sync"], ["checkpoint", "idle_seconds_checkpoint"],
    ["control", "idle_seconds_control"],
  ]],
  ["Groups", "steps", "", [["finished, waiting", "ready_groups"], ["running", "running_groups"]]],
  ["Generated tokens", "steps", "per s", [["tokens", "generated_tokens_per_s"]]],
  ["Response length", "steps", "tokens", [["mean", "response_length_mean"]]],
  ["Loss", "steps", "", [["loss", "loss"]]],
  ["Entropy", "steps", "nats", [["entropy", "entropy"]]],
  ["Trainer against rollout", "steps", "nats", [["divergence", "kl_rollout"]]],
  ["Gradient norm", "steps", "", [["norm", "grad_norm"]]],
];

/** Draw all charts of a run into an element. */
export function drawCharts(target, run) {
  target.replaceChildren(...CHARTS.map(([title, source, unit, lines]) => draw(title, run[source], unit, lines)));
}

function draw(title, points, unit, lines) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = unit ? `${title} (${unit})` : title;
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  const legend = document.createElement("div");
  legend.className = "legend";
  figure.append(caption, svg, legend);
  const scales = axes(svg, points, lines);
  lines.forEach(([label, key], index) => {
    const known = points.filter((point) => Number.isFinite(point[key]));
    if (known.length) svg.append(line(known, key, scales, COLOURS[index]));
    legend.append(legendEntry(label, known.at(-1)?.[key], COLOURS[index]));
  });
  return figure;
}

function axes(svg, points, lines) {
  const values = points.flatMap((point) => lines.map(([, key]) => point[key])).filter(Number.isFinite);
  const [low, high] = bounds(values);
  const [first, last] = [points[0]?.step ?? 0, Math.max(points.at(-1)?.step ?? 1, 1)];
  const x = (step) => MARGIN.left + ((step - first) / Math.max(last - first, 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (value) => HEIGHT - MARGIN.bottom - ((value - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(make("line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(value), y2: y(value) }));
    svg.append(label(MARGIN.left - 4, y(value) + 3, short(value), "end"));
  }
  svg.append(label(MARGIN.left, HEIGHT - 4, `step ${first}`, "start"));
  svg.append(label(WIDTH - MARGIN.right, HEIGHT - 4, last, "end"));
  return { x, y };
}

/** Bounds that hold all values and 0 where it is near, and are never equal. */
function bounds(values) {
  if (!values.length) return [0, 1];
  let low = values.reduce((a, b) => Math.min(a, b));
  let high = values.reduce((a, b) => Math.max(a, b));
  if (low > 0 && low < high / 2) low = 0;
  if (high === low) high = low + Math.max(Math.abs(low) / 10, 1e-6);
  return [low, high];
}

function line(points, key, { x, y }, colour) {
  const path = points.map((point) => `${x(point.step).toFixed(1)},${y(point[key]).toFixed(1)}`).join(" ");
  return make("polyline", { points: path, fill: "none", stroke: colour, "stroke-width": 1.6 });
}

function label(x, y, text, anchor) {
  const made = make("text", { class: "label", x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

function legendEntry(text, value, colour) {
  const entry = document.createElement("span");
  const mark = document.createElement("i");
  mark.style.background = colour;
  entry.append(mark, value === undefined ? text : `${text} ${short(value)}`);
  return entry;
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function make(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
