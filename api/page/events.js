// Events of one request on the router and on its nodes. They are loaded only while the section is
// open, because the router has to query every node.

import { byId, keep, say, tableRow } from "./dom.js";
import { duration } from "./format.js";
import { fetchJson } from "./feed.js";

export class Events {
  constructor() {
    this.id = undefined;
    this.details = byId("events");
    this.details.addEventListener("toggle", () => this.load());
  }

  /** Args: the id of the selected request. */
  show(id) {
    this.id = id;
    this.load();
  }

  async load() {
    if (!this.details.open || this.id === undefined) return;
    const id = this.id;
    let history = { events: [], nodes: [] };
    let problem = "";
    try {
      history = await fetchJson(`/requests/${encodeURIComponent(id)}/events`);
    } catch (error) {
      problem = error.message;
    }
    if (this.id !== id) return; // another request was selected meanwhile
    const silent = history.nodes.filter((node) => node.problem);
    const words = silent.map((node) => `${node.role} ${node.address} did not respond: ${node.problem}`);
    say(byId("events-note"), [problem, ...words].filter(Boolean).join("; "));
    const rows = history.events.map((event, i) => ({ ...event, key: `${i}` }));
    keep(byId("event-rows"), rows, (row) => row.key, make, fill);
  }
}

const make = () => tableRow("number", "", "", "");

function fill(line, { at_s: at, where, node, event }) {
  const [moment, place, what, detail] = line.children;
  say(moment, duration(at));
  say(place, [where, node].filter(Boolean).join(" "));
  say(what, event.what);
  say(detail, event.detail);
}
