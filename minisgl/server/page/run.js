// The engine as its trace tells it (minisgl/engine/trace.py): state after each step. Draws nothing.

// chapters/figures.py has the same, and so have all drawings of the course.
export const REQUESTS = ["#3f83dd", "#e08a2e", "#2fa273", "#c25fb2", "#b5a030", "#3aa6b9"];
const KEPT = 400; // steps

export class Run {
  constructor(header, colors = new Map()) {
    this.header = header;
    this.pages = header.pages;
    this.pageSize = header.page_size;
    this.steps = []; // {step, cells: Map(request -> {kind, start, n, cached}), finished: Map(request -> reason)}
    this.tables = new Map(); // request -> its pages
    this.computed = new Map(); // request -> tokens whose K and V are in its pages
    this.tree = []; // [parent, first tokens, number of tokens, pages, locks]
    this.free = header.pages;
    this.waiting = 0;
    this.step = NaN; // the last one's number
    this.colors = colors; // request -> index; outlives a broken connection
  }

  take(event) {
    const cells = new Map();
    const snapshot = Number.isNaN(this.step) && !event.batch.length; // what there was before anybody looked
    const next = event.step === this.step + 1; // else steps were left out, and a request's first one may be among them
    this.step = event.step;
    for (const [request, start, n] of event.batch) {
      const fresh = next && !this.tables.has(request);
      cells.set(request, { kind: fresh || n > 1 ? "prefill" : "decode", start, n, cached: fresh ? start : 0 });
      this.computed.set(request, start + n);
    }
    for (const request of event.waiting) cells.set(request, { kind: "waiting" });
    for (const request of event.preempted) cells.set(request, { kind: "preempted" });
    for (const [id, pages] of Object.entries(event.tables)) {
      if (pages.length) this.tables.set(+id, pages);
      else this.tables.delete(+id);
    }
    for (const request of this.tables.keys()) if (!cells.has(request)) cells.set(request, { kind: "paused" });
    for (const request of this.computed.keys()) if (!this.tables.has(request)) this.computed.delete(request);
    if (event.tree) this.tree = event.tree;
    this.free = event.free;
    this.waiting = event.waiting.length + event.preempted.length;
    if (snapshot || (!cells.size && !event.finished.length)) return;
    this.steps.push({ step: event.step, cells, finished: new Map(event.finished) });
    if (this.steps.length > 2 * KEPT) this.steps = this.steps.slice(-KEPT);
  }

  // The same colour for a request wherever it is drawn.
  color(request) {
    if (!this.colors.has(request)) {
      if (this.colors.size > 10_000) this.colors.clear();
      this.colors.set(request, this.colors.size % REQUESTS.length);
    }
    return REQUESTS[this.colors.get(request)];
  }

  // Per page: its first holder (-1: none), all holders of those that have several, the share that is written, and
  // whether the tree holds it.
  holders() {
    const size = this.pages + 1; // page 0 is the dummy
    const first = new Int32Array(size).fill(-1);
    const filled = new Float32Array(size);
    const cached = new Uint8Array(size);
    const shared = new Map();
    for (const [request, pages] of this.tables) {
      this.color(request);
      const written = (this.computed.get(request) ?? Infinity) / this.pageSize;
      pages.forEach((page, i) => {
        if (first[page] < 0) first[page] = request;
        else if (shared.has(page)) shared.get(page).push(request);
        else shared.set(page, [first[page], request]);
        filled[page] = Math.max(filled[page], Math.min(Math.max(written - i, 0), 1));
      });
    }
    for (const node of this.tree) {
      for (const page of node[3]) {
        cached[page] = 1;
        filled[page] = 1;
      }
    }
    return { first, filled, cached, shared, of: (page) => shared.get(page) ?? (first[page] < 0 ? [] : [first[page]]) };
  }
}
