// Lines between node cards, from the prefill node to the decode node that reads its pages.

import { element, keep, mark, say, shape } from "./dom.js";
import { gigabytes } from "./format.js";

/** Meaning of each data path between nodes. */
export const PATHS = {
  nvlink: "nvlink: copy between GPUs over NVLink",
  cuda_ipc: "cuda_ipc: copy between GPUs of one host",
  rdma: "rdma: read between hosts by their network cards",
  cma: "cma: copy from another process of the same host by the kernel (cross-memory attach)",
  tcp: "tcp: socket, used if no faster path works",
};
const LABEL_HEIGHT = 18;
const LABEL_AT = 0.8; // position along the line, near the reading node, where lines do not overlap
const BEND = 0.45; // of the distance between two columns
const LOOP = 110; // bend of a line between two cards of one column
const MOST_LOUD = 48; // with more lines, all are thin and without animation

export class Links {
  /** Args: the element with all cards, the SVG over it, and the list for the legend. */
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
          consumer: node.address,
          key: `${link.peer} ${node.address}`,
          busy: busy(link.peer) && busy(node.address),
        })),
      );
    const paths = [...new Set(this.links.map((link) => link.path))].sort();
    keep(this.legend, paths, (path) => path, (path) => element("li", { "data-path": path, title: PATHS[path] }, path), () => {});
    this.draw();
  }

  /** Highlights the lines of one card, or of all with null. */
  single(card) {
    const address = card?.dataset.address;
    this.canvas.classList.toggle("single", Boolean(address));
    const own = new Set(
      this.links.filter((l) => l.peer === address || l.consumer === address).map((l) => l.key),
    );
    for (const part of [...this.lines.children, ...this.labels.children]) {
      part.classList.toggle("on", own.has(part.dataset.key));
    }
  }

  draw() {
    const origin = this.canvas.getBoundingClientRect();
    if (!origin.width) return; // on a phone, links are lines of text
    const box = (card) => {
      const { left, right, top, height } = card.getBoundingClientRect();
      const y = top - origin.top;
      return { left: left - origin.left, right: right - origin.left, top: y, height };
    };
    const boxes = new Map(
      [...this.fabric.querySelectorAll(".node")].map((card) => [card.dataset.address, box(card)]),
    );
    const hasGap = this.legend.getBoundingClientRect().width > 0;
    const known = (link) => hasGap && boxes.has(link.peer) && boxes.has(link.consumer);
    const drawn = this.links.filter(known);
    this.canvas.classList.toggle("dense", drawn.length > MOST_LOUD);
    const heights = spread(drawn, boxes);
    const curve = (link) => {
      const [from, to] = heights.get(link.key);
      return { ...bent(boxes.get(link.peer), boxes.get(link.consumer), origin.width / 2), y0: from.y, y1: to.y };
    };
    keep(this.lines, drawn, (link) => link.key, makeLine, (group, link) => {
      const { x0, c0, c1, x1, arrives, y0, y1 } = curve(link);
      const d = `M${x0} ${y0}C${c0} ${y0} ${c1} ${y1} ${x1 - 7 * arrives} ${y1}`;
      const [line, flow, tip] = group.children;
      mark(group, "data-path", link.path);
      group.classList.toggle("busy", link.busy);
      mark(line, "d", d);
      mark(flow, "d", d);
      mark(tip, "d", `M${x1 - 8 * arrives} ${y1 - 4}L${x1 - arrives} ${y1}L${x1 - 8 * arrives} ${y1 + 4}Z`);
      line.style.strokeWidth = Math.min(4, 1.25 + Math.log2(1 + link.gib_per_s) / 2);
    });
    const labelled = drawn.filter((link) => heights.get(link.key)[1].room >= LABEL_HEIGHT);
    keep(this.labels, labelled, (link) => link.key, makeLabel, (label, link) => {
      const { x0, c0, c1, x1, y0, y1 } = curve(link);
      mark(label, "x", `${along(LABEL_AT, x0, c0, c1, x1)}`);
      mark(label, "y", `${along(LABEL_AT, y0, y0, y1, y1)}`);
      say(label, `${link.path} ${gigabytes(link.gib_per_s)}`);
    });
  }
}

/** Returns a coordinate on a Bézier curve from those of its four points. */
function along(t, p0, p1, p2, p3) {
  const s = 1 - t;
  return s * s * s * p0 + 3 * s * s * t * p1 + 3 * s * t * t * p2 + t * t * t * p3;
}

/**
 * Returns the x coordinates of a line through the gap between the columns: its ends, its control
 * points, and the direction in which it arrives (1: to the right, -1: to the left).
 */
function bent(peer, consumer, middle) {
  const leaves = peer.left < middle ? 1 : -1;
  const arrives = consumer.left < middle ? -1 : 1;
  const x0 = leaves > 0 ? peer.right : peer.left;
  const x1 = arrives > 0 ? consumer.left : consumer.right;
  const bend = leaves === arrives ? Math.abs(x1 - x0) * BEND : LOOP;
  return { x0, c0: x0 + bend * leaves, c1: x1 - bend * arrives, x1, arrives };
}

/**
 * Returns the y coordinates and the room of both ends of each link. The ends on a card are side by
 * side, in the order of the other ends.
 */
function spread(links, boxes) {
  const heights = new Map(links.map((link) => [link.key, []]));
  const ends = links.flatMap(({ key, peer, consumer }) => [
    { key, card: peer, other: consumer, place: 0 },
    { key, card: consumer, other: peer, place: 1 },
  ]);
  for (const [address, own] of groups(ends, (end) => end.card)) {
    const { top, height } = boxes.get(address);
    const room = Math.min(height, 150) / (own.length + 1);
    own.sort((a, b) => boxes.get(a.other).top - boxes.get(b.other).top || a.place - b.place);
    own.forEach((end, i) => {
      heights.get(end.key)[end.place] = { y: top + room * (i + 1), room };
    });
  }
  return heights;
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
