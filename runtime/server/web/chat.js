// The conversation: what is sent, what comes back, and what the buttons do.
"use strict";

const ALTERNATIVES = 5; // most of them that are shown with a token
const NEAR = 120; // pixels from the end of the page within which it follows a growing reply

class Chat {
  constructor() {
    this.connection = new Connection();
    this.settings = new Settings(this.connection);
    this.facts = null;
    this.turns = []; // { text, user, reply, view } in order
    this.running = null; // the AbortController of the growing reply
    this.log = byId("log");
    this.field = byId("message");
    this.listen();
    this.start();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.submit();
    });
    this.field.addEventListener("input", () => this.fitField());
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.running?.abort();
    });
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("probabilities").addEventListener("click", () => this.toggleTokens());
    byId("key-form").addEventListener("submit", () => this.useKey(byId("key").value));
    byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  }

  /** Ask what is served. Returns whether that is known now. */
  async start() {
    let facts;
    try {
      facts = await this.connection.facts();
    } catch (error) {
      this.notice(error.message);
      return false;
    }
    if (facts.locked) {
      this.askKey();
      return false;
    }
    this.facts = facts;
    this.notice("");
    const { model, context, chat } = this.facts;
    byId("model").textContent = document.title = model;
    byId("context").textContent = `${context.toLocaleString("en")} tokens of context`;
    this.settings.fit(this.facts);
    byId("key-field").hidden = !this.connection.key;
    if (!chat) {
      byId("welcome-title").textContent = "Begin a text";
      byId("welcome-text").textContent = "This model has no chat template: it continues your text as it stands (/v1/completions). Texts stay in this tab, and are gone when it is closed.";
      this.field.placeholder = "Write the beginning of a text";
      byId("message-label").textContent = "Your text";
    }
    this.field.focus();
    return true;
  }

  askKey() {
    byId("key").value = "";
    byId("key-hint").textContent = this.connection.key ? "The server did not take the last one. A key is kept until this tab is closed." : "It is kept until this tab is closed, and sent to this server alone.";
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }

  /** Try a key; the message that the server refused without it, if there is one, is sent again. */
  async useKey(key) {
    this.connection.useKey(key);
    const last = this.turns.at(-1);
    if ((await this.start()) && last?.reply.error?.status === 401) this.again(last);
  }

  get plain() {
    return !this.facts.chat;
  }

  get tokensWanted() {
    return byId("probabilities").getAttribute("aria-pressed") === "true";
  }

  async submit() {
    const text = this.field.value;
    if (!text.trim()) return;
    if (!this.facts && !(await this.start())) return;
    this.field.value = "";
    this.fitField();
    byId("welcome").hidden = true;
    const turn = { text };
    turn.user = new UserView(text, this.plain, () => this.edit(turn));
    this.turns.push(turn);
    this.log.append(turn.user.element);
    this.answer(turn);
  }

  /** Generate the reply of the last turn. */
  async answer(turn) {
    const reply = (turn.reply = new Reply());
    turn.view?.element.remove();
    const again = () => this.again(turn);
    const retry = () => (reply.error.status === 401 ? this.askKey() : this.again(turn));
    turn.view = new ReplyView(reply, this.plain, { again, retry });
    turn.view.show();
    this.log.append(turn.view.element);
    this.notice("");
    this.run(true);
    this.follow();
    let due = false;
    try {
      for await (const event of this.connection.events(...this.request(), this.running.signal)) {
        reply.take(event);
        if (due) continue;
        due = true;
        requestAnimationFrame(() => {
          due = false;
          if (reply.ended === null) this.grow(turn);
        });
      }
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof ServerError)) throw error;
      reply.ended = error.name === "AbortError" ? "stopped" : "failed";
      reply.error = reply.ended === "failed" ? error : null;
    } finally {
      reply.ended ??= "failed";
      this.finish(turn);
    }
  }

  grow(turn) {
    const near = this.near();
    turn.view.show();
    if (near) this.follow();
  }

  finish(turn) {
    if (!this.turns.includes(turn)) return; // a new chat has begun
    const near = this.near();
    turn.view.end();
    turn.view.showTokens(this.tokensWanted);
    this.run(false);
    this.say(turn.reply.error ? "" : ["The reply has ended", ...turn.reply.numbers()].join(", "));
    if (near) this.follow();
    if (turn.reply.error?.status === 401) this.askKey();
  }

  /** The path and the body of the request for the reply of the last turn. */
  request() {
    const options = this.settings.options();
    const earlier = this.turns.slice(0, -1).filter((turn) => turn.reply?.content || turn.reply?.reasoning);
    const last = this.turns.at(-1);
    if (this.plain) {
      const prompt = earlier.map((turn) => turn.text + turn.reply.content).join("") + last.text;
      return ["v1/completions", { prompt, ...options, ...(this.tokensWanted && { logprobs: ALTERNATIVES }) }];
    }
    const messages = this.settings.system.trim() ? [{ role: "system", content: this.settings.system }] : [];
    for (const { text, reply } of earlier) {
      const reasoning = reply.reasoning && { reasoning_content: reply.reasoning };
      messages.push({ role: "user", content: text }, { role: "assistant", content: reply.content, ...reasoning });
    }
    messages.push({ role: "user", content: last.text });
    return ["v1/chat/completions", { messages, ...options, ...(this.tokensWanted && { logprobs: true, top_logprobs: ALTERNATIVES }) }];
  }

  /** Show whether a reply grows: the button stops it then, and what changes the conversation waits. */
  run(running) {
    this.running = running ? new AbortController() : null;
    const button = byId("send");
    button.setAttribute("aria-label", running ? "Stop" : "Send");
    button.title = running ? "Stop" : "Send";
    byId("send-icon").setAttribute("href", running ? "#icon-stop" : "#icon-send");
    this.log.setAttribute("aria-busy", String(running));
    if (running) this.say("The reply is being generated");
    this.turns.forEach(({ view, user }, at) => {
      user.edit.hidden = running;
      view.offerAgain(!running && at === this.turns.length - 1);
    });
  }

  again(turn) {
    if (this.running || this.turns.at(-1) !== turn) return;
    this.field.focus();
    this.answer(turn);
  }

  /** Take the conversation back to before a turn, so that the user can change the turn's text. */
  edit(turn) {
    if (this.running) return;
    for (const { user, view } of this.turns.splice(this.turns.indexOf(turn))) {
      user.element.remove();
      view.element.remove();
    }
    this.run(false);
    this.field.value = turn.text;
    this.fitField();
    this.field.focus();
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    this.log.replaceChildren();
    byId("welcome").hidden = false;
    this.run(false);
    this.say("");
    this.notice("");
    this.field.focus();
  }

  toggleTokens() {
    const wanted = !this.tokensWanted;
    byId("probabilities").setAttribute("aria-pressed", String(wanted));
    for (const { view, reply } of this.turns) if (reply.ended) view.showTokens(wanted);
    const missing = this.turns.some(({ reply }) => reply.tokens.length === 0);
    this.notice(wanted && missing ? "Probabilities are known from the next reply on. Regenerate to see those of the last one." : "");
  }

  /** Show a line above the message field; an empty one is taken away. */
  notice(text) {
    byId("notice").textContent = text;
  }

  /** Tell what happens to those who do not see it. */
  say(text) {
    byId("status").textContent = text;
  }

  near() {
    const page = document.documentElement;
    return page.scrollHeight - page.scrollTop - page.clientHeight < NEAR;
  }

  follow() {
    window.scrollTo({ top: document.documentElement.scrollHeight });
  }

  fitField() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }
}

const chat = new Chat();
