// The prompt box: sends a prompt, shows the answer as it comes, and how fast it came.

import { byId, element, keep, say } from "./dom.js";
import { count, duration } from "./format.js";
import { fetchWithKey } from "./key.js";
import { events } from "./sse.js";

export class Ask {
  /** `onEnd(id)` is called with the id of each request of ours that had an answer, at its end. */
  constructor(onEnd) {
    this.onEnd = onEnd;
    this.form = byId("form");
    this.prompt = byId("prompt");
    this.answer = byId("answer");
    this.stopping = undefined; // of the request under way
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.stopping) this.send();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    byId("ask").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopping?.abort();
    });
    byId("stop").addEventListener("click", () => this.stopping?.abort());
  }

  /** Offers chat where the model has a template for it. */
  know(router) {
    byId("kind").hidden = !router.has_chat_template;
  }

  async send() {
    const run = new Run(this.answer);
    this.stopping = new AbortController();
    this.busy(true);
    let id = "";
    try {
      const answer = await this.post(this.stopping.signal);
      if (!answer.ok) throw new Error(await reason(answer));
      id = answer.headers.get("baton-request-id") ?? "";
      for await (const event of events(answer.body)) run.take(event);
      run.end();
    } catch (error) {
      run.fail(this.stopping.signal.aborted ? "" : sentence(error));
    } finally {
      this.stopping = undefined;
      this.busy(false);
    }
    if (id) this.onEnd(id);
  }

  post(signal) {
    const text = this.prompt.value;
    const chat = !byId("kind").hidden && this.form.elements.kind.value === "chat";
    const body = {
      ...(chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    };
    return fetchWithKey(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
  }

  busy(on) {
    const focused = document.activeElement;
    byId("stop").hidden = !on;
    byId("send").hidden = on;
    this.answer.setAttribute("aria-busy", String(on));
    if (focused === byId("send")) byId("stop").focus();
    if (focused === byId("stop")) byId("send").focus();
  }
}

/** One answer, from nothing to its end. */
class Run {
  constructor(answer) {
    this.answer = answer;
    this.text = document.createTextNode("");
    this.unseen = "";
    this.began = performance.now();
    this.first = undefined;
    this.last = undefined;
    this.usage = undefined;
    this.finish = undefined;
    answer.replaceChildren(this.text);
    answer.hidden = false;
    byId("problem").hidden = true;
    byId("facts").hidden = true;
    say(byId("progress"), "Waiting for the first token");
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices ?? [];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const text = choice.text ?? choice.delta?.content ?? "";
    if (!text) return;
    this.last = performance.now();
    if (this.first === undefined) {
      this.first = this.last;
      say(byId("progress"), "");
    }
    // At most one change of the page for each frame it paints.
    if (!this.unseen) requestAnimationFrame(() => this.paint());
    this.unseen += text;
  }

  paint() {
    const { scrollHeight, scrollTop, clientHeight } = this.answer;
    const atEnd = scrollHeight - scrollTop - clientHeight < 24;
    this.text.appendData(this.unseen);
    this.unseen = "";
    if (atEnd) this.answer.scrollTop = this.answer.scrollHeight;
  }

  end() {
    this.paint();
    say(byId("progress"), "");
    const { prompt_tokens: asked, completion_tokens: made, prompt_tokens_details: of } = this.usage;
    const spent = (this.last - this.first) / 1e3;
    const facts = [
      ["First token", duration((this.first - this.began) / 1e3)],
      ["Tokens/s", made > 1 && spent > 0 ? count((made - 1) / spent) : "–"],
      ["Tokens", this.finish === "length" ? `${made}, the limit` : `${made}`],
      ["Prompt", `${asked} tokens${of ? `, ${of.cached_tokens} cached` : ""}`],
    ];
    byId("facts").hidden = false;
    keep(byId("facts"), facts, ([name]) => name, makeFact, (fact, [, value]) => say(fact.lastChild, value));
  }

  /** `words`: empty where a person has stopped it. */
  fail(words) {
    this.paint();
    const after = duration((performance.now() - this.began) / 1e3);
    say(byId("progress"), words ? "" : `Stopped after ${after}`);
    this.answer.hidden = !this.text.length;
    byId("problem").hidden = !words;
    say(byId("problem"), words);
  }
}

const makeFact = ([name]) => element("div", {}, element("dt", {}, name), element("dd"));

async function reason(answer) {
  const content = await answer.json().catch(() => null);
  const words = content?.error?.message ?? `The router answers with status ${answer.status}.`;
  const retry = answer.headers.get("retry-after");
  return retry ? `${capital(words)}. Try again in ${retry} s.` : capital(words);
}

function sentence(error) {
  // What browsers say of a connection that fails differs, and tells nobody anything.
  return error instanceof TypeError ? "The router cannot be reached." : capital(error.message);
}

const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
