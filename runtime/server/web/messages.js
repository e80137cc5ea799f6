// How messages look: what the user said, and a reply with what can be done with it.
"use strict";

/** The user's message. edit: called to take the conversation back to before it. */
class UserView {
  constructor(text, plain, edit) {
    this.edit = actionButton("edit", "Edit", edit);
    const said = element("div", { className: "said" }, text);
    const actions = element("div", { className: "actions" }, copyButton(() => text), this.edit);
    const attributes = { "aria-label": "You" };
    this.element = element("article", { className: `turn user${plain ? " plain-text" : ""}`, attributes }, said, actions);
  }
}

/** Shows a reply while it grows. plain: as it is, not as Markdown. */
class ReplyView {
  constructor(reply, plain, actions) {
    this.reply = reply;
    this.plain = plain;
    this.actions = actions; // { again, retry }
    this.asTokens = false;
    this.openedItself = false; // how reasoning was last shown, unless the reader changed that
    this.again = null; // the button, once the reply has ended
    this.said = element("div", { className: plain ? "said" : "said markdown" });
    this.thought = element("div");
    this.reasoning = element("details", { className: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thought);
    this.waiting = element("div", { className: "waiting" }, element("i"), element("i"), element("i"));
    this.numbers = element("span", { className: "numbers" });
    this.buttons = element("div", { className: "actions", hidden: true });
    const beneath = element("div", { className: "beneath" }, this.buttons, this.numbers);
    const attributes = { "aria-label": "Reply" };
    this.element = element("article", { className: `turn assistant${plain ? " plain-text" : ""}`, attributes }, this.reasoning, this.said, this.waiting, beneath);
  }

  /** Show the reply's present state. */
  show() {
    const { reply } = this;
    this.waiting.hidden = reply.ended !== null || reply.content !== "" || reply.reasoning !== "";
    this.showReasoning();
    this.thought.textContent = reply.reasoning.trim();
    if (this.plain) this.said.textContent = reply.content;
    else showMarkdown(this.said, reply.content);
    this.said.hidden = reply.content === "" || this.asTokens;
    this.numbers.textContent = reply.numbers().join(" · ");
  }

  /** Reasoning is open until what it leads to begins, unless the reader opens or closes it. */
  showReasoning() {
    const { content, reasoning, ended } = this.reply;
    const open = content === "" && ended === null;
    this.reasoning.hidden = reasoning === "";
    if (this.reasoning.open === this.openedItself) this.reasoning.open = this.openedItself = open;
  }

  /** Show that the reply has ended: what can be done with it, and its error if it has one. */
  end() {
    const { reply } = this;
    this.copy = copyButton(() => reply.content);
    this.again = actionButton("again", "Regenerate", this.actions.again);
    this.copy.hidden = reply.content === "";
    this.buttons.append(this.copy, this.again);
    this.buttons.hidden = false;
    this.show();
    if (reply.ended === "stop" && !reply.content && !reply.reasoning) this.numbers.append(" · the reply is empty");
    if (reply.error) this.element.append(this.errorElement(reply.error));
  }

  /** What went wrong, and a button to try again where that may help. */
  errorElement({ message, status, code }) {
    const long = code === "context_length_exceeded";
    const text = long ? `${sentence(message)}. Edit the message, or begin a new chat.` : sentence(message);
    const shown = element("div", { className: "error", attributes: { role: "alert" } }, element("span", {}, text));
    if (long) return shown;
    const retry = element("button", { type: "button" }, status === 401 ? "Enter the key" : "Try again");
    retry.addEventListener("click", this.actions.retry);
    shown.append(retry);
    return shown;
  }

  /** Offer to generate the reply anew, or not; after an error there is another button for that. */
  offerAgain(offered) {
    if (this.again) this.again.hidden = !offered || this.reply.error !== null;
  }

  /** Show tokens instead of the text, where their probabilities are known. */
  showTokens(wanted) {
    this.asTokens = wanted && this.reply.tokens.length > 0;
    this.tokens?.remove();
    this.tokens = this.asTokens ? tokensElement(this.reply.tokens) : null;
    if (this.tokens) this.said.after(this.tokens);
    this.said.hidden = this.reply.content === "" || this.asTokens;
  }
}

/** A text with a capital letter at its start: messages of the server begin as parts of a line. */
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
