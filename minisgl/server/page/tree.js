// The prefix tree as an indented list: a line a node, with its pages, its first tokens and its locks.

import { theme, tint } from "./draw.js";

const MOST_NODES = 40;
const MOST_PAGES = 10;
const LINE = 20;
const SQUARE = 11;
const INDENT = 18;

const ruler = document.createElement("canvas").getContext("2d");

// As much of a text as fits into `room` pixels, and … if that is not all, or if it goes on anyway.
function fit(text, room, goesOn) {
  const wide = (s) => ruler.measureText(s).width;
  if (!goesOn && wide(text) <= room) return text;
  const letters = [...text];
  while (letters.length && wide(`${letters.join("")}…`) > room) letters.pop();
  return letters.length ? `${letters.join("").trimEnd()}…` : "";
}

function element(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// The nodes that are drawn, depth first: [index, depth]. Those in use come before those that are only kept; a node
// stands after its parent in the trace, and whoever locks it locks its parent, so that no child is drawn without one.
function choose(tree) {
  const locked = tree.map((_, i) => i).filter((i) => tree[i][4]);
  const rest = tree.map((_, i) => i).filter((i) => !tree[i][4]);
  const drawn = new Set([...locked, ...rest].slice(0, MOST_NODES));
  const children = new Map();
  for (const i of [...drawn].sort((a, b) => a - b)) {
    const parent = tree[i][0];
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(i);
  }
  const order = [];
  const walk = (parent, depth) => {
    for (const i of children.get(parent) ?? []) {
      order.push([i, depth]);
      walk(i, depth + 1);
    }
  };
  walk(-1, 0);
  return order;
}

// `words` makes text of token ids, or returns undefined while it does not know.
export function drawTree(svg, run, words) {
  const order = choose(run.tree);
  const left = run.tree.length - order.length;
  const height = (order.length + (left ? 1 : 0)) * LINE + 4;
  const width = svg.clientWidth;
  const held = run.holders();
  ruler.font = `12px ${theme.sans}`;
  const parts = [];
  const lines = new Map(); // node -> its middle
  const least = Math.max(width - 190, 120); // deep nodes keep room for their text
  order.forEach(([i, depth], row) => {
    const [parent, tokens, count, pages, locks] = run.tree[i];
    const x = Math.min(4 + depth * INDENT, least);
    const y = row * LINE + LINE / 2;
    lines.set(i, y);
    if (depth && x < least) {
      const [fork, from] = [x - INDENT + 5, lines.get(parent) + 6];
      parts.push(element("path", { d: `M${fork} ${from}V${y}H${x - 2}`, fill: "none", stroke: theme.faint }));
    }
    pages.slice(0, MOST_PAGES).forEach((page, j) => {
      const who = held.of(page).slice(0, 5);
      const place = { x: x + j * (SQUARE + 1), width: SQUARE };
      for (const [k, color] of (who.length ? who.map((r) => tint(run.color(r), 0.85)) : [tint(theme.page, 0.35)]).entries()) {
        const high = SQUARE / Math.max(who.length, 1);
        parts.push(element("rect", { ...place, y: y - SQUARE / 2 + k * high, height: high, fill: color }));
      }
    });
    let end = x + Math.min(pages.length, MOST_PAGES) * (SQUARE + 1) + 6;
    if (locks) {
      parts.push(element("path", {
        d: `M${end + 2} ${y - 1}v-2a2.5 2.5 0 0 1 5 0v2`, fill: "none", stroke: theme.ink, "stroke-width": 1.3,
      }));
      parts.push(element("rect", { x: end + 0.5, y: y - 1, width: 8, height: 6, rx: 1, fill: theme.ink }));
      parts.push(element("text", { x: end + 12, y: y + 4, fill: theme.ink }, locks));
      end += 20 + ruler.measureText(locks).width;
    }
    const size = `${count} tokens`;
    const room = width - end - ruler.measureText(size).width - 12;
    const text = fit(words(tokens)?.replaceAll("\n", "↵") ?? tokens.join(" "), room, count > tokens.length);
    parts.push(element("text", { x: end, y: y + 4, fill: locks ? theme.ink : theme.muted }, text));
    parts.push(element("text", { x: width - 1, y: y + 4, "text-anchor": "end", fill: theme.muted }, size));
  });
  if (left) {
    const y = order.length * LINE + LINE / 2 + 4;
    parts.push(element("text", { x: 4, y, fill: theme.muted }, `and ${left} more, not drawn`));
  }
  svg.setAttribute("height", order.length ? height : 0);
  svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(height, 1)}`);
  svg.replaceChildren(...parts);
  const used = run.tree.filter((node) => node[4]).length;
  const kept = run.tree.reduce((sum, node) => sum + node[3].length, 0);
  svg.setAttribute("aria-label", `Prefix tree of ${run.tree.length} nodes with ${kept} pages, ${used} nodes locked by running requests`);
  return { nodes: run.tree.length, used, pages: kept };
}
