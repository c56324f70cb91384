// Polls the router. A failure is reported immediately, and retries back off.

import { fetchWithKey } from "./key.js";

const INTERVAL_MS = 1000;
const LONGEST_MS = 5000; // between retries
const ANSWER_MS = 6000; // nodes have two seconds, and the router may be busy

export class Feed {
  /** `onAnswer(content)` or `onLost(error)` is called after each poll. */
  constructor(path, onAnswer, onLost) {
    this.path = path;
    this.onAnswer = onAnswer;
    this.onLost = onLost;
    this.failures = 0;
    this.timer = undefined;
    this.asking = false;
  }

  start() {
    // A hidden page does not poll.
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

/** Returns the JSON at a path of the router. Rejects with a readable sentence. */
export async function fetchJson(path) {
  let answer;
  try {
    const signal = AbortSignal.timeout(ANSWER_MS);
    answer = await fetchWithKey(path, { cache: "no-store", signal });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Error(late ? "The router does not respond." : "The router cannot be reached.");
  }
  const content = await answer.json().catch(() => null);
  if (answer.ok && content !== null) return content;
  const words = content?.error?.message ?? `The router returned status ${answer.status}.`;
  throw Object.assign(new Error(words), { status: answer.status });
}
