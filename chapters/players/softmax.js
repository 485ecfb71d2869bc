// The online softmax over one row of real scores: after each tile the largest score, the total and acc.
//
// Frames: the row; then of each tile a look at its scores, a shrinking of what was summed if a larger score came, and
// the adding; at the end acc / total beside the engine's own answer. Knows what benchmarks/players/softmax.py records.

minisglPlayer("softmax", (() => {
  const LEFT = 84, COLUMN = 29, SCORES = 112, WEIGHTS = 212, ACC = 312, UNIT = 14, TALL = 58;

  const framesOf = (data, choice) => {
    const frames = [{ kind: "row", tile: -1 }];
    data.runs[choice].steps.forEach((step, tile, steps) => {
      frames.push({ kind: "look", tile });
      if (tile && step.largest > steps[tile - 1].largest) frames.push({ kind: "shrink", tile });
      frames.push({ kind: "add", tile });
    });
    return [...frames, { kind: "finish", tile: data.runs[choice].steps.length }];
  };

  // What is carried along at a frame: the numbers before the tile, shrunk, or after it.
  const stateAt = ({ steps, rescaled }, { kind, tile }) => {
    const nothing = { largest: -Infinity, total: 0, acc: steps[0].acc.map(() => 0), weights: [] };
    if (kind === "row") return nothing;
    if (kind === "add" || kind === "finish") return steps[Math.min(tile, steps.length - 1)];
    const before = steps[tile - 1] ?? nothing, { largest } = steps[tile];
    const factor = kind === "shrink" && rescaled ? Math.exp(before.largest - largest) : 1;
    const shrunk = numbers => numbers.map(x => x * factor);
    return { largest, total: before.total * factor, acc: shrunk(before.acc), weights: shrunk(before.weights) };
  };

  const three = x => (x === -Infinity ? "−∞" : x.toFixed(3).replace("-", "−"));
  const word = text => `“${text.trim()}”`;
  const named = (data, score) => `${three(score)} (${word(data.words[data.scores.indexOf(score)])})`;

  function draw(pen, data, i, choice) {
    const run = data.runs[choice], frame = framesOf(data, choice)[i], state = stateAt(run, frame);
    const end = frame.kind === "finish", seen = end ? data.words.length : (frame.tile + 1) * run.tile;
    const most = Math.max(...data.exact), x = key => LEFT + key * COLUMN;
    const label = (key, y, words, below) => {
      pen.text(`label ${key}`, LEFT - 10, y, words, "end");
      if (below) pen.text(`below ${key}`, LEFT - 10, y + 13, below, "small muted end");
    };

    if (frame.tile >= 0 && !end) {
      const width = Math.min(run.tile, data.words.length - frame.tile * run.tile) * COLUMN;
      pen.rect("tile", x(frame.tile * run.tile) - 1, 2, width, WEIGHTS + 4, "free ring");
      pen.text("tile's name", x(frame.tile * run.tile) + 3, WEIGHTS + 17, `tile ${frame.tile + 1}`, "small");
    }
    if (state.largest > -Infinity) {
      const y = SCORES - state.largest * UNIT;
      pen.line("largest", LEFT, y, x(Math.min(seen, data.words.length)), y, "q dashed");
    }
    label("scores", 80, "score", "query · key");
    label("weights", 174, "weight", "exp(score −");
    pen.text("below weights 2", LEFT - 10, 200, "largest)", "small muted end");
    data.words.forEach((text, key) => {
      const score = data.scores[key], tall = Math.abs(score) * UNIT, hover = `${word(text)}: score ${three(score)}`;
      pen.text(`word ${key}`, x(key) + COLUMN / 2, key % 2 ? 29 : 16, text.trim(), "small middle", hover);
      pen.rect(`score ${key}`, x(key) + 4, SCORES - Math.max(0, score) * UNIT, COLUMN - 9, tall, key < seen ? "q" : "free", hover);
      const above = SCORES - Math.max(0, score) * UNIT - 3;
      pen.text(`number ${key}`, x(key) + COLUMN / 2, above, score.toFixed(1).replace("-", "−"), `small middle ${key < seen ? "" : "muted"}`);
      const weight = state.weights[key] ?? 0, must = (data.exact[key] / most) * TALL;
      if (key in state.weights) {
        pen.rect(`weight ${key}`, x(key) + 4, WEIGHTS - weight * TALL, COLUMN - 9, weight * TALL, "k",
          `${word(text)} weighs ${three(weight)} now; in the end it must weigh ${three(data.exact[key] / most)}`);
      }
      pen.path(`must ${key}`, `M${x(key) + 1} ${WEIGHTS - must}h${COLUMN - 3}`, "new", `${word(text)} in the end`);
    });
    pen.line("zero", LEFT, SCORES, x(data.words.length), SCORES, "faint");
    pen.line("ground", LEFT, WEIGHTS, x(data.words.length), WEIGHTS, "faint");

    const before = run.steps[frame.tile - 1];
    const shrinks = frame.kind === "shrink" && `× ${(run.rescaled ? state.total / before.total : 1).toFixed(3)}`;
    const newest = { row: "", look: "largest", shrink: "total", add: "total", finish: "" }[frame.kind];
    [["largest", state.largest], ["total", state.total]].forEach(([name, value], n) => {
      pen.text(`name ${name}`, LEFT + 78 + n * 170, ACC - 64, name, "end");
      pen.rect(`box ${name}`, LEFT + 84 + n * 170, ACC - 79, 62, 21, newest === name ? "new" : "q");
      pen.text(`value ${name}`, LEFT + 115 + n * 170, ACC - 64, three(value), "middle mono");
    });
    if (shrinks) pen.text("factor", LEFT + 328, ACC - 64, `total and acc ${shrinks}`, "strong");

    const numbers = end ? state.acc.map(a => a / state.total) : state.acc;
    const unit = 54 / Math.max(...(end ? data.answer : run.steps.at(-1).acc).map(Math.abs));
    const bar = (COLUMN * data.words.length) / numbers.length;
    label("acc", ACC - 8, end ? "acc / total" : "acc", `${numbers.length} numbers`);
    numbers.forEach((a, d) => {
      const tall = Math.abs(a) * unit;
      pen.rect(`acc ${d}`, LEFT + d * bar, ACC - Math.max(0, a) * unit, bar - 1.5, tall, "v", `acc[${d}] = ${three(a)}`);
      if (end) pen.path(`answer ${d}`, `M${LEFT + d * bar - 1} ${ACC - data.answer[d] * unit}h${bar}`, "new");
    });
    pen.line("middle", LEFT, ACC, x(data.words.length), ACC, "faint");
    const red = end ? "Red: the engine's own answer." : "Red: what each key must weigh in the end, with the largest at 1.";
    pen.text("key", LEFT, ACC + 36, red, "small muted");
  }

  function caption(data, i, choice) {
    const run = data.runs[choice], { kind, tile } = framesOf(data, choice)[i], count = data.words.length;
    if (kind === "row") {
      return `The last token, ${word(data.words.at(-1))}, asks the keys of all ${count} tokens (SmolLM2, layer ${data.layer}, head ${data.head}); ` +
        `the model's next token is ${word(data.next)}. A softmax first looks for the largest of ${count} scores; ` +
        `here they come ${run.tile} at a time.`;
    }
    if (kind === "finish") {
      const largest = [...new Set(run.steps.map(step => step.largest))].map(score => word(data.words[data.scores.indexOf(score)]));
      return run.rescaled
        ? `At the end, once, acc / total: from the engine's own answer it differs by at most ${run.error.toFixed(7)}, ` +
          "which is rounding. All weights stand at their red lines."
        : `${largest.join(", ")}: each was the largest once, so each weighs 1. The answer is off by up to ${run.error}, ` +
          "and nothing has raised an error.";
    }
    const step = run.steps[tile], before = run.steps[tile - 1];
    const factor = before && Math.exp(before.largest - step.largest);
    if (kind === "look") {
      const n = Math.min(run.tile, count - tile * run.tile);
      if (!before) return `Tile 1 brings ${n} scores. The largest so far is ${named(data, step.largest)}; every weight will be relative to it.`;
      return step.largest > before.largest
        ? `Tile ${tile + 1} holds ${named(data, step.largest)}, more than ${three(before.largest)}. ` +
          "What was summed is relative to the old one: too large by a factor that is known."
        : `Tile ${tile + 1} brings ${n} scores, none above ${three(before.largest)}: the factor is exp(0) = 1, and what was summed stays as it is.`;
    }
    if (kind === "shrink") {
      const known = `exp(${three(before.largest)} − ${three(step.largest)}) = ${three(factor)}`;
      return run.rescaled
        ? `${known}. total shrinks from ${three(before.total)} to ${three(before.total * factor)}, and acc with it: ` +
          "no earlier score or value is read again."
        : `Here total and acc should shrink by ${known}. They stay as they are: that is the mistake.`;
    }
    const kept = before ? before.total * (run.rescaled ? factor : 1) : 0;
    return `Its weights, ${three(step.total - kept)} in sum, are added to total, now ${three(step.total)}, ` +
      "and weight times value to acc. The next tile may take this one's place.";
  }

  return {
    size: [640, 354],
    choices: data => Object.keys(data.runs),
    frames: (data, choice) => framesOf(data, choice).length,
    draw,
    caption,
  };
})());
