// Lines between cards: from the prefill node whose pages are read to the decode node that reads.

import { element, keep, mark, say, shape } from "./dom.js";
import { gigabytes } from "./format.js";
import { PATHS } from "./paths.js";

const LABEL_HEIGHT = 18;
const LABEL_AT = 0.68; // of the way: nearer to the reader, where lines have parted
const BEND = 0.45;
const MOST_LOUD = 48; // more lines than this are thin, and still

export class Links {
  /** Args: the element that all cards are in, the SVG over it, and the list for the legend. */
  constructor(fabric, canvas, legend) {
    this.fabric = fabric;
    this.canvas = canvas;
    this.lines = shape("g");
    this.labels = shape("g"); // in front of every line
    canvas.append(this.lines, this.labels);
    this.legend = legend;
    this.links = [];
    new ResizeObserver(() => this.draw()).observe(fabric);
    for (const kind of ["pointerover", "focusin"]) {
      fabric.addEventListener(kind, (event) => this.single(event.target.closest(".node")));
    }
    for (const kind of ["pointerleave", "focusout"]) {
      fabric.addEventListener(kind, () => this.single(null));
    }
    fabric.addEventListener("toggle", () => this.draw(), true);
  }

  show(cluster, rates) {
    const busy = (address) => (rates.of(address, "handoffs_completed") ?? 0) > 0;
    this.links = cluster.nodes
      .filter((node) => node.state !== "unreachable")
      .flatMap((node) =>
        node.links.map((link) => ({
          ...link,
          reader: node.address,
          key: `${link.peer} ${node.address}`,
          busy: busy(link.peer) && busy(node.address),
        })),
      );
    const paths = [...new Set(this.links.map((link) => link.path))].sort();
    keep(this.legend, paths, (path) => path, (path) => element("li", { "data-path": path, title: PATHS[path] }, path), () => {});
    this.draw();
  }

  /** Makes the lines of one node stand out; of all with null. */
  single(card) {
    const address = card?.dataset.address;
    this.canvas.classList.toggle("single", Boolean(address));
    const own = new Set(
      this.links.filter((l) => l.peer === address || l.reader === address).map((l) => l.key),
    );
    for (const part of [...this.lines.children, ...this.labels.children]) {
      part.classList.toggle("on", own.has(part.dataset.key));
    }
  }

  draw() {
    const origin = this.canvas.getBoundingClientRect();
    if (!origin.width) return; // on a phone links are lines of text
    const box = (card) => {
      const { left, right, top, height } = card.getBoundingClientRect();
      const y = top - origin.top;
      return { left: left - origin.left, right: right - origin.left, top: y, height };
    };
    const boxes = new Map(
      [...this.fabric.querySelectorAll(".node")].map((card) => [card.dataset.address, box(card)]),
    );
    const drawn = this.links.filter((link) => boxes.has(link.peer) && boxes.has(link.reader));
    this.canvas.classList.toggle("dense", drawn.length > MOST_LOUD);
    const rank = (address) => boxes.get(address).top;
    const from = spread(drawn, boxes, (l) => l.peer, (l) => rank(l.reader));
    const to = spread(drawn, boxes, (l) => l.reader, (l) => rank(l.peer));
    const ends = (link) => {
      const [x0, x1] = [boxes.get(link.peer).right, boxes.get(link.reader).left];
      return { x0, x1, a: from.get(link.key), b: to.get(link.key) };
    };
    keep(this.lines, drawn, (link) => link.key, makeLine, (group, link) => {
      const { x0, x1, a, b } = ends(link);
      const bend = (x1 - x0) * BEND;
      const d = `M${x0} ${a.y}C${x0 + bend} ${a.y} ${x1 - bend} ${b.y} ${x1 - 7} ${b.y}`;
      const [line, flow, tip] = group.children;
      mark(group, "data-path", link.path);
      group.classList.toggle("busy", link.busy);
      mark(line, "d", d);
      mark(flow, "d", d);
      mark(tip, "d", `M${x1 - 8} ${b.y - 4}L${x1 - 1} ${b.y}L${x1 - 8} ${b.y + 4}Z`);
      line.style.strokeWidth = Math.min(4, 1.25 + Math.log2(1 + link.gib_per_s) / 2);
    });
    const told = drawn.filter((link) => to.get(link.key).room >= LABEL_HEIGHT);
    keep(this.labels, told, (link) => link.key, makeLabel, (label, link) => {
      const { x0, x1, a, b } = ends(link);
      mark(label, "x", `${x0 + (x1 - x0) * along(LABEL_AT, 0, BEND, 1 - BEND, 1)}`);
      mark(label, "y", `${along(LABEL_AT, a.y, a.y, b.y, b.y)}`);
      say(label, `${link.path} ${gigabytes(link.gib_per_s)}`);
    });
  }
}

/** A coordinate on a Bézier curve, from one at each of its four points. */
function along(t, p0, p1, p2, p3) {
  const s = 1 - t;
  return s * s * s * p0 + 3 * s * s * t * p1 + 3 * s * t * t * p2 + t * t * t * p3;
}

/** Where on its card each link ends: side by side, in the order of the other ends. */
function spread(links, boxes, own, other) {
  const ends = new Map();
  for (const [address, of] of groups(links, own)) {
    const { top, height } = boxes.get(address);
    const usable = Math.min(height, 150);
    of.sort((a, b) => other(a) - other(b));
    of.forEach((link, i) => {
      ends.set(link.key, { y: top + (usable * (i + 1)) / (of.length + 1), room: usable / (of.length + 1) });
    });
  }
  return ends;
}

function groups(items, key) {
  const by = new Map();
  for (const item of items) {
    if (!by.has(key(item))) by.set(key(item), []);
    by.get(key(item)).push(item);
  }
  return by;
}

const makeLine = () =>
  shape(
    "g",
    { class: "link" },
    shape("path", { class: "line" }),
    shape("path", { class: "flow" }),
    shape("path", { class: "tip" }),
  );

const makeLabel = () => shape("text", { "text-anchor": "middle", "dominant-baseline": "central" });
