// Shows /admin/state.json, once a second. All text goes in through textContent.
"use strict";

const EVERY_MS = 1000;
const STALE_MS = 3000;
const STATES = ["owned", "leased", "quarantined", "cached", "free"];
let answeredAt = null;
let trouble = "";

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 ? count : count.toFixed(count < 10 ? 2 : 1)} ${units[unit]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 5400 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

const plural = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

// "free" in the pool counts cached blocks too; on the page each block is shown once.
function share(pool) {
  return { owned: pool.owned, leased: pool.leased, quarantined: pool.quarantined, cached: pool.cached, free: pool.free - pool.cached };
}

// SVG, because the page's security policy forbids style attributes.
function bar(counts, total) {
  const name = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(name, "svg");
  drawing.setAttribute("viewBox", "0 0 1000 1");
  drawing.setAttribute("preserveAspectRatio", "none");
  let at = 0;
  for (const state of STATES) {
    // A single block of a large pool must still be seen.
    const wide = counts[state] === 0 ? 0 : Math.max(1000 * counts[state] / Math.max(total, 1), state === "free" ? 0 : 6);
    const piece = document.createElementNS(name, "rect");
    piece.setAttribute("class", state);
    piece.setAttribute("x", at);
    piece.setAttribute("width", Math.max(Math.min(wide, 1000 - at), 0));
    piece.setAttribute("height", 1);
    drawing.append(piece);
    at += wide;
  }
  const said = STATES.map((state) => `${counts[state]} ${state}`).join(", ");
  return element("div", { class: "bar", role: "img", "aria-label": `of ${total} blocks: ${said}` }, drawing);
}

function table(columns, rows, empty) {
  if (rows.length === 0) return element("p", { class: "none" }, empty);
  const head = columns.map((column) => element("th", column.number ? { class: "number" } : {}, column.title));
  const body = rows.map((row) => element("tr", {}, columns.map((column) => {
    const value = column.show(row);
    const kind = column.number ? "number" : column.error ? "error" : "";
    return element("td", kind ? { class: kind } : {}, value === null || value === undefined ? "" : value);
  })));
  return element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
}

const MOODS = { ready: "good", "not ready": "warn", new: "warn", suspect: "bad", failed: "bad", "no worker": "bad", "no answer": "bad",
  complete: "good", incompatible: "bad" };
const mood = (state) => element("span", { class: `state ${MOODS[state] || ""}` }, state === "new" ? "being tried" : state);

// The start and the side tell owners apart; the whole name is in the tooltip.
function shortened(owner) {
  const side = owner.lastIndexOf("/");
  return side > 16 ? `${owner.slice(0, 13)}…${owner.slice(side)}` : owner;
}

function holdings(node) {
  if (node.holdings.length === 0) return null;
  const columns = [
    { title: "held by", show: (row) => element("code", { title: row.owner }, shortened(row.owner)) },
    { title: "blocks", number: true, show: (row) => row.blocks },
    { title: "KV", number: true, show: (row) => node.worker ? bytes(row.blocks * node.worker.block_bytes) : null },
    { title: "for", number: true, show: (row) => seconds(row.held_seconds) },
    { title: "taken back", number: true, show: (row) => row.remaining_seconds === null ? "with worker" : `in ${seconds(row.remaining_seconds)}` },
  ];
  return element("div", { class: "scroll" }, table(columns, node.holdings, ""));
}

function card(node) {
  const worker = node.worker;
  const kind = node.state === "ready" ? "" : node.state === "not ready" ? " pending" : " problem";
  const made = element("article", { class: `node${kind}` },
    element("h3", {}, node.node, element("code", { class: "quiet", title: "incarnation" }, `@${node.incarnation.slice(0, 8)}`),
      worker ? element("span", { class: "tag" }, worker.role) : null, mood(node.state)),
    worker
      ? element("p", { class: "quiet" }, `${worker.model} · ${worker.dtype} · context ${worker.context} · ${worker.block_tokens} tokens a block · `
        + `${bytes(worker.block_bytes)} a block · ${plural(node.requests, "request")} from here`)
      : element("p", { class: "quiet" }, `control ${node.control}`));
  if (node.error) made.append(element("p", { class: "bad" }, node.error));
  if (node.pool) {
    const counts = share(node.pool);
    made.append(bar(counts, node.pool.total), element("ul", { class: "counts" },
      STATES.map((state) => element("li", counts[state] ? {} : { class: "zero" }, element("b", {}, counts[state]), ` ${state}`)),
      element("li", { class: "quiet" }, `of ${node.pool.total} blocks`,
        worker ? `, ${bytes(node.pool.total * worker.block_bytes)}` : "")));
  }
  const held = holdings(node);
  if (held) made.append(held);
  return made;
}

const PAIRS = [
  { title: "prefill", show: (row) => row.prefill },
  { title: "decode", show: (row) => row.decode },
  { title: "state", show: (row) => mood(row.state) },
  { title: "path", show: (row) => row.path },
  { title: "model", show: (row) => row.model },
  { title: "why not", error: true, show: (row) => row.error },
];
const HANDOFFS = [
  { title: "ago", number: true, show: (row) => seconds(row.age_seconds) },
  { title: "from", show: (row) => row.source },
  { title: "to", show: (row) => row.target },
  { title: "path", show: (row) => row.path },
  { title: "tokens", number: true, show: (row) => row.tokens },
  { title: "KV", number: true, show: (row) => bytes(row.bytes) },
  { title: "GB/s", number: true, show: (row) => row.transfer_seconds > 0 ? row.gigabytes_per_second.toPrecision(2) : "–" },
  { title: "moving", number: true, show: (row) => seconds(row.transfer_seconds) },
  { title: "outcome", show: (row) => row.outcome === "complete" ? mood("complete") : element("span", { class: "bad" }, row.outcome) },
  { title: "request", show: (row) => row.probe ? element("span", { class: "quiet" }, "probe") : element("code", {}, row.request) },
  { title: "error", error: true, show: (row) => row.error },
];

function fill(id, content) {
  const place = document.getElementById(id);
  const scrolled = place.scrollLeft;
  place.replaceChildren(...[content].flat());
  place.scrollLeft = scrolled;
}

function show(state) {
  const verdict = element("span", { class: state.ready ? "good" : "bad" }, state.ready ? "ready" : `not ready: ${state.why}`);
  fill("summary", [verdict, ` · ${plural(state.nodes.length, "node")} · ${plural(state.requests_running, "request")} running`,
    state.directory_error ? element("span", { class: "bad" }, ` · directory: ${state.directory_error}`) : ""]);
  fill("nodes", state.nodes.length ? state.nodes.map(card) : element("p", { class: "none" }, "No daemon has announced itself."));
  const incompatible = state.incompatible.map((row) => ({ ...row, state: "incompatible", path: null, model: null }));
  fill("pairs", table(PAIRS, [...state.pairs, ...incompatible], "No pair of a prefill and a decode worker is there."));
  fill("handoffs", table(HANDOFFS, state.handoffs, "None yet."));
}

function showFreshness() {
  const age = answeredAt === null ? null : performance.now() - answeredAt;
  const stale = age === null ? trouble !== "" : age > STALE_MS;
  const place = document.getElementById("freshness");
  place.className = stale ? "stale" : "";
  place.textContent = !stale ? (age === null ? "" : "live")
    : `${age === null ? "no answer yet" : `stale: ${seconds(age / 1000)} old`}${trouble ? ` (${trouble})` : ""}`;
  document.body.classList.toggle("stale", stale);
}

async function refresh() {
  try {
    const answer = await fetch("/admin/state.json", { cache: "no-store", signal: AbortSignal.timeout(STALE_MS) });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
    answeredAt = performance.now();
    trouble = "";
  } catch (error) {
    trouble = error.name === "TimeoutError" ? "the router does not answer" : error.message;
  }
  showFreshness();
  setTimeout(refresh, EVERY_MS);
}

setInterval(showFreshness, 500);
refresh();
