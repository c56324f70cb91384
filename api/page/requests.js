// The list of recent requests. One of them is selected.

import { byId, element, keep, mark, say, tableRow } from "./dom.js";
import { duration } from "./format.js";
import { fetchJson } from "./feed.js";
import { silentWorkers } from "./totals.js";

const SHOWN = 60;

export class Requests {
  /** `onChoose(id)` is called when a request is selected. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.rows = byId("request-rows");
    this.chosen = undefined;
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) this.choose(row.dataset.key);
    });
  }

  async refresh() {
    let content;
    try {
      content = await fetchJson("/requests");
    } catch (error) {
      // A lost connection is already reported at the top of the page.
      if (error.status) say(byId("requests-note"), error.message);
      return;
    }
    const shown = content.requests.slice(0, SHOWN);
    byId("requests-frame").hidden = !shown.length;
    const note = shown.length ? `Latest ${shown.length}` : "No requests yet. Send a prompt.";
    say(byId("requests-note"), [note, silentWorkers(content)].filter(Boolean).join(". "));
    keep(this.rows, shown, (request) => request.id, make, (row, request) => fill(row, request));
    this.markChosen();
    if (this.chosen === undefined && shown.length) {
      const ended = shown.find((request) => request.outcome !== "live");
      if (ended) this.choose(ended.id);
    }
  }

  choose(id) {
    this.chosen = id;
    this.markChosen();
    this.onChoose(id);
  }

  markChosen() {
    for (const row of this.rows.children) {
      const chosen = row.dataset.key === this.chosen;
      row.classList.toggle("chosen", chosen);
      mark(row.querySelector("button"), "aria-pressed", String(chosen));
    }
  }
}

/** Returns the client's name of the request, or else its id. */
export const called = (request) => request.label ?? request.id;

export const finishReason = ({ outcome }) => (outcome === "live" ? "running" : outcome);

function make(request) {
  const name = element("button", { type: "button", class: "mono clip", title: request.id }, called(request));
  const row = tableRow("name", "number", "number", "number", "end");
  row.firstChild.append(name);
  return row;
}

function fill(row, request) {
  const [, tokens, first, all, end] = row.children;
  say(tokens, `${request.prompt_tokens} + ${request.completion_tokens}`);
  say(first, duration(request.ttft_s));
  say(all, duration(request.seconds));
  say(end, finishReason(request));
  mark(end, "data-outcome", request.outcome);
}
