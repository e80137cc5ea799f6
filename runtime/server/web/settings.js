// The settings of replies: a form in a drawer, kept while the tab is open.
"use strict";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const COMPLETION_TOKENS = 256; // a text that is continued rarely ends by itself

class Settings {
  constructor(connection) {
    this.connection = connection;
    this.dialog = byId("settings");
    this.form = byId("settings-form");
    this.fields = Object.fromEntries(["system", ...NUMBERS].map((name) => [name, byId(name)]));
    this.hints = new Map(NUMBERS.map((name) => [name, byId(`${name}-hint`).textContent]));
    const stored = JSON.parse(kept.get("qcompile-settings") || "{}");
    for (const [name, field] of Object.entries(this.fields)) field.value = stored[name] ?? "";
    byId("open-settings").addEventListener("click", () => this.open());
    byId("reset").addEventListener("click", () => {
      for (const field of Object.values(this.fields)) field.value = "";
      this.check();
    });
    this.form.addEventListener("submit", (event) => {
      if (!this.check()) event.preventDefault();
    });
    this.form.addEventListener("change", () => this.check());
    this.dialog.addEventListener("close", () => this.keep());
  }

  open() {
    byId("settings-key").value = this.connection.key;
    this.dialog.showModal();
  }

  /** Fit the form to what is served. */
  fit(facts) {
    byId("system-field").hidden = !facts.chat;
    byId("version").textContent = `qcompile ${facts.version}`;
    for (const name of ["temperature", "top_p"]) this.fields[name].placeholder = facts.defaults[name];
    this.fields.max_tokens.placeholder = facts.chat ? "no limit" : COMPLETION_TOKENS;
    this.fields.seed.placeholder = "none";
    this.chat = facts.chat;
  }

  /** Whether all fields can be sent; marks those that cannot. */
  check() {
    let first = null;
    for (const [name, usual] of this.hints) {
      const field = this.fields[name];
      const hint = byId(`${name}-hint`);
      const wrong = !field.checkValidity();
      field.setAttribute("aria-invalid", String(wrong));
      hint.textContent = wrong ? complaint(field) : usual;
      hint.classList.toggle("wrong", wrong);
      if (wrong) first ??= field;
    }
    first?.focus();
    return first === null;
  }

  keep() {
    const values = Object.entries(this.fields).map(([name, field]) => [name, field.checkValidity() ? field.value : ""]);
    for (const [name, value] of values) this.fields[name].value = value;
    this.check();
    kept.set("qcompile-settings", JSON.stringify(Object.fromEntries(values)));
    if (!byId("key-field").hidden) this.connection.useKey(byId("settings-key").value);
  }

  get system() {
    return this.fields.system.value;
  }

  /** The fields of a request. */
  options() {
    const given = NUMBERS.filter((name) => this.fields[name].value !== "");
    const limit = this.chat ? {} : { max_tokens: COMPLETION_TOKENS };
    return { ...limit, ...Object.fromEntries(given.map((name) => [name, Number(this.fields[name].value)])) };
  }
}

function complaint(field) {
  const { min, max, step } = field;
  const kind = step === "1" ? "A whole number" : "A number";
  return max ? `${kind} from ${min} to ${max}` : `${kind} of at least ${min}`;
}
