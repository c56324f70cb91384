// Connects the parts of the page. Each part changes only its own piece of the document.

import { Ask } from "./ask.js";
import { byId, mark, say } from "./dom.js";
import { Events } from "./events.js";
import { Feed } from "./feed.js";
import { age } from "./format.js";
import { KeyForm, wantsKey } from "./key.js";
import { Links } from "./links.js";
import { legend, Nodes } from "./nodes.js";
import { showPlans } from "./planner.js";
import { Rates } from "./rates.js";
import { Requests } from "./requests.js";
import { Timeline } from "./timeline.js";
import { about, silentWorkers, Totals } from "./totals.js";

const REQUESTS_EVERY = 2; // cluster responses

const rates = new Rates();
const totals = new Totals(byId("tiles"));
const sides = [
  new Nodes(byId("prefill-nodes"), byId("prefill-count"), "prefill"),
  new Nodes(byId("decode-nodes"), byId("decode-count"), "decode"),
  new Nodes(byId("encode-nodes"), byId("encode-count"), "encode"),
];
const links = new Links(byId("fabric"), byId("links"), byId("paths"));
const events = new Events();
const timeline = new Timeline((request) => {
  ask.agree(request);
  events.show(request.id);
});
const requests = new Requests((id) => timeline.show(id));
const ask = new Ask((id) => {
  requests.choose(id);
  requests.refresh();
});

let answers = 0;
let lastAnswer;

function show(cluster) {
  lastAnswer = Date.now();
  connected(true);
  keyForm.want("");
  const { router } = cluster;
  rates.take(cluster);
  totals.show(cluster, rates);
  for (const side of sides) side.show(cluster, rates);
  links.show(cluster, rates);
  const several = router.models.length > 1;
  showPlans(several ? cluster.plans : [cluster.plan], several);
  ask.know(router);
  say(byId("model"), several ? router.models.map(modelState).join(", ") : router.model);
  const state = router.state === "ready" ? "ready" : `${router.state}: ${router.reason}`;
  say(byId("router-state"), [state, silentWorkers(router)].filter(Boolean).join("; "));
  mark(byId("router-state"), "data-state", router.state);
  say(byId("about"), about(router));
  for (const role of ["prefill", "encode"]) {
    document.body.classList.toggle(`no-${role}`, !cluster.nodes.some((node) => node.role === role));
  }
  if (answers++ % REQUESTS_EVERY === 0) requests.refresh();
}

const modelState = ({ name, state }) => (state === "ready" ? name : `${name} (${state})`);

function lose(error) {
  if (wantsKey(error)) {
    refuse(error.message);
    return;
  }
  connected(false);
  say(byId("lost-words"), error.message);
  // Outside the alert, because screen readers would announce every retry.
  const since = (Date.now() - lastAnswer) / 1e3;
  say(byId("lost-age"), lastAnswer === undefined ? "" : `The data is ${age(since)} old.`);
  say(byId("router-state"), "connection lost");
  mark(byId("router-state"), "data-state", "lost");
}

function refuse(words) {
  connected(true);
  keyForm.want(words);
  say(byId("router-state"), "an operator's API key is required");
  mark(byId("router-state"), "data-state", "lost");
}

function connected(yes) {
  byId("lost").hidden = yes;
  document.body.classList.toggle("stale", !yes);
}

const feed = new Feed("/cluster", show, lose);
const keyForm = new KeyForm(() => feed.now());
byId("reconnect").addEventListener("click", () => feed.now());
legend(byId("holders"));
feed.start();
