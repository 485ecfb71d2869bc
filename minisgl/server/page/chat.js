// The conversation: turns, streaming, stopping, and what a server refuses.

import { call, events } from "./api.js";

const $ = (id) => document.getElementById(id);
const messages = []; // {role, content} of finished turns
let running = null; // the AbortController of the answer that is being written
let conversation = {}; // another one after each "New chat"
let plain = false; // the model has no chat template: it continues text

function add(parent, tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}

function turn(role, text) {
  const log = $("log");
  $("empty").hidden = true;
  const box = add(log, "div", `turn ${role}`);
  add(box, "span", "unseen", role === "user" ? "You: " : "Model: ");
  const body = add(box, "div", "text", text);
  log.scrollTop = log.scrollHeight;
  return { box, body };
}

// The request without its messages. An empty field is left to the server's default.
function sampling() {
  const fields = {};
  for (const id of ["temperature", "top_p", "max_tokens"]) {
    if ($(id).value !== "") fields[id] = Number($(id).value);
  }
  return fields;
}

function request(model, text) {
  const system = $("system").value.trim();
  const common = { model, ...sampling(), stream: true, stream_options: { include_usage: true } };
  if (plain) {
    const prompt = (system ? `${system}\n\n` : "") + messages.map((m) => m.content).join("") + text;
    return ["v1/completions", { ...common, prompt }];
  }
  const first = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...common, messages: [...first, ...messages, { role: "user", content: text }] }];
}

// Writes an answer into `body` as it comes; returns what is known about it, also if it breaks off.
async function stream(path, body, node, signal, answer) {
  const log = $("log");
  const begun = performance.now();
  let unwritten = "";
  let planned = 0;
  const write = () => {
    planned = 0;
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    node.append(unwritten);
    unwritten = "";
    if (follow) log.scrollTop = log.scrollHeight;
  };
  try {
    const response = await call(path, { body, signal });
    let complete = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) answer.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (piece) {
        answer.first ??= performance.now() - begun;
        answer.text += piece;
        unwritten += piece;
        planned ||= setTimeout(write, 16);
      }
      if (choice.finish_reason) answer.reason = choice.finish_reason;
    }
    if (!complete) throw new Error("the connection broke off before the answer was complete");
  } finally {
    clearTimeout(planned);
    write();
    node.normalize();
    answer.total = performance.now() - begun;
  }
}

function describe(answer) {
  const said = [];
  const tokens = answer.usage?.completion_tokens;
  if (tokens !== undefined) said.push(`${tokens} tokens`);
  if (tokens > 1 && answer.total > answer.first) {
    said.push(`${((1000 * (tokens - 1)) / (answer.total - answer.first)).toFixed(1)} tokens/s`);
  }
  if (answer.first !== undefined) said.push(`first after ${(answer.first / 1000).toFixed(2)} s`);
  const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
  if (answer.usage) said.push(`${cached ?? 0} of ${answer.usage.prompt_tokens} prompt tokens cached`);
  if (answer.stopped) said.push("stopped");
  else if (answer.reason === "length") said.push("cut off at max tokens or the context's end");
  else if (answer.reason && answer.reason !== "stop") said.push(answer.reason);
  return said.join(" · ");
}

async function send(getModel, text) {
  running = new AbortController();
  const { signal } = running;
  const mineStill = conversation;
  swap("send", "stop");
  turn("user", text);
  const { box, body } = turn("assistant", "");
  box.setAttribute("aria-busy", "true");
  const answer = { text: "" };
  let problem = null;
  try {
    const model = await getModel(signal);
    try {
      await stream(...request(model, text), body, signal, answer);
    } catch (error) {
      const noTemplate = error.status === 400 && /has no chat template/.test(error.message);
      if (plain || !noTemplate) throw error;
      plain = true;
      $("notice").textContent = "This model has no chat template. It continues your text instead of answering it.";
      $("notice").hidden = false;
      await stream(...request(model, text), body, signal, answer);
    }
  } catch (error) {
    if (signal.aborted) answer.stopped = true;
    else problem = error;
  }
  box.setAttribute("aria-busy", "false");
  const meta = describe(answer);
  if (meta) add(box, "p", "meta", meta);
  if (problem) {
    const status = problem.status ? `${problem.status}: ` : "";
    const message = problem instanceof TypeError ? "the server cannot be reached" : problem.message;
    const later = problem.later ? ` (try again in ${problem.later} s)` : "";
    add(box, "p", "error", status + message + later).setAttribute("role", "alert");
    if (problem.status === 401) askKey();
  }
  running = null;
  swap("stop", "send");
  if (conversation !== mineStill) return;
  if (answer.text) messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
  else if ((problem || answer.stopped) && !$("input").value) $("input").value = text; // to be sent again, or mended
  $("log").scrollTop = $("log").scrollHeight;
}

// One button gives way to another, which keeps the focus.
function swap(from, to) {
  const focused = document.activeElement === $(from);
  $(to).hidden = false;
  if (focused) $(to).focus();
  $(from).hidden = true;
}

export function askKey() {
  $("details").open = true;
  $("key").focus();
}

// getModel(signal) tells the name of the model to ask for.
export function startChat(getModel) {
  const submit = () => {
    const text = $("input").value;
    if (running || !text.trim()) return;
    if (!$("settings").reportValidity()) {
      $("details").open = true;
      $("settings").reportValidity();
      return;
    }
    $("input").value = "";
    send(getModel, text);
  };
  const stop = () => running?.abort();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  $("chat").addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", () => {
    stop();
    messages.length = 0;
    conversation = {};
    $("log").replaceChildren($("empty"));
    $("empty").hidden = false;
    $("input").focus();
  });
  const summary = () => {
    const { temperature, top_p, max_tokens } = sampling();
    const say = [];
    if (temperature !== undefined) say.push(`temperature ${temperature}`);
    if (top_p !== undefined) say.push(`top-p ${top_p}`);
    if (max_tokens !== undefined) say.push(`${max_tokens} tokens`);
    $("summary").textContent = say.length ? `(${say.join(", ")})` : "";
  };
  $("settings").addEventListener("input", summary);
  summary();
}
