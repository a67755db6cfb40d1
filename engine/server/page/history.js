// The last two minutes of snapshots.

import { METRICS } from "./names.js";
import { Span } from "./prometheus.js";

export const HISTORY_SECONDS = 120;
const WINDOW_SECONDS = 60;
const NOW_SECONDS = 2.5;
const GAP_SECONDS = 5; // a longer silence is no rate: the tab was hidden or the server away

export class History {
  #snapshots = [];

  add(snapshot) {
    const before = this.#snapshots.at(-1);
    const hasRestarted = before && snapshot.value(METRICS.steps) < before.value(METRICS.steps);
    if (hasRestarted) this.#snapshots = [];
    const oldest = snapshot.time - 1000 * HISTORY_SECONDS;
    this.#snapshots = this.#snapshots.filter((old) => old.time >= oldest);
    this.#snapshots.push(snapshot);
  }

  get last() {
    return this.#snapshots.at(-1);
  }

  #since(seconds) {
    const from = this.last.time - 1000 * seconds;
    return this.#snapshots.find((old) => old.time >= from && old !== this.last) ?? null;
  }

  /** The last minute if `name` grew in it, else everything since the server's start. */
  recent(name) {
    const span = new Span(this.#since(WINDOW_SECONDS), this.last);
    return span.first && span.count(name) > 0 ? span : new Span(null, this.last);
  }

  /** How fast `name` grows now, a second; null before the second snapshot. */
  rate(name) {
    const first = this.#since(NOW_SECONDS);
    if (!first) return null;
    const span = new Span(first, this.last);
    return span.count(name) / span.seconds;
  }

  /** [{time, value}] of the rate between neighbours; value null where there is a gap. */
  rates(name) {
    return this.#snapshots.slice(1).map((snapshot, i) => {
      const span = new Span(this.#snapshots[i], snapshot);
      const value = span.seconds > GAP_SECONDS ? null : span.count(name) / span.seconds;
      return { time: snapshot.time, value };
    });
  }
}
