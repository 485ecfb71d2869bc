// The calculator of roofline.md. A classic script, so that the page also works from a folder. The arithmetic is that of
// benchmarks/floor.py; tests/site/test_roofline.py compares the two.
(function () {
  "use strict";

  // name: [title, layers, hidden, heads, KV heads, head_dim, intermediate, vocabulary, tied]
  const MODELS = {
    "smollm2-135m": ["SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, true],
    "qwen3-0.6b": ["Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, true],
    "llama-2-7b": ["Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, false],
    "32b": ["a 32B (Qwen3's shape)", 64, 5120, 64, 8, 128, 25600, 151936, false],
  };
  const SHAPE = ["layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "tied"];
  // name: [title, GB/s, TFLOP/s, GB]; those without numbers are filled with what the page says was measured.
  const DEVICES = {
    h200: ["H200, measured", 0, 0, 141],
    a100: ["A100 80 GB, data sheet", 2039, 312, 80],
    t4: ["T4, data sheet", 320, 65, 16],
    cpu: ["two CPU cores, measured", 0, 0, 16],
  };
  const FIELDS = [
    ["Model", [
      ["layers", "layers", 1], ["hidden", "hidden size", 1], ["heads", "query heads", 1], ["kv_heads", "KV heads", 1],
      ["head_dim", "head_dim", 1], ["intermediate", "intermediate size", 1], ["vocabulary", "vocabulary", 1],
      ["tied", "tied embeddings"], ["weight_bytes", "bytes per weight", "any"], ["kv_bytes", "bytes per K or V number", "any"],
    ]],
    ["Machine", [
      ["gb_s", "bandwidth, GB/s", "any"], ["tflop_s", "arithmetic, TFLOP/s", "any"], ["memory_gb", "memory, GB", "any"],
    ]],
    ["Step", [["batch", "requests", 1], ["context", "tokens of each", 1]]],
  ];
  const NUMBERS = FIELDS.flatMap(([, fields]) => fields.map(([name]) => name)).filter(name => name !== "tied");
  const WHOLE = new Set(FIELDS.flatMap(([, fields]) => fields.filter(f => f[2] === 1).map(([name]) => name)));

  // What a step needs and how long that takes at least. s: all numbers of the form, by name.
  function compute(s) {
    const table = s.vocabulary * s.hidden;
    const attention = s.layers * s.hidden * (2 * s.heads + 2 * s.kv_heads) * s.head_dim;
    const mlp = s.layers * 3 * s.hidden * s.intermediate;
    const norms = (2 * s.layers + 1) * s.hidden;
    const parameters = (s.tied ? 1 : 2) * table + attention + mlp + norms;
    const read = table + attention + mlp + norms; // of an embedding beside the head, a step reads a few rows only
    const width = s.layers * s.heads * s.head_dim;
    const bandwidth = 1e9 * s.gb_s, peak = 1e12 * s.tflop_s, memory = 1e9 * s.memory_gb;

    const weightBytes = s.weight_bytes * parameters, readBytes = s.weight_bytes * read;
    const kvPerToken = s.kv_bytes * 2 * s.layers * s.kv_heads * s.head_dim;
    const kvBytes = kvPerToken * s.batch * s.context;
    const decodeFlops = s.batch * (2 * (attention + mlp + table) + 4 * width * s.context);
    const prefillFlops = 2 * (attention + mlp) * s.context + 2 * width * s.context ** 2 + 2 * table;
    const weightsS = readBytes / bandwidth, kvS = kvBytes / bandwidth, operationsS = decodeFlops / peak;
    const decodeS = Math.max(weightsS + kvS, operationsS);
    const prefillS = Math.max(readBytes / bandwidth, prefillFlops / peak);
    return {
      parameters, weightBytes, kvPerToken, kvBytes, readBytes, decodeFlops, prefillFlops, bandwidth, peak, memory,
      ridge: peak / bandwidth,
      weightsS, kvS, operationsS, decodeS, prefillS,
      tokensPerS: s.batch / decodeS,
      longest: Math.floor((memory - weightBytes) / (kvPerToken * s.batch)),
      decodeIntensity: decodeFlops / (readBytes + kvBytes),
      prefillIntensity: prefillFlops / readBytes,
      binds: operationsS > weightsS + kvS ? "arithmetic" : weightsS >= kvS ? "weights" : "kv",
      prefillBinds: prefillFlops / peak > readBytes / bandwidth ? "arithmetic" : "weights",
    };
  }

  const BINDS = {
    weights: "Memory binds: most of the time goes into reading weights. More requests at once cost little.",
    kv: "Memory binds: most of the time goes into reading K and V. More requests make a step longer.",
    arithmetic: "Arithmetic binds: reading takes less time than computing. More requests bring no more tokens per second.",
  };

  // Text.

  const digits = (x, n = 3) =>
    x >= 1000 ? Math.round(x).toLocaleString("en-US") : Number(x.toPrecision(n)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  function scaled(x, unit) {
    const step = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => x >= size) || [1, ""];
    return digits(x / step[0]) + " " + step[1] + unit;
  }
  const time = s => (s >= 1 ? digits(s) + " s" : s >= 1e-3 ? digits(1e3 * s) + " ms" : digits(1e6 * s) + " µs");

  // The document.

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  function drawn(tag, attributes = {}, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  }

  const STYLE = `
    .roofline { border: 1px solid var(--faint, #8886); border-radius: .2rem; padding: .6rem .8rem; margin: 1.2em 0; font-size: .7rem; }
    .roofline fieldset { border: 0; margin: 0 0 .6rem; padding: 0; min-width: 0; }
    .roofline legend { font-weight: 650; padding: 0 0 .2rem; }
    .roofline .fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .35rem .6rem; }
    .roofline label { display: block; color: var(--muted, inherit); }
    .roofline label.check { display: flex; align-items: center; gap: .4rem; }
    .roofline label.preset { grid-column: 1 / -1; }
    .roofline input:not([type=checkbox]), .roofline select { display: block; box-sizing: border-box; width: 100%; padding: .2rem .35rem; font: inherit;
      font-variant-numeric: tabular-nums; color: var(--ink, inherit); background: var(--md-code-bg-color, transparent);
      border: 1px solid var(--faint, #8886); border-radius: .2rem; }
    .roofline :is(input, select):focus-visible { outline: 2px solid var(--md-typeset-a-color, currentColor); outline-offset: 1px; }
    .roofline input[aria-invalid=true] { border-color: var(--new, #dc4c64); }
    .roofline dl { display: grid; grid-template-columns: minmax(0, 11rem) minmax(55%, 1fr); gap: .15rem .8rem; margin: .6rem 0; }
    .roofline dt { color: var(--muted, inherit); margin: 0; font-weight: 400; }
    .roofline dd { margin: 0 !important; font-variant-numeric: tabular-nums; }
    .roofline dd strong { font-weight: 650; }
    .roofline svg { display: block; width: 100%; height: auto; }
    .roofline svg text { font: 12px var(--md-text-font, sans-serif); fill: var(--ink, currentColor); }
    .roofline svg .muted { fill: var(--muted, currentColor); }
    .roofline svg .grid { stroke: var(--faint, #8884); stroke-width: 1; }
    .roofline svg .roof { fill: none; stroke: var(--ink, currentColor); stroke-width: 2; }
    .roofline svg .decode { fill: var(--q, #3f83dd); } .roofline svg .prefill { fill: var(--k, #e08a2e); }
    .roofline svg .weights { fill: var(--weights, #8d74d6); } .roofline svg .kv { fill: var(--v, #2fa273); }
    .roofline svg .arithmetic { fill: var(--k, #e08a2e); }`;

  function build(root) {
    const given = { h200: root.dataset.h200, cpu: root.dataset.cpu };
    for (const [name, text] of Object.entries(given)) {
      if (!text) continue;
      const [bytes, flops] = text.split(" ").map(Number);
      DEVICES[name][1] = Number((bytes / 1e9).toPrecision(5));
      DEVICES[name][2] = Number((flops / 1e12).toPrecision(5));
    }

    const inputs = {};
    function preset(name, label, choices) {
      const select = element("select", { name });
      for (const [key, [title]] of Object.entries(choices)) select.append(element("option", { value: key }, title));
      select.append(element("option", { value: "own" }, "your own numbers"));
      inputs[name] = select;
      return element("label", { class: "preset" }, label, select);
    }
    function field(name, label, step) {
      const check = step === undefined;
      const input = element("input", check ? { type: "checkbox", name } : { type: "number", name, min: step === 1 ? 1 : 0, step, inputmode: "decimal", required: "" });
      inputs[name] = input;
      return check ? element("label", { class: "check" }, input, label) : element("label", {}, label, input);
    }
    const form = element("form", { "aria-label": "Model, machine and step" });
    for (const [title, fields] of FIELDS) {
      const grid = element("div", { class: "fields" });
      if (title === "Model") grid.append(preset("model", "a model", MODELS));
      if (title === "Machine") grid.append(preset("device", "a machine", DEVICES));
      grid.append(...fields.map(f => field(...f)));
      form.append(element("fieldset", {}, element("legend", {}, title), grid));
    }
    const results = element("dl", { "aria-live": "polite" });
    const bars = element("div"), plot = element("div");
    root.replaceChildren(element("style", {}, STYLE), form, results, bars, plot);

    function choose(kind, key) {
      if (kind === "model" && MODELS[key]) {
        SHAPE.forEach((name, i) => {
          if (name === "tied") inputs.tied.checked = MODELS[key][i + 1];
          else inputs[name].value = MODELS[key][i + 1];
        });
      }
      if (kind === "device" && DEVICES[key]) ["gb_s", "tflop_s", "memory_gb"].forEach((name, i) => (inputs[name].value = DEVICES[key][i + 1]));
      inputs[kind].value = key;
    }

    // All numbers of the form, or null while one of them is none.
    function state() {
      const found = { tied: inputs.tied.checked };
      let whole = true;
      for (const name of NUMBERS) {
        const value = Number(inputs[name].value);
        const good = inputs[name].value !== "" && value > 0 && Number.isFinite(value) && (!WHOLE.has(name) || Number.isInteger(value));
        inputs[name].setAttribute("aria-invalid", String(!good));
        whole = whole && good;
        found[name] = value;
      }
      return whole ? found : null;
    }

    // The state in the address: presets by their names, and the numbers only where there is no preset.
    function address() {
      const parts = [["model", inputs.model.value], ["device", inputs.device.value]];
      if (inputs.model.value === "own") parts.push(...SHAPE.map(n => [n, n === "tied" ? Number(inputs.tied.checked) : inputs[n].value]));
      if (inputs.device.value === "own") parts.push(...["gb_s", "tflop_s", "memory_gb"].map(n => [n, inputs[n].value]));
      parts.push(...["weight_bytes", "kv_bytes", "batch", "context"].map(n => [n, inputs[n].value]));
      return "#" + parts.map(([name, value]) => name + "=" + encodeURIComponent(value)).join("&");
    }
    function restore() {
      if (!location.hash.includes("=")) return false;
      const told = new Map(new URLSearchParams(location.hash.slice(1)));
      for (const kind of ["model", "device"]) if (told.has(kind)) choose(kind, { ...MODELS, ...DEVICES }[told.get(kind)] ? told.get(kind) : "own");
      for (const name of NUMBERS) if (told.has(name)) inputs[name].value = told.get(name);
      if (told.has("tied")) inputs.tied.checked = told.get("tied") === "1";
      return true;
    }

    function show() {
      const s = state();
      results.replaceChildren();
      if (!s) {
        results.append(element("dt", {}, "waiting"), element("dd", {}, "A field is empty or not a positive number."));
        bars.replaceChildren();
        plot.replaceChildren();
        return;
      }
      const r = compute(s);
      const line = (name, label, ...text) => results.append(element("dt", {}, label), element("dd", { "data-name": name }, ...text));
      line("weights", "weights", `${scaled(r.weightBytes, "B")}, ${scaled(r.parameters, "")} parameters`);
      line("kv", "K and V of one token", `${Math.round(r.kvPerToken).toLocaleString("en-US")} bytes`);
      line("kv_all", "of all requests", scaled(r.kvBytes, "B"));
      const room = r.memory - r.weightBytes;
      line("longest", "longest context that fits", room <= 0
        ? "none: the weights alone are larger than the memory"
        : `${r.longest.toLocaleString("en-US")} tokens for each of ${s.batch.toLocaleString("en-US")}` + (r.longest < s.context ? ", which is less than this step has" : ""));
      line("ridge", "ridge", `${digits(r.ridge)} operations a byte`);
      line("decode", "decode step, at least", element("strong", {}, time(r.decodeS)), ` = the larger of weights ${time(r.weightsS)} + K and V ${time(r.kvS)}, and arithmetic ${time(r.operationsS)}`);
      line("tokens", "tokens per second, at most", element("strong", {}, digits(r.tokensPerS)), `, ${digits(1 / r.decodeS)} for each request`);
      line("prefill", "prefill of one prompt, at least", `${time(r.prefillS)} (${r.prefillBinds === "weights" ? "memory" : "arithmetic"} binds)`);
      line("binds", "what binds a decode step", BINDS[r.binds]);
      draw(r);
    }

    function draw(r) {
      const wide = Math.max(280, Math.round(root.clientWidth ? root.clientWidth - 32 : 640));
      bars.replaceChildren(timeBars(r, wide));
      plot.replaceChildren(roof(r, wide));
    }

    form.addEventListener("submit", event => event.preventDefault());
    form.addEventListener("input", event => {
      const name = event.target.name;
      if (name === "model" || name === "device") choose(name, event.target.value);
      else if (SHAPE.includes(name)) inputs.model.value = "own";
      else if (["gb_s", "tflop_s", "memory_gb"].includes(name)) inputs.device.value = "own";
      show();
      history.replaceState(null, "", address());
    });
    choose("model", "qwen3-0.6b");
    choose("device", "h200");
    Object.assign(inputs.weight_bytes, { value: 2 });
    Object.assign(inputs.kv_bytes, { value: 2 });
    Object.assign(inputs.batch, { value: 16 });
    Object.assign(inputs.context, { value: 1024 });
    if (restore()) root.scrollIntoView();
    show();
    addEventListener("hashchange", () => restore() && show());
    let width = root.clientWidth;
    addEventListener("resize", () => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      show();
    });
  }

  // Memory's time and arithmetic's, one above the other: the longer bar is the floor.
  function timeBars(r, wide) {
    const left = 78, most = Math.max(r.weightsS + r.kvS, r.operationsS), scale = (wide - left - 8) / most;
    const svg = drawn("svg", { viewBox: `0 0 ${wide} 66`, role: "img", "aria-label": `Decode step: memory ${time(r.weightsS + r.kvS)}, arithmetic ${time(r.operationsS)}` });
    const bar = (y, from, seconds, kind) => svg.append(drawn("rect", { x: left + from * scale, y, width: Math.max(seconds * scale, .5), height: 14, class: kind }));
    svg.append(drawn("text", { x: 0, y: 12 }, "memory"), drawn("text", { x: 0, y: 34 }, "arithmetic"));
    bar(1, 0, r.weightsS, "weights");
    bar(1, r.weightsS, r.kvS, "kv");
    bar(23, 0, r.operationsS, "arithmetic");
    let x = left;
    for (const [kind, label, room] of [["weights", "weights", 84], ["kv", "K and V", 84]]) {
      svg.append(drawn("rect", { x, y: 48, width: 10, height: 10, class: kind }), drawn("text", { x: x + 14, y: 58, class: "muted" }, label));
      x += room;
    }
    return svg;
  }

  // Operations per second against operations per byte, both in powers of ten.
  function roof(r, wide) {
    const high = 250, left = 52, bottom = 34, top = 12, right = 10;
    const points = [["decode", r.decodeIntensity], ["prefill", r.prefillIntensity]];
    const first = Math.floor(Math.log10(Math.min(...points.map(p => p[1]), r.ridge) / 2));
    const last = Math.ceil(Math.log10(Math.max(...points.map(p => p[1]), r.ridge) * 2));
    const reach = x => Math.min(r.bandwidth * x, r.peak);
    const low = Math.floor(Math.log10(reach(10 ** first))), highest = Math.ceil(Math.log10(r.peak) + 0.05);
    const X = x => left + (Math.log10(x) - first) / (last - first) * (wide - left - right);
    const Y = y => top + (highest - Math.log10(y)) / (highest - low) * (high - top - bottom);
    const svg = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img",
      "aria-label": `Roofline: decode at ${digits(r.decodeIntensity)} and prefill at ${digits(r.prefillIntensity)} operations a byte, ridge at ${digits(r.ridge)}` });
    for (let e = first; e <= last; e++) {
      svg.append(drawn("line", { x1: X(10 ** e), x2: X(10 ** e), y1: top, y2: high - bottom, class: "grid" }));
      svg.append(drawn("text", { x: X(10 ** e), y: high - 18, "text-anchor": e === last ? "end" : "middle", class: "muted" }, digits(10 ** e)));
    }
    for (let e = low; e <= highest; e++) {
      svg.append(drawn("line", { x1: left, x2: wide - right, y1: Y(10 ** e), y2: Y(10 ** e), class: "grid" }));
      svg.append(drawn("text", { x: left - 5, y: Y(10 ** e) + 4, "text-anchor": "end", class: "muted" }, scaled(10 ** e, "")));
    }
    svg.append(drawn("text", { x: wide - right, y: high - 2, "text-anchor": "end", class: "muted" }, "operations a byte"));
    svg.append(drawn("text", { x: left + 4, y: top + 12, class: "muted" }, "operations/s"));
    svg.append(drawn("path", { class: "roof", d: `M${X(10 ** first)} ${Y(reach(10 ** first))} L${X(r.ridge)} ${Y(r.peak)} L${X(10 ** last)} ${Y(r.peak)}` }));
    for (const [name, intensity] of points) {
      const x = X(intensity), y = Y(reach(intensity)), leftward = x > wide * 0.7;
      svg.append(drawn("circle", { cx: x, cy: y, r: 6, class: name }));
      svg.append(drawn("text", { x: x + (leftward ? -10 : 10), y: y + (name === "decode" ? 20 : 24), "text-anchor": leftward ? "end" : "start" }, name));
    }
    return svg;
  }

  window.roofline = { MODELS, SHAPE, DEVICES, compute };
  for (const root of document.querySelectorAll("[data-roofline]")) build(root);
})();
