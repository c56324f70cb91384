// The viewer's API key. The page asks for it if the router requires one, and keeps it until the tab
// is closed.

import { byId, mark, say } from "./dom.js";

const KEPT_AS = "baton.api-key";
const WANTED = new Set([401, 403]); // statuses without a sufficient key

/** Calls fetch with the key, if there is one. */
export function fetchWithKey(path, options = {}) {
  const key = sessionStorage.getItem(KEPT_AS);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers });
}

export const wantsKey = (error) => WANTED.has(error.status);

/** The form for the key, shown only while the router requires one. */
export class KeyForm {
  /** `onKey()` is called when the user has entered a key. */
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

  /** `words`: the router's reason, or empty if no key is required. */
  want(words) {
    const appears = this.form.hidden && words;
    this.form.hidden = !words;
    say(byId("key-words"), words);
    mark(this.field, "aria-invalid", String(Boolean(words && sessionStorage.getItem(KEPT_AS))));
    if (appears) this.field.focus();
  }
}
