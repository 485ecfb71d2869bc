// A request's way through a real server: above, where it is; below, when. One noted event is one frame.
//
// Data: runs: {name: {question, max_tokens, events: [{ms, who, what, ...}]}}, as benchmarks/players/request.py notes them.

{
  const LEFT = 62, RIGHT = 612, LANES = { client: 216, front: 244, engine: 272 };
  const BOX = [88, 34]; // of a station
  const STATIONS = { // x, y, what it is, whose code it is
    checks: [110, 26, "checks", "Gate, fields"], tokenizer: [304, 26, "tokenizer", "encode"],
    live: [110, 72, "hang-up?", "Live"], sse: [110, 118, "events", "_stream"],
    detokenizer: [207, 118, "detokenizer", "Answer.read"], notes: [304, 118, "notes", "Answer.receive"],
    inbox: [474, 26, "messages", "before a step"], step: [474, 72, "step", "Engine.step"], tells: [474, 118, "tells", "StepDone"],
  };
  const CLIENT = [8, 26, 66, 126];
  const WAY = { // an event: the station that it is at, and the way by which it came there
    asks: ["client"], checked: ["checks", "M74 43H110"], encoded: ["tokenizer", "M198 43H304"],
    Submit: ["tokenizer", "M392 43H474"], "takes Submit": ["inbox"], step: ["step", "M518 60V72"],
    StepDone: ["tells", "M518 106V118"], "takes StepDone": ["notes", "M474 135H392"], text: ["detokenizer", "M304 135H295"],
    events: ["sse", "M207 135H198"], reads: ["client", "M110 135H74"], "hangs up": ["client"],
    "http.disconnect": ["live", "M74 89H110"], Abort: ["live", "M198 89H420V52H474"], "takes Abort": ["inbox"],
  };
  const ms = time => `${time < 100 ? time.toFixed(1) : time.toFixed(0)} ms`;

  // Which events are frames: all of a request's way to its first token; of the later tokens' way in the front only the end.
  function frames(run) {
    const gone = run.events.some(event => event.what === "hangs up");
    const first = run.events.findIndex(event => event.what === "reads");
    const shown = run.events.map((event, i) => ({ ...event, i })).filter(({ what, i }) => {
      if (what === "encodes" || (what === "http.disconnect" && !gone)) return false;
      const late = gone && i > run.events.findIndex(event => event.what === "hangs up");
      return i < first || late || !["takes StepDone", "text"].includes(what);
    });
    return shown;
  }

  const earlier = (run, i, what) => run.events.slice(0, i).reverse().find(event => event.what === what);
  const heard = (run, i) => run.events.slice(0, i + 1).filter(event => event.what === "reads").map(event => event.text).join("");
  const quoted = text => `“${text}”`;

  function pagesHeld(run, i) {
    const told = run.events.slice(0, i + 1).filter(event => event.what === "StepDone").pop();
    return told ? told.pages - told.available : 0;
  }

  function carried(run, event) {
    const texts = {
      asks: () => `POST /v1/chat/completions  ${quoted(run.question)}`,
      encoded: () => `${event.tokens} token ids`,
      Submit: () => `Submit: ids and parameters, ${event.bytes} bytes`,
      step: () => `rows [[position ${event.rows[0][1]}, ${event.rows[0][2]} token${event.rows[0][2] > 1 ? "s" : ""}]]`,
      StepDone: () => `StepDone: ids [${event.outputs[0][2] === "abort" ? "" : event.outputs[0][1]}]${event.outputs[0][2] ? `, ${event.outputs[0][2]}` : ""}`,
      "takes StepDone": () => (event.tokens.length ? `ids [${event.tokens}]` : "no new id"),
      text: () => quoted(event.text),
      events: () => (event.last ? "data: [DONE]" : `data: {… "content": "${earlier(run, event.i, "text").text}" …}, ${event.bytes} bytes`),
      reads: () => quoted(event.text),
      Abort: () => `Abort, ${event.bytes} bytes`,
    };
    return texts[event.what]?.() ?? "";
  }

  function draw(pen, data, at, choice) {
    const run = data.runs[choice], event = frames(run)[at], i = event.i;
    const [here, way] = WAY[event.what];

    pen.rect("front", 98, 16, 306, 148, "free");
    pen.text("front name", 251, 11, "the front: HTTP, JSON, text", "small middle");
    pen.rect("engine", 448, 16, 164, 148, "free");
    pen.text("engine name", 530, 11, "the engine's process: ids", "small middle");
    Object.values(WAY).forEach(([, path], n) => path && pen.path(`way ${n}`, path, "arrow"));
    pen.path("loop", "M562 135H596V43H562", "dashed arrow");
    pen.rect("client", ...CLIENT, here === "client" ? "request-0 ring" : "page");
    pen.text("client name", 41, 92, "client", "strong middle");
    for (const [station, [x, y, name, code]] of Object.entries(STATIONS)) {
      pen.rect(station, x, y, ...BOX, here === station ? "request-0 ring" : "page");
      pen.text(`name ${station}`, x + 44, y + 14, name, "strong middle");
      pen.text(`code ${station}`, x + 44, y + 27, code, "small muted middle");
    }
    if (way) pen.path("now way", way, "new");
    pen.text("carried", 8, 184, carried(run, event), "mono small");

    const last = run.events[run.events.length - 1].ms, x = time => LEFT + (time * (RIGHT - LEFT)) / last;
    for (const [lane, y] of Object.entries(LANES)) {
      pen.text(`lane ${lane}`, 8, y + 4, lane, "small muted");
      pen.line(`line ${lane}`, LEFT, y, RIGHT, y, "faint");
    }
    const every = [20, 50, 100, 200, 500, 1000].find(step => last / step < 8) ?? 2000;
    for (let time = 0; time < last; time += every) pen.text(`time ${time}`, x(time), 300, time ? time : "0 ms", "small muted middle");
    run.events.forEach((each, n) => {
      const past = n <= i;
      if (each.what === "step") {
        const end = run.events.slice(n).find(later => later.what === "StepDone"), to = past ? Math.min(end.ms, Math.max(event.ms, each.ms)) : end.ms;
        const wide = Math.max(x(to) - x(each.ms), 1), tokens = each.rows[0][2];
        pen.rect(`step ${n}`, x(each.ms), LANES.engine - 8, wide, 16, past ? "request-0" : "free", `a step of ${ms(end.ms - each.ms)}, ${tokens} tokens`);
        if (past && wide > 20) pen.text(`tokens ${n}`, x(each.ms) + wide / 2, LANES.engine + 4, tokens, "small middle");
      } else if (past && each.who === "front") {
        pen.line(`front ${n}`, x(each.ms), LANES.front - 6, x(each.ms), LANES.front + 6, "v");
      } else if (past && each.who === "client") {
        pen.circle(`client ${n}`, x(each.ms), LANES.client, 3, `${each.what === "hangs up" ? "new" : "request-0"} full`, `${each.what} at ${ms(each.ms)}`);
        pen.text(`word ${n}`, Math.min(x(each.ms) + 16, RIGHT), LANES.client - 8, each.text?.trim() ?? each.what, "small end");
      }
    });
    pen.line("now", x(event.ms), LANES.client - 6, x(event.ms), LANES.engine + 14, "new");
    pen.text("has", 8, 322, heard(run, i) ? `the client has ${quoted(heard(run, i).trim())}` : "the client has nothing yet", "small");
    pen.text("pages", RIGHT, 322, `pages held: ${pagesHeld(run, i)}`, "small end");
  }

  function caption(data, at, choice) {
    const run = data.runs[choice], event = frames(run)[at], i = event.i;
    const since = what => ms(event.ms - earlier(run, i, what).ms);
    const aborted = earlier(run, i, "Abort"), first = !earlier(run, i, "reads");
    const told = {
      asks: () => `The client posts a chat and wants a stream of at most ${run.max_tokens} new tokens.`,
      checked: () => "The front has checked the key, the body's size and every field.",
      encoded: () => `The tokenizer, a part of the front, makes ${event.tokens} ids of template and question, in ${since("encodes")}.`,
      Submit: () => "The front sends Submit to the engine's process. From here on there is no text.",
      "takes Submit": () => "The engine's loop takes all messages that are there, always before a step.",
      step: () => {
        const [, start, tokens] = event.rows[0];
        if (first && tokens > 1) return `The first step begins, with ${tokens} prompt tokens; ${start} more were found in the prefix cache, left by an earlier question.`;
        return `The engine begins the next step ${since("StepDone")} after it sent StepDone. It waits for nobody's socket.`;
      },
      StepDone: () => {
        if (event.outputs[0][2] === "abort") return "The request ends with “abort”, without another step, and its pages are free.";
        const took = `The step has taken ${since("step")}.`;
        if (aborted) return `${took} Its token comes for nobody, and until now its pages were in use.`;
        return `${took} One StepDone tells the front the new tokens of all its answers: here one id.${event.outputs[0][2] ? " It is the last, and the pages are free." : ""}`;
      },
      "takes StepDone": () => event.tokens.length
        ? aborted ? "The front notes the token. Nobody will read it." : `The front notes the id, ${since("StepDone")} after it was sent, and wakes who waits for it.`
        : "The front hears of the end, and forgets the answer.",
      text: () => `The detokenizer makes text of the id, ${since("takes StepDone")} later.`,
      events: () => event.last ? "The stream ends with [DONE]." : first
        ? `The text leaves as a server-sent event, with the chunk that opens the answer. The front's work for it took ${since("takes StepDone")}.`
        : `Noted, made text of, and sent: the front needed ${since("takes StepDone")} for this token.`,
      reads: () => `The client reads it, ${since("StepDone")} after the step that made it${event.done ? `. All has taken ${ms(event.ms)}` : first ? `, and ${ms(event.ms)} after it asked: the time to first token` : ""}.`,
      "hangs up": () => "The client hangs up in the middle of a step. The engine knows nothing of it.",
      "http.disconnect": () => `The front hears of it after ${since("hangs up")} and cancels the response's work.`,
      Abort: () => "The end of that work sends Abort. It lies in the socket, because the engine is in a step.",
      "takes Abort": () => `The loop takes Abort, before the next step, ${since("hangs up")} after the client has gone.`,
    };
    return `${ms(event.ms)}. ${told[event.what]()}`;
  }

  minisglPlayer("request", {
    size: [620, 330],
    choices: data => Object.keys(data.runs),
    frames: (data, choice) => frames(data.runs[choice]).length,
    draw,
    caption,
  });
}
