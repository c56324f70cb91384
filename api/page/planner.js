// What a planner says of the cluster: how much each role has to do, and what it has decided lately.

import { byId, element, keep, say } from "./dom.js";
import { age, count } from "./format.js";

const SILENT_S = 30; // it tells with every look, some seconds apart

/** Shows `plan`; hides the panel as long as no planner has told anything. */
export function showPlan(plan) {
  const pressures = Object.entries(plan.pressures).sort().reverse(); // prefill before decode
  byId("planner").hidden = !pressures.length;
  if (!pressures.length) return;
  const numbers = pressures.map(([role, pressure]) => `${role} ${count(pressure)}`);
  const manner = plan.acts ? "acts" : "only says what it would do";
  const silent = plan.ago_s > SILENT_S ? `; silent for ${age(plan.ago_s)}` : "";
  say(byId("planner-note"), `${manner}; pressure: ${numbers.join(", ")}${silent}`);
  byId("planner-frame").hidden = !plan.events.length;
  const occurred = plan.events.map((event, i) => ({ ...event, key: `${i}` }));
  keep(byId("planner-rows"), occurred, (event) => event.key, make, fill);
}

const make = () =>
  element(
    "tr",
    {},
    element("td", { class: "number" }),
    element("td", {}),
    element("td", {}),
  );

function fill(row, { ago_s: ago, what, because }) {
  const [when, said, why] = row.children;
  say(when, age(ago));
  say(said, what);
  say(why, because);
}
