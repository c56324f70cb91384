// The planner's report: the pressure of each role and the latest decisions.

import { byId, keep, say, tableRow } from "./dom.js";
import { age, count } from "./format.js";

const SILENT_S = 30; // a planner reports every few seconds

/** Shows the plans, or hides the panel if no planner has reported. `several`: models are named. */
export function showPlans(plans, several) {
  const reported = plans.filter((plan) => Object.keys(plan.pressures).length);
  byId("planner").hidden = !reported.length;
  if (!reported.length) return;
  const named = (plan, words) => (several ? `${plan.model}: ${words}` : words);
  say(byId("planner-note"), reported.map((plan) => named(plan, note(plan))).join(". "));
  const events = reported.flatMap((plan) =>
    plan.events.map((event) => ({ ...event, what: named(plan, event.what) })),
  );
  byId("planner-frame").hidden = !events.length;
  events.sort((a, b) => a.ago_s - b.ago_s);
  const occurred = events.map((event, i) => ({ ...event, key: `${i}` }));
  keep(byId("planner-rows"), occurred, (event) => event.key, make, fill);
}

function note(plan) {
  const pressures = Object.entries(plan.pressures).sort().reverse(); // prefill before decode
  const numbers = pressures.map(([role, pressure]) => `${role} ${count(pressure)}`);
  const manner = plan.acts ? "applies its decisions" : "dry run";
  const silent = plan.ago_s > SILENT_S ? `. No report for ${age(plan.ago_s)}` : "";
  return `Mode: ${manner}. Pressure: ${numbers.join(", ")}${silent}`;
}

const make = () => tableRow("number", "", "");

function fill(row, { ago_s: ago, what, because }) {
  const [when, said, why] = row.children;
  say(when, age(ago));
  say(said, what);
  say(why, because);
}
