// Rates per second, from counters that only grow, by address and instance of a node.

const WINDOW_S = 4;

export class Rates {
  constructor() {
    this.samples = new Map(); // by address: samples of one instance, oldest first
  }

  /** Adds a response of GET /cluster. Nodes missing from it are forgotten. */
  take(cluster) {
    const kept = new Map();
    for (const node of cluster.nodes) {
      const sample = {
        instance: node.instance_id,
        at: node.seen_s,
        values: { ...node.counters, steps: node.steps },
      };
      const before = this.samples.get(node.address) ?? [];
      if (node.state === "unreachable") {
        kept.set(node.address, []);
        continue;
      }
      const last = before.at(-1);
      // A restarted node counts from zero, and a restarted router has another clock.
      const goes = last?.instance === sample.instance && last.at <= sample.at;
      const samples = goes ? before : [];
      if (!goes || last.at < sample.at) samples.push(sample);
      while (samples.length > 2 && samples[1].at <= sample.at - WINDOW_S) samples.shift();
      kept.set(node.address, samples);
    }
    this.samples = kept;
  }

  /** Returns the rate over the last seconds, or undefined with fewer than two samples. */
  of(address, counter) {
    const samples = this.samples.get(address) ?? [];
    const [first, last] = [samples[0], samples.at(-1)];
    if (samples.length < 2) return undefined;
    const grown = (last.values[counter] ?? 0) - (first.values[counter] ?? 0);
    return Math.max(0, grown / (last.at - first.at));
  }

  /** Returns the sum over these nodes, or undefined if no rate is known. */
  sum(nodes, counter) {
    const known = nodes.map((node) => this.of(node.address, counter)).filter((r) => r !== undefined);
    return known.length ? known.reduce((a, b) => a + b, 0) : undefined;
  }
}
