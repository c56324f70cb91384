// The prompt box. It sends a prompt, streams the response and shows its latency.

import { byId, element, keep, say, showFacts } from "./dom.js";
import { duration, speed } from "./format.js";
import { fetchWithKey } from "./key.js";

/** Example prompts by the model's name at the router. */
const EXAMPLES = {
  "baton-demo": [
    "add 27 15 =",
    "copy red fox moon =",
    "reverse a b c d =",
    "anna = paris, bob = rome, carl = oslo, bob =",
  ],
};

export class Ask {
  /** `onEnd(id)` is called when a request of this form that got a response ends. */
  constructor(onEnd) {
    this.onEnd = onEnd;
    this.form = byId("form");
    this.prompt = byId("prompt");
    this.answer = byId("answer");
    this.stopping = undefined; // aborts the running request
    this.id = ""; // id of the last request
    this.facts = new Map(); // of its response: text by name
    this.models = []; // of the router
    byId("ask-model").addEventListener("change", () => this.offer());
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

  /** Offers the models if there are several. */
  know(router) {
    this.models = router.models;
    byId("model-choice").hidden = this.models.length < 2;
    const make = ({ name }) => element("option", { value: name }, name);
    keep(byId("ask-model"), this.models, ({ name }) => name, make, () => {});
    this.offer();
  }

  /** Offers chat if the model has a chat template, and example prompts for known models. */
  offer() {
    const chosen = this.models.find(({ name }) => name === byId("ask-model").value);
    byId("kind").hidden = !chosen?.has_chat_template;
    const prompts = EXAMPLES[chosen?.name] ?? [];
    byId("examples").hidden = !prompts.length;
    keep(byId("examples"), prompts, (prompt) => prompt, (prompt) => this.example(prompt), () => {});
  }

  example(prompt) {
    const button = element("button", { type: "button", class: "mono" }, prompt);
    button.addEventListener("click", () => {
      this.prompt.value = prompt;
      byId("temperature").value = 0; // each example has one correct response
      if (!this.stopping) this.form.requestSubmit();
    });
    return element("li", {}, button);
  }

  /** Replaces the browser's times of the last request with the router's. */
  agree(request) {
    if (request.id === this.id && request.outcome !== "live") this.describe(speed(request));
  }

  describe(facts) {
    this.facts = new Map([...this.facts, ...facts]);
    byId("facts").hidden = false;
    showFacts(byId("facts"), [...this.facts]);
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
      this.describe(run.end());
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
      ...(this.models.length > 1 ? { model: byId("ask-model").value } : {}),
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

/** One streamed response. */
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
    // Changes the page at most once per frame.
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

  /** Returns the facts of the response. Times are the browser's. */
  end() {
    this.paint();
    say(byId("progress"), "");
    const { prompt_tokens, completion_tokens, prompt_tokens_details: of } = this.usage;
    const seen = (moment) => (moment === undefined ? null : (moment - this.began) / 1e3);
    return [
      ...speed({ ttft_s: seen(this.first), last_token_s: seen(this.last), completion_tokens }),
      ["Output", `${completion_tokens} tokens`],
      ["Finish reason", this.finish ?? "–"],
      ["Prompt", `${prompt_tokens} tokens${of ? `, ${of.cached_tokens} cached` : ""}`],
    ];
  }

  /** `words`: the error, or empty if the user stopped the response. */
  fail(words) {
    this.paint();
    const after = duration((performance.now() - this.began) / 1e3);
    say(byId("progress"), words ? "" : `Stopped after ${after}`);
    this.answer.hidden = !this.text.length;
    byId("problem").hidden = !words;
    say(byId("problem"), words);
  }
}

/**
 * Yields the content of every event of a body, until [DONE]: one `data:` line of JSON each.
 * Throws if the stream ends without it, because the response is then incomplete.
 */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection closed before the response was complete.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.startsWith("data: ") ? part.slice(6) : "";
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reason(answer) {
  const content = await answer.json().catch(() => null);
  const words = content?.error?.message ?? `The router returned status ${answer.status}.`;
  const retry = answer.headers.get("retry-after");
  return retry ? `${capital(words)}. Try again in ${retry} s.` : capital(words);
}

function sentence(error) {
  // Browsers word connection failures differently, without useful details.
  return error instanceof TypeError ? "The router cannot be reached." : capital(error.message);
}

const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
