// How the page reaches the server: the key, errors with the server's own words, server-sent events.

const KEY = "minisgl-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, message, later) {
    super(message);
    this.status = status;
    this.later = later; // seconds to wait, if the server says so
  }
}

// A GET, or a POST of `body`. Throws an ApiError unless the status is 2xx. Addresses are relative to the page's own, so
// that it may stand behind a proxy under any path.
export async function call(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store", credentials: "same-origin" };
  const response = await fetch(new URL(path, document.baseURI), { ...options, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const text = await response.text();
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {} // a proxy's page, say: its status must do
  const message = error.message || response.statusText || "the server refuses";
  throw new ApiError(response.status, message, response.headers.get("Retry-After"));
}

// The data of each server-sent event of a response.
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split(/\r\n|\n|\r(?!$)/); // at the end it may be half of \r\n
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        } // comments keep the connection open and say nothing
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
