// Asks the router again and again. A failed try is told at once; tries then come less often.

import { fetchWithKey } from "./key.js";

const INTERVAL_MS = 1000;
const LONGEST_MS = 5000; // between tries
const ANSWER_MS = 6000; // nodes have two seconds, and a router may be busy

export class Feed {
  /** `onAnswer(content)` or `onLost(error)` is called after each try. */
  constructor(path, onAnswer, onLost) {
    this.path = path;
    this.onAnswer = onAnswer;
    this.onLost = onLost;
    this.failures = 0;
    this.timer = undefined;
    this.asking = false;
  }

  start() {
    // A page that nobody looks at asks nothing.
    document.addEventListener("visibilitychange", () => this.now());
    window.addEventListener("online", () => this.now());
    this.now();
  }

  now() {
    clearTimeout(this.timer);
    if (!this.asking && !document.hidden) this.ask();
  }

  async ask() {
    this.asking = true;
    try {
      const content = await fetchJson(this.path);
      this.failures = 0;
      this.onAnswer(content);
    } catch (error) {
      this.failures += 1;
      this.onLost(error);
    } finally {
      this.asking = false;
      clearTimeout(this.timer);
      const wait = Math.min(INTERVAL_MS * 1.6 ** this.failures, LONGEST_MS);
      this.timer = setTimeout(() => this.now(), wait);
    }
  }
}

/** The JSON at a path of the router. Rejects with a sentence for people. */
export async function fetchJson(path) {
  let answer;
  try {
    const signal = AbortSignal.timeout(ANSWER_MS);
    answer = await fetchWithKey(path, { cache: "no-store", signal });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Error(late ? "The router does not answer." : "The router cannot be reached.");
  }
  const content = await answer.json().catch(() => null);
  if (answer.ok && content !== null) return content;
  const words = content?.error?.message ?? `The router answers with status ${answer.status}.`;
  throw Object.assign(new Error(words), { status: answer.status });
}
