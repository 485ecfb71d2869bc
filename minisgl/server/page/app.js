// Puts the page together: the connection to the engine's trace, the numbers, what is drawn when.

import { ApiError, call, events, key } from "./api.js";
import { askKey, startChat } from "./chat.js";
import { pool, readTheme, timeline } from "./draw.js";
import { Run } from "./run.js";
import { drawTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let run = null;
let watching = null; // the AbortController of the open trace
let paused = false;
let wake = () => {}; // ends a wait

function say(state, text) {
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
  $("state").dataset.state = state;
}

// ── The model ──

let model = "";

async function getModel(signal) {
  if (!model) {
    const { data } = await (await call("v1/models", { signal })).json();
    model = data[0].id;
    $("model").textContent = $("model").title = model;
  }
  return model;
}

// ── Drawing: as often as there is something new, but no more than a third of the time: the chat has the same thread ──

const dirty = { canvas: true, tree: true };
const due = { canvas: 0, tree: 0, labels: 0 };
const grids = {}; // what the canvases show, by their id

function draw(now) {
  requestAnimationFrame(draw);
  if (dirty.canvas && now > due.canvas) {
    dirty.canvas = false;
    grids.timeline = timeline($("timeline"), run);
    grids.pool = pool($("pool"), run);
    const each = grids.pool.each;
    $("scale").textContent = each > 1 ? `a square is ${each} pages` : run ? `a page is ${run.pageSize} tokens` : "";
    for (const id of ["timeline", "pool"]) point(id);
    due.canvas = now + Math.max(40, 3 * (performance.now() - now));
  }
  if (dirty.tree && now > due.tree) {
    dirty.tree = false;
    due.tree = now + 200;
    const { nodes, used, pages } = run ? drawTree($("tree"), run, words) : { nodes: 0 };
    $("tree-empty").hidden = !run || nodes > 0;
    $("tree-says").textContent = nodes ? `${nodes} nodes, ${used} locked, ${pages} pages` : "";
  }
  if (now > due.labels) {
    due.labels = now + 2000;
    for (const [id, grid] of Object.entries(grids)) $(id).setAttribute("aria-label", grid.label);
  }
}

function redraw() {
  dirty.canvas = dirty.tree = true;
}

// ── What a cell means: under the pointer, or moved to with the arrow keys ──

const at = {}; // canvas id -> [column, row]

function point(id) {
  const grid = grids[id];
  $(`${id}-says`).textContent = at[id] && grid?.columns ? grid.at(...at[id]) : "";
}

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

for (const id of ["timeline", "pool"]) {
  $(id).addEventListener("pointermove", (event) => {
    const grid = grids[id];
    at[id] = [Math.floor((event.offsetX - grid.left) / grid.width), Math.floor(event.offsetY / grid.height)];
    point(id);
  });
  $(id).addEventListener("keydown", (event) => {
    const move = KEYS[event.key];
    const grid = grids[id];
    if (!move || !grid?.columns) return;
    event.preventDefault();
    const [x, y] = at[id] ?? [id === "timeline" ? grid.columns : -1, 0];
    const within = (value, end) => Math.min(Math.max(value, 0), end - 1);
    at[id] = [within(x + move[0], grid.columns), within(y + move[1], grid.rows)];
    point(id);
  });
  for (const leave of ["pointerleave", "blur"]) {
    $(id).addEventListener(leave, () => {
      delete at[id];
      point(id);
    });
  }
}

// ── Words for the tree's tokens, a few at a time ──

const texts = new Map();
let asking = 0;
let canAsk = true;

function words(tokens) {
  const name = tokens.join();
  if (!texts.has(name) && canAsk && asking < 4) {
    if (texts.size > 2000) texts.clear();
    asking++;
    texts.set(name, undefined);
    call("detokenize", { body: { tokens } })
      .then((response) => response.json())
      .then(({ prompt }) => texts.set(name, prompt))
      .catch(() => (canAsk = false)) // ids will do
      .finally(() => {
        asking--;
        dirty.tree = true;
      });
  } else if (!texts.has(name) && canAsk) setTimeout(() => (dirty.tree = true), 250);
  return texts.get(name);
}

// ── Numbers ──

let before = null;
const rates = Array(60).fill(0);
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function show(id, number, unit = "") {
  const whole = (n) => (n < 1e5 ? Math.round(n).toLocaleString("en") : compact.format(n));
  const known = Number.isFinite(number);
  $(id).textContent = !known ? "–" : number < 100 && number % 1 ? number.toFixed(1) : whole(number);
  if (known && unit) $(id).append(" ", Object.assign(document.createElement("small"), { textContent: unit }));
}

function numbers(stats) {
  const now = { time: performance.now(), tokens: stats.generation_tokens };
  if (before && now.tokens >= before.tokens) {
    const rate = (1000 * (now.tokens - before.tokens)) / (now.time - before.time);
    rates.push(rate);
    rates.shift();
    show("n-rate", rate);
    const most = Math.max(...rates, 1);
    $("spark").firstElementChild.setAttribute("points", rates.map((r, i) => `${i},${20 - (19 * r) / most}`).join(" "));
  }
  before = now;
  show("n-running", stats.running);
  show("n-waiting", stats.waiting);
  show("n-pages", stats.pages - stats.pages_available, `of ${stats.pages.toLocaleString("en")}`);
  show("n-hits", (100 * stats.cached_tokens) / stats.prompt_tokens, "%");
}

async function count() {
  let missed = 0;
  for (;;) {
    if (watching && !paused && !document.hidden) {
      try {
        numbers(await (await call("stats", { signal: AbortSignal.timeout(5000) })).json());
        missed = 0;
      } catch {
        if (++missed >= 3) watching?.abort(); // a server that is gone without a word
        before = null;
      }
    }
    await sleep(1000);
  }
}

// ── The connection: as long as somebody looks ──

async function watch() {
  const colors = new Map();
  let failures = 0;
  for (;;) {
    if (paused || document.hidden) {
      if (paused) say("paused", "paused");
      await new Promise((resolve) => (wake = resolve));
      continue;
    }
    watching = new AbortController();
    const { signal } = watching;
    let problem = null;
    try {
      await getModel(signal);
      for await (const data of events(await call("trace", { signal }))) {
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        if (event.page_size) {
          run = new Run(event, colors);
          failures = 0;
          say("live", "live");
        } else run?.take(event);
        redraw();
      }
    } catch (error) {
      problem = error;
    }
    watching.abort(); // of a body that was not read to its end
    watching = null;
    if (paused || document.hidden) continue;
    model = ""; // it may come back with another
    const why = problem instanceof ApiError ? problem.message : "The server is gone";
    if (problem?.status === 401) {
      say("gone", "The server wants an API key");
      if (!failures++) askKey();
      await new Promise((resolve) => (wake = resolve));
      continue;
    }
    const seconds = Math.min(1 + failures++, 5);
    say("gone", `${why}: trying again in ${seconds} s`);
    await Promise.race([sleep(1000 * seconds), new Promise((resolve) => (wake = resolve))]);
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", paused);
  if (paused) watching?.abort(); // the engine writes no trace for nobody
  before = null;
  if (!paused) say("waiting", "connecting");
  wake();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) watching?.abort();
  before = null;
  wake();
});
$("key").value = key.get();
$("key").addEventListener("change", () => {
  key.set($("key").value.trim());
  canAsk = true;
  wake();
});

readTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readTheme();
  redraw();
});
new ResizeObserver(redraw).observe($("engine"));
startChat(getModel);
requestAnimationFrame(draw);
count();
watch();
