// Phases of a request as bars over time, with a lane for the router and for each node.

import { element, shape } from "./dom.js";
import { duration } from "./format.js";

/** Meaning of each phase. The group selects the colour. */
export const PHASES = {
  tokenize: { group: "router", words: "The router checks and tokenizes the prompt." },
  place: { group: "router", words: "The router picks nodes and submits the request to the decode node." },
  lost_node: { group: "lost", words: "The decode node failed, and another node continued the request." },
  stream: { group: "stream", words: "The router streams text to the client." },
  dispatch: { group: "router", words: "The node sends the request from its server process to its engine." },
  prealloc_queue: { group: "wait", words: "The request waits for pages on the decode node." },
  prefill_wait: { group: "wait", words: "The decode node waits for the first pages of the prefill node." },
  transfer: { group: "move", words: "The decode node reads pages while the prefill node computes the next ones." },
  release: { group: "move", words: "The prefill node confirms that the pages were valid when they were read." },
  join: { group: "wait", words: "The request waits to join the running batch." },
  local_queue: { group: "wait", words: "The request waits for a prefill on the decode node." },
  local_prefill: { group: "work", words: "The decode node computes the prompt itself." },
  running: { group: "run", words: "The decode node generates tokens in the running batch." },
  retracted: { group: "lost", words: "The request left the device, because pages were short or a higher priority needed them." },
  bootstrap_queue: { group: "wait", words: "The request waits until the decode node grants pages." },
  waiting_queue: { group: "wait", words: "The request waits for a forward on the prefill node." },
  prefill: { group: "work", words: "The prefill node computes the prompt." },
  retries: { group: "lost", words: "Earlier attempts failed." },
  network: { group: "other", words: "The request was in the network or in event loops." },
};
const LANES = ["router", "prefill", "decode"];
const ROW = 24;
const BAR = 18;
const HEAD = 22; // of a lane
const AXIS = 26;
const LETTER = 6.6; // px, of the label in a bar

export const phaseWords = (phase) => phase.replaceAll("_", " ");

export class Chart {
  constructor(parent, hint) {
    this.parent = parent;
    this.hint = hint;
    this.width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - this.width) < 1) return;
      this.width = entry.contentRect.width;
      this.draw();
    }).observe(parent);
  }

  /** Args: a request from GET /requests/ID, and whether to show it up to its end. */
  show(request, whole) {
    this.request = request;
    this.whole = whole;
    this.draw();
  }

  draw() {
    if (!this.request || !this.width) return;
    const end = this.whole ? wholeEnd(this.request) : firstEnd(this.request);
    const scale = (seconds) => (Math.min(Math.max(seconds, 0), end) / end) * this.width;
    const lanes = lanesOf(this.request.phases.filter((phase) => phase.start_s < end));
    const height = AXIS + lanes.reduce((sum, lane) => sum + HEAD + lane.rows * ROW + 6, 0);
    const label = `Phases of the request over ${duration(end)}. The table below lists all phases.`;
    const size = { width: this.width, height, viewBox: `0 0 ${this.width} ${height}` };
    const canvas = shape("svg", { ...size, role: "img", "aria-label": label });
    canvas.append(...axis(end, scale, this.width, height));
    canvas.append(...firstToken(this.request, scale, end, height));
    let top = AXIS;
    for (const lane of lanes) {
      canvas.append(...this.lane(lane, top, scale, end));
      top += HEAD + lane.rows * ROW + 6;
    }
    this.parent.replaceChildren(canvas);
    this.describe();
  }

  lane(lane, top, scale, end) {
    const name = shape("text", { class: "lane", x: 0, y: top + 15, "data-lane": lane.where }, lane.where);
    if (lane.node) name.append(shape("tspan", { class: "lane-node", dx: 8 }, lane.node));
    const line = shape("line", { class: "rule", x1: 0, x2: this.width, y1: top, y2: top });
    const bars = lane.bars.map(({ phase, row }) => {
      const x = scale(phase.start_s);
      const width = Math.max(1.5, scale(phase.end_s) - x);
      const y = top + HEAD + row * ROW;
      const group = shape("g", {
        class: "phase",
        "data-phase": phase.phase,
        "data-group": PHASES[phase.phase]?.group ?? "other",
      });
      // A bar that continues beyond the edge has no round end.
      const over = phase.end_s > end ? 8 : 0;
      group.append(shape("rect", { x, y, width: width + over, height: BAR, rx: Math.min(4, width / 2) }));
      const text = phaseWords(phase.phase);
      if (text.length * LETTER + 10 < width) {
        group.append(shape("text", { x: x + 6, y: y + 13 }, text));
      }
      for (const kind of ["pointerenter", "pointerdown"]) {
        group.addEventListener(kind, () => this.describe(phase));
      }
      // A touch ends when the finger is lifted, but its text stays.
      group.addEventListener("pointerleave", (event) => {
        if (event.pointerType === "mouse") this.describe();
      });
      return group;
    });
    return [line, name, ...bars];
  }

  /** Describes a bar, or how to select one. */
  describe(phase) {
    if (!phase) {
      this.hint.replaceChildren("Point at a bar or tap it to read its meaning.");
      return;
    }
    const took = duration(phase.end_s - phase.start_s);
    const attempt = phase.attempt > 1 ? `, attempt ${phase.attempt}` : "";
    const words = PHASES[phase.phase]?.words ?? "";
    this.hint.replaceChildren(
      element("strong", {}, `${phaseWords(phase.phase)} ${took}`),
      ` from ${duration(phase.start_s)}${attempt}. ${words}`,
    );
  }
}

function wholeEnd(request) {
  return Math.max(request.seconds, ...request.phases.map((phase) => phase.end_s), 1e-6);
}

/** End of the TTFT view. The first token is often sent before all pages have arrived. */
function firstEnd(request) {
  const until = request.phases
    .filter((phase) => !["running", "stream", "retracted"].includes(phase.phase))
    .map((phase) => phase.end_s);
  return Math.max(request.ttft_s ?? 0, ...until, 1e-6) * 1.06;
}

/** Lanes with their bars, in the minimum number of rows without overlap. */
function lanesOf(phases) {
  const lanes = new Map();
  for (const phase of phases) {
    const key = `${phase.where} ${phase.node}`;
    if (!lanes.has(key)) lanes.set(key, { where: phase.where, node: phase.node, ends: [], bars: [] });
    const { ends, bars } = lanes.get(key);
    const free = ends.findIndex((end) => end <= phase.start_s + 1e-9);
    const row = free < 0 ? ends.length : free;
    ends[row] = phase.end_s;
    bars.push({ phase, row });
  }
  const place = (lane) => LANES.indexOf(lane.where);
  return [...lanes.values()]
    .map((lane) => ({ ...lane, rows: lane.ends.length }))
    .sort((a, b) => place(a) - place(b));
}

function axis(end, scale, width, height) {
  const step = niceStep(end, Math.max(2, Math.floor(width / 90)));
  const shapes = [];
  for (let at = 0; at <= end; at += step) {
    const x = scale(at);
    if (at > 0 && x > width - 30) break;
    shapes.push(shape("line", { class: "grid", x1: x, x2: x, y1: AXIS - 6, y2: height }));
    const anchor = at === 0 ? "start" : "middle";
    shapes.push(shape("text", { class: "tick", x, y: 12, "text-anchor": anchor }, tick(at, step)));
  }
  return shapes;
}

function niceStep(end, most) {
  const rough = end / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
}

function tick(at, step) {
  if (at === 0) return "0";
  const digits = (unit) => Math.max(0, -Math.floor(Math.log10(step * unit + 1e-12)));
  return step < 0.5 ? `${(at * 1e3).toFixed(digits(1e3))} ms` : `${at.toFixed(digits(1))} s`;
}

function firstToken(request, scale, end, height) {
  if (request.ttft_s === null || request.ttft_s > end) return [];
  const x = scale(request.ttft_s);
  return [shape("line", { class: "first", x1: x, x2: x, y1: AXIS - 6, y2: height })];
}
