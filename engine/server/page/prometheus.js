// The text format of /metrics, read into snapshots, and what two snapshots say together.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n" };

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of (text ?? "").matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (_, letter) => ESCAPED[letter] ?? letter);
  }
  return labels;
}

function numberOf(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

/** One reading of /metrics; `time` in milliseconds. */
export class Snapshot {
  constructor(text, time) {
    this.time = time;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (!match) continue;
      const [, name, labels, value] = match;
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels: labelsOf(labels), value: numberOf(value) });
    }
  }

  has(name) {
    return this.samples.has(name);
  }

  rows(name) {
    return this.samples.get(name) ?? [];
  }

  value(name) {
    return this.rows(name)[0]?.value ?? 0;
  }

  /** Label value -> sample value. */
  by(name, label) {
    return new Map(this.rows(name).map((row) => [row.labels[label], row.value]));
  }
}

/** What was counted between two snapshots; `first` null means since the start. */
export class Span {
  constructor(first, last) {
    this.first = first;
    this.last = last;
  }

  get seconds() {
    return (this.last.time - this.first.time) / 1000;
  }

  count(name) {
    return this.last.value(name) - (this.first?.value(name) ?? 0);
  }

  by(name, label) {
    const before = this.first?.by(name, label) ?? new Map();
    return new Map([...this.last.by(name, label)].map(([key, value]) => [key, value - (before.get(key) ?? 0)]));
  }

  /** The median of a histogram, between two bounds by straight line; null if nothing was observed. */
  median(name) {
    const buckets = [...this.by(`${name}_bucket`, "le")].map(([bound, count]) => [numberOf(bound), count]);
    const half = (buckets.at(-1)?.[1] ?? 0) / 2;
    if (!half) return null;
    let [lower, below] = [0, 0];
    for (const [bound, count] of buckets) {
      if (count >= half) {
        return bound === Infinity ? lower : lower + ((bound - lower) * (half - below)) / (count - below);
      }
      [lower, below] = [bound, count];
    }
    return lower;
  }
}
