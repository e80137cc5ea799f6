// Markdown's blocks: a text becomes a list of plain objects, each with its `kind`. Every pattern takes linear time.
"use strict";

const MOST_DEPTH = 12; // of lists and quotes within each other; what is deeper stays text
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const TASK = /^\[([ xX])\] /;

/** The blocks of a text. */
function markdownBlocks(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  let mark = ""; // of the code that a line is in, where tabs stay tabs
  return blocksOf(lines.map((line) => {
    const [found] = fenceOf(line.trim()) ?? [""];
    if (mark ? found.startsWith(mark) : found) mark = mark ? "" : found;
    return mark && !found ? line : line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
  }), 0);
}

/** What opens a block of code: its mark and its language; null if a line opens none. */
function fenceOf(line) {
  const found = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
  return !found || (found[1][0] === "`" && found[2].includes("`")) ? null : [found[1], found[2].trim().split(" ")[0]];
}

/** The blocks of the lines of a text, a quote or an item. */
function blocksOf(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const read = [readCode, readHeading, readRule, readQuote, readList, readTable, readParagraph];
    for (const rule of read) {
      const found = rule(lines, at, depth);
      if (found) {
        blocks.push(found.block);
        at = found.end;
        break;
      }
    }
  }
  return blocks;
}

/** Whether a line begins a block that ends a paragraph above it. */
function interrupts(line) {
  if (fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && item[0].length < line.length && (!/^\d/.test(item[2]) || parseInt(item[2], 10) === 1);
}

const indentOf = (line) => line.length - line.trimStart().length;

function readCode(lines, at) {
  const fence = fenceOf(lines[at]);
  if (!fence) return null;
  const [mark, language] = fence;
  const indent = indentOf(lines[at]);
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && indentOf(line) < 4 && text === mark[0].repeat(text.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const inside = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return { block: { kind: "code", language, text: inside.join("\n") }, end: end + 1 };
}

function readHeading(lines, at) {
  const heading = HEADING.exec(lines[at]);
  if (!heading) return null;
  let text = lines[at].trim().slice(heading[1].length).trim();
  const closed = text.length - [...text].reverse().findIndex((letter) => letter !== "#");
  if (text && closed < text.length && text[closed - 1] === " ") text = text.slice(0, closed).trim();
  return { block: { kind: "heading", level: heading[1].length, text }, end: at + 1 };
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? { block: { kind: "rule" }, end: at + 1 } : null;
}

function readQuote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= MOST_DEPTH) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { block: { kind: "quote", blocks: blocksOf(inside, depth + 1) }, end };
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= MOST_DEPTH) return null;
  const kindOf = (mark) => mark.at(-1); // "-", "*", "+", "." or ")": another one begins another list
  const block = { kind: "list", ordered: /^\d/.test(first[2]), start: parseInt(first[2], 10) || 0, items: [], loose: false };
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || kindOf(item[2]) !== kindOf(first[2]) || RULE.test(lines[end]) || item[1].length >= first[1].length + 2) break;
    const found = readItem(lines, end, item);
    block.items.push(itemOf(found.lines, depth));
    if (block.items.at(-1).blocks.filter(({ kind }) => kind === "paragraph").length > 1) block.loose = true;
    let next = found.end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    const follows = next < lines.length && ITEM.exec(lines[next]);
    if (next > found.end && follows && kindOf(follows[2]) === kindOf(first[2])) block.loose = true;
    end = follows ? next : found.end;
  }
  return { block, end };
}

/** The lines of a list item, without its mark and indentation, and where they end. */
function readItem(lines, at, item) {
  const inner = item[1].length + 2; // models often indent what is in an item less than its text
  const width = item[3].length > 4 ? item[1].length + item[2].length + 1 : item[0].length;
  const inside = [lines[at].slice(width)];
  let end = at + 1;
  let blank = false;
  let fenced = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const empty = !line.trim();
    const inItem = indentOf(line) >= inner;
    if (!empty && !inItem && (blank || fenced || interrupts(line) || ITEM.test(line))) break;
    if (!empty && fenceOf(line.trim())) fenced = !fenced;
    inside.push(line.slice(Math.min(width, indentOf(line))));
    blank = empty;
  }
  while (inside.length > 1 && !inside.at(-1).trim()) {
    inside.pop();
    end -= 1;
  }
  return { lines: inside, end };
}

function itemOf(lines, depth) {
  const task = TASK.exec(lines[0]);
  const rest = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  return { done: task ? task[1] !== " " : null, blocks: blocksOf(rest, depth + 1) };
}

function readTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !DELIMITERS.test(lines[at + 1].trim())) return null;
  const head = cellsOf(lines[at]);
  const marks = cellsOf(lines[at + 1]);
  if (head.length !== marks.length) return null;
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !interrupts(lines[end])) {
    const cells = cellsOf(lines[end]).slice(0, head.length);
    rows.push([...cells, ...Array(head.length - cells.length).fill("")]);
    end += 1;
  }
  return { block: { kind: "table", head, sides, rows }, end };
}

/** The cells of a table's line; `\|` is no border. */
function cellsOf(line) {
  const cells = [""];
  const text = line.trim();
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|") cells.push("");
    else cells[cells.length - 1] += text[at];
  }
  if (text.endsWith("|") && !text.endsWith("\\|") && cells.length > 1) cells.pop();
  return cells.map((cell) => cell.trim());
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) {
    if (readTable(lines, end)) break;
    end += 1;
  }
  return { block: { kind: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n") }, end };
}
