// Rates and percentiles from two snapshots of the counters (/v1/stats), as `nvmfctl top` has them.

export const STAGES = ["receive", "wait", "pull", "disk", "push", "reply"];
export const MEANINGS = {
  receive: "the command, until it is looked at",
  wait: "rate limits, buffers, locks",
  pull: "data of the host",
  disk: "the backing store",
  push: "data to the host",
  reply: "the response to the host",
};

const UNIT_NS = 1024;
const LAST_NS = 2 ** 40;

/** The lower bound of the bucket below a bound: four buckets to each power of two. */
function lower(bound) {
  if (bound === LAST_NS) return 2 ** 36;
  const value = bound - 1;
  const width = value < 4 * UNIT_NS ? UNIT_NS : 2 ** (Math.floor(Math.log2(value)) - 2);
  return bound - width;
}

class Latency {
  time = 0;
  counts = new Map();
  add({ time_ns, below }, sign = 1) {
    this.time += sign * time_ns;
    for (const [bound, count] of below) this.counts.set(bound, (this.counts.get(bound) ?? 0) + sign * count);
  }
  percentile(share) {
    const buckets = [...this.counts].filter(([, count]) => count > 0).sort(([a], [b]) => a - b);
    let rank = share * buckets.reduce((sum, [, count]) => sum + count, 0);
    for (const [bound, count] of buckets) {
      if (rank <= count) return bound === LAST_NS ? lower(bound) : lower(bound) + (bound - lower(bound)) * (rank / count);
      rank -= count;
    }
    return null;
  }
}

/** Sums of operations, by difference. */
class Sum {
  commands = 0;
  failures = 0;
  bytes = 0;
  latency = new Latency();
  stages = Object.fromEntries(STAGES.map((stage) => [stage, 0]));
  add(ops, sign) {
    this.commands += sign * ops.commands;
    this.failures += sign * ops.failures;
    this.bytes += sign * ops.bytes;
    this.latency.add(ops.latency, sign);
    for (const { stage, latency } of ops.stages) this.stages[stage] = (this.stages[stage] ?? 0) + sign * latency.time_ns;
  }
  result(seconds) {
    const { time } = this.latency;
    return {
      commands: this.commands, failures: this.failures,
      iops: this.commands / seconds, bytes: this.bytes / seconds,
      depth: time / 1e9 / seconds,
      mean: this.commands ? time / this.commands : null,
      p50: this.latency.percentile(0.5), p99: this.latency.percentile(0.99),
      stages: STAGES.map((stage) => ({
        stage,
        share: time > 0 ? this.stages[stage] / time : 0,
        depth: this.stages[stage] / 1e9 / seconds,
        mean: this.commands ? this.stages[stage] / this.commands : null,
      })),
    };
  }
}

const key = ({ subsystem, nsid, host }) => JSON.stringify([subsystem, nsid, host]);

/** Rates between two snapshots; null if the daemon has restarted between them. */
export function rates(before, now) {
  const seconds = (now.at_us - before.at_us) / 1e6;
  if (!(seconds > 0)) return null;
  const [all, kinds, rows] = [new Sum(), {}, new Map()];
  const add = (row, sign) => {
    const of = rows.get(key(row)) ?? { row, sum: new Sum() };
    rows.set(key(row), of);
    for (const ops of row.ops) {
      for (const sum of [all, of.sum, kinds[ops.op] ??= new Sum()]) sum.add(ops, sign);
    }
  };
  now.rows.forEach((row) => add(row, 1));
  before.rows.forEach((row) => add(row, -1));
  const reactors = now.reactors.map((reactor) => {
    const was = before.reactors.find(({ index }) => index === reactor.index);
    return { ...reactor, busy: was ? (reactor.busy_ns - was.busy_ns) / 1e9 / seconds : null };
  });
  return {
    all: all.result(seconds),
    kinds: Object.fromEntries(Object.entries(kinds).map(([op, sum]) => [op, sum.result(seconds)])),
    rows: [...rows.values()].map(({ row, sum }) => ({ ...row, ...sum.result(seconds) })).sort((a, b) => b.iops - a.iops),
    reactors,
  };
}
