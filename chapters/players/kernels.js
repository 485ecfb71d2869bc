// A decode step on two lanes, host and GPU: what the host calls, when each kernel runs, and the gaps in between.
//
// Above the whole step, below a window into it that follows the frames: a few kernels at a time through the first
// layer, then layer by layer. All choices share one scale of time. Knows what benchmarks/players/kernels.py records.

minisglPlayer("kernels", (() => {
  const LEFT = 46, WIDTH = 640, WINDOW = 700; // the last in microseconds
  const WHOLE = { host: 24, gpu: 46 }, NEAR = { host: 106, gpu: 172 };
  const COLORS = { small: "new", product: "weights", attention: "k" };
  const MANY = { small: "all small", product: "products", attention: "attentions" };
  const DOES = { // what a kernel's name may leave open
    decode_rows: "looks up where everything is", qk_norm_rope_store: "norms and rotation, and K and V to their pages", decode: "attention",
    add_rms_norm: "adds and normalises", silu_and_mul: "SiLU times up",
  };

  // "name,start,length;…" in tenths of a microsecond, each start counted from the one before.
  function unpacked(text, names) {
    let start = 0;
    return text.split(";").map(part => {
      const [name, since, length] = part.split(",").map(Number);
      start += since;
      return { name: names[name], which: name, start: start / 10, us: length / 10, end: (start + length) / 10 };
    });
  }

  const stories = new Map();

  // Kernels, calls and frames of a step. A frame ends with kernel number `last`; "calls" comes before the first.
  function storyOf(data, choice) {
    if (stories.has(choice)) return stories.get(choice);
    const step = data.steps[choice];
    const kernels = unpacked(step.kernels, step.names).map(k => ({ ...k, kind: step.kinds[k.which] }));
    const calls = unpacked(step.calls, step.call_names).map(c => ({ ...c, waits: step.waits[c.which] }));
    const attentions = kernels.flatMap((k, n) => (k.kind === "attention" ? [n] : []));
    const frames = [{ kind: "whole", first: 0, last: -1 }, { kind: "calls", first: 0, last: -1 }];
    const group = (first, end) => {
      for (let n = first; n < end;) {
        let last = n;
        while (last + 1 < end && kernels[last + 1].kind === kernels[n].kind) last += 1;
        frames.push({ kind: "group", first: n, last });
        n = last + 1;
      }
    };
    group(0, attentions[1] + 1);
    attentions.slice(2).forEach((at, n) => frames.push({ kind: "layer", layer: n + 2, first: attentions[n + 1] + 1, last: at }));
    group(attentions.at(-1) + 1, kernels.length);
    frames.push({ kind: "end", first: 0, last: kernels.length - 1 });
    const launches = calls.filter(call => call.name.includes("Launch")), graph = launches.find(call => call.name.includes("Graph"));
    const end = Math.max(step.host_step_us, ...kernels.map(k => k.end));
    const story = { step, kernels, calls, frames, launches, graph, layers: attentions.length, end };
    stories.set(choice, story);
    return story;
  }

  // Of the time from the first kernel's start to the end of kernel `last`: that in which at least one kernel runs, and the rest.
  function spent(kernels, first, last) {
    let busy = 0, reached = kernels[first].start;
    for (const { start, end } of kernels.slice(first, last + 1)) {
      busy += Math.max(0, end - Math.max(start, reached));
      reached = Math.max(reached, end);
    }
    return { busy, idle: reached - kernels[first].start - busy };
  }

  const us = x => `${x.toFixed(x < 100 ? 1 : 0).replace(/\B(?=(\d{3})+(?!\d))/g, ",")} µs`;
  const many = n => n.toLocaleString("en");
  const named = name => (/nvjet|cublas/i.test(name) ? "product of cuBLAS" : name.replace(/^.*::/, ""));
  const explained = name => (DOES[name.replace("_kernel", "")] ? `${named(name)} (${DOES[name.replace("_kernel", "")]})` : named(name));

  // For each of the drawing's columns, each `wide` µs, a stroke as tall as the share of its time in which something runs.
  function strokes(spans, wide, bottom, tall) {
    const busy = new Map();
    let reached = 0;
    for (const { start, end } of spans) { // a kernel may start before the one before it has ended
      for (let at = Math.floor(start / wide); at * wide < end; at += 1) {
        const time = Math.min(end, (at + 1) * wide) - Math.max(start, reached, at * wide);
        busy.set(at, (busy.get(at) ?? 0) + Math.max(0, time));
      }
      reached = Math.max(reached, end);
    }
    return [...busy].map(([at, time]) => `M${LEFT + at + 0.5} ${bottom}v${-Math.max(2, (tall * time) / wide).toFixed(1)}`).join("");
  }

  function draw(pen, data, i, choice) {
    const { step, kernels, calls, frames, launches } = storyOf(data, choice), frame = frames[i];
    const overall = frame.kind === "whole" || frame.kind === "end", host = step.host_step_us;
    const longest = Math.max(...Object.keys(data.steps).map(each => storyOf(data, each).end));
    const column = longest / (WIDTH - LEFT - 4), far = t => LEFT + t / column;
    const begin = overall ? kernels[0].start - WINDOW / 4 : frame.last < 0 ? 0 : kernels[frame.last].end - 0.75 * WINDOW;
    const from = Math.max(0, begin);
    const near = t => LEFT + ((t - from) / WINDOW) * (WIDTH - LEFT - 4);
    const cut = (a, b) => [Math.max(a, from), Math.min(b, from + WINDOW)];
    const span = (key, a, b, y, height, names, title) => {
      const [begin, end] = cut(a, b);
      if (end > begin) pen.rect(key, near(begin), y, Math.max(1, near(end) - near(begin)), height, names, title);
    };

    const wide = `${(longest / 1000).toFixed(1)} ms wide`;
    pen.text("the whole", LEFT, 13, `the whole step, ${wide}; strokes are as tall as the share of time that is busy`, "small muted");
    for (const lane of ["host", "gpu"]) {
      pen.text(`far ${lane}`, LEFT - 8, WHOLE[lane] + 13, lane === "gpu" ? "GPU" : lane, "end");
      pen.text(`near ${lane}`, LEFT - 8, NEAR[lane] + 22, lane === "gpu" ? "GPU" : lane, "end");
    }
    pen.rect("far python", far(0), WHOLE.host, far(host) - far(0), 17, "page", `the host's step: ${us(host)}`);
    calls.filter(c => c.waits && c.us > 100).forEach((c, n) => {
      pen.rect(`far wait ${n}`, far(c.start), WHOLE.host + 2, c.us / column, 13, "", "waiting");
    });
    if (step.in_flight) pen.path("far before", `M${far(0)} ${WHOLE.gpu}H${far(kernels[0].start)}V${WHOLE.gpu + 17}H${far(0)}z`, "dashed");
    pen.path("far calls", strokes(calls.filter(c => !c.waits), column, WHOLE.host + 15, 13), "q");
    pen.path("far kernels", strokes(kernels, column, WHOLE.gpu + 17, 17), "new");
    pen.line("far ground", LEFT, WHOLE.gpu + 18, WIDTH - 4, WHOLE.gpu + 18, "faint");
    const left = far(from), right = Math.min(far(from + WINDOW), WIDTH - 1);
    pen.rect("window", left, WHOLE.host - 5, right - left, 48, "free ring");
    pen.path("lens", `M${left} ${WHOLE.gpu + 22}L${LEFT} ${NEAR.host - 6}M${right} ${WHOLE.gpu + 22}L${WIDTH - 4} ${NEAR.host - 6}`, "faint");
    pen.text("the window", LEFT + 4, NEAR.host - 10, `${WINDOW} µs of it, from ${from ? us(from) : "the beginning"} on`, "small muted");
    span("python", 0, host, NEAR.host, 32, "page", "Python");
    span("next", host, Infinity, NEAR.host, 32, "free", "the host's next step");
    if (from + WINDOW > Math.max(host, from) + 60) {
      pen.text("next's name", Math.max(near(host), LEFT) + 6, NEAR.host + 20, "the next step", "small muted");
    }
    calls.forEach((call, n) => {
      span(`call ${n}`, call.start, call.end, NEAR.host + 4, 24, call.waits ? "" : "q", `${call.name}: ${us(call.us)}`);
    });
    if (step.in_flight) {
      span("before", 0, kernels[0].start, NEAR.gpu, 40, "free", "the step before");
      if (kernels[0].start > from + 80) pen.text("before's name", LEFT + 6, NEAR.gpu + 24, "kernels of the step before", "small muted");
    }
    const seen = frame.kind === "end" || frame.last < 0 ? kernels.length - 1 : frame.last;
    kernels.forEach((k, n) => {
      const active = frame.kind !== "end" && n >= frame.first && n <= frame.last;
      const names = `${COLORS[k.kind]}${active ? " full" : n > seen ? " free" : ""}`;
      span(`kernel ${n}`, k.start, k.end, NEAR.gpu + (n % 2) * 20, 19, names, `${n + 1}: ${k.name}, ${us(k.us)}`);
    });
    pen.line("near ground", LEFT, NEAR.gpu + 41, WIDTH - 4, NEAR.gpu + 41, "faint");
    const now = kernels[frame.last], call = launches.length === kernels.length ? launches[frame.last] : null;
    if (now && call && !overall && call.start >= from) {
      pen.path("launch", `M${near(call.start + call.us / 2)} ${NEAR.host + 33}L${near(now.start + now.us / 2)} ${NEAR.gpu - 2}`, "arrow");
    }
    if (now && !overall) {
      const right = near(now.end) > WIDTH / 2;
      pen.text("name", near(right ? now.end : now.start), NEAR.gpu + 56, named(now.name), right ? "end strong" : "strong");
    }

    const { busy, idle } = spent(kernels, 0, frame.last < 0 ? kernels.length - 1 : frame.last);
    const count = frame.last < 0 ? kernels.length : frame.last + 1;
    pen.text("count", LEFT, 252, `${many(count)} kernels: the GPU is in one for ${us(busy)}, in none for ${us(idle)}`, "strong");
    const full = WIDTH - LEFT - 4, share = busy / (busy + idle);
    pen.rect("idle", LEFT, 260, full, 12, "free", "no kernel runs");
    pen.rect("busy", LEFT, 260, full * share, 12, "new full", `${(100 * share).toFixed(0)} % of the time in a kernel`);
    [["Python", "page"], ["a call of CUDA", "q"], ["waiting", ""], ["attention", "k"], ["matrix product", "weights"], ["other kernels", "new"]]
      .forEach(([words, names], n) => {
        pen.rect(`key ${n}`, LEFT + n * 97, 288, 10, 10, names);
        pen.text(`key's ${n}`, LEFT + n * 97 + 14, 297, words, "small");
      });
  }

  function caption(data, i, choice) {
    const { step, kernels, calls, frames, launches, graph, layers } = storyOf(data, choice), { kind, first, last, layer } = frames[i];
    const all = spent(kernels, 0, kernels.length - 1), count = kernels.length;
    if (kind === "whole") {
      return `A decode step of ${data.batch} requests: ${many(count)} kernels. ` + (graph
        ? "They stand close together, behind those of the step before; the host launched them " +
          `${us(kernels[0].start - graph.start)} before the first of them ran.`
        : `Most are over in microseconds, and the step takes ${(step.host_step_us / 1000).toFixed(1)} ms: ` +
          `the GPU has nothing to do for ${(100 * step.idle_share).toFixed(0)} % of it.`);
    }
    if (kind === "calls") {
      const each = launches.reduce((time, call) => time + call.us, 0) / launches.length, wait = calls.find(call => call.waits);
      return graph
        ? `${graph.name} hands over all ${many(count)} kernels at once, in ${us(graph.us)} (with a profiler looking on). ` +
          `The GPU is still at the step before, and the host waits ${us(wait.us)} for that one's tokens.`
        : "Python calls a layer, the layer an op, and the op allocates its output and hands a kernel to the driver: " +
          `${many(launches.length)} calls for ${many(count)} kernels, each ${us(each)} long, ` +
          `with ${us(step.host_step_us / launches.length)} from one to the next.`;
    }
    if (kind === "end") {
      return `${many(count)} kernels, ${(all.busy / 1000).toFixed(2)} ms in kernels and ${(all.idle / 1000).toFixed(2)} ms in none. ` +
        `Without the profiler a step of this engine took ${step.step_ms.toFixed(1)} ms.`;
    }
    const { busy, idle } = spent(kernels, first, last), n = last - first + 1;
    const gap = first ? kernels[first].start - Math.max(...kernels.slice(0, first).map(k => k.end)) : 0;
    if (kind === "layer") {
      return `On to the attention of layer ${layer} of ${layers - 1}: ${n} kernels, ` +
        `${us(busy)} in kernels and ${us(Math.max(0, gap) + idle)} in none.`;
    }
    const between = idle > 0 ? `, with ${us(idle)} of nothing between them` : "";
    const which = n === 1
      ? `Kernel ${last + 1}, ${explained(kernels[last].name)}, runs ${us(busy)}.`
      : `Kernels ${first + 1} ${n === 2 ? "and" : "to"} ${last + 1}, ${MANY[kernels[first].kind]}, run ${us(busy)}${between}.`;
    if (!first) return which;
    if (gap <= 0) return `${which} No gap: it was let in before the kernel before it had ended, and that wait is part of its time.`;
    return `${which} Before that the GPU had nothing to do for ${us(gap)}${graph ? "" : ", while Python was on its way to the call"}.`;
  }

  return {
    size: [WIDTH, 304],
    choices: data => Object.keys(data.steps),
    frames: (data, choice) => storyOf(data, choice).frames.length,
    draw,
    caption,
  };
})());
