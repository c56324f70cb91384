// The prompt box: sends a prompt, shows the answer as it comes, and how fast it came.

import { byId, element, keep, say } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { duration } from "./format.js";
import { fetchWithKey } from "./key.js";
import { speed } from "./speed.js";
import { events } from "./sse.js";

export class Ask {
  /** `onEnd(id)` is called with the id of each request of ours that had an answer, at its end. */
  constructor(onEnd) {
    this.onEnd = onEnd;
    this.form = byId("form");
    this.prompt = byId("prompt");
    this.answer = byId("answer");
    this.stopping = undefined; // of the request under way
    this.id = ""; // of the last request
    this.facts = new Map(); // of its answer: name to text
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

  /** Offers chat where the model has a template for it, and prompts that it is known to answer. */
  know(router) {
    byId("kind").hidden = !router.has_chat_template;
    const prompts = EXAMPLES[router.model] ?? [];
    byId("examples").hidden = !prompts.length;
    keep(byId("examples"), prompts, (prompt) => prompt, (prompt) => this.example(prompt), () => {});
  }

  example(prompt) {
    const button = element("button", { type: "button", class: "mono" }, prompt);
    button.addEventListener("click", () => {
      this.prompt.value = prompt;
      byId("temperature").value = 0; // there is one right answer
      if (!this.stopping) this.form.requestSubmit();
    });
    return element("li", {}, button);
  }

  /** The router's record of the last answer is here: its times take the place of the browser's. */
  agree(request) {
    if (request.id === this.id && request.outcome !== "live") this.tell(speed(request));
  }

  tell(facts) {
    this.facts = new Map([...this.facts, ...facts]);
    byId("facts").hidden = false;
    keep(byId("facts"), [...this.facts], ([name]) => name, makeFact, (fact, [, value]) => say(fact.lastChild, value));
  }

  async send() {
    const run = new Run(this.answer);
    this.stopping = new AbortController();
    this.busy(true);
    this.id = "";
    this.facts = new Map();
    try {
      const answer = await this.post(this.stopping.signal);
      if (!answer.ok) throw new Error(await reason(answer));
      this.id = answer.headers.get("baton-request-id") ?? "";
      for await (const event of events(answer.body)) run.take(event);
      this.tell(run.end());
    } catch (error) {
      run.fail(this.stopping.signal.aborted ? "" : sentence(error));
    } finally {
      this.stopping = undefined;
      this.busy(false);
    }
    if (this.id) this.onEnd(this.id);
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

  /** Returns what to tell of it, times as the browser saw them. */
  end() {
    this.paint();
    say(byId("progress"), "");
    const { prompt_tokens: asked, completion_tokens: made, prompt_tokens_details: of } = this.usage;
    const seen = (moment) => (moment === undefined ? null : (moment - this.began) / 1e3);
    return [
      ...speed({ ttft_s: seen(this.first), last_token_s: seen(this.last), completion_tokens: made }),
      ["Tokens", this.finish === "length" ? `${made}, the limit` : `${made}`],
      ["Prompt", `${asked} tokens${of ? `, ${of.cached_tokens} cached` : ""}`],
    ];
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
