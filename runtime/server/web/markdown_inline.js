// Markdown within a paragraph: a text becomes a tree of texts and { tag, children, ... }. Links go to the web and to
// mail alone; whatever else a model writes as an address stays text.
"use strict";

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const BARE_LINK = /^https?:\/\/[^\s<>"'`\\^{}|]+/;
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;
const MOST_NESTED = 16; // emphasis within emphasis; what is around it stays text
const MOST_MARKS = 4000; // of emphasis in one paragraph; what comes after stays text

/** The tree of a paragraph's text. */
function markdownInline(text) {
  return new InlineReader(text).read();
}

/** The address of a link if pages may be opened there, else null. */
function safeAddress(given) {
  const address = given.trim();
  if (!/^(https?:\/\/|mailto:)/i.test(address) || /[\s\u0000-\u001f]/.test(address)) return null;
  return URL.canParse(address) ? address : null;
}

/** Reads a text once from left to right: what opens waits on a stack until something closes it. */
class InlineReader {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.pieces = []; // texts, nodes, and marks: { mark, count, opens, closes }
    this.brackets = []; // places in `pieces` of "[" that may begin a link
    this.marks = 0;
  }

  read() {
    while (this.at < this.text.length) this.step();
    return emphasized(this.pieces);
  }

  step() {
    const letter = this.text[this.at];
    if (letter === "\\") return this.escape();
    if (letter === "`") return this.code();
    if (letter === "*" || letter === "_" || letter === "~") return this.mark(letter);
    if (letter === "[" || (letter === "!" && this.text[this.at + 1] === "[")) return this.open(letter);
    if (letter === "]") return this.close();
    if (letter === "<") return this.pointed();
    if (letter === "\n") return this.line();
    if (letter === "h" && this.text.startsWith("http", this.at)) return this.bare();
    return this.add(letter);
  }

  /** Add a text, to the last one if there is one. */
  add(text, length = text.length) {
    if (typeof this.pieces.at(-1) === "string" && this.brackets.at(-1)?.place !== this.pieces.length - 1) {
      this.pieces.push(this.pieces.pop() + text);
    } else this.pieces.push(text);
    this.at += length;
  }

  node(node, length) {
    this.pieces.push(node);
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.node({ tag: "br", children: [] }, 2);
    if (next !== undefined && ESCAPABLE.test(next)) return this.add(next, 2);
    return this.add("\\");
  }

  /** A run of backticks, and what is between it and the next run of its length. Few lengths are never closed. */
  code() {
    const run = this.text.slice(this.at, this.pastRun(this.at));
    for (let end = this.text.indexOf(run, this.at + run.length); end >= 0; end = this.text.indexOf(run, end)) {
      const past = this.pastRun(end);
      if (past - end === run.length) {
        const inside = this.text.slice(this.at + run.length, end).replaceAll("\n", " ");
        const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
        const code = padded ? inside.slice(1, -1) : inside;
        return this.node({ tag: "code", children: [code] }, past - this.at);
      }
      end = past;
    }
    return this.add(run);
  }

  /** Where a run of one letter ends. */
  pastRun(at) {
    let past = at;
    while (this.text[past] === this.text[at]) past += 1;
    return past;
  }

  mark(letter) {
    const end = this.pastRun(this.at);
    const count = end - this.at;
    const before = this.at ? this.text[this.at - 1] : " ";
    const after = this.text[end] ?? " ";
    const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
    const [wordBefore, wordAfter] = [WORD.test(before), WORD.test(after)];
    let opens = !spaceAfter && (wordAfter || spaceBefore || !wordBefore);
    let closes = !spaceBefore && (wordBefore || spaceAfter || !wordAfter);
    if (letter === "_") [opens, closes] = [opens && !wordBefore, closes && !wordAfter];
    if (letter === "~" && count !== 2) [opens, closes] = [false, false];
    this.marks += 1;
    if ((!opens && !closes) || this.marks > MOST_MARKS) return this.add(letter.repeat(count));
    return this.node({ mark: letter, count, opens, closes }, count);
  }

  open(letter) {
    const image = letter === "!";
    this.brackets.push({ place: this.pieces.length, image });
    this.pieces.push(image ? "![" : "[");
    this.at += image ? 2 : 1;
  }

  close() {
    const opened = this.brackets.pop();
    const target = opened && /^\]\(<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:[ \n]+(?:"[^"]*"|'[^']*'))?\)/.exec(this.text.slice(this.at, this.at + 2048));
    const address = target && safeAddress(target[1]);
    if (!address) return this.add("]");
    const inside = this.pieces.splice(opened.place).slice(1);
    const children = emphasized(inside).flatMap((child) => (child.tag === "a" ? child.children : [child]));
    if (!opened.image) this.brackets = []; // no links within links
    return this.node({ tag: "a", address, children: children.length ? children : [address] }, target[0].length);
  }

  /** `<https://example.org>` */
  pointed() {
    const found = /^<([^\s<>]{1,2000})>/.exec(this.text.slice(this.at, this.at + 2002));
    const address = found && safeAddress(found[1]);
    if (!address) return this.add("<");
    return this.node({ tag: "a", address, children: [found[1]] }, found[0].length);
  }

  /** An address that stands in the text as it is; what ends a sentence is no part of it. */
  bare() {
    const found = BARE_LINK.exec(this.text.slice(this.at, this.at + 2048));
    const before = this.at ? this.text[this.at - 1] : " ";
    if (!found || WORD.test(before) || this.brackets.length) return this.add("h");
    let address = found[0].replace(/[.,;:!?*_~\]]{1,9}$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.replace(/\){1,9}$/, "");
    if (!safeAddress(address)) return this.add("h");
    return this.node({ tag: "a", address, children: [address] }, address.length);
  }

  /** Lines stay lines: models write them so. */
  line() {
    const last = this.pieces.at(-1);
    if (typeof last === "string" && this.brackets.at(-1)?.place !== this.pieces.length - 1) {
      this.pieces[this.pieces.length - 1] = last.trimEnd();
    }
    return this.node({ tag: "br", children: [] }, 1);
  }
}

/** Pieces with their marks turned into emphasis where an opening one meets a closing one, and else into text. */
function emphasized(pieces) {
  const done = [];
  const openers = []; // places in `done`
  for (const piece of pieces) {
    if (piece.mark === undefined) {
      done.push(piece);
      continue;
    }
    const mark = { ...piece };
    while (mark.closes && mark.count > 0) {
      const found = openerOf(done, openers, mark);
      if (found < 0) break;
      const place = openers[found];
      const opener = done[place];
      const used = mark.mark === "~" || (opener.count > 1 && mark.count > 1) ? 2 : 1;
      const tag = mark.mark === "~" ? "del" : used === 2 ? "strong" : "em";
      const children = done.splice(place + 1).map(asText).filter((child) => child !== "");
      openers.length = found + 1;
      opener.count -= used;
      mark.count -= used;
      const depth = 1 + Math.max(0, ...children.map((child) => child.depth ?? 0));
      if (depth > MOST_NESTED) done.push(opener.mark.repeat(used), ...children, opener.mark.repeat(used));
      else done.push({ tag, children, depth });
      if (opener.count === 0) {
        done.splice(place, 1);
        openers.pop();
      }
    }
    if (mark.count > 0) {
      if (mark.opens) openers.push(done.length);
      done.push(mark);
    }
  }
  return done.map(asText).filter((piece) => piece !== "");
}

/** The place in `openers` of what a mark closes, -1 if nothing: a mark that both opens and closes fits few lengths. */
function openerOf(done, openers, mark) {
  for (let at = openers.length - 1; at >= 0; at -= 1) {
    const opener = done[openers[at]];
    if (opener.mark !== mark.mark) continue;
    const both = opener.closes || mark.opens;
    if (both && (opener.count + mark.count) % 3 === 0 && (opener.count % 3 || mark.count % 3)) continue;
    return at;
  }
  return -1;
}

const asText = (piece) => (piece.mark === undefined ? piece : piece.mark.repeat(piece.count));
