// The API key of whoever looks: asked for when the router wants one, kept as long as the tab is open.

import { byId, mark, say } from "./dom.js";

const KEPT_AS = "baton.api-key";
const WANTED = new Set([401, 403]); // statuses of answers to who has none that is good enough

/** As fetch, with the key if there is one. */
export function fetchWithKey(path, options = {}) {
  const key = sessionStorage.getItem(KEPT_AS);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers });
}

export const wantsKey = (error) => WANTED.has(error.status);

/** The field for it, which is there only while a key is wanted. */
export class KeyForm {
  /** `onKey()` is called when a person has given one. */
  constructor(onKey) {
    this.form = byId("key-form");
    this.field = byId("key");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEPT_AS, this.field.value.trim());
      this.field.value = "";
      onKey();
    });
  }

  /** `words`: the router's own, why; empty when no key is wanted any more. */
  want(words) {
    const appears = this.form.hidden && words;
    this.form.hidden = !words;
    say(byId("key-words"), words);
    mark(this.field, "aria-invalid", String(Boolean(words && sessionStorage.getItem(KEPT_AS))));
    if (appears) this.field.focus();
  }
}
