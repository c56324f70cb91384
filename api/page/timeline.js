// One request: its facts, the phases of its TTFT, and all phases as bars.

import { Chart, PHASES, phaseWords } from "./chart.js";
import { byId, element, keep, mark, say, showFacts } from "./dom.js";
import { count, duration, plural, speed } from "./format.js";
import { fetchJson } from "./feed.js";
import { called, finishReason } from "./requests.js";

const SLIVER = 0.15; // if the TTFT is a smaller share of the latency, the view starts with the TTFT
const AGAIN_MS = 700; // while a request is running

export class Timeline {
  /** `onShow(request)` is called with each request that is drawn. */
  constructor(onShow) {
    this.onShow = onShow;
    this.chart = new Chart(byId("chart"), byId("chart-hint"));
    this.id = undefined;
    this.timer = undefined;
    byId("span").addEventListener("change", () => {
      this.decided = true; // the user's choice holds for all requests
      this.draw();
    });
  }

  /** Args: the id of a request, and the number of retries if the router does not know it. */
  async show(id, again = 3) {
    if (this.id !== id) say(byId("timeline-id"), id);
    this.id = id;
    clearTimeout(this.timer);
    byId("timeline").hidden = false;
    let request;
    try {
      request = await fetchJson(`/requests/${encodeURIComponent(id)}`);
    } catch (error) {
      if (this.id !== id) return;
      this.problem(error.message);
      // The response may end before the router has recorded the request.
      if (again) this.timer = setTimeout(() => this.show(id, again - 1), AGAIN_MS);
      return;
    }
    if (this.id !== id) return; // another request was selected meanwhile
    this.problem("");
    this.request = request;
    say(byId("timeline-id"), called(request));
    mark(byId("timeline-id"), "title", request.id);
    if (!this.decided && request.ttft_s !== null) {
      const sliver = request.ttft_s < SLIVER * request.seconds;
      document.querySelector(`#span [value=${sliver ? "first" : "whole"}]`).checked = true;
    }
    this.draw();
    this.onShow(request);
    if (request.outcome === "live") this.timer = setTimeout(() => this.show(id), AGAIN_MS);
  }

  problem(words) {
    byId("timeline-problem").hidden = !words;
    say(byId("timeline-problem"), words);
    byId("timeline-body").hidden = Boolean(words);
  }

  draw() {
    if (!this.request) return;
    const whole = document.querySelector("#span [value=whole]").checked;
    showFacts(byId("timeline-facts"), facts(this.request));
    breakdown(this.request);
    this.chart.show(this.request, whole);
    table(this.request);
  }
}

function facts(request) {
  const [first, rate] = speed(request);
  const shown = [
    first,
    ["Latency", duration(request.seconds)],
    rate,
    ["Prompt", `${request.prompt_tokens} tokens, ${request.cached_tokens} cached`],
    ["Output", `${request.completion_tokens} tokens`],
    ["Finish reason", finishReason(request)],
  ];
  const held = request.attempts.findLast((attempt) => attempt.outcome === "completed");
  if (held) {
    const rest = held.bytes ? `, ${count(held.bytes / 1e6)} MB` : "";
    shown.push(["Hand-off", `${plural(held.pages, "page")}${rest} over ${held.path}`]);
  }
  const lost = request.attempts.filter((attempt) => attempt.outcome !== "completed");
  for (const attempt of lost) {
    shown.push([`Attempt ${attempt.number}`, `${attempt.outcome}: ${attempt.reason || "no reason given"}`]);
  }
  if (request.replays) shown.push(["Replays", count(request.replays)]);
  if (request.trace_id) shown.push(["Trace", request.trace_id]);
  if (request.error) shown.push(["Error", request.error]);
  return shown;
}

function breakdown({ ttft, ttft_s: all }) {
  byId("breakdown").hidden = !ttft.length;
  const key = (part) => part.phase;
  const make = (part) => element("span", { "data-group": groupOf(part.phase) });
  keep(byId("breakdown-bar"), ttft, key, make, (piece, part) => {
    piece.style.flexGrow = part.seconds / all; // the shares add up to one and fill the bar
  });
  const item = (part) =>
    element("li", { "data-group": groupOf(part.phase), title: PHASES[part.phase]?.words }, phaseWords(part.phase), " ", element("strong"));
  keep(byId("breakdown-legend"), ttft, key, item, (line, part) => {
    say(line.lastChild, duration(part.seconds));
    mark(line, "data-small", String(part.seconds < 0.01 * all));
  });
}

const groupOf = (phase) => PHASES[phase]?.group ?? "other";

function table(request) {
  const rows = request.phases.map((phase, i) => ({ ...phase, key: `${i} ${phase.where} ${phase.phase}` }));
  const make = (row) =>
    element(
      "tr",
      {},
      element("td", {}, row.where, " ", element("span", { class: "mono" }, row.node)),
      element("td", { title: PHASES[row.phase]?.words }, phaseWords(row.phase)),
      element("td", { class: "number" }),
      element("td", { class: "number" }),
    );
  keep(byId("phase-rows"), rows, (row) => row.key, make, (line, row) => {
    say(line.children[2], duration(row.start_s));
    say(line.children[3], duration(row.end_s - row.start_s));
  });
}
