// The planner's report: the pressure of each role and the latest decisions.

import { byId, element, keep, say } from "./dom.js";
import { age, count } from "./format.js";

const SILENT_S = 30; // a planner reports every few seconds

/** Shows `plan`, or hides the panel if no planner has reported. */
export function showPlan(plan) {
  const pressures = Object.entries(plan.pressures).sort().reverse(); // prefill before decode
  byId("planner").hidden = !pressures.length;
  if (!pressures.length) return;
  const numbers = pressures.map(([role, pressure]) => `${role} ${count(pressure)}`);
  const manner = plan.acts ? "applies its decisions" : "dry run";
  const silent = plan.ago_s > SILENT_S ? `. No report for ${age(plan.ago_s)}` : "";
  say(byId("planner-note"), `Mode: ${manner}. Pressure: ${numbers.join(", ")}${silent}`);
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
