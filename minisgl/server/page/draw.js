// Timeline and pool on canvases, in the look of the course's drawings (chapters/draw.py).

export let theme = {};
let tints = new Map();

export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  theme = Object.fromEntries(["ink", "muted", "faint", "paper", "new", "page", "sans"].map((n) => [n, get(n)]));
  tints = new Map();
}

// The colour mixed into the page behind.
export function tint(color, strength) {
  const name = color + strength;
  if (!tints.has(name)) {
    const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const paper = parts(theme.paper);
    const mixed = parts(color).map((c, i) => Math.round(strength * c + (1 - strength) * paper[i]));
    tints.set(name, `rgb(${mixed.join(" ")})`);
  }
  return tints.get(name);
}

// A context in CSS pixels, for a canvas as wide as its place and `height` high, empty.
function sheet(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const GUTTER = 34; // for the requests' ids
const COLUMN = 8;
const MOST_ROWS = 160;
const MARKS = { abort: "×", error: "!" };

// One column a step, the newest at the right; one row a request. Returns what a point shows: at(x, y) or null.
export function timeline(canvas, run) {
  const width = canvas.clientWidth;
  const columns = Math.max(Math.floor((width - GUTTER - 12) / COLUMN), 1);
  const steps = run ? run.steps.slice(-columns) : [];
  let requests = new Set();
  const ran = new Set();
  for (const step of steps) {
    for (const [request, cell] of step.cells) {
      requests.add(request);
      if (cell.n) ran.add(request);
    }
    for (const request of step.finished.keys()) if (requests.has(request)) ran.add(request);
  }
  if (requests.size > MOST_ROWS) requests = ran;
  requests = [...requests].sort((a, b) => a - b).slice(-MOST_ROWS);
  const row = Math.min(Math.max(200 / Math.max(requests.length, 1), 2), 18);
  const height = Math.max(Math.ceil(row * requests.length), 120);
  const c = sheet(canvas, width, height);
  const line = new Map(requests.map((request, i) => [request, i * row]));
  const gap = row > 4 ? 1 : 0;
  c.font = `10px ${theme.sans}`;
  c.textBaseline = "middle";
  steps.forEach((step, i) => {
    const x = GUTTER + i * COLUMN;
    for (const [request, cell] of step.cells) {
      const y = line.get(request);
      if (y === undefined) continue;
      const color = run.color(request);
      if (cell.n) {
        c.fillStyle = tint(color, cell.kind === "prefill" ? 0.95 : 0.4);
        c.fillRect(x, y + gap, COLUMN - 1, row - 2 * gap);
      } else if (cell.kind === "paused") {
        c.fillStyle = tint(color, 0.4);
        c.fillRect(x, y + row / 2 - 1, COLUMN, Math.min(2, row));
      } else {
        const waits = cell.kind === "waiting";
        c.fillStyle = waits ? (row < 6 ? theme.faint : theme.muted) : theme.new;
        const high = row < 6 ? 1 : 1.5;
        c.fillRect(x, y + (row - high) / 2, waits ? 2 : 5, high);
        if (waits) c.fillRect(x + 4, y + (row - high) / 2, 2, high);
      }
    }
    for (const [request, reason] of step.finished) {
      const y = line.get(request);
      if (y === undefined || row < 8) continue;
      c.fillStyle = reason === "error" ? theme.new : run.color(request);
      const mark = x + (step.cells.get(request)?.n ? COLUMN : 0) + 1; // behind its last step
      if (MARKS[reason]) c.fillText(MARKS[reason], mark, y + row / 2 + 0.5);
      else c.fillRect(mark + 1, y + row / 2 - 2, 4, 4);
    }
  });
  if (row >= 10) {
    c.textAlign = "right";
    c.fillStyle = theme.muted;
    for (const [request, y] of line) c.fillText(String(request), GUTTER - 7, y + row / 2 + 0.5);
    c.textAlign = "left";
  }
  const at = (x, y) => {
    const step = steps[x];
    const request = requests[y];
    if (!step) return "";
    const cell = step.cells.get(request);
    const total = [...step.cells.values()].reduce((sum, one) => sum + (one.n ?? 0), 0);
    let what = step.finished.has(request) ? `finished: ${step.finished.get(request)}` : "";
    if (cell?.n) {
      const cached = cell.cached ? ` after ${cell.cached} from the cache` : "";
      what = `${cell.kind} of ${cell.n} at ${cell.start}${cached}`;
    } else if (cell) what ||= cell.kind;
    return `step ${step.step}: ${total} tokens` + (what ? ` · request ${request}: ${what}` : "");
  };
  const last = steps.at(-1);
  const running = last ? [...last.cells.values()].filter((cell) => cell.n).length : 0;
  const label = last
    ? `Batch timeline, up to step ${last.step}: ${running} requests in it, ${run.waiting} waiting`
    : "Batch timeline, no step yet";
  return { columns: steps.length, rows: requests.length, left: GUTTER, width: COLUMN, height: row, at, label };
}

const HIGHEST = 250;

// A square a page, or several pages where there is no room for that.
export function pool(canvas, run) {
  const width = canvas.clientWidth;
  const pages = run?.pages ?? 0;
  let cell = 18;
  const lines = (size) => Math.ceil(pages / Math.max(Math.floor(width / size), 1));
  while (cell > 6 && lines(cell) * cell > HIGHEST) cell--;
  let each = 1;
  if (lines(cell) * cell > HIGHEST) {
    cell = 10;
    each = Math.ceil(pages / (Math.floor(width / cell) * Math.floor(HIGHEST / cell)));
  }
  const columns = Math.max(Math.floor(width / cell), 1);
  const rows = Math.ceil(pages / each / columns);
  const c = sheet(canvas, width, Math.max(rows * cell, 20));
  if (!run) return { columns: 0, rows: 0, left: 0, width: cell, height: cell, at: () => "", label: "Page pool", each };
  const held = run.holders();
  const size = cell - (cell > 8 ? 2 : 1);
  c.lineWidth = 1;
  const count = Math.ceil(pages / each);
  for (let i = 0; i < count; i++) {
    const x = (i % columns) * cell;
    const y = Math.floor(i / columns) * cell;
    if (each === 1) square(c, run, held, i + 1, x, y, size);
    else band(c, run, held, i * each + 1, Math.min((i + 1) * each, pages), x, y, size);
  }
  let used = 0;
  let kept = 0;
  for (let page = 1; page <= pages; page++) {
    if (held.first[page] >= 0) used++;
    else if (held.cached[page]) kept++;
  }
  const at = (x, y) => {
    const from = (y * columns + x) * each + 1;
    if (from > pages) return "";
    if (each > 1) return `pages ${from} to ${Math.min(from + each - 1, pages)}`;
    const who = held.of(from);
    const tree = held.cached[from] ? "in the tree" : "";
    const by = who.length ? `request${who.length > 1 ? "s" : ""} ${who.slice(0, 6).join(", ")}${who.length > 6 ? " …" : ""}` : "";
    return `page ${from}: ${[by, tree].filter(Boolean).join(", ") || "free"}`;
  };
  const label = `Page pool: of ${pages} pages ${used} held by requests, ${kept} only in the prefix tree, ${run.free} free`;
  return { columns, rows, left: 0, width: cell, height: cell, at, label, each };
}

function square(c, run, held, page, x, y, size) {
  const who = held.of(page).slice(0, Math.max(Math.floor(size / 2), 1));
  const cached = held.cached[page];
  if (!who.length && !cached) {
    c.strokeStyle = theme.faint;
    c.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    return;
  }
  if (!who.length) {
    c.fillStyle = tint(theme.page, 0.35);
    c.fillRect(x, y, size, size);
  }
  who.forEach((request, i) => {
    const [top, high] = [y + (i * size) / who.length, size / who.length];
    c.fillStyle = tint(run.color(request), 0.2);
    c.fillRect(x, top, size, high);
    c.fillStyle = tint(run.color(request), 0.85);
    c.fillRect(x, top, size * held.filled[page], high);
  });
  if (cached && size > 7) {
    c.strokeStyle = who.length ? theme.ink : theme.page;
    c.globalAlpha = 0.55;
    c.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    c.globalAlpha = 1;
  }
}

// Several pages in one square: what share of them is whose, from the bottom up.
function band(c, run, held, from, to, x, y, size) {
  const shares = new Map();
  let kept = 0;
  for (let page = from; page <= to; page++) {
    if (held.first[page] >= 0) {
      const color = run.color(held.first[page]);
      shares.set(color, (shares.get(color) ?? 0) + 1);
    } else kept += held.cached[page];
  }
  c.strokeStyle = theme.faint;
  c.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  let bottom = y + size;
  const pile = (color, pages) => {
    const high = (pages / (to - from + 1)) * size;
    c.fillStyle = color;
    c.fillRect(x, bottom - high, size, high);
    bottom -= high;
  };
  for (const [color, pages] of shares) pile(tint(color, 0.85), pages);
  if (kept) pile(tint(theme.page, 0.35), kept);
}
