// A reply as tokens, coloured by their probability; the one that is pointed at or chosen by arrow keys shows what else
// was probable.
"use strict";

const SHARES = [0.9, 0.6, 0.3, 0.1]; // each bounds a colour from below
const LEGEND = ["90 % and more", "60 %", "30 %", "10 %", "less"];
let listings = 0;

/** The element of a reply's tokens. */
function tokensElement(tokens) {
  const list = `tokens-${(listings += 1)}`;
  const options = tokens.map(({ text, logprob }, at) => element("span", {
    id: `${list}-${at}`,
    className: `p${colourOf(logprob)}`,
    attributes: { role: "option", "aria-selected": "false", "aria-label": `${spelled(text)}, ${percent(logprob)}` },
  }, visible(text)));
  const attributes = { role: "listbox", tabindex: "0", "aria-label": "Tokens of the reply", "aria-orientation": "horizontal" };
  const box = element("div", { className: "tokens", attributes }, ...options);
  const chances = element("div", { className: "chances" });
  let chosen = -1;
  const choose = (at) => {
    options[chosen]?.setAttribute("aria-selected", "false");
    chosen = Math.min(Math.max(at, 0), tokens.length - 1);
    options[chosen].setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", options[chosen].id);
    chances.replaceChildren(chancesTable(tokens[chosen]));
  };
  const pointed = (event) => {
    const at = options.indexOf(event.target);
    if (at >= 0) choose(at);
  };
  const moves = { ArrowLeft: () => chosen - 1, ArrowRight: () => chosen + 1, Home: () => 0, End: () => tokens.length - 1 };
  box.addEventListener("mouseover", pointed);
  box.addEventListener("click", pointed);
  box.addEventListener("keydown", (event) => {
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(moves[event.key]());
    options[chosen].scrollIntoView({ block: "nearest" });
  });
  choose(0);
  return element("div", {}, box, legend(), chances);
}

function colourOf(logprob) {
  const at = SHARES.findIndex((share) => Math.exp(logprob) >= share);
  return at < 0 ? SHARES.length : at;
}

function legend() {
  const entries = LEGEND.map((text, at) => element("span", {}, element("b", { className: `p${at}` }), text));
  return element("p", { className: "legend" }, "Probability:", ...entries);
}

function chancesTable({ text, logprob, others }) {
  const listed = others.some((other) => other.text === text) ? others : [{ text, logprob }, ...others];
  const rows = listed.map((other) => {
    const bar = element("span", { className: "share" });
    bar.style.width = `${100 * Math.exp(other.logprob)}%`;
    const cells = [element("td", {}, bar), element("td", {}, percent(other.logprob))];
    const name = element("th", { scope: "row", title: spelled(other.text) }, spelled(other.text));
    return element("tr", { className: other.text === text ? "chosen" : "" }, name, ...cells);
  });
  return element("table", {}, element("caption", {}, `Where ${spelled(text)} was chosen`), element("tbody", {}, ...rows));
}

const spelled = (text) => JSON.stringify(text);
const visible = (text) => text.replaceAll("\n", "↵\n") || "∅";

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}
