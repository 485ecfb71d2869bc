// One pool, cut into pages or into regions: who holds what after each step, and how much of it holds a token.
//
// Data: slots; requests: [{prompt: tokens in it, tokens: [words]}]; cuts: {name: {page_size, pages, steps}}, where a
// step is an event of the engine's trace: batch, waiting, preempted, finished, tables (only those that changed), free.

{
  const SLOT = 18, ACROSS = 16, GAP = 6, LINE = 42, TOP = 26, TABLES = 352, ROW = 35; // 4 pages of 4 slots in a line
  const name = id => "ABCDEF"[id];
  const listed = words => [words.slice(0, -1).join(", "), ...words.slice(-1)].filter(Boolean).join(" and ");
  const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const nth = n => `${n}${[, "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;

  // The page tables and the tokens in them after a step.
  function after(cut, step) {
    const tables = {}, stored = {};
    for (const event of cut.steps.slice(0, step + 1)) {
      Object.assign(tables, event.tables);
      for (const [id, start, tokens] of event.batch) stored[id] = start + tokens;
    }
    for (const id in tables) if (!tables[id].length) delete tables[id];
    const given = Object.values(tables).flat().length * cut.page_size;
    const used = Object.keys(tables).reduce((sum, id) => sum + stored[id], 0);
    return { tables, stored, given, used };
  }

  function holders(tables) {
    const pages = {};
    for (const id in tables) tables[id].forEach((page, entry) => (pages[page] = [Number(id), entry]));
    return pages;
  }

  function draw(pen, data, at, choice) {
    const cut = data.cuts[choice], size = cut.page_size, word = size > ACROSS ? "region" : "page";
    const now = after(cut, at), held = holders(now.tables), before = at ? holders(after(cut, at - 1).tables) : {};
    const x = slot => 8 + (slot % ACROSS) * SLOT + Math.floor((slot % ACROSS) / 4) * GAP;
    const y = slot => TOP + Math.floor(slot / ACROSS) * LINE;

    pen.text("pool", 8, 14, `the pool: ${many(cut.pages, word)} of ${size} slots`, "strong");
    for (let page = 1; page <= cut.pages; page++) {
      const first = (page - 1) * size, [owner, entry] = held[page] ?? [];
      const taken = held[page] && before[page]?.[0] !== owner, released = before[page] && !held[page];
      const names = `${held[page] ? `request-${owner}` : "free"} ${taken || released ? "ring" : ""} ${released ? "dashed" : ""}`;
      const hover = held[page] ? `${word} ${page}: entry ${entry} of ${name(owner)}'s page table` : `${word} ${page} is free`;
      for (let slot = first; slot < first + size; slot += Math.min(size, ACROSS)) {
        const last = slot + Math.min(size, ACROSS) - 1;
        pen.rect(`page ${page} ${slot}`, x(slot) - 2, y(slot), x(last) + SLOT - x(slot) + 2, LINE - 8, names, hover);
      }
      pen.text(`number ${page}`, x(first) + 2, y(first) + 12, size > ACROSS ? `region ${page}` : page, "small muted");
      if (held[page]) pen.text(`owner ${page}`, x(first + Math.min(size, ACROSS) - 1) + 12, y(first) + 12, name(owner), "small strong end");
      for (let slot = first; slot < first + size; slot++) {
        const position = held[page] ? entry * size + slot - first : -1, full = position >= 0 && position < now.stored[owner];
        const word = full ? data.requests[owner].tokens[position] : "";
        pen.rect(`slot ${slot}`, x(slot) + 1, y(slot) + 17, SLOT - 4, 12, full ? `request-${owner} full` : "free",
          full ? `token ${position} of ${name(owner)}: “${word}”` : held[page] ? `given to ${name(owner)}, holds nothing` : "free");
      }
    }

    pen.text("tables", TABLES, 14, "page tables", "strong");
    data.requests.forEach((request, id) => {
      const top = TOP + id * ROW, table = now.tables[id], event = cut.steps[at];
      pen.text(`name ${id}`, TABLES, top + 13, name(id), "strong");
      if (table) {
        const spare = table.length * size - now.stored[id];
        table.forEach((page, entry) => {
          const fresh = before[page]?.[0] !== id;
          pen.rect(`entry ${id} ${entry}`, TABLES + 18 + entry * 22, top, 20, 17, `request-${id} ${fresh ? "ring" : ""}`, `tokens ${entry * size} to ${entry * size + size - 1}`);
          pen.text(`page of ${id} ${entry}`, TABLES + 28 + entry * 22, top + 13, page, "small middle");
        });
        pen.text(`size ${id}`, TABLES + 24 + table.length * 22, top + 13, `${many(now.stored[id], "token")}, ${spare} spare`, "small");
        const said = request.tokens.slice(0, now.stored[id]).join("").replace(/\s+/g, " ").trim();
        pen.text(`words ${id}`, TABLES + 18, top + 28, said.length > 42 ? said.slice(-41).replace(/^\S*/, "…") : said, "small muted");
      } else {
        const waits = event.waiting.includes(id) || event.preempted.includes(id);
        pen.text(`size ${id}`, TABLES + 18, top + 13, waits ? "waits" : "done", "small muted");
      }
    });

    // The whole pool as a bar: tokens, slots given out without one, free slots.
    const wide = slots => (slots * 310) / data.slots, bar = TOP + 4 * LINE + 8;
    pen.rect("whole", 6, bar, wide(data.slots), 14, "free", "the pool");
    pen.rect("given", 6, bar, wide(now.given), 14, "page", `${now.given} slots given out`);
    pen.rect("used", 6, bar, wide(now.used), 14, "page full", `${now.used} tokens stored`);
    pen.text("bar", 8, bar + 29, `${many(now.used, "token")} in ${now.given} slots given out of ${data.slots}`, "small");
  }

  function caption(data, at, choice) {
    const cut = data.cuts[choice], event = cut.steps[at], size = cut.page_size, regions = size > ACROSS;
    const now = after(cut, at), before = at ? after(cut, at - 1) : { tables: {} }, word = regions ? "region" : "page";
    const told = [];
    const news = event.batch.filter(([, start]) => start === 0).map(([id]) => id);
    if (news.length) {
      const sizes = listed(news.map(id => `${name(id)}'s ${data.requests[id].prompt}`));
      const takes = listed(news.map(id => `${now.tables[id]?.length ?? 0}`));
      told.push(`${listed(news.map(name))} come in: ${sizes} prompt tokens take ${regions ? "a region each" : `${takes} pages`}.`);
    }
    const grown = event.batch.filter(([id]) => before.tables[id] && now.tables[id]?.length > before.tables[id].length);
    if (grown.length) {
      const who = listed(grown.map(([id, start]) => `${name(id)}'s ${nth(start + 1)} token`));
      const which = listed(grown.map(([id]) => now.tables[id].at(-1)));
      told.push(`${who} ${grown.length > 1 ? "begin new pages" : "begins a new page"}: alloc gives ${which}.`);
    }
    for (const id of event.finished) {
      const pages = before.tables[id] ?? [];
      told.push(`${name(id)} is done and releases ${word}${pages.length > 1 ? "s" : ""} ${listed(pages)}.`);
    }
    for (const id of event.preempted) {
      if (before.tables[id]) told.push(`No page is left: ${name(id)}, who came last, gives back its ${many(before.tables[id].length, "page")} and waits.`);
    }
    if (!told.length) {
      told.push(regions ? `A new token for ${listed(event.batch.map(([id]) => name(id)))}, in ${event.batch.length > 1 ? "their regions" : "its region"}.` : "Each new token has a slot in its request's last page: nothing is allocated.");
    }
    const waiting = [...event.waiting, ...event.preempted].sort().map(name);
    if (waiting.length) {
      const why = event.free ? " until the whole group has ended (chapter 5 changes that)" : `, though ${data.slots - now.used} of ${data.slots} slots hold nothing`;
      told.push(`${listed(waiting)} ${waiting.length > 1 ? "wait" : "waits"}${why}.`);
    }
    if (at === cut.steps.length - 1) told.push(`The pool is whole again, after ${many(cut.steps.length, "step")}.`);
    return `Step ${at + 1}. ${told.join(" ")}`;
  }

  minisglPlayer("pages", {
    size: [620, 244],
    choices: data => Object.keys(data.cuts),
    frames: (data, choice) => data.cuts[choice].steps.length,
    draw,
    caption,
  });
}
