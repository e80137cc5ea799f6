// A reply as it grows: its text, reasoning, token probabilities, and how fast it came.
"use strict";

class Reply {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.tokens = []; // { text, logprob, others: [{ text, logprob }] }
    this.usage = null;
    this.ended = null; // finish_reason, "stopped", or "failed"
    this.error = null;
    this.asked = performance.now();
    this.first = null; // when the first tokens came, in milliseconds, and how many these were
    this.firstTokens = 0;
    this.last = null;
  }

  /** Take an event of /v1/chat/completions or /v1/completions. */
  take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta ?? { content: choice.text };
    this.content += content ?? "";
    this.reasoning += reasoning ?? "";
    this.tokens.push(...(choice.delta ? chatTokens(choice.logprobs) : completionTokens(choice.logprobs)));
    this.ended = choice.finish_reason ?? this.ended;
    const count = this.usage?.completion_tokens ?? 0;
    if (count === 0) return;
    this.last = performance.now();
    if (this.first === null) [this.first, this.firstTokens] = [this.last, count];
  }

  /** The numbers to show below a reply: texts. */
  numbers() {
    const count = this.usage?.completion_tokens;
    if (!count) return [];
    const shown = [count === 1 ? "1 token" : `${count.toLocaleString("en")} tokens`];
    const seconds = (this.last - this.first) / 1000;
    if (count > this.firstTokens && seconds > 0) shown.push(`${inDigits((count - this.firstTokens) / seconds)} tokens/s`);
    shown.push(`first after ${inDigits((this.first - this.asked) / 1000)} s`);
    const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = this.usage.completion_tokens_details ?? {};
    if (accepted + rejected > 0) shown.push(`${Math.round((100 * accepted) / (accepted + rejected))}\u00a0% of drafts accepted`);
    if (this.ended === "length") shown.push("ended by the limit of tokens");
    if (this.ended === "stopped") shown.push("stopped");
    return shown;
  }
}

/** A number with about three digits. */
function inDigits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map(({ token, logprob, top_logprobs: others }) => (
    { text: token, logprob, others: others.map((other) => ({ text: other.token, logprob: other.logprob })) }
  ));
}

function completionTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((text, at) => {
    const others = Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([other, logprob]) => ({ text: other, logprob }));
    others.sort((one, other) => other.logprob - one.logprob);
    return { text, logprob: logprobs.token_logprobs[at], others };
  });
}
