// Making elements. Text enters the document as text nodes alone: nothing here, or elsewhere, parses HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with an id. */
const byId = (id) => document.getElementById(id);

/** A new element with properties (class as `className`), `attributes`, and children: elements or texts. */
function element(tag, { attributes = {}, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** An icon of the page's, which assistive technology skips: what it stands for has a name of its own. */
function icon(name) {
  const drawn = document.createElementNS(SVG, "svg");
  const used = document.createElementNS(SVG, "use");
  drawn.setAttribute("aria-hidden", "true");
  used.setAttribute("href", `#icon-${name}`);
  drawn.append(used);
  return drawn;
}

/** A small button below a message or on a block of code. */
function actionButton(name, label, act) {
  const button = element("button", { type: "button", className: "action" }, icon(name), element("span", {}, label));
  button.addEventListener("click", () => act(button));
  return button;
}

/** A button that copies the text that `text()` gives, and says for a while whether it did. */
function copyButton(text) {
  return actionButton("copy", "Copy", async (button) => {
    const label = button.querySelector("span");
    label.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { label.textContent = "Copy"; }, 1500);
  });
}

/** Copy a text to the clipboard; false if the browser does not allow it. */
async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Without permission, the older way may work.
    }
  }
  const focused = document.activeElement; // browsers lend no clipboard to pages that come without TLS from afar
  const field = element("textarea", { value: text, className: "unseen", attributes: { "aria-hidden": "true" } });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}
