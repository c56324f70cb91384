// The nodes of one role, with a card each.

import { element, keep, mark, say } from "./dom.js";
import { count, gigabytes, percent } from "./format.js";
import { PATHS } from "./links.js";

/** Meaning of each holder of pages, in the order of the bar. */
export const HOLDERS = {
  request: "held by requests on this node",
  step: "held by a running forward",
  read: "being written by a read from another node",
  publication: "kept because another node may read them",
  copy: "being copied to or from host memory",
  cache: "only in the prefix cache, evicted when pages are needed",
  free: "without a holder",
};
/** Meaning of each queue. */
export const QUEUES = {
  bootstrap: "waiting until the decode node grants pages",
  pooled: "embedding requests that are being computed",
  inflight: "computed, and held until the decode node has read the pages",
  unpaired: "waiting for a prefill node",
  prealloc: "waiting for pages",
  transfer: "pages are being computed and read",
  migrating: "migrating to another decode node",
  grammar: "waiting for grammar compilation",
  offload_load: "loading a prefix from an offload tier",
  fetching: "fetching a prefix from another node",
  encoding: "images that wait for the encoder",
  embeddings: "waiting for embeddings of images from encode nodes",
  paused: "waiting until the node continues after a pause",
  adapter: "waiting until the LoRA adapter is on the device",
  waiting: "waiting for a forward",
  chunked: "prompts that are computed in chunks",
  on_device: "in the current chunk or the running batch",
  retracted: "retracted from the device, because pages were short or a higher priority needed them",
};
/** Meaning of each figure of a node. */
export const FACTS = {
  "steps/s": "forwards of the engine per second",
  "hand-offs/s": "completed hand-offs per second",
  "cache hit rate": "share of prompt tokens found in the prefix cache since the node started",
  "images refused": "images that this encode node refused since it started. Prefill nodes encoded them",
  "local prefills": "prompts that this decode node computed itself since it started",
  "hand-offs failed": "failed hand-offs since the node started. They were retried, or the decode node computed the prompt",
  "canaries failed": "failed canary checks since the node started. Requests are not handed over from a prefill node that failed",
  retractions: "requests retracted from the device since the node started. They continue later",
};
// Queues that are shown only if they are not empty.
const RARE = new Set([
  ...["adapter", "chunked", "embeddings", "fetching", "grammar"],
  ...["migrating", "offload_load", "pooled", "retracted", "unpaired"],
]);
const MOST_OPEN = 4; // with more nodes of one role, cards start closed
const MOST_TALL = 8; // with more nodes of one role, each takes one line

export class Nodes {
  /** Args: the list to fill, the element for the number of nodes, and their role. */
  constructor(list, counter, role) {
    this.list = list;
    this.counter = counter;
    this.role = role;
  }

  show(cluster, rates) {
    const nodes = cluster.nodes.filter((node) => node.role === this.role);
    this.list.classList.toggle("many", nodes.length > MOST_TALL);
    const open = nodes.length <= MOST_OPEN;
    const several = cluster.router.models.length > 1;
    const make = (node) => card(node, open, several ? `${node.served_model} ` : "");
    keep(this.list, nodes, (node) => node.address, make, (child, node) => fill(child, node, rates));
    say(this.counter, nodes.length ? `${nodes.length}` : "none");
  }
}

export function legend(list) {
  for (const [name, meaning] of Object.entries(HOLDERS)) {
    list.append(element("li", { title: meaning, "data-holder": name }, name));
  }
}

function card(node, open, model) {
  return element(
    "li",
    { class: "node", "data-role": node.role, "data-address": node.address },
    element(
      "details",
      { open: open && "" },
      element(
        "summary",
        {},
        element("span", { class: "node-head" },
          element("span", { class: "address mono" }, model + node.address),
          element("span", { class: "speed" }),
          element("span", { class: "state" }),
        ),
        element("span", { class: "bar", role: "img" },
          ...Object.keys(HOLDERS).map((name) => element("span", { "data-holder": name })),
        ),
      ),
      element("div", { class: "node-body" },
        element("ul", { class: "legend amounts", "aria-hidden": "true" }),
        element("dl", { class: "facts" }),
        element("ul", { class: "queues", "aria-label": "Queues" }),
        element("ul", { class: "reads", "aria-label": "Reads from" }),
        element("p", { class: "hint pids" }),
      ),
    ),
  );
}

function fill(child, node, rates) {
  mark(child, "data-state", node.state);
  const at = (selector) => child.querySelector(selector);
  say(at(".state"), node.state);
  const [counter, unit] = PRODUCTS[node.role];
  const speed = rates.of(node.address, counter);
  say(at(".speed"), speed === undefined ? "" : `${count(speed)} ${unit}`);
  fillPages(at(".bar"), at(".amounts"), node.pages);
  keep(at(".facts"), facts(node, rates), (fact) => fact.label, makeFact, updateFact);
  const queues = sorted(node.queues, QUEUES).filter(([name, number]) => number || !RARE.has(name));
  keep(at(".queues"), queues, ([name]) => name, makeQueue, (item, [, number]) => {
    say(item.lastChild, count(number));
    item.classList.toggle("some", number > 0);
  });
  keep(at(".reads"), node.links, (link) => link.peer, makeRead, (item, link) => {
    mark(item, "data-path", link.path);
    say(item.lastChild, `${link.path} ${gigabytes(link.gib_per_s)}`);
  });
  say(at(".pids"), words(node));
}

/** Counter and unit of what a node of each role produces. */
const PRODUCTS = {
  prefill: ["prompt_tokens", "prompt tok/s"],
  decode: ["generated_tokens", "tok/s"],
  encode: ["embedding_exports/completed", "images/s"],
};

function fillPages(bar, amounts, pages) {
  const all = Object.values(pages).reduce((a, b) => a + b, 0);
  for (const part of bar.children) {
    const number = pages[part.dataset.holder] ?? 0;
    part.style.flexGrow = number;
    part.hidden = number === 0;
  }
  const held = sorted(pages, HOLDERS).filter(([name, number]) => name !== "free" && number > 0);
  const sentence = all
    ? `${count(pages.free ?? 0)} of ${count(all)} pages free` +
      held.map(([name, number]) => `, ${name} ${count(number)}`).join("")
    : "pages unknown";
  mark(bar, "aria-label", sentence);
  bar.classList.toggle("unknown", all === 0);
  // Hidden from screen readers, which read the sentence.
  const shown = all ? [...held, ["free", pages.free ?? 0]] : [];
  keep(amounts, shown, ([name]) => name, makeAmount, (item, [name, number]) => {
    say(item, name === "free" ? `${count(number)} of ${count(all)} free` : count(number));
  });
}

const makeAmount = ([name]) =>
  element("li", { "data-holder": name, title: `${name}: ${HOLDERS[name] ?? ""}` });

function facts(node, rates) {
  if (node.state === "unreachable") return [];
  const of = (counter) => rates.of(node.address, counter);
  if (node.role === "encode") {
    const { "embedding_exports/refused": refused = 0 } = node.counters;
    return refused ? [{ label: "images refused", value: refused, bad: true }] : [];
  }
  const shown = [
    { label: "steps/s", value: of("steps") },
    { label: "hand-offs/s", value: of("handoffs_completed") },
  ];
  const found = cacheHitRate([node]);
  if (found) shown.push({ label: "cache hit rate", text: found });
  const { retractions = 0, local_prefills: local = 0, handoffs_failed: lost = 0 } = node.counters;
  if (local) shown.push({ label: "local prefills", value: local });
  // At a prefill node, canaries end like failed hand-offs.
  if (lost && node.role === "decode") shown.push({ label: "hand-offs failed", value: lost, bad: true });
  const wrong = node.counters["canaries/failed"] ?? 0;
  if (wrong) shown.push({ label: "canaries failed", value: wrong, bad: true });
  if (node.role === "decode" || retractions) {
    shown.push({ label: "retractions", value: retractions, bad: retractions > 0 });
  }
  return shown;
}

/** Returns the share of prompt tokens found in the prefix caches, or "" without prompts. */
export function cacheHitRate(nodes) {
  const sum = (counter) => nodes.reduce((all, node) => all + (node.counters[counter] ?? 0), 0);
  return sum("prompt_tokens") ? percent(sum("cached_tokens") / sum("prompt_tokens")) : "";
}

const makeFact = (fact) =>
  element("div", { title: FACTS[fact.label] }, element("dt", {}, fact.label), element("dd"));

function updateFact(child, fact) {
  say(child.lastChild, fact.text ?? (fact.value === undefined ? "–" : count(fact.value)));
  child.classList.toggle("bad", Boolean(fact.bad));
}

/** Returns the entries of `numbers` in the order of `known`, followed by all others. */
function sorted(numbers, known) {
  const names = [...new Set([...Object.keys(known), ...Object.keys(numbers)])];
  return names.filter((name) => name in numbers).map((name) => [name, numbers[name]]);
}

function makeQueue([name]) {
  const label = element("span", {}, name.replaceAll("_", " "));
  return element("li", { title: QUEUES[name] }, label, " ", element("strong"));
}

const makeRead = (link) =>
  element(
    "li",
    { title: PATHS[link.path] },
    element("span", { class: "mono clip" }, link.peer), " ", element("span"),
  );

function words(node) {
  const parts = [];
  if (node.mode === "colocated") parts.push("colocated");
  if (node.pids.length) parts.push(`pid ${node.pids.join(", ")}`);
  if (node.instance_id !== "0") parts.push(`instance ${BigInt(node.instance_id).toString(16)}`);
  return parts.join(" · ");
}
