// The radix tree, one operation a frame. A line is a node, indented under its parent; a box is a page with its tokens.
//
// Data: page_size; requests: [{continues, text, prompt, found, answer}]; texts: of pages; frames: [{what, who, pages:
// those it is about, tree: [[parent, locks, pages, their texts]], tables: {request: pages}, holders: one digit a page}].

{
  const PAGE = 105, LINE = 30, TOP = 122, STRIP = 25;
  const name = id => "ABCDEF"[id];
  const listed = words => [words.slice(0, -1).join(", "), ...words.slice(-1)].filter(Boolean).join(" and ");
  const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const pages = list => (list.length > 1 ? `pages ${listed(list)}` : `page ${list[0]}`);
  const question = (data, id) => data.requests[id].text.match(/Q: (.*)/)?.[1] ?? `${data.requests[id].text.slice(0, 34)}…`;
  const shown = text => text.replace(/\n/g, "⏎");

  // Of whom a page is: the request of this frame, another that reads it, or the tree's alone.
  function owner(frame, page) {
    const readers = Object.keys(frame.tables).map(Number).filter(id => frame.tables[id].includes(page));
    return readers.includes(frame.who) ? `request-${frame.who}` : readers.length ? `request-${readers[0]}` : "page";
  }

  function draw(pen, data, at) {
    const frame = data.frames[at], before = data.frames[at - 1];
    const mark = page => (frame.pages.includes(page) ? `ring ${frame.what === "short" ? "dashed" : ""}` : "");
    const holders = page => Number(frame.holders[page - 1]);

    pen.text("holders", 8, 12, `the pool: how many hold each of its ${frame.holders.length} pages`, "strong");
    [...frame.holders].forEach((count, i) => {
      const page = i + 1, freed = before && count === "0" && before.holders[i] !== "0";
      const names = count === "0" ? `free ${freed ? "ring dashed" : ""}` : `${owner(frame, page)} ${mark(page)}`;
      pen.rect(`pool ${page}`, 8 + i * STRIP, 18, STRIP - 4, 20, names, `page ${page}: ${count === "0" ? "free" : many(Number(count), "holder")}`);
      pen.text(`count ${page}`, 8 + i * STRIP + 10.5, 32, count === "0" ? "" : count, "small strong middle");
      pen.text(`number ${page}`, 8 + i * STRIP + 10.5, 49, page, "small muted middle");
    });

    Object.entries(frame.tables).forEach(([id, table], line) => {
      const y = 58 + line * 22;
      pen.text(`name ${id}`, 8, y + 13, `${name(id)}'s page table`, "small strong");
      table.forEach((page, entry) => {
        const fresh = !before?.tables[id]?.includes(page);
        pen.rect(`entry ${id} ${entry}`, 92 + entry * 24, y, 21, 17, `request-${id} ${fresh ? "ring" : ""}`);
        pen.text(`entry of ${id} ${entry}`, 102.5 + entry * 24, y + 13, page, "small middle");
      });
      pen.text(`asks ${id}`, 98 + table.length * 24, y + 13, question(data, id), "small muted");
    });
    if (!Object.keys(frame.tables).length) pen.text("nobody", 8, 71, "No request holds pages; what is taken, the tree holds.", "small muted");

    const places = [];
    pen.text("root", 8, TOP - 6, "the tree", "strong");
    frame.tree.forEach(([parent, locks, own, texts], i) => {
      const x = parent < 0 ? 12 : places[parent][0] + 20, y = TOP + 4 + i * LINE;
      const from = parent < 0 ? [12, TOP - 2] : [places[parent][0] + 8, places[parent][1] + 26];
      places.push([x, y]);
      pen.path(`edge ${own[0]}`, `M${from[0]} ${from[1]}V${y + 13}H${x + (locks ? 8 : 48)}`);
      pen.text(`locks ${own[0]}`, x + 11, y + 17, locks ? many(locks, "lock") : "", "small strong");
      own.forEach((page, place) => {
        const left = x + 50 + place * PAGE;
        pen.rect(`page ${page}`, left, y, PAGE - 3, 26, `${owner(frame, page)} ${mark(page)}`,
          `page ${page}, ${many(holders(page), "holder")}: “${data.texts[texts[place]]}”`);
        pen.text(`words ${page}`, left + 4, y + 11, shown(data.texts[texts[place]]).trim(), "small");
        pen.text(`page of ${page}`, left + 4, y + 22, `page ${page} · ${many(holders(page), "holder")}`, "small muted");
      });
    });
  }

  function caption(data, at) {
    const { what, who, tokens, tables, pages: about, holders, rows, free, ended } = data.frames[at];
    const who_ = name(who), size = data.page_size, request = data.requests[who], before = data.frames[at - 1];
    const new_ = before && before.who !== who && ["match", "split"].includes(what) && !data.frames.slice(0, at).some(f => f.who === who);
    const comes = new_ ? `${who_} ${request.continues >= 0 ? `goes on with ${name(request.continues)}'s talk` : request.text.includes("Q: ") ? "asks" : "brings another text"}: “${question(data, who)}” ` : "";
    const told = {
      split: () => `Match: the node of ${pages(about)} agrees with it for ${many(tokens / size, "page")} only, so it is split there. Nothing is copied.`,
      match: () => about.length
        ? `Match: of its ${tokens} tokens the first ${about.length * size} are in ${pages(about)}, a prefix hit. ${tokens - about.length * size} are left to compute.`
        : `Match: none of its ${tokens} tokens are found, since its first page is no child of the root.`,
      lock: () => `${who_} locks its path and holds what it found: ${pages(about)} ${about.length > 1 ? "have" : "has"} ${listed([...new Set(about.map(p => holders[p - 1]))].sort())} holders now.`,
      step: () => `One step computes ${listed(rows.map(([id, start, n]) => `${name(id)}'s tokens ${start + 1}–${start + n}`))} into new ${pages(rows.flatMap(([id, start]) => tables[id].slice(start / size)))}.`,
      insert: () => ended
        ? `${who_} has its answer, “${request.answer.trim()}”. Insert: ${about.length ? `${pages(about)}, full by now, ${about.length > 1 ? "join" : "joins"} the tree` : "nothing new is full"}.`
        : `The step is over, and ${who_}'s ${many(Math.floor(tokens / size), "whole page")} can be matched. Insert: the tree holds ${pages(about)} now${tokens % size ? `; page ${tables[who][Math.floor(tokens / size)]} is not full and stays ${who_}'s own` : ""}.`,
      unlock: () => {
        const freed = [...holders].map((count, i) => (count === "0" && before.holders[i] !== "0" ? i + 1 : 0)).filter(Boolean);
        return `${who_} ends: unlock, and release. ${freed.length ? `${pages(freed).replace("p", "P")}, which no one else holds, ${freed.length > 1 ? "are" : "is"} free. ` : ""}The tree keeps the rest for whoever comes.`;
      },
      short: () => `${who_} needs ${many(tokens + free, "new page")}, and ${free === 1 ? "1 is" : `${free || "none"} are`} free. Those at the ends of the least recently used leaves without locks go: ${pages(about)}.`,
      evict: () => `Evict: the tree lets go of ${pages(about)} and nobody else holds ${about.length > 1 ? "them" : "it"}, so ${about.length > 1 ? "they are" : "it is"} free for ${who_}.`,
    };
    return comes + told[what]();
  }

  minisglPlayer("radix", { size: [620, 402], frames: data => data.frames.length, draw, caption });
}
