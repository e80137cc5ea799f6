// Shows Markdown as elements. While a text grows, only its last block is made anew: what is above keeps its selection,
// its focus and its place.
"use strict";

/** Show a text in a container, which holds the elements of an earlier state of the text or nothing. */
function showMarkdown(container, text) {
  const blocks = markdownBlocks(text);
  const shown = container.shownBlocks ?? [];
  const keys = blocks.map((block) => JSON.stringify(block));
  keys.forEach((key, at) => {
    const old = container.children[at];
    if (old && shown[at] === key) return;
    if (old && blocks[at].kind === "code" && old.dataset.language === blocks[at].language) {
      old.querySelector("code").textContent = blocks[at].text;
    } else if (old) old.replaceWith(blockElement(blocks[at]));
    else container.append(blockElement(blocks[at]));
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
  container.shownBlocks = keys;
}

function blockElement(block) {
  if (block.kind === "code") return codeElement(block);
  if (block.kind === "heading") return element(`h${Math.min(block.level + 1, 6)}`, {}, ...inlineElements(block.text));
  if (block.kind === "rule") return element("hr");
  if (block.kind === "quote") return element("blockquote", {}, ...block.blocks.map(blockElement));
  if (block.kind === "list") return listElement(block);
  if (block.kind === "table") return tableElement(block);
  return element("p", {}, ...inlineElements(block.text));
}

function codeElement({ language, text }) {
  const code = element("code", {}, text);
  const name = language || "text";
  const head = element("div", { className: "code-head" }, element("span", {}, name), copyButton(() => code.textContent));
  const attributes = { tabindex: "0", role: "group", "aria-label": `Code: ${name}` };
  const made = element("div", { className: "code" }, head, element("pre", { attributes }, code));
  made.dataset.language = language;
  return made;
}

function listElement(list) {
  const items = list.items.map(({ done, blocks }) => {
    const item = element("li");
    if (done !== null) {
      const attributes = { "aria-label": done ? "Done" : "To do" };
      item.className = "task";
      item.append(element("input", { type: "checkbox", checked: done, disabled: true, attributes }), " ");
    }
    for (const block of blocks) {
      if (block.kind === "paragraph" && !list.loose) item.append(...inlineElements(block.text));
      else item.append(blockElement(block));
    }
    return item;
  });
  return list.ordered ? element("ol", { start: list.start }, ...items) : element("ul", {}, ...items);
}

function tableElement({ head, sides, rows }) {
  const cell = (tag) => (text, at) => element(tag, { className: sides[at] }, ...inlineElements(text));
  const top = element("thead", {}, element("tr", {}, ...head.map(cell("th"))));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td")))));
  const attributes = { tabindex: "0", role: "group", "aria-label": "Table" };
  return element("div", { className: "table", attributes }, element("table", {}, top, body));
}

const inlineElements = (text) => markdownInline(text).map(inlineElement);

function inlineElement(piece) {
  if (typeof piece === "string") return document.createTextNode(piece);
  const made = element(piece.tag, {}, ...piece.children.map(inlineElement));
  if (piece.tag === "a") {
    Object.assign(made, { href: piece.address, target: "_blank", rel: "noopener noreferrer nofollow" });
    made.title = piece.address;
  }
  return made;
}
