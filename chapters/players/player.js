// What every player of the course shares: the controls, the keyboard, and a pen that draws SVG.
//
// A player shows frames recorded from a run of the engine, one at a time. It knows how to draw frame i and says in a
// sentence what happens in it; this file knows nothing of what is drawn. Classic scripts with their data inside the
// page, so that the site also works from a folder of files.
//
//   minisglPlayer("pages", {
//     size: [720, 300],                      // of the drawing, in its own units
//     choices: data => ["paged", "contiguous"],  // optional: variants of the same run
//     frames: (data, choice) => data.steps.length,
//     draw: (pen, data, i, choice) => { pen.rect("page 3", 10, 10, 20, 20, "request-0"); },
//     caption: (data, i, choice) => "Request 0 takes page 3.",
//   });

window.minisglPlayer ??= (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ICONS = {
    start: "M3 2v12M13 2.5v11L5.5 8z",
    back: "M11.5 2.5v11L4 8z",
    play: "M4.5 2.5v11L12 8z",
    pause: "M5 3v10M11 3v10",
    on: "M13 2v12M3 2.5v11L10.5 8z",
  };
  const SPEEDS = { "½×": 2000, "1×": 1000, "2×": 500, "5×": 200 }; // ms a frame

  const html = (tag, attributes = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  };

  // Shapes have keys. A shape drawn again under its key is moved, not made anew: so a page glides to its new owner.
  class Pen {
    constructor(svg) {
      this.svg = svg;
      this.shapes = new Map();
      this.defined = 0;
    }

    begin() {
      this.drawn = new Set();
    }

    end() {
      for (const [key, shape] of this.shapes) {
        if (!this.drawn.has(key)) {
          shape.remove();
          this.shapes.delete(key);
        }
      }
    }

    // title: what a reader sees when pointing at the shape.
    shape(key, tag, attributes, names = "", title = "") {
      let shape = this.shapes.get(key);
      if (!shape) {
        shape = document.createElementNS(SVG, tag);
        this.shapes.set(key, shape);
      }
      if (shape.nodeName !== tag) throw new Error(`${key} is a ${shape.nodeName} already, and cannot be a ${tag}`);
      if (!this.drawn.has(key)) this.svg.append(shape); // later shapes lie on top
      this.drawn.add(key);
      for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
      shape.setAttribute("class", names);
      if (title) {
        const hover = document.createElementNS(SVG, "title");
        hover.textContent = title;
        shape.replaceChildren(...[...shape.childNodes].filter(n => n.nodeName !== "title"), hover);
      }
      return shape;
    }

    rect(key, x, y, width, height, names = "", title = "") {
      const shape = this.shape(key, "rect", { width, height, rx: 2 }, names, title);
      shape.style.transform = `translate(${x}px, ${y}px)`;
    }

    circle(key, x, y, r, names = "", title = "") {
      this.shape(key, "circle", { r }, names, title).style.transform = `translate(${x}px, ${y}px)`;
    }

    // names: "middle" or "end" moves the anchor; "small", "strong", "muted", "mono" set the type.
    text(key, x, y, words, names = "", title = "") {
      const shape = this.shape(key, "text", {}, names);
      if (shape.textContent !== String(words)) shape.textContent = words;
      if (title) this.shape(key, "text", {}, names, title);
      shape.style.transform = `translate(${x}px, ${y}px)`;
    }

    line(key, x1, y1, x2, y2, names = "") {
      this.path(key, `M${x1} ${y1}L${x2} ${y2}`, names);
    }

    // "arrow" among the names puts a head at the end.
    path(key, d, names = "", title = "") {
      this.shape(key, "path", { d }, names, title);
    }
  }

  function mount(figure, player) {
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const choices = player.choices?.(data) ?? [];
    const [width, height] = player.size;
    let choice = choices[0];
    let frame = 0;
    let timer = null;

    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", figure.getAttribute("aria-label"));
    svg.innerHTML =
      '<defs><marker id="player-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" ' +
      'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>';
    const pen = new Pen(svg);

    const last = () => player.frames(data, choice) - 1;
    const label = (element, icon, title) => {
      element.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[icon]}"/></svg>`;
      element.title = title;
      return element;
    };
    const button = (icon, title, onclick) => label(html("button", { type: "button", onclick }), icon, title);
    const playing = button("play", "Play (space)", () => (timer ? stop() : play()));
    const slider = html("input", { type: "range", min: 0, step: 1, value: 0 });
    slider.setAttribute("aria-label", "Frame");
    slider.oninput = () => go(Number(slider.value));
    const count = html("output");
    const speed = html("select", { title: "Speed" }, ...Object.keys(SPEEDS).map(s => new Option(s, s, s === "1×", s === "1×")));
    speed.onchange = () => timer && play();
    const caption = html("p", { className: "player-caption" });
    caption.setAttribute("aria-live", "polite");

    function show() {
      frame = Math.max(0, Math.min(frame, last()));
      pen.begin();
      player.draw(pen, data, frame, choice);
      pen.end();
      const words = player.caption(data, frame, choice);
      caption.textContent = words;
      slider.max = last();
      slider.value = frame;
      slider.setAttribute("aria-valuetext", `frame ${frame + 1} of ${last() + 1}: ${words}`);
      count.textContent = `${frame + 1} / ${last() + 1}`;
      figure.dataset.frame = frame;
    }

    function go(to) {
      stop();
      frame = to;
      show();
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      label(playing, "play", "Play (space)");
      caption.setAttribute("aria-live", "polite");
    }

    function play() {
      stop();
      if (frame >= last()) frame = -1;
      const next = () => {
        frame += 1;
        show();
        if (frame >= last()) stop();
      };
      caption.setAttribute("aria-live", "off"); // a reader of the screen is not told every frame
      label(playing, "pause", "Pause (space)");
      timer = setInterval(next, SPEEDS[speed.value]);
      next();
    }

    const variants = html("div", { className: "player-choices" });
    variants.setAttribute("role", "radiogroup");
    for (const name of choices) {
      const radio = html("input", { type: "radio", name: `player-${figure.dataset.player}`, checked: name === choice });
      radio.onchange = () => {
        choice = name;
        go(Math.min(frame, last()));
      };
      variants.append(html("label", {}, radio, name));
    }

    figure.tabIndex = 0;
    figure.setAttribute("role", "group");
    figure.onkeydown = event => {
      if (event.target.matches("select, input[type='radio']") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === " " && event.target.matches("button")) return; // the button's own
      const keys = {
        " ": () => (timer ? stop() : play()),
        ArrowRight: () => go(frame + 1),
        ArrowLeft: () => go(frame - 1),
        Home: () => go(0),
        End: () => go(last()),
      };
      if (!(event.key in keys)) return;
      event.preventDefault();
      event.stopPropagation(); // Material turns pages with the arrow keys
      keys[event.key]();
    };

    const controls = html(
      "div", { className: "player-controls" },
      button("start", "To the start (Home)", () => go(0)),
      button("back", "One frame back (←)", () => go(frame - 1)),
      playing,
      button("on", "One frame on (→)", () => go(frame + 1)),
      slider, count, speed,
    );
    figure.querySelector(".player-stage").replaceChildren(
      ...(choices.length > 1 ? [variants] : []), html("div", { className: "player-drawing" }, svg), caption, controls,
    );
    show();
  }

  return (name, player) => document.querySelectorAll(`[data-player="${name}"]`).forEach(f => mount(f, player));
})();
