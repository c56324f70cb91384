// The row of tiles: the whole cluster in six numbers, some with their last minute.

import { element, keep, mark, say, shape } from "./dom.js";
import { age, count, percent } from "./format.js";
import { foundInCache } from "./nodes.js";

const KEPT = 60; // polls
const WIDTH = 96;
const HEIGHT = 28;

const rate = (value) => (value === undefined ? "–" : count(value));

export class Totals {
  constructor(parent) {
    this.parent = parent;
    this.history = new Map(); // label: numbers, oldest first
  }

  show(cluster, rates) {
    const { nodes, router } = cluster;
    const ready = nodes.filter((node) => node.state === "ready").length;
    const [used, cached, all] = pages(nodes);
    const promptTokens = rates.sum(nodes, "prompt_tokens");
    const generated = rates.sum(nodes, "generated_tokens");
    const readers = nodes.filter((node) => node.role === "decode");
    const handoffs = rates.sum(readers, "handoffs_completed");
    const found = foundInCache(nodes);
    const tiles = [
      { label: "Nodes ready", value: `${ready}`, unit: `of ${nodes.length}`, note: "" },
      {
        label: "Live requests",
        value: count(router.live_requests),
        unit: `of ${count(router.max_requests)}`,
        note: "",
        past: router.live_requests,
      },
      { label: "Tokens", value: rate(generated), unit: "/s", note: "", past: generated },
      { label: "Prompt tokens", value: rate(promptTokens), unit: "/s", note: found ? `${found} found in cache` : "", past: promptTokens },
      { label: "Hand-offs", value: rate(handoffs), unit: "/s", note: "", past: handoffs },
      {
        label: "Pages in use",
        value: all ? percent(used / all) : "–",
        unit: all ? `of ${count(all)}` : "",
        note: all ? `${percent(cached / all)} only cached` : "",
      },
    ];
    for (const tile of tiles) if (tile.past !== undefined) this.remember(tile.label, tile.past);
    keep(this.parent, tiles, (tile) => tile.label, make, (child, tile) => {
      const [, main, foot] = child.children;
      say(main.firstChild, tile.value);
      say(main.lastChild, tile.unit);
      say(foot.firstChild, tile.note);
      const line = foot.querySelector("path");
      if (line) mark(line, "d", sparkline(this.history.get(tile.label) ?? []));
    });
  }

  remember(label, value) {
    const past = this.history.get(label) ?? [];
    past.push(value);
    if (past.length > KEPT) past.shift();
    this.history.set(label, past);
  }
}

export function about(router) {
  const processes = router.processes > 1 ? `, ${router.processes} processes` : "";
  return `Baton ${router.version}, up for ${age(router.uptime_s)}${processes}`;
}

/** What of a router is missing in what it tells, as words; "" of nothing. */
export function missing({ processes, silent_processes: silent }) {
  if (!silent) return "";
  return `${silent} of ${processes} router processes ${silent === 1 ? "does" : "do"} not answer`;
}

function make(tile) {
  const foot = element("dd", { class: "tile-foot" }, element("span"));
  if ("past" in tile) {
    const box = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" };
    foot.append(shape("svg", { ...box, preserveAspectRatio: "none" }, shape("path")));
  }
  return element(
    "div",
    { class: "tile" },
    element("dt", {}, tile.label),
    element("dd", { class: "tile-main" }, element("strong"), element("span")),
    foot,
  );
}

function sparkline(values) {
  const top = Math.max(...values, 1e-9);
  const step = WIDTH / (KEPT - 1);
  const left = WIDTH - (values.length - 1) * step;
  if (values.length < 2) return "";
  const points = values.map((value, i) => {
    const y = HEIGHT - 1.5 - (value / top) * (HEIGHT - 3);
    return `${(left + i * step).toFixed(1)} ${y.toFixed(1)}`;
  });
  return `M${points.join("L")}`;
}

/** Pages that requests, steps, reads and publications hold; held by caches alone; all. */
function pages(nodes) {
  let [used, cached, all] = [0, 0, 0];
  for (const node of nodes) {
    for (const [holder, number] of Object.entries(node.pages)) {
      all += number;
      if (holder === "cache") cached += number;
      else if (holder !== "free") used += number;
    }
  }
  return [used, cached, all];
}
