// One decode step on one, two or three ranks: what each holds, and what it says to the others, layer by layer.
//
// A lane for each rank, from the embedding down to the logits; a bar across the lanes is a collective. Frames follow
// the step. Knows what benchmarks/players/ranks.py records: shapes, heads, and each call's bytes and first number.

minisglPlayer("ranks", (() => {
  const LEFT = 88, WIDTH = 640, GAP = 12, GLYPH = 46, TALL = 26;
  const Y = { // of each row
    embed: 48, embedded: 80, qkv: 110, heads: 142, o: 166, attended: 198,
    gate: 228, down: 260, summed: 292, head: 326, gathered: 358, token: 388,
  };
  const BARS = ["embedded", "attended", "summed", "gathered"];
  const WEIGHTS = { embed: "embed_tokens", qkv: "qkv_proj", o: "o_proj", gate: "gate_up_proj", down: "down_proj", head: "embed_tokens" };
  const CUT = { embed: "by tokens", qkv: "by columns", o: "by rows", gate: "by columns", down: "by rows", head: "by tokens" };

  // Where the step is at each frame; a bar's `where` names its call.
  const framesOf = data => [
    { at: "start" }, { at: "embed" }, { at: "embedded", where: "model.embed_tokens" },
    ...Array.from({ length: data.num_hidden_layers }, (_, layer) => [
      { at: "qkv", layer }, { at: "heads", layer }, { at: "o", layer },
      { at: "attended", layer, where: `model.layers.${layer}.self_attn.o_proj` },
      { at: "gate", layer }, { at: "down", layer },
      { at: "summed", layer, where: `model.layers.${layer}.mlp.down_proj` },
    ]).flat(),
    { at: "head" }, { at: "gathered", where: "head" }, { at: "token" },
  ];

  const groupOf = (data, choice) => data.groups[choice.split(" ")[0]];
  const callOf = (rank, where) => rank.calls.find(call => call.where === where);
  const madeBy = (rank, frames, i) => frames.slice(0, i + 1).map(frame => callOf(rank, frame.where)).filter(call => call?.sent);
  const sum = numbers => numbers.reduce((a, b) => a + b, 0);
  const number = x => x.toFixed(3).replace("-", "−");
  const bytes = n => `${n.toLocaleString("en")} bytes`;
  const added = ([first, ...others]) => // 1.5 + 0.2 − 0.7
    number(first.mine) + others.map(({ mine }) => ` ${mine < 0 ? "−" : "+"} ${number(Math.abs(mine))}`).join("");

  // A matrix as x meets it, with the part that this rank holds: columns are slices from left to right, rows from top to bottom.
  function matrix(pen, key, x, y, data, group, r, row) {
    pen.path(`${key} all`, `M${x} ${y}h${GLYPH}v${TALL}h${-GLYPH}z`, "dashed");
    const part = 1 / group.length;
    if (row === "qkv") {
      const { num_attention_heads: q, num_key_value_heads: kv } = data, unit = GLYPH / (q + 2 * kv), { q_heads, kv_heads } = group[r];
      pen.rect(`${key} q`, x + q_heads[0] * unit, y, q_heads.length * unit, TALL, "q");
      for (const h of new Set(kv_heads)) {
        pen.rect(`${key} k${h}`, x + (q + h) * unit, y, unit, TALL, "k");
        pen.rect(`${key} v${h}`, x + (q + kv + h) * unit, y, unit, TALL, "v");
      }
    } else if (row === "embed" || CUT[row] === "by rows") pen.rect(`${key} part`, x, y + r * part * TALL, GLYPH, part * TALL, "weights");
    else pen.rect(`${key} part`, x + r * part * GLYPH, y, part * GLYPH, TALL, "weights");
  }

  function draw(pen, data, i, choice) {
    const group = groupOf(data, choice), frames = framesOf(data), frame = frames[i];
    const lane = (WIDTH - LEFT - 2 - GAP * (group.length - 1)) / group.length;
    const now = frames.slice(0, i + 1).findLast(f => "layer" in f)?.layer ?? 0;
    const past = frames.findIndex(f => f.at === "head") <= i;
    const top = Y.qkv - 7, bottom = Y.summed + 21;
    pen.path("layer", `M${LEFT - 6} ${top}h-76V${bottom}h76`, "faint");
    pen.text("which layer", LEFT - 78, bottom - 6, past ? "layers: done" : `layer ${now}`, "small strong");
    for (const row of Object.keys(WEIGHTS)) {
      pen.text(`name ${row}`, LEFT - 10, Y[row] + 11, row === "head" ? "head" : WEIGHTS[row], "small end");
      pen.text(`cut ${row}`, LEFT - 10, Y[row] + 23, group.length > 1 ? CUT[row] : "whole", "small muted end");
    }
    pen.text("name heads", LEFT - 10, Y.heads + 12, "heads", "small end");
    group.forEach((rank, r) => {
      const x = LEFT + r * (lane + GAP), calls = madeBy(rank, frames, i);
      pen.text(`rank ${r}`, x, 13, `rank ${r}`, "strong");
      pen.text(`sent ${r}`, x + lane, 13, `sent ${bytes(sum(calls.map(call => call.sent)))}`, "small end");
      pen.text(`holds ${r}`, x, 26, `${bytes(rank.weight_bytes)} of weights`, "small muted");
      pen.text(`kv ${r}`, x, 38, `${bytes(rank.kv_bytes_per_token)} of K and V a token`, "small muted");
      for (const row of Object.keys(WEIGHTS)) {
        const shape = rank.weights[WEIGHTS[row]], y = Y[row], hover = `${bytes(4 * shape[0] * shape[1])} on rank ${r}`;
        matrix(pen, `${row} ${r}`, x + 4, y, data, group, r, row);
        pen.text(`shape ${row} ${r}`, x + GLYPH + 12, y + 17, `[${shape}]`.replace(",", ", "), "mono", hover);
        if (frame.at === row) pen.rect(`ring ${r}`, x, y - 3, lane, TALL + 6, "free ring");
      }
      const part = { embed: "embedded", o: "attended", down: "summed" }[frame.at] && callOf(rank, frames.slice(i).find(f => f.where).where);
      if (part) pen.text(`part ${r}`, x + lane - 5, Y[frame.at] + 17, number(part.mine), "end strong", "the first number of this rank's part");
      const cell = Math.min(18, (lane - 14) / (rank.q_heads.length + rank.kv_heads.length));
      const reads = rank.q_heads.length / rank.kv_heads.length;
      rank.q_heads.forEach((h, n) => {
        const hover = `query head ${h} reads KV head ${rank.kv_heads[Math.floor(n / reads)]}`;
        pen.rect(`q ${r} ${n}`, x + 4 + n * cell, Y.heads, cell - 2, 16, "q", hover);
        pen.text(`q's ${r} ${n}`, x + 3 + (n + 0.5) * cell, Y.heads + 12, h, "small middle");
      });
      rank.kv_heads.forEach((h, n) => {
        const at = x + 12 + (rank.q_heads.length + n) * cell, readers = rank.q_heads.slice(n * reads, (n + 1) * reads);
        pen.rect(`kv ${r} ${n}`, at, Y.heads, cell - 2, 16, "k", `K and V of KV head ${h}, for query heads ${readers.join(", ")}`);
        pen.text(`kv's ${r} ${n}`, at + cell / 2 - 1, Y.heads + 12, h, "small middle");
      });
      if (frame.at === "heads") pen.rect(`ring ${r}`, x, Y.heads - 4, lane, 24, "free ring");
      if (frame.at === "token") pen.text(`token ${r}`, x + lane / 2, Y.token + 8, `token ${rank.chosen}`, "middle strong");
    });
    for (const bar of BARS) {
      const active = frame.at === bar, calls = group.map(rank => callOf(rank, frame.where)), gather = bar === "gathered";
      pen.rect(bar, LEFT, Y[bar], WIDTH - LEFT - 2, 17, active ? "new" : group.length > 1 ? "page" : "free");
      const name = group.length === 1 ? "one rank: nothing to send" : gather ? "all-gather" : "all-reduce";
      const gives = () => (gather ? `${calls.map(call => call.shape[1]).join(" + ")} logits` : `${added(calls)} = ${number(calls[0].all)}`);
      const result = active && group.length > 1 ? `: ${gives()}` : "";
      pen.text(`${bar}'s name`, (LEFT + WIDTH) / 2, Y[bar] + 12, name + result, `small middle ${active ? "strong" : ""}`);
    }
  }

  const firsts = (group, where) => group.map(rank => number(callOf(rank, where).mine)).join(" and ");
  const addedUp = (what, group, calls) => group.length === 1
    ? `One rank's part is the whole: ${number(calls[0].all)}. It is added to x, and nothing is sent.`
    : `The all-reduce behind ${what}: ${added(calls)} = ${number(calls[0].all)}, and so for every number. Each rank brings ` +
      `${bytes(calls[0].bytes)}, sends ${bytes(calls[0].sent)} around a ring, and adds the sum to its x.`;

  const SAYS = {
    start(data, group, alone) {
      const [{ weight_bytes, kv_bytes_per_token: kv }] = group, heads = data.num_key_value_heads;
      const model = `A tiny model in 32 bits: ${data.num_attention_heads} query and ${heads} KV heads of ${data.head_dim}, ` +
        `width ${data.hidden_size}.`;
      if (group.length === 1) return `${model} One rank holds all of it, ${bytes(weight_bytes)}, and ${bytes(kv)} of K and V a token.`;
      const twice = kv * group.length > alone.kv_bytes_per_token;
      return `${model} Each of ${group.length} ranks holds ${weight_bytes.toLocaleString("en")} of the ${bytes(alone.weight_bytes)} of weights, ` +
        `and of K and V ${bytes(kv)} a token` +
        (twice ? `, where one rank alone holds ${alone.kv_bytes_per_token}: some of the ${heads} heads stand twice.` : ", its share.");
    },

    embed(data, group) {
      const [{ read }] = group, owner = group.findIndex(({ tokens: [first, end] }) => first <= read && read < end);
      if (group.length === 1) return `The step reads token ${read}: row ${read} of the table is x.`;
      const [first, end] = group[owner].tokens;
      return `The step reads token ${read}. Rank ${owner} holds rows ${first} to ${end - 1} of the table and looks it up; ` +
        "a rank without the row gives zeros.";
    },

    embedded: (data, group, alone, calls) => group.length === 1
      ? "One rank has looked up all there is."
      : `The first all-reduce, over ${data.hidden_size} numbers (the first is shown): ${added(calls)} = ${number(calls[0].all)}. ` +
        `Each rank has the whole x now, and each brought ${bytes(calls[0].bytes)}.`,

    qkv: (data, group, alone, calls, layer) =>
      `Layer ${layer}. Every rank takes the norm of the whole x and multiplies by its columns of q, k and v: ` +
      `${group[0].weights.qkv_proj[0]} outputs of ${alone.weights.qkv_proj[0]}, complete. Nothing is sent.`,

    heads(data, [{ q_heads, kv_heads }]) {
      const theirs = kv_heads.length > 1 ? `KV heads ${kv_heads.join(", ")}` : `KV head ${kv_heads[0]}`;
      return `Rank 0 has query heads ${q_heads[0]} to ${q_heads.at(-1)}, and for them ${theirs}. It stores this token's K and V and attends; ` +
        "no head needs another, so nothing is sent.";
    },

    o: (data, group, alone, calls, layer) =>
      `o_proj is cut by rows: a rank's ${group[0].weights.o_proj[1]} numbers meet the rows that belong to them, and give ` +
      `${group.length > 1 ? "a part of " : ""}every output. Of the first: ${firsts(group, `model.layers.${layer}.self_attn.o_proj`)}.`,

    attended: (data, group, alone, calls) => addedUp("attention", group, calls),

    gate: (data, group, alone, calls, layer) =>
      `The MLP of layer ${layer}: gate and up are cut by columns, ${group[0].weights.down_proj[1]} of ${alone.weights.down_proj[1]} features ` +
      "on each rank. SiLU and the product go feature by feature, where they lie.",

    down: (data, group, alone, calls, layer) =>
      `down_proj is cut by rows: these features' part of every output. Of the first: ${firsts(group, `model.layers.${layer}.mlp.down_proj`)}.`,

    summed: (data, group, alone, calls) => addedUp("the MLP", group, calls),

    head: (data, [{ weights }, ...others]) =>
      `The table is the head, too: each rank multiplies x by its rows and has ${weights.embed_tokens[0]} logits` +
      `${others.length ? ", of its own tokens" : ""}.`,

    gathered(data, group, alone, calls) {
      if (group.length === 1) return "One rank has all logits.";
      const all = sum(calls.map(call => call.shape[1]));
      return `The gather puts them behind one another: ${all} logits, of which ${all - data.vocab_size} is padding and goes. ` +
        `Each rank sends ${bytes(calls[0].sent)}; in a sum it sends ${group[0].calls[0].sent}.`;
    },

    token(data, [rank, ...others], alone) {
      if (!others.length) return `The largest logit is that of token ${rank.chosen}. One rank has sent nothing.`;
      const made = rank.calls.filter(call => call.sent), same = rank.chosen === alone.chosen ? "the token" : "not the token";
      return `All ranks have the same ${data.vocab_size} logits, so all choose token ${rank.chosen} without asking: ${same} that ` +
        `one rank alone chooses. A rank sent ${bytes(sum(made.map(call => call.sent)))} in ${made.length} calls.`;
    },
  };

  return {
    size: [WIDTH, 408],
    choices: () => ["2 ranks", "3 ranks", "1 rank"],
    frames: data => framesOf(data).length,
    draw,
    caption(data, i, choice) {
      const group = groupOf(data, choice), { at, layer, where } = framesOf(data)[i];
      return SAYS[at](data, group, data.groups["1"][0], group.map(rank => callOf(rank, where)), layer);
    },
  };
})());
