// The same requests under three schedulers. A column is a step, as wide as it takes; a row is a request.
//
// Data: budget, cost; requests: [{arrival, text, prompt, answer: [words]}]; modes: {name: [{end, rows, waiting}]}, where
// a row is [request, position of its first token, tokens]. Times are milliseconds.

{
  const LEFT = 92, RIGHT = 612, ROW = 36, TOP = 24, CELL = 20, BAR = 262, TABLE = 308;
  const name = id => "ABCDEF"[id];
  const listed = words => [words.slice(0, -1).join(", "), ...words.slice(-1)].filter(Boolean).join(" and ");
  const names = ids => listed(ids.map(name));
  const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const total = step => step.rows.reduce((sum, [, , tokens]) => sum + tokens, 0);
  const begin = (steps, i) => steps[i].end - cost(steps[i]);
  let price;
  const cost = step => price.step_ms + price.token_ms * total(step);

  // Whether a row's step brings its request a token: it reaches the last token that is known.
  const brings = (data, [id, start, tokens]) => start + tokens >= data.requests[id].prompt;

  // When each token of each request came.
  function tokenTimes(data, steps) {
    const times = data.requests.map(() => []);
    for (const step of steps) for (const row of step.rows) if (brings(data, row)) times[row[0]].push(step.end);
    return times;
  }

  function summary(data, steps) {
    const times = tokenTimes(data, steps);
    const first = times.map(([time], id) => time - data.requests[id].arrival);
    return [
      steps[steps.length - 1].end,
      Math.max(...times.flatMap(own => own.slice(1).map((time, i) => time - own[i]))),
      first.reduce((a, b) => a + b) / first.length,
    ].map(ms => `${ms.toFixed(0)} ms`);
  }

  function draw(pen, data, at, mode) {
    price = data.cost;
    const steps = data.modes[mode];
    const longest = Math.max(...Object.values(data.modes).map(each => each[each.length - 1].end));
    const x = ms => LEFT + (ms * (RIGHT - LEFT)) / longest;

    for (let ms = 0; ms <= longest; ms += 50) {
      pen.line(`tick ${ms}`, x(ms), TOP - 6, x(ms), TOP + 6 * ROW, "faint");
      pen.text(`ms ${ms}`, x(ms), TOP - 10, ms ? ms : "0 ms", "small muted middle");
    }
    data.requests.forEach((request, id) => {
      const y = TOP + id * ROW;
      pen.text(`name ${id}`, 8, y + 14, name(id), "strong", request.text);
      pen.text(`size ${id}`, 24, y + 14, `${request.prompt} → ${request.answer.length}`, "small muted", request.text);
      const mine = steps.flatMap((step, i) => (step.rows.some(row => row[0] === id) ? [i] : []));
      const admitted = begin(steps, mine[0]), now = steps[at].end;
      // Waiting is dashed; a line shows through where somebody who runs is left out.
      if (now > request.arrival) pen.line(`wait ${id}`, x(request.arrival), y + 10, x(Math.min(now, admitted)), y + 10, "dashed");
      const over = steps[mine[mine.length - 1]].end;
      if (now > admitted) pen.line(`runs ${id}`, x(admitted), y + 10, x(Math.min(now, over)), y + 10, `request-${id}`);
      pen.line(`came ${id}`, x(request.arrival), y, x(request.arrival), y + CELL);

      for (const i of mine) {
        const row = steps[i].rows.find(each => each[0] === id), tokens = row[2];
        const prefill = row[1] < request.prompt, height = prefill ? CELL : 10;
        const [from, to] = [x(begin(steps, i)), x(steps[i].end)];
        const hover = `step ${i + 1}: ${many(tokens, "token")} of ${name(id)} from position ${row[1]} (${prefill ? "prefill" : "decode"})`;
        pen.rect(`cell ${id} ${i}`, from + 0.5, y + 10 - height / 2, to - from - 1, height, i <= at ? `request-${id}` : "free", hover);
        if (prefill) pen.text(`count ${id} ${i}`, (from + to) / 2, y + 14, tokens, `small middle ${i <= at ? "strong" : "muted"}`);
      }
      const said = steps.slice(0, at + 1).flatMap(step => step.rows).filter(row => row[0] === id && brings(data, row)).length;
      const words = request.answer.slice(0, said).join("").trim();
      const firstToken = steps.find(step => step.rows.some(row => row[0] === id && brings(data, row))).end;
      if (words) pen.text(`words ${id}`, Math.min(x(firstToken), RIGHT - 5 * words.length), y + 30, words, "small muted");
    });
    pen.line("now", x(steps[at].end), TOP - 6, x(steps[at].end), TOP + 6 * ROW, "new");

    // The tokens of this step beside the budget.
    const most = Math.max(...Object.values(data.modes).flat().map(total)), wide = tokens => (tokens * (RIGHT - LEFT)) / most;
    let left = LEFT;
    pen.text("step", 8, BAR + 13, `step ${at + 1}`, "strong");
    for (const [id, , tokens] of steps[at].rows) {
      pen.rect(`share ${id}`, left, BAR, wide(tokens), 18, `request-${id}`, `${many(tokens, "token")} of ${name(id)}`);
      if (tokens > 20) pen.text(`share of ${id}`, left + 4, BAR + 13, `${name(id)} ${tokens}`, "small");
      left += wide(tokens);
    }
    const bound = mode === "mixed";
    pen.text("sum", 8, BAR + 28, many(total(steps[at]), "token"), "small muted");
    pen.line("budget", LEFT + wide(data.budget), BAR - 6, LEFT + wide(data.budget), BAR + 24, bound ? "new" : "dashed");
    pen.text("budget size", LEFT + wide(data.budget) + 4, BAR + 28, `budget ${data.budget}${bound ? "" : ", for mixed only"}`, "small muted");

    ["", "all done", "longest pause", "mean time to first token"].forEach((title, i) => pen.text(`title ${i}`, [0, 190, 310, 480][i], TABLE, title, "small muted end"));
    Object.entries(data.modes).forEach(([each, own], line) => {
      const y = TABLE + 15 + line * 15, names = each === mode ? "small strong" : "small";
      pen.text(`mode ${each}`, 8, y, each, names);
      summary(data, own).forEach((ms, i) => pen.text(`${each} ${i}`, [190, 310, 480][i], y, ms, `${names} end`));
    });
  }

  function caption(data, at, mode) {
    price = data.cost;
    const steps = data.modes[mode], step = steps[at];
    const reads = step.rows.filter(([id, start]) => start < data.requests[id].prompt);
    const decodes = step.rows.filter(row => !reads.includes(row)).map(([id]) => id);
    const parts = reads.map(([id, start, tokens]) => {
      const size = data.requests[id].prompt;
      return tokens === size ? `${name(id)}'s prompt of ${size}` : `tokens ${start + 1}–${start + tokens} of ${name(id)}'s ${size}`;
    });
    if (decodes.length) parts.push(`one new token each for ${names(decodes)}`.replace(/ each for ([A-F])$/, " for $1"));
    let words = `Step ${at + 1}: ${many(total(step), "token")} in ${cost(step).toFixed(1)} ms, ${listed(parts)}.`;

    const there = id => step.rows.some(row => row[0] === id);
    const ran = steps.slice(0, at).flatMap(each => each.rows.map(row => row[0]));
    const goesOn = steps.slice(at + 1).flatMap(each => each.rows.map(row => row[0]));
    const still = data.requests.map((_, id) => id).filter(id => !there(id) && ran.includes(id) && goesOn.includes(id));
    const done = step.rows.map(([id]) => id).filter(id => !goesOn.includes(id));
    if (still.length) words += ` ${names(still)} ${still.length > 1 ? "stand" : "stands"} still: a new prompt goes first, whole.`;
    if (step.waiting.length) {
      const why = mode === "static" ? `the group runs until its last member is done` : `the budget is spent`;
      words += ` ${names(step.waiting)} ${step.waiting.length > 1 ? "wait" : "waits"}: ${why}.`;
    }
    if (done.length && at < steps.length - 1) words += ` ${names(done)} ${done.length > 1 ? "are" : "is"} done.`;
    if (at === steps.length - 1) words += ` All is done after ${step.end.toFixed(0)} ms and ${steps.length} steps.`;
    return words;
  }

  minisglPlayer("timeline", {
    size: [620, 362],
    choices: data => Object.keys(data.modes),
    frames: (data, mode) => data.modes[mode].length,
    draw,
    caption,
  });
}
