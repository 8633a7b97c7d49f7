// The live page. What it shows comes as server-sent events (pdserve/router/admin/live_frames.py says what is in them); everything
// that is a name or a message goes in as text, never as markup.
"use strict";

const PARTS = ["queue", "settle", "prefill", "publish", "pull", "decode", "router"];
const TIERS = ["device", "host", "pool", "computed"];
const MAX_POINTS = 300;
const SILENT_MS = 15000;
const partColor = (part) => `var(--c${PARTS.indexOf(part)})`;
const tierColor = (tier) => `var(--${tier})`;
let points = [];
let heard = 0;

const $ = (id) => document.getElementById(id);
const element = (tag, text, ...classes) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes.filter(Boolean));
  return made;
};
const drawn = (tag, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};

const count = (n) => Math.round(n).toLocaleString("en");
const rate = (n) => (n >= 10 || n === 0 ? count(n) : n.toFixed(1));
const percent = (share) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(1)} %`);
const duration = (s) => (s === null || s === undefined ? "-" : s >= 1 ? `${s.toFixed(2)} s` : `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms`);
const size = (bytes) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1000) return `${bytes >= 100 || unit === "B" ? Math.round(bytes) : bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
};
const sum = (numbers) => Object.values(numbers).reduce((a, b) => a + b, 0);

// --- bars, charts

function showBar(name, values, keys, color, text) {
  const total = sum(values);
  const there = keys.filter((key) => values[key]);
  $(`${name}-bar`).replaceChildren(...there.map((key) => {
    const piece = element("i");
    piece.style.width = `${(100 * values[key]) / total}%`;
    piece.style.background = color(key);
    piece.title = `${key}: ${text(values[key], total)}`;
    return piece;
  }));
  showLegend(`${name}-legend`, there.map((key) => [key, color(key), text(values[key], total)]));
}

function showLegend(id, rows) {
  $(id).replaceChildren(...rows.map(([name, color, value]) => {
    const one = element("span");
    const mark = element("i");
    mark.style.background = color;
    one.append(mark, `${name} ${value}`);
    return one;
  }));
}

// Stacked areas: `seen` has values by key for each point; where there is nothing, what was there
// before is held, if it is to be.
function showChart(id, seen, keys, color, label, top, isHeld = true) {
  let last = {};
  const rows = seen.map((row) => { last = sum(row) || !isHeld ? row : last; return last; });
  const chart = $(id);
  const width = chart.clientWidth || 400;
  const height = chart.clientHeight || 144;
  const base = height - 16;
  const most = top ?? Math.max(1e-9, ...rows.map(sum));
  const begin = points[0].at_s;
  const span = points[points.length - 1].at_s - begin;
  const x = (i) => (span ? (width * (points[i].at_s - begin)) / span : width);
  const y = (value) => base - (base - 12) * Math.min(1, value / most);
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const shapes = [drawn("line", { x1: 0, x2: width, y1: base, y2: base }), drawn("line", { x1: 0, x2: width, y1: y(most), y2: y(most) })];
  const below = rows.map(() => 0);
  for (const key of keys) {
    if (!rows.some((row) => row[key])) continue;
    const lower = below.slice();
    rows.forEach((row, i) => { below[i] += row[key] || 0; });
    const upper = below.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
    const back = lower.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).reverse();
    const area = drawn("polygon", { points: [...upper, ...back].join(" ") });
    area.style.fill = color(key); // an attribute would be against the page's content security policy
    shapes.push(area);
  }
  shapes.push(drawn("text", { x: 0, y: 9 }, label(most)));
  if (points.length > 1) {
    shapes.push(drawn("text", { x: 0, y: height - 3 }, span < 90 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`));
    shapes.push(drawn("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
  }
  chart.replaceChildren(...shapes);
}

// What was last seen of something that happens only now and then, over the last half minute.
function lately(pick) {
  const since = points[points.length - 1].at_s - 30;
  const added = {};
  let n = 0;
  for (const point of points) {
    const values = pick(point);
    if (point.at_s < since || !sum(values)) continue;
    n += 1;
    for (const [key, value] of Object.entries(values)) added[key] = (added[key] || 0) + value;
  }
  for (const key of Object.keys(added)) added[key] /= n;
  return added;
}

function showPoints() {
  const parts = lately((point) => point.parts_s);
  const tiers = lately((point) => point.tokens_s);
  showBar("parts", parts, PARTS, partColor, (value) => duration(value));
  showBar("tiers", tiers, TIERS, tierColor, (value, total) => percent(value / total));
  const total = sum(tiers);
  $("reused").textContent = total ? percent(1 - (tiers.computed || 0) / total) : "-";
  showChart("parts-chart", points.map((p) => p.parts_s), PARTS, partColor, duration);
  const shares = points.map(({ tokens_s: tokens }) => {
    const all = sum(tokens);
    return Object.fromEntries(Object.entries(tokens).map(([key, value]) => [key, value / all]));
  });
  showChart("tiers-chart", shares, TIERS, tierColor, percent, 1);
  const flow = points.map((p) => ({ failed: p.failed_s, answered: Math.max(0, p.requests_s - p.failed_s) }));
  const flowColor = (key) => (key === "failed" ? "var(--bad)" : "var(--pool)");
  showChart("requests-chart", flow, ["answered", "failed"], flowColor, (most) => `${rate(most)}/s`, undefined, false);
  const last = flow[flow.length - 1];
  showLegend("requests-legend", [["answered", flowColor("answered"), `${rate(last.answered)}/s`], ["failed", flowColor("failed"), `${rate(last.failed)}/s`]]);
}

// --- tables

const cell = (text, ...classes) => element("td", text, ...classes);
const number = (text) => cell(text, "n");
function filled(used, whole, text) {
  const made = cell();
  const meter = element("meter");
  Object.assign(meter, { max: whole || 1, high: 0.95 * (whole || 1), value: used, title: `${size(used)} of ${size(whole)}` });
  made.append(meter, text);
  return made;
}

function showTable(id, rows, none) {
  const body = $(id).tBodies[0];
  if (!rows.length) {
    const only = element("td", none);
    only.colSpan = 9;
    rows = [[only]];
  }
  body.replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    row.append(...cells);
    return row;
  }));
}

// A row of its own, which is never wider than the screen.
const longRow = (text) => {
  const made = cell(undefined, "long");
  made.colSpan = 9;
  made.append(element("span", text));
  return [made];
};
const workerRows = (worker) => {
  const requests = (worker.in_flight ?? "?") + (worker.elsewhere ? ` + ${worker.elsewhere}` : "");
  const row = [
    cell(worker.id), cell(worker.role), cell(worker.state, worker.state),
    number(requests), number(count(worker.queued_tokens)), number(worker.free_kv_tokens === null ? "-" : count(worker.free_kv_tokens)),
  ];
  return worker.says ? [row, longRow(worker.says)] : [row];
};
const nodeRow = (node) => node.error ? longRow(`${node.node}: ${node.error}`) : [
  cell(node.node), filled(node.used_bytes, node.capacity_bytes, percent(node.used_bytes / node.capacity_bytes)), number(count(node.pages)), number(percent(node.hit_rate)),
  number(rate(node.operations_s)), number(size(node.read_bytes_s)), number(size(node.written_bytes_s)), number(count(node.clients)),
];
const spaceRow = (space) => [
  cell(space.name), space.quota_bytes ? filled(space.slot_bytes, space.quota_bytes, percent(space.slot_bytes / space.quota_bytes)) : cell("no quota"),
  number(count(space.pages)), number(size(space.page_bytes)), number(percent(space.hit_rate)), number(count(space.evictions)), number(rate(space.evictions_s)),
];
const problemRow = (problem) => {
  const made = element("li");
  const again = problem.count > 1 ? ` (${count(problem.count)} times)` : "";
  made.append(element("time", new Date(1000 * problem.at_s).toLocaleTimeString()), element("span", problem.level, problem.level), ` ${problem.text}${again}`);
  return made;
};

// --- events

function state(text, isBad) {
  $("state").textContent = text;
  $("state").classList.toggle("bad", isBad);
}

function showFrame(frame) {
  const { point, workers, nodes } = frame;
  points = [...points, point].slice(-MAX_POINTS);
  $("requests").textContent = rate(point.requests_s);
  $("in-flight").textContent = count(point.in_flight);
  $("waiting").textContent = count(frame.waiting);
  $("sessions").textContent = count(frame.sessions);
  $("first-byte").textContent = point.first_byte_p50_s === null ? "-" : `${duration(point.first_byte_p50_s)} / ${duration(point.first_byte_p90_s)}`;
  showPoints();
  showTable("workers", workers.flatMap(workerRows), "no worker");
  showTable("nodes", nodes.map(nodeRow), "the router knows no pool node: admin.pool is empty");
  showTable("namespaces", frame.namespaces.map(spaceRow), "none");
  $("problems").replaceChildren(...(frame.problems.length ? frame.problems.map(problemRow) : [element("li", "none")]));
  const away = workers.filter((worker) => worker.state !== "ready" && worker.state !== "draining").length + nodes.filter((node) => node.error).length;
  const parts = workers.length + nodes.length;
  state(away ? `${away} of ${parts} parts are not well` : `all ${parts} parts are up`, away > 0);
  heard = Date.now();
}

const source = new EventSource("events");
source.addEventListener("history", (event) => { points = JSON.parse(event.data); });
source.addEventListener("frame", (event) => showFrame(JSON.parse(event.data)));
source.addEventListener("error", () => state("the router does not answer", true));
setInterval(() => { if (heard && Date.now() - heard > SILENT_MS) state("nothing heard for a while", true); }, 1000);
window.addEventListener("resize", () => { if (points.length) showPoints(); });
