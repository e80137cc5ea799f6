// What the page asks of its server: what is served, and replies as they are generated.
"use strict";

/** A request that the server refused, or that did not reach it (status 0). */
class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const LOST = "The connection to the server was lost.";

/** Storage of this tab; nothing is kept where the browser forbids that. */
const kept = {
  get(name) {
    try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; }
  },
  set(name, value) {
    try { sessionStorage.setItem(name, value); } catch { /* it then holds until the page is loaded again */ }
  },
};

class Connection {
  constructor() {
    this.key = kept.get("qcompile-key");
  }

  useKey(key) {
    this.key = key;
    kept.set("qcompile-key", key);
  }

  /** What is served: { model, context, chat, defaults, version, locked }; only `locked`, true, without the right key. */
  async facts() {
    return (await this.send("page.json", {})).json();
  }

  /** The events of a streamed response, as objects. Throws ServerError, and AbortError once `signal` aborts. */
  async *events(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const asked = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await this.send(path, { method: "POST", headers, body: JSON.stringify(asked), signal });
    for await (const data of eventData(response.body, signal)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 500, event.error.code);
      yield event;
    }
    throw new ServerError(LOST);
  }

  async send(path, options) {
    const key = this.key ? { Authorization: `Bearer ${latin(this.key)}` } : {};
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...options.headers, ...key }, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer.");
    }
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    throw new ServerError(told?.error?.message ?? `status ${response.status}`, response.status, told?.error?.code);
  }
}

/** A text as headers carry it: each byte of its UTF-8 as a letter. */
const latin = (text) => String.fromCharCode(...new TextEncoder().encode(text));

/** The data of server-sent events. */
async function* eventData(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ServerError(LOST);
    }
    if (read.done) return;
    const events = (text + read.value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}
