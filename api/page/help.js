// The reference of the dashboard. The meanings are those that the dashboard shows as tooltips.

import { PHASES, phaseWords } from "./chart.js";
import { byId, element } from "./dom.js";
import { PATHS } from "./links.js";
import { FACTS, HOLDERS, QUEUES } from "./nodes.js";
import { TILES } from "./totals.js";

const PHASE_MEANINGS = Object.entries(PHASES).map(([name, { words }]) => [phaseWords(name), words]);
const LISTS = {
  tiles: Object.entries(TILES),
  facts: Object.entries(FACTS),
  holders: Object.entries(HOLDERS),
  queues: Object.entries(QUEUES).map(([name, words]) => [phaseWords(name), words]),
  paths: Object.entries(PATHS).map(([name, words]) => [name, words.slice(name.length + 2)]),
  phases: PHASE_MEANINGS,
};

for (const [list, terms] of Object.entries(LISTS)) {
  const entry = ([name, words]) => element("div", {}, element("dt", {}, name), element("dd", {}, words));
  byId(list).append(...terms.map(entry));
}
